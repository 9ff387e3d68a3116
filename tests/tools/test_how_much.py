"""More rows are forecast from trainings on fewer: intervals hold what comes, and what cannot be said is not."""

from __future__ import annotations

import json
import math
import random
import re

import forked_launches
import pytest
from rich.text import Text

from accel_sft.tools.compare import rounds
from accel_sft.tools.compare.learning_curve import Curve, forecast, in_sentences, learnt, read_curve
from accel_sft.tools.compare.tables import terminal_table


def test_parts_are_trained_smallest_first_and_page_has_curve(called, monkeypatch, tmp_path):
    forked_launches.use(monkeypatch, rounds)
    job = ("math", "--train-examples", "64", "--validation-examples", "8", "--sizes", "64,8,32", "--seeds", "1")
    job += ("--global-batch-size", "4", "--max-steps", "2", "--learning-rate", "1e-9")
    done = called("how-much", *job, run_dir=tmp_path)
    assert done.status == 0, done.output
    record = json.loads((tmp_path / "comparison.json").read_text())
    assert [entry["values"]["train_limit"] for entry in record["settings"]] == ["8", "32", "64"]
    counts = [json.loads(path.read_text())["config"]["train_limit"] for path in sorted(tmp_path.rglob("run.json"))]
    assert counts == ["8", "32", "64"]
    assert record["findings"][0].startswith("accuracy after training is 0 with 8 rows, 0 with 32 rows, 0 with 64 rows")
    assert "All trainings ended with the same metric, so more rows cannot be judged." in " ".join(done.output.split())
    assert record["command"].startswith("accel-sft how-much math ")
    monkeypatch.setattr("accel_sft.tools.compare.command.lock", lambda folder: None)  # this process has locked it
    again = called("how-much", *job, run_dir=tmp_path)
    assert again.status == 0, again.output
    assert "3 runs are done already" in again.output
    page = (tmp_path / "comparison.html").read_text()
    assert page.index('<section id="rows"') < page.index('<section id="findings"')
    assert "Metric by number of training rows" in page
    assert '"rows":64' in page.replace(".0", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--train-examples 20", "20 training rows are too few for parts of at least 8 rows; a curve needs at"),
        ("--sizes 8,16", "--sizes 8,16: too few sizes; a curve needs at least 3 different numbers"),
        ("--train-examples 64 --sizes 8,16,65", "--sizes '65': give comma-separated row counts, each at most 64 (the"),
        ("--learning-rate 1e-3,1e-4", "--learning-rate: how-much varies only the number of rows"),
        ("-- --seed 3", "--seed after --: how-much sets this for each training"),
    ],
)
def test_rows_without_a_curve_are_refused_before_training(tmp_path, monkeypatch, called, arguments, message):
    monkeypatch.chdir(tmp_path)
    refused = called("how-much", "math", *arguments.split())
    assert refused.status == 1
    assert f"Error: {message}" in " ".join(refused.output.split())
    assert not [*tmp_path.iterdir()]


def test_dry_run_prints_each_training(tmp_path, monkeypatch, called):
    monkeypatch.chdir(tmp_path)
    done = called("how-much", "math", "--sizes", "70,35,150", "--dry-run", "--train-examples", "200")
    named = [f"train-limit {rows}, seed {seed}" for rows in (35, 70, 150) for seed in (1, 2)]
    assert (done.status, done.output.splitlines()[::2]) == (0, named)
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


def test_intervals_of_95_percent_cover_twice_as_many_rows():
    held, widths = 0, []
    for number in range(40):
        curve, truth = drawn(number)
        (point,) = forecast(curve, [16_000])
        assert point["low"] <= point["value"] <= point["high"]
        held += point["low"] <= truth <= point["high"]
        widths.append(point["high"] - point["low"])
    assert held >= 37
    assert sorted(widths)[20] <= 0.25


def made(metrics, errors=(0.01,), **more):
    """A record of settings with these metrics by number of rows, one for each seed; `errors` are of tests in pairs."""
    alike = {"status": "complete", "launch": {}, "spread": {}, "runs": [], "disturbed": {}}
    numbers = dict.fromkeys(("tokens_per_second", "peak_device_memory_gib"))
    entries = [
        {"values": {"train_limit": str(rows), "seed": seed}, "median": {**numbers, "metric_after": metric}, **alike}
        for rows, values in metrics.items()
        for seed, metric in enumerate(values, 1)
    ]
    record = {"varied": ["train_limit", "seed"], "main_metric": "f1", "higher_is_better": True, "settings": entries}
    record["paired"] = {f"train-limit {n}": {"examples": 50, "standard_error": one} for n, one in enumerate(errors)}
    record |= more
    record["learning_curve"] = learnt(record)
    return record


