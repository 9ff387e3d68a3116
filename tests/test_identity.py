"""A task or a function is known again when, and only when, it would do the same."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import subprocess
import sys

import pytest

from accel_sft.data.fingerprint import identity

TASK = """
import dataclasses
import functools
from helping import PREFIX

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
    from {lazy} import late
    return row
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """`make(name=source, ...)` writes modules and imports the first of them anew."""
    monkeypatch.syspath_prepend(tmp_path)
    made = set()

    def make(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
            made.add(name)
        for name in made:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(next(iter(sources)))

    yield make
    for name in made:
        sys.modules.pop(name, None)


SOURCES = {"having": TASK.format(lazy="later"), "helping": "PREFIX = 'a'\n", "later": "late = 1\n"}


def test_values_and_sources_decide(modules):
    def every(**changes):
        having = modules(**{**SOURCES, **changes})
        return [
            identity(having.Thing()),
            identity(having.Thing(size=4)),
            identity(having.Thing(names=("b",))),
            identity(having.Thing().parse),
            identity(having.parse),
            identity(functools.partial(having.parse, 3)),
            identity(functools.partial(having.parse, frozenset(["x", "y"]))),
            identity(having.Thing),
        ]

    known = every()
    assert None not in known
    assert len(set(known)) == len(known)
    assert every() == known
    for changes in (
        {"having": SOURCES["having"] + "\n"},
        {"helping": "PREFIX = 'b'\n"},
        {"later": "late = 2\n"},  # imported only when it is called
        {"helping": "import further\nPREFIX = 'a'\n", "further": ""},
    ):
        assert not set(every(**changes)) & set(known)


def test_what_was_computed_from_the_values_does_not_count(modules):
    thing = modules(**SOURCES).Thing()
    before = identity(thing)
    assert thing.computed
    assert identity(thing) == before


def test_in_doubt_nothing_is_known(modules):
    having = modules(**SOURCES)
    odd, replaced = having.Thing(), having.Thing()
    odd.something = object()
    replaced.parse = lambda row: row
    local = dataclasses.make_dataclass("Local", ["size"])
    having.parse.__qualname__ = "Thing.parse"
    in_doubt = [odd, replaced, replaced.parse, local(3), having.parse, [].append, having.Thing(size=object())]
    assert [identity(value) for value in in_doubt] == [None] * len(in_doubt)


@pytest.mark.parametrize(
    "reaching", ["import importlib\nlate = importlib.import_module('later')", "TEXT = open(__file__).read()"]
)
def test_a_source_that_reaches_for_what_no_import_names_is_in_doubt(modules, reaching):
    having = modules(**{**SOURCES, "helping": f"{reaching}\nPREFIX = 'a'\n"})
    assert identity(having.Thing()) is None


def test_values_that_hold_each_other_are_in_doubt(modules):
    thing = modules(**SOURCES).Thing()
    thing.names = [thing]
    assert identity(thing) is None


def test_it_is_the_same_in_another_process_however_that_orders_its_sets(modules, tmp_path):
    having = modules(**SOURCES)
    code = (
        "import having; from accel_sft.data.fingerprint import identity; print(identity(having.Thing(), having.parse))"
    )
    for seed in "1234":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert told.stdout.strip() == identity(having.Thing(), having.parse)
