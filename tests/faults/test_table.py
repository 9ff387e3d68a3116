"""What the table of faults names is there."""

from __future__ import annotations

import re

from places import ROOT


def test_only_cases_of_a_test_are_left_out_of_the_default_run():
    marked = re.compile(r"^\s*@pytest\.mark\.long|^pytestmark\b.*\blong\b", re.MULTILINE)
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text())]
    assert not files, "mark cases instead: pytest.param(..., marks=pytest.mark.long)"


def test_every_test_that_the_table_names_is_there():
    file, missing, named = None, [], 0
    for row in (ROOT / "docs" / "faults.md").read_text().splitlines():
        for name in re.findall(r"`((?:tests/[\w/]+\.py|…)(?:::\w+…?)?)`", row.rpartition("|")[0].rpartition("|")[2]):
            path, _, test = name.partition("::")
            file = file if path == "…" else ROOT / path
            there = file.is_file() and (not test or re.search(rf"def {test.rstrip('…')}\w*\(", file.read_text()))
            missing += [] if there else [name]
            named += 1
    assert not missing
    assert named > 30
