"""The Chinese README and the catalogues of docs/locale say what the English text says, as far as a program can tell."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from babel.messages import Catalog
from babel.messages.pofile import read_po
from places import ROOT

PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
CATALOGUES = ROOT / "docs/locale/zh_CN/LC_MESSAGES"


def _code_spans(text: str) -> Counter[str]:
    return Counter(found[2] for found in re.finditer(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", text, re.S))


def _links(text: str) -> Counter[str]:
    return Counter(re.findall(r"\]\(([^)\s]+)\)", text))


def _has_words(message: str) -> bool:
    """Whether there is something to translate beside code and numbers."""
    return re.search(r"[A-Za-z]{2}", re.sub(r"(`+).*?\1", "", message)) is not None


def _catalogue(path: Path) -> Catalog:
    with path.open("rb") as file:
        return read_po(file, abort_invalid=True)


def _translations(path: Path) -> dict[str, str]:
    """The messages that are shown in Chinese: a fuzzy one was translated from another sentence, and is not."""
    return {message.id: message.string for message in _catalogue(path) if message.id and not message.fuzzy}


def _readme(name: str) -> tuple[list[str], str]:
    """Its code blocks, and the rest without the link to the other language."""
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = r"^```.*?^```"
    prose = re.sub(blocks, "", text, flags=re.S | re.M)
    return re.findall(blocks, text, re.S | re.M), re.sub(r"\]\(README(\.zh-CN)?\.md\)", "]", prose)


def test_chinese_readme_has_the_blocks_headings_links_and_names():
    blocks, prose = _readme("README.md")
    chinese_blocks, chinese = _readme("README.zh-CN.md")
    assert len(blocks) >= 8
    assert chinese_blocks == blocks
    headings = re.findall(r"^#+ ", prose, re.M)
    assert re.findall(r"^#+ ", chinese, re.M) == headings
    assert _links(chinese) == _links(prose)
    assert _code_spans(prose) - _code_spans(chinese) == Counter()
    assert "](README.zh-CN.md)" in (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]


@pytest.mark.long
def test_pages_are_translated_to_nine_tenths(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "gettext", "-d", str(tmp_path / "cache"), "docs"]
    subprocess.run([*command, str(tmp_path / "messages")], cwd=ROOT, check=True)
    extracted = {path.stem: path for path in (tmp_path / "messages").glob("*.pot")}
    assert sorted(extracted) == PAGES
    english = {}
    for page, path in extracted.items():
        messages = [message.id for message in _catalogue(path) if message.id and _has_words(message.id)]
        stored = CATALOGUES / f"{page}.po"
        translated = _translations(stored) if stored.exists() else {}
        missing = [message for message in messages if not translated.get(message)]
        if len(missing) > len(messages) / 10:
            english[page] = missing
    assert english == {}, "`make docs-messages`, then translate in docs/locale: see docs/locale/README.md"


def test_translations_keep_code_spans_and_links():
    wrong = {}
    for path in CATALOGUES.glob("*.po"):
        for message, translation in _translations(path).items():
            kept = (_code_spans(translation), _links(translation)) == (_code_spans(message), _links(message))
            if translation and not kept:
                wrong[path.stem, message] = translation
    assert wrong == {}
