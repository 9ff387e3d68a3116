"""Simulates how often intervals cover the truth, and how often paired tests call a difference one.

python benchmarks/significance.py; minutes on a core, no GPU. Seeds are fixed, so every run prints the same.
"""

import math

import numpy as np
from scipy.stats import binom, binomtest

from accel_sft.results.resampled import measured
from accel_sft.results.significance import LEVEL, Measured, needed, paired
from smoke import parse, parser

DRAWS = 1000


def rate(right: np.ndarray) -> Measured:
    """A rate of right answers: `right` says which examples are answered right."""
    scores = right.astype(float).tolist()
    return Measured(sum(scores) / len(scores), range(len(scores)), scores)


def wilson(count: int, truth: float, draws: int = DRAWS) -> tuple[float, float]:
    """The share of intervals that cover the truth: over this many draws, and over all draws by their probabilities."""
    random = np.random.default_rng([count, round(100 * truth)])
    covers = {}
    for right in range(count + 1):
        found = binomtest(right, count).proportion_ci(1 - LEVEL, "wilson")
        covers[right] = found.low <= truth <= found.high
    drawn = []
    for _ in range(draws):
        low, high = rate(random.random(count) < truth).interval() or (math.nan, math.nan)
        drawn.append(low <= truth <= high)
    exact = sum(binom.pmf(right, count, truth) for right, covered in covers.items() if covered)
    return sum(drawn) / draws, float(exact)


def answers(random: np.random.Generator, count: int, worse: float, better: float) -> tuple[Measured, Measured]:
    """Two models with half of the answers right; these shares of all become wrong (`worse`) or right."""
    before, chance = random.random(count) < 0.5, random.random(count)
    after = np.where(before, chance >= 2 * worse, chance < 2 * better)
    return rate(before), rate(after)


def micro_f1(scores) -> dict[str, float]:
    right, wrong, missed = (sum(score[key] for score in scores) for key in ("tp", "fp", "fn"))
    return {"f1": 2 * right / (2 * right + wrong + missed)}


def entities(random: np.random.Generator, count: int, recalls: tuple[float, ...]) -> list[Measured]:
    """The micro-F1 of models that find these shares of one to six entities an example, and less in harder examples."""
    gold, ease = random.integers(1, 7, count), random.beta(4, 4, count) * 2
    found = []
    for recall in recalls:
        right, wrong = random.binomial(gold, np.clip(recall * ease, 0, 1)), random.poisson(0.3, count)
        columns = zip(right.tolist(), wrong.tolist(), (gold - right).tolist(), strict=True)
        scores = [dict(zip(("tp", "fp", "fn"), column, strict=True)) for column in columns]
        samples = [{"index": index, "prompt": "", "scores": each} for index, each in enumerate(scores)]
        found.append(measured(micro_f1(scores), samples, micro_f1)[0]["f1"])
    return found


def true_f1(recall: float) -> float:
    """The micro-F1 over enough examples for a noise of only 0.0002."""
    random, count = np.random.default_rng(1), 4_000_000
    gold, ease = random.integers(1, 7, count), random.beta(4, 4, count) * 2
    right, wrong = random.binomial(gold, np.clip(recall * ease, 0, 1)).sum(), random.poisson(0.3, count).sum()
    return float(2 * right / (right + wrong + gold.sum()))


def of_f1(count: int, recall: float, draws: int = DRAWS) -> float:
    """The share of bootstrap intervals of micro-F1 that cover the truth."""
    random, truth = np.random.default_rng([count, round(100 * recall)]), true_f1(recall)
    spans = [entities(random, count, (recall,))[0].interval() or (math.nan, math.nan) for _ in range(draws)]
    return sum(low <= truth <= high for low, high in spans) / draws


def of_skewed_mean(count: int, draws: int = DRAWS) -> float:
    """The share of intervals that cover the mean of scores: 70% of the scores are 1, the others are uniform."""
    random, covered = np.random.default_rng(count), 0
    for _ in range(draws):
        scores = np.where(random.random(count) < 0.7, 1.0, random.random(count)).tolist()
        low, high = Measured(sum(scores) / count, range(count), scores).interval() or (math.nan, math.nan)
        covered += low <= 0.85 <= high
    return covered / draws


def called(pairs, truth: float) -> tuple[float, float]:
    """The share of pairs of models that are called different, and of intervals that cover the true difference."""
    changes = [paired(*pair) for pair in pairs]
    covered = [change["low"] <= truth <= change["high"] for change in changes]
    return sum(change["p"] < LEVEL for change in changes) / len(changes), sum(covered) / len(covered)


def row(what: str, count: int, truth: float | str, covered: float, exact: str = "", different: str = "") -> None:
    print(f"| {what} | {count:,} | {truth} | {covered:.1%} | {exact} | {different} |", flush=True)


def main() -> None:
    known = parser(__doc__)
    known.add_argument("--draws", type=int, help=f"Draws of examples for each row; default: {DRAWS}.")
    draws = parse(known, draws=4).draws or DRAWS
    print(
        "| | examples | truth | intervals that cover it | of all draws | called different |\n|---|---|---|---|---|---|"
    )
    for count in (200, 1000):
        for truth in (0.2, 0.5, 0.8, 0.95):
            drawn, exact = wilson(count, truth, draws)
            row("rate, Wilson", count, truth, drawn, f"{exact:.1%}")
    for count, recall in ((200, 0.5), (200, 0.8), (1000, 0.5)):
        row("micro-F1, bootstrap", count, f"{true_f1(recall):.3f}", of_f1(count, recall, draws))
    for count in (12, 30, 100):
        row("skewed mean, Student", count, 0.85, of_skewed_mean(count, draws))
    random = np.random.default_rng(0)
    for count, worse, better in ((200, 0.1, 0.1), (200, 0.05, 0.05), (1000, 0.1, 0.1)):
        different, covered = called([answers(random, count, worse, better) for _ in range(draws)], 0.0)
        row("difference of rates", count, 0, covered, "", f"{different:.1%}")
    for worse, better in ((0.05, 0.08), (0.1, 0.13), (0.05, 0.15), (0.02, 0.12)):
        truth = better - worse
        error = math.sqrt((worse + better - truth**2) / 200)
        count = needed({"difference": truth, "standard_error": error, "examples": 200}) or 0
        different, covered = called([answers(random, count, worse, better) for _ in range(draws)], truth)
        row("rates, as many examples as are needed", count, f"{truth:+.2f}", covered, "", f"{different:.1%}")
    for count, recalls in ((200, (0.6, 0.6)), (200, (0.6, 0.63))):
        truth, what = true_f1(recalls[1]) - true_f1(recalls[0]), "difference of micro-F1"
        if truth:
            errors = [paired(*entities(random, count, recalls))["standard_error"] for _ in range(20)]
            change = {"difference": truth, "standard_error": sum(errors) / len(errors), "examples": count}
            count, what = needed(change) or 0, "micro-F1, as many examples as are needed"
        different, covered = called((entities(random, count, recalls) for _ in range(draws)), truth)
        row(what, count, f"{truth:+.3f}", covered, "", f"{different:.1%}")


if __name__ == "__main__":
    main()