def test_the_table_has_the_rows_in_order_and_no_speed():
    record = made({35: (0.28,), 70: (0.3,), 150: (0.2,)})
    for entry in record["settings"]:
        entry["median"] |= dict.fromkeys(("median_step_seconds", "mfu", "peak_host_memory_gib", "eval_loss_after"), 1.0)
        entry["disturbed"] = {1: ["steps 2 to 9: other processes took 1.4 of 2 cores"]}
    table = terminal_table(record)
    assert [*table.columns[0].cells] == [Text("35"), Text("70"), Text("150")]
    assert [column.header for column in table.columns] == ["train limit", "seed", "f1", "loss"]


def test_sentences_name_gain_of_more_rows_and_its_end():
    rising = [*in_sentences(made({500: (0.5, 0.52), 1000: (0.6, 0.61), 2000: (0.68, 0.69), 4000: (0.74, 0.75)}))]
    assert rising[0].startswith("f1 after training is 0.51 (0.5 to 0.52) with 500 rows, 0.605 (0.6 to 0.61) with")
    assert re.fullmatch(
        r"With 4,000 more rows \(8,000 in all\) f1 is forecast at 0\.7\d+ \(95%: 0\.7\d+ to 0\.\d+\), "
        r"a change of \+0\.0\d\d? from the 0\.7\d+ forecast for 4,000\.",
        rising[1],
    )
    assert rising[2].startswith("The validation examples cannot show differences below 0.028")
    flat = [*in_sentences(made(dict.fromkeys((500, 1000, 2000, 4000), (0.9, 0.91))))]
    assert "Beyond about 4,000 rows, no gain above this is expected" in flat[2]


def test_flat_forecast_is_no_gain_after_a_worse_largest_part():
    record = made({35: (0.28, 0.3), 70: (0.3, 0.3), 150: (0.2, 0.3)})
    now, _, twice = (one["value"] for one in record["learning_curve"]["forecast"][:3])
    sentences = [*in_sentences(record)]
    assert "0.25 (0.2 to 0.3) with 150 rows." in sentences[0]
    assert abs(twice - now) < 0.02  # against the 0.25 that was measured it would be 0.05
    assert f"a change of {twice - now:+.2g} from the {now:.4g} forecast for 150." in sentences[1]


def test_metric_better_when_lower_is_forecast_to_fall():
    record = made({500: (2.4,), 1000: (2.2,), 2000: (2.05,), 4000: (1.95,)}, higher_is_better=False)
    (point,) = forecast(read_curve(record), [8000])
    assert 1.75 < point["low"] < point["value"] < point["high"] < 2.0
    record = made({500: (50.0,), 1000: (20.0,), 2000: (9.0,), 4000: (6.0,)}, higher_is_better=False)  # a perplexity
    assert min(one["low"] for one in record["learning_curve"]["forecast"]) == 0


@pytest.mark.parametrize("better", [True, False])
def test_metric_that_fell_with_rows_is_not_forecast(better):
    falling = {500: (0.9, 0.91), 1000: (0.85, 0.86), 2000: (0.8, 0.81), 4000: (0.7, 0.71)}
    metrics = falling if better else {rows: [2 - value for value in values] for rows, values in falling.items()}
    sentences = [*in_sentences(made(metrics, higher_is_better=better))]
    assert len(sentences) == 2
    assert sentences[1].startswith("f1 was better after 500 rows than after 4,000, so nothing is forecast: ")
    noisy = {500: (0.5, 0.9), 1000: (0.6, 0.8), 2000: (0.4, 0.7), 4000: (0.3, 0.6)}
    assert made(noisy)["learning_curve"]["forecast"]


def test_sizes_that_answer_like_the_best_end_no_forecast():
    metrics = {500: (0.9,), 1000: (0.98,), 2000: (0.98,), 4000: (0.98,)}
    for errors, count, detectable in (((0.0, 0.01), 3, 0.028), ((0.0, 0.0), 2, None)):
        record = made(metrics, errors)
        assert len([*in_sentences(record)]) == count
        smallest = record["learning_curve"]["detectable"]
        assert (smallest and round(smallest, 3)) == detectable


def test_other_comparisons_have_no_curve():
    metrics = {500: (0.5,), 1000: (0.6,), 2000: (0.7,)}
    assert made({500: (0.5,), 1000: (0.6,)})["learning_curve"] is None
    assert made(metrics, varied=["train_limit", "learning_rate"])["learning_curve"] is None
    assert made(metrics)["learning_curve"]["forecast"][0]["rows"] == 2000
