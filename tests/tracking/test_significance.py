"""Intervals cover the truth as often as they say, and so do paired tests err; what has no interval says why."""

import io
import math
from functools import partial

import numpy as np
import pytest
from matrix import matrix, run
from rich.cells import cell_len
from rich.console import Console
from scipy.stats import sem, t, ttest_rel

import significance as simulated
from accel_sft.io.files import write_json_lines
from accel_sft.io.heartbeat import heartbeat_count
from accel_sft.io.run_dir import RunDir
from accel_sft.results import resampled
from accel_sft.results.resampled import add_intervals, measured, read_measured
from accel_sft.results.run_report import about_intervals, print_report, render_report
from accel_sft.results.significance import against_best, average, needed, paired, verdict, words_for
from accel_sft.tools.report.runs import read_run
from accel_sft.tools.report.tables import against_best_run

WORDS = words_for(True)


def answers(key, scores):
    rows = [score if isinstance(score, dict) else {key: score} for score in scores]
    texts = {"expected": "e", "generated": "g"}
    return [{"index": place, "prompt": f"{place}?", **texts, "scores": row} for place, row in enumerate(rows)]


def rate(wrong, right, lost=0, gained=0):
    """A rate over examples of which `lost` and `gained` are others than those of `rate(wrong, right)`."""
    scores = [1.0] * gained + [0.0] * (wrong - gained) + [0.0] * lost + [1.0] * (right - lost)
    value = sum(scores) / len(scores)
    return measured({"accuracy": value}, answers("accuracy", scores), None)[0]["accuracy"]


class Micro:
    """A task with a rate and micro-F1."""

    main_metric, higher_is_better = "f1", True

    @staticmethod
    def aggregate(scores):
        return {**simulated.micro_f1(scores), "right": sum(score["right"] for score in scores) / len(scores)}


def micro_answers(seed, recall, count=60):
    random, scores = np.random.default_rng(seed), []
    for _ in range(count):
        hits = int(random.binomial(4, recall))
        scores.append({"tp": hits, "fp": int(random.poisson(0.3)), "fn": 4 - hits, "right": int(hits == 4)})
    return answers("", scores)


def evaluated(before, after, task=Micro, run_dir=None):
    result = {"task": "t", "main_metric": task.main_metric, "status": "complete"}
    for side, samples in (("before", before), ("after", after)):
        result[side] = {**task.aggregate([sample["scores"] for sample in samples]), "eval_loss": 1.0}
    add_intervals(result, task, before, after, run_dir)
    return result


@pytest.mark.parametrize(
    ("lost", "gained", "words"),
    [
        (5, 25, "better (+0.10, 0.05 to 0.15)"),
        (25, 5, "worse (-0.10, -0.15 to -0.05)"),
        (12, 18, "no difference that 200 examples can show; 1,400 would"),
        (9, 9, "no difference that 200 examples can show"),
        (0, 0, "the same"),
    ],
)
def test_what_a_paired_test_finds_is_said_in_words(lost, gained, words):
    assert verdict(paired(rate(100, 100), rate(100, 100, lost, gained)), WORDS) == words


def test_better_direction_is_the_tasks_and_otherwise_unknown():
    change = paired(rate(100, 100), rate(100, 100, 5, 25))
    assert verdict(change, words_for(False)).startswith("worse (+0.10,")
    assert verdict(change, words_for(None)).startswith("higher (+0.10,")


def test_interval_is_no_point_where_every_answer_changed():
    change = paired(rate(50, 0), rate(50, 0, 0, 50))
    assert change["low"] < 0.95
    assert change["high"] == 1.0
    low, high = rate(0, 50).interval()
    assert 0.9 < low < 0.95
    assert high == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("lost", "gained", "low", "high", "p"), [(2, 12, 0.0560, 0.3286, 0.0074), (0, 0, -0.0377, 0.0377, 1.0)]
)
def test_difference_of_rates_has_agresti_mins_interval_and_mcnemars_p(lost, gained, low, high, p):
    change = paired(rate(25, 25), rate(25, 25, lost, gained))
    assert (change["low"], change["high"], change["p"]) == pytest.approx((low, high, p), abs=6e-5)


