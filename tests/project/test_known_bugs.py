"""The page of known bugs has ten, each with tests that are there."""

from __future__ import annotations

import ast
import re

from places import ROOT


def test_each_of_ten_known_bugs_names_its_tests():
    page = (ROOT / "docs" / "known-bugs.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 10
    for row in rows:
        *_, bug, _, _, named, _ = row.split("|")
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", named)
        assert tests, bug
        for file, name in tests:
            module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}, (bug, name)
