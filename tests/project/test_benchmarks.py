"""Every benchmark and every series of recipes runs, on small models for a step or two, and ends with its tables: the
quickest in the default run, the others in that of `.ci/run --all`. What is measured says nothing at that size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT


def run(script: str, *arguments: str, folder: Path) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a benchmark; what it leaves is in `folder`."""
    script, *options = script.split()
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options, "--smoke", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)})
    return done.returncode, done.stdout, done.stderr


def table(output: str) -> list[dict[str, str]]:
    """The rows of the one table in it, by heading; all rows have a cell for each."""
    lines = [line for line in output.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells, output
    headings, _, *rows = cells
    return [dict(zip(headings, row, strict=True)) for row in rows]


def number(cell: str) -> float:
    """The number a cell begins with, without its unit."""
    return float(cell.split()[0].rstrip("x%").replace(",", ""))


@pytest.mark.parametrize(
    ("script", "heading", "rows"),
    [
        ("plan_accuracy.py --source simulated", "measured", {"0.5B"}),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("speed.py", "real tokens/s", {"accel_sft"}),
                ("preferences.py", "pairs/s", {"accel_sft"}),
                ("batching.py", "s a step", {"the default", "shared 16"}),
                ("precision.py", "real tokens/s", {"fp32", "bf16, ZeRO-2"}),
                ("hybrids.py", "times padded", {"lfm2"}),
                ("generation.py", "answers/s", {"accel_sft", "`generate`, 64 rows"}),
                ("checkpoint.py", "GiB", {"waiting", "background", "save_state"}),
                ("memory.py", "USS median", {"2,000"}),
                ("overhead.py", "lines: median", {"a step", "forward", "backward", "optimizer", "**ours**"}),
                ("kernels.py", "ms a step", {"matrix products", "attention", "optimizer", "ours"}),
                ("startup.py", "no launcher, again", {"in all", "imports of the libraries", "layout trials"}),
                ("gpu.py", "tokens/s", {"0.5B full"}),
                ("plan_accuracy.py", "measured", {"20 million"}),
                ("plan_accuracy.py --source images", "measured", {"qwen2_vl"}),
                ("significance.py", "intervals that cover it", {"rate, Wilson"}),
            )
        ),
    ],
)
def test_benchmarks_print_their_tables(script, heading, rows, tmp_path):
    status, output, errors = run(script, folder=tmp_path)
    assert status == 0, output + errors
    found = table(output)
    first = next(iter(found[0]))
    named = {row[first].split(" (")[0]: row for row in found}
    assert rows <= named.keys(), output
    for name in rows:
        assert number(named[name][heading]) > 0, named[name]
    if script == "startup.py":
        assert "never called" not in errors, errors


def test_benchmark_of_a_failing_trainer_says_why_and_fails(tmp_path):
    status, output, errors = run("startup.py", "--", "--max-steps", "none", folder=tmp_path)
    assert status == 1
    assert "--max-steps" in errors, errors
    assert not output


LAUNCHES = ("single", "ddp", "z0", "z1", "z2", "z2_offload", "z3", "z3_offload")
SERIES = {
    "a": ({"LAUNCH": "single"}, {"single"}, "base-and-tuned/report.md"),
    "b": ({}, {f"{name}, micro-batch-size {rows}" for name in LAUNCHES for rows in (1, 32)}, "comparison.html"),
    "c": ({}, {f"{name}, adapter {kind}" for name in ("single", "z2", "z3") for kind in ("lora", "adalora")}, "*.html"),
    "d": ({"STEPS": "6"}, set(), "**/profile/*.json"),
}
"""Variables of a series, settings that its comparison has, and a file beside it."""


@pytest.mark.long
@pytest.mark.timeout(1200)
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