def test_examples_without_a_difference_are_never_called_enough():
    undecided = 0
    for count in range(2, 13):
        for lost in range(count + 1):
            for gained in range(count + 1 - lost):
                change = paired(rate(count - lost, lost), rate(count - lost, lost, lost, gained))
                more = needed(change)
                if change["p"] >= 0.05 and more:
                    assert more > count, change
                    undecided += 1
    assert undecided > 100
    few = {"difference": 4.0, "standard_error": 1.0, "examples": 3, "p": 0.057}  # of a bootstrap
    assert needed(few) > 3


def test_equal_changes_have_only_rounding_noise():
    scores = [0.2, 0.7, 0.4]
    before = [0.1 + 0.2 + score - 0.3 for score in scores]  # differs by rounding
    after, before = (measured({"a": sum(of) / len(of)}, answers("a", of), None)[0]["a"] for of in (scores, before))
    change = paired(before, after)
    assert (change["standard_error"], change["low"], needed(change)) == (0.0, None, None)
    assert verdict(change, WORDS) == "the same"


def test_other_examples_are_not_paired():
    one, other = rate(5, 5), rate(5, 6)
    assert paired(one, other) is None
    otherwise = [{**answer, "prompt": "other"} for answer in answers("accuracy", [0, 1])]
    assert paired(rate(1, 1), measured({"accuracy": 0.5}, otherwise, None)[0]["accuracy"]) is None
    assert average([one, other]) is None


def test_levels_are_corrected_for_every_pair_of_settings():
    """Of four settings there are six pairs."""
    settings = {"a": rate(100, 100, 0, 30), "b": rate(100, 100), "c": rate(100, 100, 0, 20), "d": rate(100, 100, 0, 24)}
    tests = against_best(settings, "a")
    assert [round(0.05 / tests[name]["level"]) for name in ("b", "c", "d")] == [6, 6, 6]
    assert verdict(tests["b"], WORDS).startswith("worse (-0.15")
    assert paired(settings["a"], settings["d"])["p"] < 0.05  # without a correction it would be a difference
    assert tests["d"]["p"] > tests["d"]["level"]
    assert needed(tests["d"], tests["d"]["level"]) > needed(tests["d"])


def test_micro_f1_interval_is_the_tasks_and_repeatable():
    before, after = micro_answers(1, 0.5), micro_answers(2, 0.8)
    result = evaluated(before, after)
    intervals = result["intervals"]
    assert intervals == evaluated(before, after)["intervals"]
    low, high = intervals["after"]["f1"]
    assert low < result["after"]["f1"] < high
    assert 0.04 < high - low < 0.15
    assert intervals["change"]["f1"]["p"] < 1e-6
    assert set(intervals["after"]) == {"f1", "right"}  # the loss has no scores of examples


def test_means_of_other_scores_are_students(monkeypatch):
    monkeypatch.setattr(resampled, "_resampled", None)
    random = np.random.default_rng(1)
    before, after = random.random(12), random.random(12) + 0.2
    one, other = (measured({"a": of.mean()}, answers("a", of.tolist()), None)[0]["a"] for of in (before, after))
    assert one.interval() == pytest.approx(t.interval(0.95, 11, before.mean(), sem(before)))
    test, change = ttest_rel(after, before), paired(one, other)
    assert change["p"] == pytest.approx(test.pvalue)
    assert (change["low"], change["high"]) == pytest.approx(test.confidence_interval())
    together = average([one, other])
    assert together.interval() == pytest.approx(t.interval(0.95, 11, together.value, sem((before + after) / 2)))
    few = measured({"a": 0.75}, answers("a", [1.0, 1.0, 0.5, 0.5]), None)[0]["a"]
    assert few.interval() == (0.5, 1.0)  # within the scores' range


