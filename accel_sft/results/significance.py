"""Distinguishes better metrics from noise by 95% intervals over examples, and by paired tests on the same examples.

numpy and scipy are imported inside the functions: only reports need them, and they take half a second to load.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from accel_sft.io.files import is_number

LEVEL = 0.05
"""Probability of reporting a difference between equal models; intervals cover 1 - LEVEL."""
POWER = 0.8
"""Probability with which the number of examples that `needed` returns reveals a difference of the observed size."""
_MOST_NEEDED = 1_000_000
_SAME = 1e-12
"""Differences up to this size count as rounding."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A metric of one evaluation, with the data from which its noise is estimated.

    Attributes:
        examples: (index, prompt) of each example; metrics are paired only where these are equal.
        scores: the score of each example, if the metric is their mean; else None.
        resampled: values of a metric that is not a mean, on resamples of the examples; all metrics of the same number
            of examples use the same resamples.
    """

    value: float
    examples: Sequence[Any]
    scores: Sequence[float] | None
    resampled: Sequence[float] = ()

    def interval(self) -> tuple[float, float] | None:
        """The 95% interval: Wilson's for a rate, whose scores are all 0 or 1; Student's for the mean of other scores,
        cut to their range; otherwise percentiles of the resamples. None if all values are equal: they show no noise."""
        from scipy.stats import binomtest

        if self.scores is None:
            return _percentiles(self.resampled, len(self.examples))
        if _is_rate(self.scores):
            limits = binomtest(round(sum(self.scores)), len(self.scores)).proportion_ci(1 - LEVEL, "wilson")
            return float(limits.low), float(limits.high)
        reach = _student(self.value, _standard_error(self.scores), len(self.scores))
        return reach and (max(reach[0], min(self.scores)), min(reach[1], max(self.scores)))


def average(of_seeds: Sequence[Measured]) -> Measured | None:
    """The mean of a metric over runs that differ in their seed only; None if their examples differ, or without runs."""
    if len(of_seeds) < 2:
        return next(iter(of_seeds), None)
    examples, value = of_seeds[0].examples, fmean(one.value for one in of_seeds)
    if any(other.examples != examples for other in of_seeds):
        return None
    scores = [one.scores for one in of_seeds if one.scores is not None]
    if len(scores) == len(of_seeds):
        return Measured(value, examples, [*map(fmean, zip(*scores, strict=True))])
    return Measured(value, examples, None, [*map(fmean, zip(*(one.resampled for one in of_seeds), strict=False))])


def paired(before: Measured, after: Measured) -> dict[str, Any] | None:
    """Test whether a metric differs between two evaluations of the same examples; None if the examples differ.

    If answers are right or wrong, the test is McNemar's in its mid-p form (Fagerland and others, 2013; the exact form
    finds too few differences), and the interval is Agresti and Min's (2005). For means of other scores, the test is the
    paired t test, and for other metrics the paired bootstrap.

    Returns:
        `difference`, `after` minus `before`; `low` and `high`, its 95% interval, None if all examples changed equally;
        `p`, the probability of as large a difference between equal models; `standard_error` and `examples`.
    """
    import numpy as np
    from scipy.stats import binom

    count = len(before.examples)
    if before.examples != after.examples or count < 2:
        return None
    difference = after.value - before.value
    reach: tuple[float, float] | None
    if before.scores is None or after.scores is None:
        resampled = [b - a for a, b in zip(before.resampled, after.resampled, strict=False)]
        if not resampled:
            return None
        error = float(np.std(resampled))
        p, reach = _p_of_equal(difference, error, count), _percentiles(resampled, count)
    elif _is_rate(before.scores) and _is_rate(after.scores):
        changes = np.subtract(after.scores, before.scores)
        gained, lost = int((changes > 0).sum()), int((changes < 0).sum())
        error, reach = float(changes.std()) / math.sqrt(count), _agresti_min(gained, lost, count)
        fewer, changed = min(gained, lost), gained + lost
        p = 2 * binom.cdf(fewer, changed, 0.5) - binom.pmf(fewer, changed, 0.5)
    else:
        error = _standard_error(np.subtract(after.scores, before.scores).tolist())
        p, reach = _p_of_equal(difference, error, count), _student(difference, error, count)
    return {
        "difference": difference,
        **dict(zip(("low", "high"), reach or (None, None), strict=True)),
        "p": float(p),
        "standard_error": error if error > _SAME else 0.0,
        "examples": count,
    }


def needed(change: Mapping[str, float], level: float = LEVEL) -> int | None:
    """How many examples would show a difference of this size with probability POWER; None if too many. The formula is
    Connor's (1987), with the uncentered variance: so the result exceeds `examples` if these show no difference."""
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
    """The smallest difference that a test at LEVEL finds with probability POWER, given its standard error."""
    from scipy.stats import norm

    return float((norm.isf(LEVEL / 2) + norm.ppf(POWER)) * standard_error)


