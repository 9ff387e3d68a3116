"""Remarks that a reader of a comparison's numbers needs: failures, loss parity, predictions, batches, surroundings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_sft.io.text import shown
from accel_sft.tools.compare.outcome import COMPLETE
from accel_sft.tools.compare.summary import completed, learns_alike
from accel_sft.tools.compare.tables import percent, predicted_peaks
from accel_sft.tracking.run_report import is_number

Cell = Mapping[str, Any]
_LITTLE = 0.05
"""Share of a step's time that making batches may take before a faster disk or processor is worth while."""


def remarks(record: Mapping[str, Any]) -> list[str]:
    """One sentence for each remark."""
    cells = record["cells"]
    of_memory = [*_predictions(cells), *_batches(cells)]
    return [*_disturbed(cells), *of_memory, *failures(cells), *_loss(cells), *_batch(cells), *_surroundings(record)]


def _disturbed(cells: Sequence[Cell]) -> Iterator[str]:
    """Say which rounds were disturbed, and whether their times count."""
    for cell in cells:
        count = len(cell["disturbed"]) == len(completed(cell))
        for number, what in cell["disturbed"].items():
            result = "its times count, as no round of this cell was undisturbed" if count else "its times do not count"
            yield f"{cell['name']}, round {number} (*): disturbed, {result} ({'; '.join(what)})."


def _predictions(cells: Sequence[Cell]) -> Iterator[str]:
    """Say by how much the predicted peaks of memory were wrong."""
    errors = {
        f"{cell['name']}, {place}": (predicted - measured) / measured
        for cell in cells
        for run in completed(cell)[:1]
        for place, (predicted, measured) in predicted_peaks(run).items()
    }
    if errors:
        worst = max(errors, key=lambda name: abs(errors[name]))
        mean = sum(map(abs, errors.values())) / len(errors)
        yield (
            f"Peaks of memory were predicted with a mean error of {percent(mean)}; the largest is "
            f"{100 * errors[worst]:+.0f}% ({worst})."
        )


def _batches(cells: Sequence[Cell]) -> Iterator[str]:
    """Say which share of a step reading rows and making batches takes at most."""
    shares = {}
    for cell in cells:
        found = [run["batch_share"] for run in completed(cell) if run["batch_share"] is not None]
        if found:
            shares[cell["name"]] = max(found)
    if not shares:
        return
    name = max(shares, key=lambda each: shares[each])
    told = f"Reading rows and making batches takes {percent(shares[name])} of a step at most ({name})"
    if shares[name] < _LITTLE:
        yield f"{told}, which matters little."
    else:
        yield f"{told}: that is the most that a faster disk or processor, or smaller images, could save."


def failures(cells: Sequence[Cell]) -> Iterator[str]:
    """Say which cells or runs did not complete, and why."""
    for cell in cells:
        bad = [run for run in cell["runs"] if run["status"] != COMPLETE]
        if cell["status"] != COMPLETE:
            yield f"{cell['name']}: {cell['status']}" + (f": {cell['reason']}" if cell["reason"] else "")
        elif bad:
            count = f"{len(bad)} of {len(cell['runs'])} runs"
            yield f"{cell['name']}: {count} ended otherwise: {bad[-1]['status']}: {bad[-1]['reason']}"


def _loss(cells: Sequence[Cell]) -> Iterator[str]:
    known = [cell for cell in cells if cell["loss_difference"]]
    if known:
        worst = max(known, key=lambda cell: cell["loss_difference"]["relative"])
        at = worst["loss_difference"]
        yield (
            f"At equal steps the loss curves of cells that should learn the same differ by "
            f"{100 * at['relative']:.2g}% at most ({worst['name']} from {at['to']}, step {at['step']})."
        )
    done = [cell for cell in cells if completed(cell)]
    if len(precisions := sorted({str(cell["launch"]["precision"]) for cell in done})) > 1:
        yield (
            f"Not all cells compute in the same precision ({', '.join(precisions)}), on which time and memory depend: "
            f"--mixed-precision {precisions[0]} gives it to all of them."
        )
    if any(not learns_alike(done[0], cell) for cell in done):
        yield "Not all cells learn the same: their settings differ in more than how a step is executed."


def _batch(cells: Sequence[Cell]) -> Iterator[str]:
    sizes = {cell["global_batch_size"] for cell in cells}
    if len(sizes) == 1:
        shares = sorted({(cell["launch"]["processes"], cell["examples_per_rank"]) for cell in cells})
        each = ", ".join(f"{shown(share)} on {count}" for count, share in shares)
        ranks = f"; a rank gets, by the number of processes: {each}" if {count for count, _ in shares} != {1} else ""
        yield f"A step learns from {sizes.pop()} examples in every cell, over all ranks together{ranks}."
    else:
        told = ", ".join(map(str, sorted(sizes)))
        yield f"A step does not learn from as many examples in every cell ({told}): go by tokens/s, not by s/step."


def _surroundings(record: Mapping[str, Any]) -> Iterator[str]:
    differing, cores = record["differences"]["environment"], record["environment"].get("cores")
    loads = [*differing.get("load_before", {}).values()]
    if is_number(cores) and (busy := [load for load in loads if is_number(load) and load > cores]):
        yield (
            f"The machine was busy: before {len(busy)} of {len(loads)} launches its load was above its {cores} cores "
            f"(up to {max(busy):.1f}), so times are longer, and differ more, than on a quiet machine."
        )
    others = [key for key in differing if not key.endswith(("before", "before_gib"))]
    if others:
        yield f"Not the same around all runs: {', '.join(others)} (comparison.md has them by run)."
