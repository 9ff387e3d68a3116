"""What .ci/run takes for the lowest and newest versions is what pyproject.toml says."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version

from packaging.requirements import Requirement
from packaging.version import Version
from places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]


def dependencies(which):
    script = str(ROOT / ".ci" / "dependencies.py")
    return subprocess.check_output([sys.executable, script, which], text=True).splitlines()


def test_lowest_tested_versions_are_the_lower_bounds():
    lowest = dict(line.split("==") for line in dependencies("lowest"))
    assert dependencies("newest") == list(lowest) == [dependency.name for dependency in DEPENDENCIES]
    for dependency in DEPENDENCIES:
        assert dependency.specifier.contains(lowest[dependency.name])
        below = [bound for bound in dependency.specifier if bound.operator == ">="]
        assert [Version(bound.version) for bound in below] == [Version(lowest[dependency.name])]


def test_libraries_used_beyond_their_promises_are_bounded_above():
    bounded = {each.name for each in DEPENDENCIES if any(bound.operator == "<" for bound in each.specifier)}
    as_transformers_bounds_it = {"huggingface-hub"}
    assert bounded == {"accelerate", "deepspeed", "peft", "transformers"} | as_transformers_bounds_it
    for dependency in DEPENDENCIES:
        assert dependency.specifier.contains(version(dependency.name), prereleases=True), "not what is tested here"
