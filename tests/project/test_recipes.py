"""Each recipe is one command that ends with its tables; here with the built-in model and a step or two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]
RECIPES = ROOT / "recipes"


def run(name, folder, **variables):
    """The recipe's finished process, and by folder the comparisons that it made."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    given = {**os.environ, "PATH": path, "OUT": str(folder), "ROUNDS": "1", "STEPS": "2", "DISCARD": "1"}
    command = ["bash", str(RECIPES / f"{name}.sh")]
    done = subprocess.run(command, env={**given, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.parent: json.loads(path.read_text()) for path in folder.rglob("comparison.json")}
    return done.stdout, found


def ended(record):
    return {setting["name"]: setting["status"] for setting in record["settings"]}


def a(tmp_path):
    """The base stands beside the tuned model."""
    printed, found = run("series-a", tmp_path / "a", LAUNCH="single")
    ((folder, record),) = found.items()
    assert ended(record) == {"single": "complete"}
    assert "base and tuned" in printed
    assert "## Answers (20 of 20" in (folder / "base-and-tuned" / "report.md").read_text()


def b(tmp_path):
    """There is a setting for each launch and number of rows."""
    _, found = run("series-b", tmp_path / "b")
    ((_, record),) = found.items()
    names = ("single", "ddp", "z0", "z1", "z2", "z2_offload", "z3", "z3_offload")
    assert ended(record) == {f"{name}, micro-batch-size {rows}": "complete" for name in names for rows in (1, 32)}


def c(tmp_path):
    """There is a setting for each adapter and launch, and the memory of each phase is told."""
    _, found = run("series-c", tmp_path / "c")
    ((folder, record),) = found.items()
    names = (f"{name}, adapter {adapter}" for name in ("single", "z2", "z3") for adapter in ("lora", "adalora"))
    assert ended(record) == dict.fromkeys(names, "complete")
    page = (folder / "comparison.html").read_text(encoding="utf-8")
    assert '<tr><th scope="row">single, adapter lora, round 1</th><td>sharded</td>' in page


def d(tmp_path):
    """It is told what making batches takes, and a trace of each is there to look at."""
    _, found = run("series-d", tmp_path / "d", STEPS="6")
    assert {folder.name for folder in found} == {"math", "ner"}
    for folder, record in found.items():
        assert {*ended(record).values()} == {"complete"}
        assert [*folder.glob("**/profile/*.json")]
        assert 0 < record["settings"][0]["runs"][0]["batch_share"] < 1


@pytest.mark.parametrize("holds", [a, b, c, d])
def test_a_series_runs_to_its_tables(holds, tmp_path):
    holds(tmp_path)