def against_best(measured: Mapping[str, Measured], best: str) -> dict[str, dict[str, Any] | None]:
    """Test every other metric against the best one. Return what `paired` returns, and the `level` to compare `p` with.
    Because the best is chosen by the same numbers, `level` is LEVEL divided by the number of pairs (Bonferroni)."""
    pairs = max(math.comb(len(measured), 2), 1)
    tests = {name: paired(measured[best], one) for name, one in measured.items() if name != best}
    return {name: change and {**change, "level": LEVEL / pairs} for name, change in tests.items()}


def verdict(change: Mapping[str, Any], words: tuple[str, str]) -> str:
    """What `paired` or `against_best` found, in words: "better (+0.021, 0.008 to 0.034)"; "" if `change` is damaged.
    `words` are for a larger and for a smaller number."""
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
    """The words for a larger and for a smaller number; neutral ones for None (unknown)."""
    return {None: ("higher", "lower"), True: ("better", "worse"), False: ("worse", "better")}[higher_is_better]


def span(low: float, high: float) -> str:
    """An interval as text, to two digits of its width."""
    decimals = _decimals(low, high)
    return f"{low:.{decimals}f} to {high:.{decimals}f}"


def _decimals(low: float, high: float) -> int:
    return min(12, max(0, 1 - math.floor(math.log10(high - low)))) if 0 < high - low < math.inf else 3


def _is_rate(scores: Sequence[float]) -> bool:
    return {*scores} <= {0.0, 1.0}


def _standard_error(scores: Sequence[float]) -> float:
    """The standard error of the mean of scores; 0 for one example."""
    return stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0


def _student(mean: float, error: float, count: int) -> tuple[float, float] | None:
    from scipy.stats import t

    reach = float(t.isf(LEVEL / 2, count - 1)) * error
    return (mean - reach, mean + reach) if error > _SAME else None


def _p_of_equal(difference: float, error: float, count: int) -> float:
    """`p` by Student's t, or by a sign test if all examples changed by the same amount, up to rounding."""
    from scipy.stats import binomtest, t

    if error > _SAME:
        return float(2 * t.sf(abs(difference) / error, count - 1))
    return float(binomtest(count, count).pvalue) if abs(difference) > _SAME else 1.0


def _agresti_min(gained: int, lost: int, count: int) -> tuple[float, float]:
    """The interval by the normal distribution, with 0.5 added to `gained` and to `lost`, and 1 to the unchanged."""
    from scipy.stats import norm

    middle, changed = (gained - lost) / (count + 2), (gained + lost + 1) / (count + 2)
    reach = float(norm.isf(LEVEL / 2)) * math.sqrt((changed - middle**2) / (count + 2))
    return max(middle - reach, -1.0), min(middle + reach, 1.0)


def _percentiles(numbers: Sequence[float], examples: int) -> tuple[float, float] | None:
    """A percentile interval of resamples, widened for few examples like Student's t interval (Hesterberg, 2015)."""
    import numpy as np
    from scipy.stats import norm, t

    if len(numbers) == 0:
        return None
    others = max(examples - 1, 1)
    tail = norm.cdf(math.sqrt((others + 1) / others) * t.ppf(LEVEL / 2, others))
    low, high = np.quantile(numbers, (tail, 1 - tail)).tolist()
    return (low, high) if high - low > _SAME else None
