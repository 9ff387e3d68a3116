"""Chooses the batching with the least work among those that are exact and fit into memory. The choice is recorded, so
that every start and resume uses the same batching."""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.batching.device_memory import LEFT_FREE, free_bytes
from accel_sft.batching.layouts import WHAT, Batching
from accel_sft.batching.sequence import in_parts
from accel_sft.batching.trial import Trial
from accel_sft.batching.verify import exact_batchings
from accel_sft.chat.encoded import Encoded
from accel_sft.chat.image_inputs import pixels_in
from accel_sft.io.files import write_atomically
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.collectives import decided_by_main, largest_of_ranks
from accel_sft.launch.describe import layout_of
from accel_sft.launch.groups import row_groups, sequence_ranks
from accel_sft.memory.activations import peak_bytes

GPU_TOKENS = tuple(2**power for power in range(10, 18))
"""Sizes of a forward, in tokens, to choose from on a GPU."""
ALIKE = 0.03
"""Work that differs by less than this share counts as equal."""
CPU_FORWARD_TOKENS, FORWARD_TOKENS = 64, 1024
"""Fixed cost of a forward and its backward, in tokens: per thread on a CPU (all threads wait), and in all on a GPU."""
USUAL_WIDTH = 1024
"""Hidden size assumed of a model whose configuration does not name it."""


def choose_batching(trial: Trial, before: Batching | None = None, also: Sequence[Encoded] = ()) -> tuple[Batching, str]:
    """Choose a layout in which the model's losses equal those of single rows and, from the rows' lengths, how many
    tokens go into one forward. Also returns a line for the log. Random state and gradients do not change.

    Args:
        before: the earlier choice of this run, which is used again if it is still exact.
        also: further rows that the layout must compute exactly; their work does not count in the choice.
    """
    in_sequence = sequence_ranks(trial.accelerator) > 1
    config = dataclasses.replace(trial.config, batching="padded") if in_sequence else trial.config
    exact, reasons = exact_batchings(dataclasses.replace(trial, config=config), also)
    if before and not any(dataclasses.replace(b, tokens=before.tokens, rows=before.rows) == before for b in exact):
        before = None
    if in_sequence:
        return in_parts(trial, before or exact[0])
    if before:
        batching, why = before, ", as before"
    elif trial.config.micro_batch_size != "auto":
        batching, why = dataclasses.replace(exact[0], rows=int(trial.config.micro_batch_size)), ""
    else:
        candidates = fitting(trial, exact)
        batching, why = least_work(trial, candidates), f", the least work of {len(candidates)} sizes"
    size = f"{batching.rows} examples" if batching.rows else f"{batching.tokens:,} tokens"
    what = WHAT[batching.layout] + (", in a cache" if batching.way.behind_cache else "")
    line = f"batching {batching.layout} ({what}), up to {size} per forward{why}"
    return batching, "; ".join([line, *(f"not {reason}" for reason in reasons)])


def least_work(trial: Trial, candidates: Sequence[Batching]) -> Batching:
    """The layout with the least work for a step (the first of several with equal work), in the smallest size whose work
    exceeds the least work by at most the share ALIKE."""
    works = {batching: _work(trial, batching) for batching in candidates}
    least = min(candidates, key=works.__getitem__)
    alike = [b for b in candidates if dataclasses.replace(b, tokens=least.tokens) == least]
    return min((b for b in alike if works[b] <= (1 + ALIKE) * works[least]), key=lambda b: b.tokens)


def _work(trial: Trial, batching: Batching) -> float:
    base = trial.accelerator.unwrap_model(trial.model).config.get_text_config(decoder=True)
    width = getattr(base, "hidden_size", None) or USUAL_WIDTH
    on_cpu = trial.accelerator.device.type == "cpu"
    fixed = CPU_FORWARD_TOKENS * torch.get_num_threads() if on_cpu else FORWARD_TOKENS
    return batching.work(trial.spread(), row_groups(trial.accelerator)[0], width, fixed)


