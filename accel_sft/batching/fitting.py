"""Finds which sizes of a forward fit on a device beside the optimizer state: by trial (with a backward) or estimate."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

from accel_sft.api.errors import UserError
from accel_sft.batching.device_memory import LEFT_FREE, free_bytes, out_of_memory
from accel_sft.batching.layouts import Batching
from accel_sft.batching.trial import Trial
from accel_sft.chat.encoded import Encoded
from accel_sft.launch.collectives import all_ranks, largest_of_ranks
from accel_sft.launch.groups import row_groups
from accel_sft.memory.activations import LOGIT, peak_bytes
from accel_sft.memory.job import MOST_LOGITS, ROOMY_LOGITS

LOGITS_SHARE = 1 / 8
"""Share of the memory that the longest row's forward leaves free, for the logits of a piece of the head."""
RESERVED_PART = 2**28
"""Maximum number of bytes that are reserved in one piece."""


def with_sized_pieces(trial: Trial, exact: Sequence[Batching]) -> list[Batching]:
    """Return the exact batchings with the pieces of the head `pieces` as large as this device has room for.

    Each piece reads and writes the gradient of the head's weights, so that a few large ones take less time. On a CPU
    and where room is scarce, pieces hold MOST_LOGITS, with which `plan` predicts what fits.
    """
    if math.isinf(free_bytes(trial.accelerator.device)) or trial.job is None:
        return list(exact)
    longest = max(len(example.input_ids) for example in trial.examples)
    sized = []
    for batching in exact:
        room = _room(trial) - _expected_bytes(trial, dataclasses.replace(batching, tokens=longest))
        logits = MOST_LOGITS
        while logits < ROOMY_LOGITS and 2 * logits * LOGIT <= LOGITS_SHARE * room:
            logits *= 2
        most = -int(largest_of_ranks(-logits))
        sized.append(dataclasses.replace(batching, most_logits=most) if batching.head == "pieces" else batching)
    return sized


def within_memory(trial: Trial, exact: Sequence[Batching], sizes: Sequence[int]) -> list[Batching]:
    """Return the exact batchings, limited to each of the `sizes` that fit beside the optimizer state on all ranks.

    Sizes are tried upwards, with forward and backward, until one does not fit, or holds a rank's whole part of a step.
    A size is tried on the longest examples together, or on the largest forward of a usual step, if that is larger.
    """
    fitting = []
    by_length = sorted(trial.examples, key=lambda example: -len(example.input_ids))
    step = trial.config.global_batch_size or len(by_length)
    longest_first = by_length[: math.ceil(step / row_groups(trial.accelerator)[0])]
    for batching in exact:
        for tokens in sizes:
            sized = dataclasses.replace(batching, tokens=tokens)
            rows = longest_first[: _most_rows(sized, longest_first)]
            usual = sized.divide(trial.spread(), row_groups(trial.accelerator)[0])
            most = max(rows, *itertools.chain(*usual), key=sized.way.tokens_in)
            if not all_ranks(_fits(trial, sized, most)):
                break
            fitting.append(sized)
            if len(rows) == len(longest_first):
                break
    if not fitting:
        longest = longest_first[0]
        raise UserError(
            f"out of device memory: not even {sizes[0]:,} tokens fit (longest example, {longest.index}: "
            f"{len(longest.input_ids):,}); add --gradient-checkpointing or --adapter lora, lower --max-length, or "
            "choose a higher ZeRO stage"
        )
    return fitting


def expected_to_fit(trial: Trial, exact: Sequence[Batching], sizes: Sequence[int]) -> list[Batching]:
    """Return the batchings of `sizes` that are estimated to fit on all ranks; if none is, or nothing can be estimated,
    those of the first size."""
    room = -largest_of_ranks(-_room(trial))
    sized = [dataclasses.replace(batching, tokens=tokens) for batching in exact for tokens in sizes]
    fitting = [batching for batching in sized if _expected_bytes(trial, batching) <= room]
    return fitting or [batching for batching in sized if batching.tokens == sizes[0]]


def _room(trial: Trial) -> float:
    """Bytes of this rank's device that an estimate may give to forwards."""
    return (1 - LEFT_FREE) * (free_bytes(trial.accelerator.device) - trial.reserved())


def _expected_bytes(trial: Trial, batching: Batching) -> float:
    """Bytes that a forward of `batching.tokens` tokens and its backward take; infinite if nothing can be estimated."""
    if trial.job is None:
        return math.inf
    forwards = itertools.chain(*batching.divide(trial.spread(), row_groups(trial.accelerator)[0]))
    largest = max(filter(None, forwards), key=batching.way.tokens_in)
    times = batching.tokens / batching.way.tokens_in(largest)
    job = dataclasses.replace(
        trial.job,
        shape=trial.job.shape.cut(trial.job.launch.tensor_ranks),
        tokens=batching.tokens,
        supervised_tokens=math.ceil(times * sum(row.supervised_tokens for row in largest)),
        rows=math.ceil(times * len(largest)),
        head=batching.head,
        most_logits=batching.most_logits or MOST_LOGITS,
        dense_mask=batching.attention == "mask" and batching.layout != "padded",
        copied_keys=round(times * batching.way.copied_keys(largest)),
        in_cache=batching.attention == "cache",
    )
    return sum(peak_bytes(job).values())


def _fits(trial: Trial, batching: Batching, rows: list[Encoded]) -> bool:
    """Whether `run` fits into this rank's memory beside what the first update will allocate."""
    hold: list[torch.Tensor] = []
    try:
        if trial.train:
            _reserve(trial, hold)
        trial.run(batching, rows)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
    finally:
        hold.clear()
        if trial.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
    return True


def _reserve(trial: Trial, hold: list[torch.Tensor]) -> None:
    """Allocate what training will take besides activations, in pieces that fit into the allocator's gaps."""
    size = trial.reserved()
    while size > 0:
        part = min(size, RESERVED_PART)
        hold.append(torch.empty(part, dtype=torch.uint8, device=trial.accelerator.device))
        size -= part


def _most_rows(batching: Batching, rows: list[Encoded]) -> int:
    """Number of these rows, in this order, that one forward takes; at least one."""
    counts = range(2, len(rows) + 1)
    return 1 + bisect.bisect_left(counts, True, key=lambda count: len(batching.divide(rows[:count], 1)[0]) > 1)
