"""More rows are forecast from trainings on fewer: intervals hold what comes, and what cannot be said is not."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys

import pytest
from click.testing import CliRunner
from fake_plugins import install

from accel_sft.api.errors import UserError
from accel_sft.cli.group import cli
from accel_sft.tools.compare.learning_curve import Curve, forecast, in_sentences, learnt, read_curve


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    install(folder, "accel-sft-copied", "copied = accel_sft_copied:Good")
    return folder


def how_much(site, cwd, *arguments):
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "accel_sft", "how-much", "copied", *arguments],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "80"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_parts_of_the_rows_are_trained_on_the_smallest_first_and_the_page_has_the_curve(site, tmp_path):
    run = ("--global-batch-size", "4", "--max-steps", "2", "--output-dir", "learnt", "--size", "64")
    done = how_much(site, tmp_path, "--sizes", "64,8,32", "--seeds", "1", *run)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "learnt" / "comparison.json").read_text())
    assert [cell["settings"]["train_limit"] for cell in record["cells"]] == ["8", "32", "64"]
    counts = [json.loads(path.read_text())["config"]["train_limit"] for path in sorted(tmp_path.rglob("run.json"))]
    assert counts == ["8", "32", "64"]
    assert record["findings"][0].startswith("accuracy after training on 8 rows 0; 32 rows 0; 64 rows 0")
    assert "All trainings ended alike, which says nothing of more rows" in " ".join(done.stdout.split())
    page = (tmp_path / "learnt" / "comparison.html").read_text()
    assert "Metric by number of training rows" in page
    assert '"rows":64' in page.replace(".0", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--train-examples", "20"),
            "20 training rows are too few, as a part has at least 8: a curve needs 3 numbers of rows",
        ),
        (("--sizes", "8,16"), "--sizes 8,16: too few: a curve needs 3 numbers of rows"),
        (("--train-examples", "64", "--sizes", "8,16,65"), "--sizes '65': expected numbers of rows up to 64"),
        (("--sizes", "8,x"), "--sizes 'x': expected numbers of rows"),
        (("--learning-rate", "1e-3,1e-4"), "--learning-rate: how-much varies the rows and the seed only"),
        (("--", "--seed", "3"), "--seed behind --: how-much sets it for each training"),
        (("--", "--train-limit", "3"), "--train-limit behind --: how-much sets it"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_makes_no_curve_is_refused_in_a_line_before_the_first_training(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(cli, ["how-much", "math", *arguments]).exception
    assert isinstance(refused, UserError)
    assert len(refused.problems) == 1
    assert refused.problems[0].startswith(message)
    assert not [*tmp_path.iterdir()]


def drawn(number):
    """A curve of five sizes and two seeds, the metric at twice the largest, and their noise; half are logistic."""
    chance = random.Random(number)
    noise, most = chance.choice((0.005, 0.01, 0.02)), 8000
    if number % 2:
        top, now, fall = chance.uniform(0.7, 1), chance.uniform(0.3, 0.69), chance.uniform(0.2, 1.2)

        def exact(rows):
            return top - (top - now) * (rows / most) ** -fall
    else:
        top, steep, place = chance.uniform(0.6, 1), chance.uniform(0.5, 2), chance.uniform(-2, 3)

        def exact(rows):
            return top / (1 + math.exp(-(steep * math.log2(rows / most) + place)))

    def seen(rows):
        return min(max(exact(rows) + chance.gauss(0, noise), 0), 1)

    sizes = [most >> halvings for halvings in range(4, -1, -1)]
    return Curve(sizes, [[seen(size), seen(size)] for size in sizes]), (seen(2 * most) + seen(2 * most)) / 2


def test_intervals_hold_what_twice_as_many_rows_bring_seventeen_times_out_of_twenty():
    held, widths = 0, []
    for number in range(40):
        curve, truth = drawn(number)
        (found,) = forecast(curve, [16_000])
        assert found.low <= found.value <= found.high
        held += found.low <= truth <= found.high
        widths.append(found.high - found.low)
    assert held >= 34
    assert sorted(widths)[20] <= 0.15


def made(metrics, **more):
    """A record of cells with these metrics by number of rows, a cell for each seed."""
    cells = [
        {
            "name": f"train-limit {rows}, seed {seed}",
            "status": "complete",
            "settings": {"train_limit": str(rows), "seed": seed},
            "launch": {"processes": 1, "zero_stage": None, "offload": {}, "backend": "plain", "precision": "no"},
            "median": dict.fromkeys(("tokens_per_second", "peak_device_memory_gib"))
            | {"metric_after": metric, "metric_low": metric - 0.02, "metric_high": metric + 0.02},
            "spread": {},
            "runs": [],
            "disturbed": {},
        }
        for rows, values in metrics.items()
        for seed, metric in enumerate(values, 1)
    ]
    record = {"varied": ["train_limit", "seed"], "main_metric": "f1", "higher_is_better": True, "cells": cells, **more}
    record["learning_curve"] = learnt(record)
    return record


def test_the_sentences_say_what_more_rows_bring_and_where_they_bring_nothing_that_shows():
    rising = [*in_sentences(made({500: (0.5, 0.52), 1000: (0.6, 0.61), 2000: (0.68, 0.69), 4000: (0.74, 0.75)}))]
    assert rising[0].startswith("f1 after training on 500 rows 0.51 (0.5 to 0.52); 1,000 rows 0.605")
    assert rising[1].startswith("4,000 more rows (8,000 in all): f1 0.745 to 0.7")
    assert rising[2].startswith(("Beyond about ", "Up to "))
    flat = [*in_sentences(made(dict.fromkeys((500, 1000, 2000, 4000), (0.9, 0.91))))]
    assert flat[2].startswith("Beyond these 4,000 rows nothing is expected that these validation examples can show")


def test_what_is_better_when_it_is_lower_is_forecast_to_fall():
    record = made({500: (2.4,), 1000: (2.2,), 2000: (2.05,), 4000: (1.95,)}, higher_is_better=False)
    (found,) = forecast(read_curve(record), [8000])
    assert 1.75 < found.low < found.value < found.high < 2.0

    record = made({500: (50.0,), 1000: (20.0,), 2000: (9.0,), 4000: (6.0,)}, higher_is_better=False)  # a perplexity
    assert min(one["low"] for one in record["learning_curve"]["forecast"]) == 0


@pytest.mark.parametrize("better", [True, False])
def test_a_metric_that_more_rows_made_worse_is_not_forecast_to_recover(better):
    falling = {500: (0.9, 0.91), 1000: (0.85, 0.86), 2000: (0.8, 0.81), 4000: (0.7, 0.71)}
    metrics = falling if better else {rows: [2 - value for value in values] for rows, values in falling.items()}
    told = [*in_sentences(made(metrics, higher_is_better=better))]
    assert len(told) == 2
    assert told[1].startswith("f1 was better after 500 rows than after 4,000, so nothing is forecast: ")
    noisy = {500: (0.5, 0.9), 1000: (0.6, 0.8), 2000: (0.4, 0.7), 4000: (0.3, 0.6)}
    assert made(noisy)["learning_curve"]["forecast"]


def test_other_comparisons_have_no_curve():
    metrics = {500: (0.5,), 1000: (0.6,), 2000: (0.7,)}
    assert made({500: (0.5,), 1000: (0.6,)})["learning_curve"] is None
    assert made(metrics, varied=["train_limit", "learning_rate"])["learning_curve"] is None
    assert made(metrics, varied=["learning_rate"])["learning_curve"] is None
    assert made(metrics)["learning_curve"]["forecast"][0]["rows"] == 2000