def fitting(trial: Trial, exact: Sequence[Batching]) -> list[Batching]:
    """On GPUs, return the exact batchings, each in every size for which its estimated memory fits on all ranks. If none
    fits, or there is no estimate, return them in the smallest size. On CPUs, the exact batchings in the sizes that
    their layouts have for CPUs."""
    if math.isinf(free_bytes(trial.accelerator.device)):
        return [
            dataclasses.replace(batching, tokens=tokens) for batching in exact for tokens in batching.way.cpu_tokens
        ]
    smallest = [dataclasses.replace(batching, tokens=GPU_TOKENS[0]) for batching in exact]
    if trial.job is None:
        return smallest
    room = -largest_of_ranks(-_room(trial))
    sized = [dataclasses.replace(batching, tokens=tokens) for batching in exact for tokens in GPU_TOKENS]
    return [batching for batching in sized if _expected_bytes(trial, batching) <= room] or smallest


def _room(trial: Trial) -> float:
    """Bytes of this rank's device that are available for forwards."""
    return (1 - LEFT_FREE) * (free_bytes(trial.accelerator.device) - trial.reserved())


def _expected_bytes(trial: Trial, batching: Batching) -> float:
    """Bytes for a forward and backward of `batching.tokens` tokens, with rows like those of the largest forward."""
    assert trial.job
    forwards = itertools.chain(*batching.divide(trial.spread(), row_groups(trial.accelerator)[0]))
    largest = max(filter(None, forwards), key=batching.way.tokens_in)
    pixels = pixels_in(trial.batch(batching, largest).inputs) if any(row.images for row in largest) else 0
    times = batching.tokens / batching.way.tokens_in(largest)
    job = dataclasses.replace(
        trial.job,
        shape=trial.job.shape.cut(trial.job.launch.tensor_ranks),
        tokens=batching.tokens,
        supervised_tokens=math.ceil(times * sum(row.supervised_tokens for row in largest)),
        rows=math.ceil(times * len(batching.way.rows(largest))),
        pixels=math.ceil(times * pixels),
        head=batching.head,
        copied_keys=round(times * batching.way.copied_keys(largest)),
        in_cache=batching.way.behind_cache,
    )
    return sum(peak_bytes(job).values())


def recorded(settings: Sequence[str], batching: Batching) -> dict[str, Any]:
    """A record for checkpoints and the run's folder; `settings`: values of `--batching` and `--micro-batch-size`."""
    return {"asked": list(settings), "chosen": dataclasses.asdict(batching)}


def restored(record: dict[str, Any] | None, settings: Sequence[str]) -> Batching | None:
    """The recorded batching; None if the settings have changed, or if this version of the package cannot read it."""
    if not record or record.get("asked") != list(settings):
        return None
    try:
        return Batching(**record["chosen"])
    except (KeyError, TypeError, ValueError):  # an unknown layout, head or field
        return None


def write(
    accelerator: Accelerator, run_dir: RunDir, settings: Sequence[str], batching: Batching, job: list[Any]
) -> None:
    """Record a run's choice, so that a run killed before its first checkpoint resumes with the same batching. `job`
    (written as JSON) identifies everything but the launch that the choice depends on."""
    record = {**recorded(settings, batching), "layout": layout_of(accelerator), "job": job}
    decided_by_main(accelerator, lambda: write_atomically(run_dir.batching, json.dumps(record, indent=2) + "\n"))


def read(accelerator: Accelerator, run_dir: RunDir, job: list[Any]) -> dict[str, Any] | None:
    """The choice that this folder's run recorded for the same job and launch; None without a readable record of it."""

    def read_record() -> dict[str, Any] | None:
        try:
            text = run_dir.batching.read_text(encoding="utf-8") if run_dir.batching.is_file() else "null"
            record = json.loads(text)
        except (OSError, ValueError):  # a damaged record: choose again
            return None
        current = {"layout": layout_of(accelerator), "job": job}
        return record if isinstance(record, dict) and current.items() <= record.items() else None

    return decided_by_main(accelerator, read_record)