def test_bootstrap_interval_of_few_examples_is_as_wide():
    """Percentiles alone are 0.85 times as wide at 12 examples, and cover less than they say."""
    scores = np.random.default_rng(1).random(12)

    def aggregate(rows):
        return {"a": 2 * sum(row["x"] for row in rows) / len(rows)}

    low, high = measured({"a": 2 * scores.mean()}, answers("x", scores.tolist()), aggregate)[0]["a"].interval()
    assert (high - low) / 4 == pytest.approx(t.ppf(0.975, 11) * sem(scores), rel=0.08)


def oddity(name):
    def of(scores):
        if name == "fails" and not any(score["x"] == 0 for score in scores):
            raise ZeroDivisionError
        some = [score["x"] for score in scores if score["x"] < 0.1]
        odd = {"odd": len(scores) / 3 if name == "count" else sum(some) / len(some)} if some or name == "count" else {}
        return {"main": max(score["x"] for score in scores), **odd}

    return of


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fails", "aggregate() fails on resampled examples (ZeroDivisionError)"),
        ("vanishes", "it is not defined on every resample"),
        ("count", "it depends on the number of examples"),
    ],
)
def test_metric_that_cannot_be_resampled_says_why(name, reason):
    samples = answers("x", [place / 20 for place in range(20)])
    aggregate = oddity(name)
    metric_of, without = measured(aggregate([sample["scores"] for sample in samples]), samples, aggregate)
    assert without["odd"] == reason
    assert ("main" in metric_of) == (name != "fails")


def test_slow_or_foreign_aggregate_has_no_interval(monkeypatch):
    beats, samples = heartbeat_count(), micro_answers(1, 0.5)
    values = Micro.aggregate([sample["scores"] for sample in samples])
    _, without = measured({**values, "f1": values["f1"] + 0.1}, samples, Micro.aggregate)
    assert without == {"f1": "aggregate() of the stored answers gives a different number"}
    measured(values, samples, Micro.aggregate)
    assert heartbeat_count() - beats >= 2000  # for the watch over hangs
    monkeypatch.setattr(resampled, "_LONGEST_SECONDS", -1.0)
    metric_of, without = measured(values, samples, Micro.aggregate)
    assert without == {"f1": "aggregate() is too slow to resample within -1 s"}
    assert metric_of.keys() == {"right"}


def test_one_example_or_none_have_no_interval():
    one = evaluated(micro_answers(1, 0.5, 1), micro_answers(2, 0.5, 1))["intervals"]
    assert one["without"] == {"f1": "there is only one example"}
    assert one["change"] == {}
    result = {"before": None, "after": None}
    add_intervals(result, Micro, [], [], None)
    assert "intervals" not in result


def test_report_and_terminal_have_intervals_and_the_tests_result():
    before, after = micro_answers(1, 0.5, 200), micro_answers(2, 0.52, 200)
    result = evaluated(before, after)
    page = render_report(result, before, after)
    assert "| validation loss | 1 | 1 | +0 |" in page
    assert "at 95%, over 200 examples. Changes are judged by a paired test on the same examples, at 5%." in page
    assert page.count("examples can show") + page.count("better (") + page.count("higher (") == 2
    expected = verdict(result["intervals"]["change"]["f1"], WORDS)
    for width in (80, 120):
        shown = io.StringIO()
        print_report(result, before, after, console=Console(file=shown, width=width))
        assert max(map(cell_len, shown.getvalue().splitlines())) <= width
        words = " ".join(shown.getvalue().split("f1", 1)[1].split())
        for word in expected.replace("(", "").replace(")", "").split():
            assert word in words, word


