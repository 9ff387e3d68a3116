"""The documentation as a site: `make docs`, and in Chinese `make docs-zh`. Nothing is fetched from the network, neither
to build it nor to read it."""

project = "accel_sft"
html_title = "accel_sft"
extensions = ["myst_parser"]
exclude_patterns = ["_build", "locale"]
myst_heading_anchors = 3  # page.md#a-heading is a link, as on a code forge
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False

# translations: one catalogue per page in docs/locale, without line numbers, so that it changes only with the text
locale_dirs = ["locale"]
gettext_compact = False
gettext_location = False
