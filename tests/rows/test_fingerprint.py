"""A task or a function has the same fingerprint when, and only when, it would do the same; in doubt it has none."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import os
import shutil
import subprocess
import sys

import pytest
from fake_plugins import install

from accel_sft.rows import fingerprint
from accel_sft.rows.fingerprint import code_fingerprint
from accel_sft_math import Math
from accel_sft_ner import Ner
from accel_sft_ner.cluener import parse as parse_cluener

TASK = """
import dataclasses
import functools
from accel_sft import RowProblem
from having.helping import PREFIX

@dataclasses.dataclass
class Thing:
    size: int = 3
    names: tuple = ()

    @functools.cached_property
    def computed(self):
        return [object()]

    def parse(self, row):
        return PREFIX + row

def parse(row):
    return row
"""
PACKAGE = {"having/__init__.py": TASK, "having/helping.py": "PREFIX = 'a'\n", "having/data/words.txt": "a"}


@pytest.fixture
def having(tmp_path, monkeypatch):
    """`having(**changes)` writes the package's files, and others beside it, and imports it anew."""
    monkeypatch.syspath_prepend(tmp_path)

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] in ("having", "beside")]:
            del sys.modules[name]

    def make(changes=()):
        shutil.rmtree(tmp_path / "having", ignore_errors=True)
        for name, source in {**PACKAGE, **dict(changes)}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(source)
        forget()
        importlib.invalidate_caches()
        return importlib.import_module("having")

    yield make
    forget()


def of_all(module):
    things = [module.Thing(), module.Thing(size=4), module.Thing(names=("b",)), module.Thing]
    parsers = [module.Thing().parse, module.parse, functools.partial(module.parse, 3)]
    parsers.append(functools.partial(module.parse, frozenset(["x", "y"])))
    return [code_fingerprint(value) for value in (*things, *parsers)]


def test_values_and_every_file_of_the_package_decide(having):
    known = of_all(having())
    assert None not in known
    assert len(set(known)) == len(known)
    module = having()
    assert of_all(module) == known
    thing = module.Thing()
    assert thing.computed
    assert code_fingerprint(thing) == known[0], "what was computed from the values does not count"
    for changes in (
        {"having/__init__.py": TASK + "\n"},
        {"having/helping.py": "PREFIX = 'b'\n"},
        {"having/data/words.txt": "b"},
        {"having/data/more.txt": ""},
        {"having/later.py": ""},  # imported by nobody, or only when a method is called
    ):
        assert not set(of_all(having(changes))) & set(known)


def test_the_shipped_tasks_are_known():
    assert None not in [code_fingerprint(task) for task in (Math(), Math()._parse, Ner(), parse_cluener)]


def test_value_neither_plain_nor_named_has_no_fingerprint(having):
    module = having()
    odd, replaced = module.Thing(), module.Thing()
    odd.something = object()
    replaced.parse = lambda row: row
    local = dataclasses.make_dataclass("Local", ["size"])
    module.parse.__qualname__ = "Thing.parse"
    cyclic = module.Thing()
    cyclic.names = [cyclic]
    in_doubt = [odd, replaced, replaced.parse, local(3), module.parse, [].append, module.Thing(size=object()), cyclic]
    assert [code_fingerprint(value) for value in in_doubt] == [None] * len(in_doubt)


UNKNOWN = {
    "a module beside the package": {"having/late.py": "def late():\n    import beside", "beside.py": "WORD = 'a'"},
    "a module by name": {"having/late.py": "import importlib\nlate = importlib.import_module('beside')"},
    "its own file": {"having/late.py": "TEXT = open(__file__).read()"},
    "the environment": {"having/late.py": "from os import environ as e\nWORD = e.get('WORD')"},
    "a file by a library": {"having/late.py": "import numpy\nWORDS = numpy.load('words.npy')"},
    "what is not Python": {"having/late.py": "import"},
    "machine code": {"having/late.so": ""},
    "more than is read at a start": {"having/large.bin": "x" * (3 << 20)},
}


@pytest.mark.parametrize("changes", UNKNOWN.values(), ids=UNKNOWN)
def test_package_reaching_beyond_its_files_has_no_fingerprint(having, monkeypatch, changes):
    monkeypatch.setattr(fingerprint, "_MAX_BYTES", 2 << 20)
    assert None not in of_all(having())
    assert of_all(having(changes)) == [None] * 8


LIBRARY = """
import sys
sys.path[:0] = {paths!r}
import having
from accel_sft.rows.fingerprint import code_fingerprint, task_record
print(code_fingerprint(having.parse), task_record(having.Thing))
"""


def test_imported_libraries_count_by_all_their_installed_versions(having, tmp_path):
    having({"having/late.py": "import library"})
    site = tmp_path / "site-packages"
    site.mkdir()
    install(site, "library", "", "", version="1.0")
    (site / "library-1.0.dist-info" / "top_level.txt").write_text("library")
    install(site, "under-the-library", "", "", version="1.0")

    def known():
        script = LIBRARY.format(paths=[str(tmp_path), str(site)])
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        of_all, _, record = result.stdout.partition(" ")
        records.append(ast.literal_eval(record))
        return of_all

    records = []
    first = known()
    assert len(first) == 64
    (site / "under_the_library-1.0.dist-info").rename(site / "under_the_library-1.1.dist-info")
    second = known()
    assert len({first, second}) == 2
    assert records[0] == records[-1]  # a run's record has the version of what the task itself imports
    assert (len(records[0]["task_code"]), records[0]["task_libraries"]) == (64, {"library": "1.0"})
    (tmp_path / "library.py").write_text("")  # comes first
    assert known() == "None"
    assert records[-1] == {"task_code": None, "task_libraries": {}}
    (tmp_path / "library.py").unlink()
    (site / "library-1.0.dist-info" / "direct_url.json").write_text("{}")  # from a folder: changes, same version
    assert known() == "None"
    shutil.rmtree(site / "library-1.0.dist-info")  # put there by hand
    assert known() == "None"


def test_a_script_and_a_linked_folder_are_not_known(having, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{TASK}from accel_sft.rows.fingerprint import code_fingerprint as of\nprint(of(parse))\n")
    module = having()
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "None"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "having" / "linked").symlink_to(tmp_path / "elsewhere")
    assert code_fingerprint(module.parse) is None


def test_fingerprint_is_the_same_in_any_process(having, tmp_path):
    module = having()
    code = "import having; from accel_sft.rows.fingerprint import code_fingerprint as of; "
    code += "print(of(having.Thing(), having.parse))"
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == code_fingerprint(module.Thing(), module.parse)
