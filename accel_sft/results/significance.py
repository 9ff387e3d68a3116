"""Tells a better metric from noise: 95% intervals over examples, and paired tests of answers to the same examples.

numpy and scipy are imported inside the functions: only reports need them, and they take half a second to load.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accel_sft.io.files import is_number
from accel_sft.io.heartbeat import heartbeat

LEVEL = 0.05
"""Probability of calling a difference between equal models one; intervals cover 1 - LEVEL."""
POWER = 0.8
"""Probability with which as many examples as `needed` says show a difference as large as the one that was seen."""
_MOST_NEEDED = 1_000_000
_SAME = 1e-12
"""Differences up to this are of rounding."""
RESAMPLES = 2000
_MOST_INDICES = 4_000_000
"""Resampled indices that are held at once, 8 bytes each."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A metric of one evaluation, with what its noise is known from.

    Attributes:
        examples: (index, prompt) of each example; metrics are paired only where these are equal.
        scores: the score of each example, if the metric is their mean; else None.
        aggregated: `resampled` of a metric that is no mean.
    """

    value: float
    examples: Sequence[Any]
    scores: Sequence[float] | None
    aggregated: Sequence[float] = ()

    @functools.cached_property
    def resampled(self) -> Sequence[float]:
        """The metric on resamples of the examples, which are the same resamples for all metrics of as many examples;
        empty with fewer than two examples. Intervals and tests of rates need none."""
        import numpy as np

        if self.scores is None:
            return self.aggregated
        scores = np.asarray(self.scores)
        return next(iter(resample(len(scores), RESAMPLES, lambda indices: [scores[indices].mean(axis=-1)])), [])

    def interval(self) -> tuple[float, float] | None:
        """The 95% interval: Wilson's for a rate, whose scores are all 0 or 1; else percentiles of the resamples.
        None if the resamples do not differ, as they then tell nothing of the noise."""
        from scipy.stats import binomtest

        if self.scores is not None and _is_rate(self.scores):
            limits = binomtest(round(sum(self.scores)), len(self.scores)).proportion_ci(1 - LEVEL, "wilson")
            return float(limits.low), float(limits.high)
        return _percentiles(self.resampled, len(self.examples))


def average(of_seeds: Sequence[Measured]) -> Measured | None:
    """The mean of a metric over runs that differ in their seed only; None if their examples differ, or without runs."""
    if len(of_seeds) < 2:
        return next(iter(of_seeds), None)
    first, many = of_seeds[0], len(of_seeds)
    if any(other.examples != first.examples for other in of_seeds):
        return None
    value = sum(one.value for one in of_seeds) / many
    columns = [one.scores for one in of_seeds if one.scores is not None]
    if len(columns) == many:
        return Measured(value, first.examples, [sum(column) / many for column in zip(*columns, strict=True)])
    resampled = [sum(column) / many for column in zip(*(one.resampled for one in of_seeds), strict=False)]
    return Measured(value, first.examples, None, resampled)


def resample(count: int, resamples: int, statistics: Callable[[Any], Any]) -> list[list[float]]:
    """Each statistic on every resample of `count` examples, which depend on `count` alone; empty below two examples.

    Args:
        statistics: called with indices of examples, whose last axis is a resample.
    """
    import numpy as np
    from scipy.stats import DegenerateDataWarning, bootstrap

    if count < 2:
        return []

    def of_batch(indices: Any, axis: int) -> Any:
        heartbeat()
        return np.asarray(statistics(indices))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # NaN is looked for by the caller
        resampled = bootstrap(
            (np.arange(count),),
            of_batch,
            n_resamples=resamples,
            batch=max(1, _MOST_INDICES // count),
            vectorized=True,
            method="percentile",
            rng=0,
        )
    return resampled.bootstrap_distribution.tolist()


def paired(before: Measured, after: Measured) -> dict[str, Any] | None:
    """Test whether a metric differs between two evaluations of the same examples; None if the examples differ.

    Returns:
        `difference`, `after` less `before`; `low` and `high`, its 95% interval, None if resamples do not differ; `p`,
        the probability of as large a difference between equal models; `standard_error` and `examples`.
        If answers are right or wrong, `p` is of McNemar's test in its mid-p form (Fagerland and others, 2013; the exact
        one calls too little a difference), and the interval is Newcombe's (1998, method 10), which combines Wilson's;
        else both are of the paired bootstrap.
    """
    import numpy as np
    from scipy.stats import binom, binomtest, t

    count = len(before.examples)
    if before.examples != after.examples or count < 2:
        return None
    difference = after.value - before.value
    reach: tuple[float, float] | None
    rates = [one.scores for one in (before, after) if one.scores is not None and _is_rate(one.scores)]
    if len(rates) == 2:
        changes = np.subtract(rates[1], rates[0])
        error, reach = float(changes.std()) / math.sqrt(count), _newcombe(before, after)
        gained, lost = int((changes > 0).sum()), int((changes < 0).sum())
        fewer, changed = min(gained, lost), gained + lost
        p = 2 * binom.cdf(fewer, changed, 0.5) - binom.pmf(fewer, changed, 0.5)
    elif before.resampled and after.resampled:
        resampled = [b - a for a, b in zip(before.resampled, after.resampled, strict=False)]
        error, reach = float(np.std(resampled)), _percentiles(resampled, count)
        if error > _SAME:
            p = 2 * t.sf(abs(difference) / error, count - 1)
        else:  # each example changed alike, to rounding: a sign test
            error = 0.0
            p = binomtest(count, count).pvalue if abs(difference) > _SAME else 1.0
    else:
        return None
    return {
        "difference": difference,
        **dict(zip(("low", "high"), reach or (None, None), strict=True)),
        "p": float(p),
        "standard_error": error,
        "examples": count,
    }


def needed(change: Mapping[str, float], level: float = LEVEL) -> int | None:
    """How many examples would show a difference as large as this one, with probability POWER; None if too many.

    By Connor (1987): the null hypothesis has the uncentred variance, so the number of examples at hand is never said to
    be enough where it was not.
    """
    from scipy.stats import norm

    size, variance = abs(change["difference"]), change["examples"] * change["standard_error"] ** 2
    if not size or not variance:
        return None
    ratio = norm.isf(level / 2) * math.sqrt(variance + size**2) + norm.ppf(POWER) * math.sqrt(variance)
    count = (ratio / size) ** 2
    if not 0 < count <= _MOST_NEEDED:
        return None
    digits = 10 ** max(0, math.floor(math.log10(count)) - 1)
    return math.ceil(count / digits) * digits


def detectable(standard_error: float) -> float:
    """The smallest difference that a test at LEVEL finds with probability POWER, by the difference's standard error."""
    from scipy.stats import norm

    return float((norm.isf(LEVEL / 2) + norm.ppf(POWER)) * standard_error)