def test_few_examples_are_named_beside_their_intervals():
    for count, few in ((12, True), (60, False)):
        sentences = about_intervals(evaluated(micro_answers(1, 0.5, count), micro_answers(2, 0.8, count)))
        assert ("; with so few, they cover about 90% if scores are skewed." in sentences) is few


@pytest.mark.parametrize("damage", [5, {"after": {"f1": [1, None]}, "change": {"f1": {"p": "x"}}}])
def test_intervals_of_no_form_are_left_out(damage):
    samples = micro_answers(1, 0.5)
    result = {**evaluated(samples, samples), "intervals": damage}
    assert "+0 |" in render_report(result, samples, samples)


def run_in(folder, seed, recall):
    folder.mkdir()
    run_dir, samples = RunDir(folder), micro_answers(seed, recall, 200)
    result = evaluated(samples, samples, run_dir=run_dir)
    run_dir.samples.mkdir()
    write_json_lines(run_dir.answers(4), samples)
    run_dir.write_result(result)
    return read_run(folder, folder.name)


def test_runs_are_tested_against_the_best_without_their_task(tmp_path):
    runs = [run_in(tmp_path / name, *about) for name, about in {"a": (1, 0.5), "b": (2, 0.7), "c": (3, 0.69)}.items()]
    (group,) = against_best_run(runs)
    (best, _, words), (second, number, alike), (third, _, worse) = group["rows"]
    assert (best, second, third, words) == ("b", "c", "a", "the best of these")
    assert alike.startswith("no difference that 200 examples can show")
    assert worse.startswith("worse (-0.")
    assert " to " in number
    assert against_best_run(runs[:1]) == []
    write_json_lines(runs[0].folder.answers(4), micro_answers(1, 0.5, 100))
    assert against_best_run(runs)[0]["rows"][2][2] == "not tested: other examples, or too few"
    runs[1].folder.resamples.write_text('{"metric": "f1"}')
    assert read_measured(runs[1].folder, runs[1].result) is None
    assert [name for name, *_ in against_best_run(runs)[0]["rows"]] == ["c", "a"]


def intervals_of_rates_cover_the_truth_in_95_of_100_draws(count, truth):
    drawn, exact = simulated.wilson(count, truth)
    assert 0.93 <= exact <= 0.97
    assert abs(drawn - exact) < 4 * math.sqrt(exact * (1 - exact) / simulated.DRAWS)


def intervals_of_micro_f1_cover_the_truth_in_95_of_100_draws(recall):
    assert 0.93 <= simulated.of_f1(200, recall) <= 0.97


def paired_tests_call_equal_models_different_no_more_often_than_they_say():
    random = np.random.default_rng(0)
    assert simulated.called([simulated.answers(random, 200, 0.1, 0.1) for _ in range(1000)], 0)[0] < 0.07
    assert simulated.called((simulated.entities(random, 200, (0.6, 0.6)) for _ in range(500)), 0)[0] < 0.08


def as_many_examples_as_would_show_a_difference_do_in_four_of_five_draws():
    random, truth = np.random.default_rng(0), 0.03
    change = {"difference": truth, "standard_error": math.sqrt((0.13 - truth**2) / 200), "examples": 200}
    pairs = [simulated.answers(random, needed(change), 0.05, 0.08) for _ in range(1000)]
    assert 0.75 < simulated.called(pairs, truth)[0] < 0.87


RATES = [(n, p) for n in (200, 1000) for p in (0.5, 0.2, 0.8, 0.95)]


@matrix(
    *[partial(intervals_of_rates_cover_the_truth_in_95_of_100_draws, count=n, truth=p) for n, p in RATES],
    *[partial(intervals_of_micro_f1_cover_the_truth_in_95_of_100_draws, recall=recall) for recall in (0.5, 0.8)],
    paired_tests_call_equal_models_different_no_more_often_than_they_say,
    as_many_examples_as_would_show_a_difference_do_in_four_of_five_draws,
)
def test_where_the_truth_is_known(check, request):
    run(check, request)
