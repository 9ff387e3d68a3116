"""Forecasts what more training rows would bring, from a comparison of trainings on growing numbers of rows.

The metric is assumed to follow the number of rows by a power law towards a ceiling (Hestness and others, 2017, arXiv
1712.00409) or, for a task that is learnt all at once, by a logistic curve over the logarithm of rows. No single curve
is chosen: each curve of a grid is weighted by how well it fits the measured points. A forecast combines all curves, so
its interval is wide where they disagree.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_sft.io.files import is_number
from accel_sft.io.text import shown
from accel_sft.launch.child import COMPLETE
from accel_sft.results.significance import detectable

ROWS = "train_limit"
FEWEST_SIZES = 3
"""Minimum number of points for a curve."""
_LEVELS = (0.025, 0.5, 0.975)
_DRAWS = 8000
"""Number of random draws; an interval's ends are quantiles of the draws."""
_NOISES = (0.005, 0.01, 0.02, 0.04, 0.08)
"""Values to try for the standard deviation of a run from its curve, as shares of the metric's range."""
_FARTHER = 0.5
"""Share by which this standard deviation grows with every halving or doubling of the rows: small sizes count less,
because the largest sizes say most about larger ones."""
_LEAST, _STEEP = 0.4, 2.0
"""The same standard deviation is multiplied by `_LEAST + _STEEP * rise`, where `rise` is the curve's rise with a
doubling of the rows: on a steep curve, a seed that learns a little earlier ends far above other seeds."""
_MISFIT = 0.3
"""Extra standard deviation of a forecast per doubling ahead, as a share of the curve's rise in the last doubling: a
task that is still being learnt follows no curve exactly. Fitted to the jobs of benchmarks/learning_curves.py."""
_FREEDOM = 4
"""Degrees of freedom of Student's t: its tails are heavy, so that one bad run does not bend the curve."""
_AHEAD = 6
"""Number of doublings of the rows within which the end of the gain is searched for."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """The measurements: for each number of rows, ascending, the main metric of each seed after training.

    `detectable` is the smallest difference of two models that the validation examples detect four times out of five.
    """

    sizes: Sequence[int]
    metrics: Sequence[Sequence[float]]
    better: int = 1  # -1 if lower is better
    detectable: float | None = None

    @property
    def fell(self) -> int | None:
        """The smallest size whose seeds all beat those of the largest, on average by `detectable`; or None."""
        last = [self.better * value for value in self.metrics[-1]]
        for size, metrics in zip(self.sizes, self.metrics, strict=True):
            values = [self.better * value for value in metrics]
            gap = statistics.mean(values) - statistics.mean(last)
            if min(values) > max(last) and self.detectable is not None and gap >= self.detectable:
                return size
        return None

    @property
    def bounded(self) -> bool:
        """Whether the metric seems to be a share: all measured values are between 0 and 1."""
        return all(0 <= value <= 1 for values in self.metrics for value in values)


def of_rows(record: Mapping[str, Any]) -> bool:
    """Whether a comparison varies the number of rows, and nothing else but seeds."""
    return ROWS in record["varied"] and {*record["varied"]} <= {ROWS, "seed"}


def read_curve(record: Mapping[str, Any]) -> Curve | None:
    """The curve of a comparison `of_rows`; None for other comparisons, or with fewer than `FEWEST_SIZES` sizes."""
    by_size: dict[int, list[float]] = {}
    for setting in record["settings"] if of_rows(record) else ():
        rows, median = str(setting["values"].get(ROWS)), setting["median"]
        if setting["status"] == COMPLETE and rows.isdecimal() and is_number(median["metric_after"]):
            by_size.setdefault(int(rows), []).append(median["metric_after"])
    if len(by_size) < FEWEST_SIZES:
        return None
    tests = [test for test in (record.get("paired") or {}).values() if test]
    # runs with equal answers do not tell by how much other runs would differ
    errors = [test["standard_error"] for test in tests if test["standard_error"] > 0]
    return Curve(
        sizes=sorted(by_size),
        metrics=[by_size[size] for size in sorted(by_size)],
        better=1 if record.get("higher_is_better", True) else -1,
        detectable=detectable(statistics.median(errors)) if errors else None,
    )


def forecast(curve: Curve, rows: Sequence[int]) -> list[dict[str, float]]:
    """Forecast the metric after training on each number of `rows`: its mean over as many seeds as were measured, on the
    same validation examples (`value`), with a 95% interval (`low` to `high`)."""
    import numpy as np

    most, draws = curve.sizes[-1], np.random.default_rng(0)
    begin, scale = _unit(curve)
    sizes = [size for size, metrics in zip(curve.sizes, curve.metrics, strict=True) for _ in metrics]
    measured = np.array([(value - begin) / scale for metrics in curve.metrics for value in metrics])  # (points,)
    points = len(measured)
    multiples = np.array([size / most for size in (*sizes, *rows)])
    curves, slopes = _grid(multiples, curve.bounded)  # both (points + rows, curves)
    spread = _LEAST + _STEEP * slopes
    off = curves[:points] - measured[:, None]
    widening = np.array([1 + _FARTHER * math.log2(most / size) for size in sizes])[:, None]
    expected = widening * spread[:points]  # as a multiple of the noise
    fits = []  # log-likelihoods: (noises, curves)
    for noise in _NOISES:
        tails = np.log1p((off / (noise * expected)) ** 2 / _FREEDOM)
        fits.append(-((_FREEDOM + 1) / 2 * tails + np.log(noise * expected)).sum(0))
    likely = np.exp(np.array(fits) - np.max(fits)).ravel()
    noise_of, which = np.divmod(draws.choice(len(likely), _DRAWS, p=likely / likely.sum()), curves.shape[1])
    seeds = max(1, round(statistics.mean(map(len, curve.metrics))))
    positive = curve.better < 0 and all(value >= 0 for metrics in curve.metrics for value in metrics)  # such as losses
    limits = (0, 1) if curve.bounded else (0 if positive else -math.inf, math.inf)
    rise = slopes[points - 1][which]
    forecasts = []
    for size, values, widths in zip(rows, curves[points:], spread[points:], strict=True):
        ahead = abs(math.log2(size / most))
        noise = widths[which] * np.array(_NOISES)[noise_of] * (1 + _FARTHER * ahead) / math.sqrt(seeds)
        drawn = values[which] + np.hypot(noise, _MISFIT * ahead * rise) * draws.standard_t(_FREEDOM, _DRAWS)
        ends = begin + scale * np.quantile(drawn, _LEVELS)
        low, middle, high = np.clip(ends, *limits).tolist()
        forecasts.append({"rows": size, "value": middle, "low": min(low, high), "high": max(low, high)})
    return forecasts


def _unit(curve: Curve) -> tuple[float, float]:
    """Return (offset, scale): (metric - offset) / scale is 1 for the best possible value. If the metric is not a share,
    the largest number of rows is assumed to bring half of the possible gain."""
    if curve.bounded:
        return (0.0, 1.0) if curve.better > 0 else (1.0, -1.0)
    first, last = (statistics.mean(curve.metrics[at]) for at in (0, -1))
    gained = last - first if (last - first) * curve.better > 0 else curve.better * (abs(last) or 1.0) / 10
    return last - gained, 2 * gained


def _grid(multiples: Any, bounded: bool) -> tuple[Any, Any]:
    """Return the values of many curves at these multiples of the largest number of rows, and at each multiple the
    curve's rise with a doubling of the rows; both have the shape (multiples, curves)."""
    import numpy as np

    axes = np.meshgrid(np.linspace(0, 1, 121), np.linspace(0, 1, 31), np.geomspace(0.05, 3, 24))
    now, gap, fall = (axis.ravel() for axis in axes)  # power laws: the metric now, the share left to gain, the exponent
    axes = np.meshgrid(np.linspace(0.025, 1, 40), np.geomspace(0.2, 5, 24), np.linspace(-8, 8, 97))
    top, steep, place = (axis.ravel() for axis in axes)  # logistic curves over log2 of the rows
    values, rises = [], []
    for multiple in multiples:
        power = now + gap * (1 - now) * (1 - multiple**-fall)
        logistic = top / (1 + np.exp(-(steep * np.log2(multiple) + place)))
        values.append(np.concatenate([power, logistic]))
        falling = gap * (1 - now) * fall * math.log(2) * multiple**-fall
        rises.append(np.concatenate([falling, steep * logistic * (1 - logistic / top)]))
    return np.maximum(values, 0) if bounded else np.array(values), np.array(rises)


