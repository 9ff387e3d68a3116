"""Each recipe is one command that ends with its tables; here with the built-in model and a step or two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]
LAUNCHES = ("single", "ddp", "z0", "z1", "z2", "z2_offload", "z3", "z3_offload")
SERIES = {
    "a": ({"LAUNCH": "single"}, {"single"}, "base-and-tuned/report.md"),
    "b": ({}, {f"{name}, micro-batch-size {rows}" for name in LAUNCHES for rows in (1, 32)}, "comparison.html"),
    "c": ({}, {f"{name}, adapter {kind}" for name in ("single", "z2", "z3") for kind in ("lora", "adalora")}, "*.html"),
    "d": ({"STEPS": "6"}, set(), "**/profile/*.json"),
}
"""Variables of a series, settings that its comparison has, and a file beside it."""


@pytest.mark.parametrize("name", SERIES)
def test_a_series_runs_to_its_tables(name, tmp_path):
    variables, settings, file = SERIES[name]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    given = {**os.environ, "PATH": path, "OUT": str(tmp_path / "out"), "ROUNDS": "1", "STEPS": "2", "DISCARD": "1"}
    command = ["bash", str(ROOT / "recipes" / f"series-{name}.sh")]
    done = subprocess.run(command, env=given | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [*(tmp_path / "out").rglob("comparison.json")]
    assert len(records) == (2 if name == "d" else 1)
    for record in records:
        ended = {one["name"]: one["status"] for one in json.loads(record.read_text())["settings"]}
        assert {*ended.values()} == {"complete"}
        assert settings <= ended.keys()
        assert [*record.parent.glob(file)]
