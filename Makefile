PYTHON = .venv/bin/python

.PHONY: test lint soak docs docs-zh docs-messages docs-tools

test:
	$(PYTHON) -m pytest -n 2

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# kills at random instants, each resumed and compared: about twenty minutes on two cores
soak:
	$(PYTHON) tests/support/soak.py --kills 50 --seed 0

# what builds the documentation, without torch and the trainer: for whoever only publishes it
docs-tools:
	$(PYTHON) -m pip install -q $$($(PYTHON) -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')

# the documentation, to be opened at docs/_build/index.html
docs:
	$(PYTHON) -m sphinx -q -W --keep-going docs docs/_build

# the same in Chinese, to be opened at docs/_build/zh/index.html
docs-zh:
	$(PYTHON) -m sphinx -q -W --keep-going -D language=zh_CN docs docs/_build/zh

# takes what is new or changed in the English pages into the catalogues of docs/locale. A changed sentence gets the flag
# `fuzzy`, and stays English until it is translated anew. Of the header only what programs need is kept: no dates or names
docs-messages:
	rm -rf docs/_build/gettext
	$(PYTHON) -m sphinx -q -b gettext docs docs/_build/gettext
	for page in docs/_build/gettext/*.pot; do \
		name=$$(basename "$$page" .pot) && \
		$(PYTHON) -m babel.messages.frontend -q update --init-missing --ignore-obsolete --no-wrap \
			-l zh_CN -D "$$name" -i "$$page" -d docs/locale && \
		sed -i -E -e '1,/^$$/{/^#/d}' -e '1,/^$$/{/^"(Content|Language:)/!{/^"/d}}' \
			"docs/locale/zh_CN/LC_MESSAGES/$$name.po" || exit 1; \
	done