def learnt(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The measured points and the forecasts, for the record of a comparison; None if it has no learning curve."""
    if (curve := read_curve(record)) is None:
        return None
    ahead = [round(curve.sizes[-1] * 2 ** (step / 2)) for step in range(2 * _AHEAD + 1)]
    return {
        "measured": [
            {"rows": size, "metric": value}
            for size, values in zip(curve.sizes, curve.metrics, strict=True)
            for value in values
        ],
        "forecast": forecast(curve, ahead) if curve.fell is None else [],
        "fell": curve.fell,
        "detectable": curve.detectable,
    }


def in_sentences(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was measured, what twice as many rows would bring, and how many rows are enough."""
    if not (curve := record.get("learning_curve")):
        return
    metric, ahead, smallest = record["main_metric"], curve["forecast"], curve["detectable"]
    by_rows: dict[int, list[float]] = {}
    for point in curve["measured"]:
        by_rows.setdefault(point["rows"], []).append(point["metric"])
    points = []
    for rows, values in by_rows.items():
        reach = f" ({shown(min(values))} to {shown(max(values))})" if min(values) < max(values) else ""
        points.append(f"{shown(statistics.mean(values))}{reach} with {rows:,} rows")
    yield f"{metric} after training is {', '.join(points)}."
    if len({point["metric"] for point in curve["measured"]}) == 1:
        yield "All trainings ended with the same metric, so more rows cannot be judged. Train longer, or on fewer rows."
        return
    if fell := curve["fell"]:
        worse = f"{metric} was better after {fell:,} rows than after {max(by_rows):,}, so nothing is forecast"
        yield f"{worse}: check whether the later rows are of another kind, or train longer."
        return
    now, twice = ahead[0], ahead[2]
    # both values are forecasts, because the value measured with the most rows has the noise of the seeds
    yield (
        f"With {twice['rows'] - now['rows']:,} more rows ({twice['rows']:,} in all) {metric} is forecast at "
        f"{shown(twice['value'])} (95%: {shown(twice['low'])} to {shown(twice['high'])}), a change of "
        f"{twice['value'] - now['value']:+.2g} from the {shown(now['value'])} forecast for {now['rows']:,}."
    )
    if smallest is None:
        return
    enough = next(point["rows"] for point in ahead if abs(ahead[-1]["value"] - point["value"]) < smallest)
    farthest = ahead[-1]["rows"] / 4  # forecasts go farther, to see whether the gain ends here
    end = (
        f"Beyond about {enough:,} rows, no gain above this is expected; hold out more examples to see smaller gains."
        if enough < farthest
        else f"Up to {farthest:,.0f} rows, the forecast shows no end of gains above this."
    )
    yield f"The validation examples cannot show differences below {shown(smallest)}. {end}"