def against_best(measured: Mapping[str, Measured], best: str) -> dict[str, dict[str, Any] | None]:
    """Test every other metric against the best one: what `paired` returns, with the `level` that its `p` is held to.

    The best is chosen by the same numbers, so this is a choice among all pairs: levels are Holm's (1979) over as many
    tests as there are pairs.
    """
    tests = {name: paired(measured[best], one) for name, one in measured.items() if name != best}
    left, level, failed = len(measured) * (len(measured) - 1) // 2, LEVEL, False
    for change in sorted(filter(None, tests.values()), key=lambda change: change["p"]):
        level = level if failed else LEVEL / left
        failed = failed or change["p"] >= level
        left -= 1
        change["level"] = level
    return tests


def verdict(change: Mapping[str, Any], words: tuple[str, str]) -> str:
    """What `paired` or `against_best` found, in words: "better (+0.021, 0.008 to 0.034)"; "" if it is damaged.

    Args:
        words: for a larger and for a smaller number.
    """
    level, numbers = change.get("level", LEVEL), ("difference", "p", "standard_error", "examples")
    if not (is_number(level) and all(is_number(change.get(key)) for key in numbers)):
        return ""
    difference = change["difference"]
    if change["p"] >= level:
        if abs(difference) <= _SAME and not change["standard_error"]:
            return "the same"
        more = needed(change, level)
        return f"no difference that {change['examples']:,} examples can show" + (f"; {more:,} would" if more else "")
    low, high = change.get("low"), change.get("high")
    word = words[0] if difference > 0 else words[1]
    if not (is_number(low) and is_number(high) and low < high):
        return f"{word} ({difference:+.3g})"
    return f"{word} ({difference:+.{_decimals(low, high)}f}, {span(low, high)})"


def words_for(higher_is_better: bool | None) -> tuple[str, str]:
    """The words for a larger and for a smaller number; None if it is not known which is better."""
    return {None: ("higher", "lower"), True: ("better", "worse"), False: ("worse", "better")}[higher_is_better]


def span(low: float, high: float) -> str:
    """An interval as text, to two digits of its width."""
    decimals = _decimals(low, high)
    return f"{low:.{decimals}f} to {high:.{decimals}f}"


def _decimals(low: float, high: float) -> int:
    return min(12, max(0, 1 - math.floor(math.log10(high - low)))) if 0 < high - low < math.inf else 3


def _is_rate(scores: Sequence[float]) -> bool:
    return {*scores} <= {0.0, 1.0}


def _newcombe(before: Measured, after: Measured) -> tuple[float, float]:
    import numpy as np

    (low_a, high_a), (low_b, high_b) = before.interval() or (0.0, 1.0), after.interval() or (0.0, 1.0)
    a, b = before.value, after.value
    both = float(np.mean(np.multiply(before.scores or (), after.scores or ()))) - a * b
    both = max(both - 0.5 / len(before.examples), min(both, 0.0))  # the correction that method 10 adds to method 8
    spread = math.sqrt(max(0.0, a * (1 - a) * b * (1 - b)))
    together = both / spread if spread > _SAME else 0.0

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * together * one * other + other**2))

    return b - a - reach(b - low_b, high_a - a), b - a + reach(high_b - b, a - low_a)


def _percentiles(numbers: Sequence[float], examples: int) -> tuple[float, float] | None:
    """An interval of resamples, of few examples as much wider as Student's t is (Hesterberg, 2015)."""
    import numpy as np
    from scipy.stats import norm, t

    if len(numbers) == 0:
        return None
    others = max(examples - 1, 1)
    tail = norm.cdf(math.sqrt((others + 1) / others) * t.ppf(LEVEL / 2, others))
    low, high = np.quantile(numbers, (tail, 1 - tail)).tolist()
    return (low, high) if high - low > _SAME else None
