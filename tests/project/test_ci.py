"""What .ci/run takes for the lowest and newest versions is what pyproject.toml says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]


def dependencies(which: str, script: Path = ROOT / ".ci" / "dependencies.py") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(script), which], capture_output=True, text=True)


def test_each_dependency_is_tested_at_a_version_that_it_allows():
    lowest = dict(line.split("==") for line in dependencies("lowest").stdout.splitlines())
    assert dependencies("newest").stdout.splitlines() == list(lowest)
    assert list(lowest) == [dependency.name for dependency in DEPENDENCIES]
    for dependency in DEPENDENCIES:
        assert dependency.specifier.contains(lowest[dependency.name])
        below = [bound for bound in dependency.specifier if bound.operator == ">="]
        assert [Version(bound.version) for bound in below] == [Version(lowest[dependency.name])]


def test_libraries_of_which_more_is_used_than_they_promise_are_bounded_above():
    bounded = {each.name for each in DEPENDENCIES if any(bound.operator == "<" for bound in each.specifier)}
    as_transformers_bounds_it = {"huggingface-hub"}
    assert bounded == {"accelerate", "deepspeed", "peft", "transformers"} | as_transformers_bounds_it
    for dependency in DEPENDENCIES:
        assert dependency.specifier.contains(version(dependency.name), prereleases=True), "not what is tested here"


def test_a_dependency_without_a_lower_bound_is_named(tmp_path):
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "dependencies.py", tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["click>=8", "torch<3"]\n')
    done = dependencies("newest", script)
    assert done.returncode == 1
    assert "pyproject.toml: 'torch<3' has no lower bound; write one: torch>=VERSION" in done.stderr


def test_an_option_that_there_is_not_runs_nothing():
    done = subprocess.run(["bash", str(ROOT / ".ci" / "run"), "--fast"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "ci: no such option: --fast (there are --all, --lowest and --newest)\n"


PYTEST = """#!/bin/sh
echo "pytest $PLANTED_BF16"
[ -n "$CPU_DEPENDENT" ] && cat noted >> "$CPU_DEPENDENT"
for word in "$@"; do case $word in @*) cat "${word#@}" ;; esac; done
echo "1 passed in 1.00s"
"""
NOTED = """tests/a.py::test_b[c d] (call)
tests/a.py::test_b[c d] (call)
 (call)
tests/e.py::test_f[g::h] (setup)
"""
AGAIN = ["pytest none", "tests/a.py::test_b[c d]", "tests/e.py", "1 passed in 1.00s"]


@pytest.mark.parametrize(("noted", "status", "again"), [(NOTED, 0, AGAIN), ("", 1, [])], ids=["some", "none"])
def test_what_depends_on_the_cpu_is_run_as_on_the_other_kind(tmp_path, noted, status, again):
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "README.md").write_text("<!-- ci: tests -->\n```bash\n.venv/bin/pytest -n 2\n```\n")
    (tmp_path / "noted").write_text(noted)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, text in {"pytest": PYTEST, "python": "#!/bin/sh\necho none\n", "ruff": "", "mypy": ""}.items():
        (program := tmp_path / ".venv/bin" / name).write_text(text)
        program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CPU_DEPENDENT"}
    environment["PLANTED_BF16"] = "bf16"
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    printed = [line for line in done.stdout.splitlines() if not line.startswith("ci: ")]
    first = ["pytest ", "1 passed in 1.00s"]
    assert printed == [*first, *again, *(["1 passed in 1.00s"] * 2 if again else [])]
