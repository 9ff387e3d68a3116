"""Chooses the batching with the least work among those that are exact and fit into memory, and records it: every start
and every resume then uses the same one."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.batching.device_memory import LEFT_FREE, forwards_alone, free_bytes, out_of_memory
from accel_sft.batching.layouts import WHAT, Batching
from accel_sft.batching.sequence import in_parts
from accel_sft.batching.trial import Trial
from accel_sft.batching.verify import exact_batchings
from accel_sft.chat.encoded import Encoded
from accel_sft.io.files import write_atomically
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.collectives import all_ranks, decided_by_main, largest_of_ranks
from accel_sft.launch.describe import layout_of
from accel_sft.launch.groups import row_groups, sequence_ranks
from accel_sft.memory.activations import LOGIT, peak_bytes
from accel_sft.memory.job import MOST_LOGITS, ROOMY_LOGITS

UNTRIED = {"cpu"}
"""Types of devices on which no forward is tried."""
TRIED_ON_DEVICE = tuple(2**power for power in range(10, 18))
"""Sizes of a forward, in tokens, that are tried on any other device, up to its memory."""
ALIKE = 0.03
"""Work that differs by less than this share counts as equal."""
CPU_FORWARD_TOKENS, FORWARD_TOKENS = 64, 1024
"""Fixed cost, in tokens, of a forward and its backward: per thread of a CPU, as all threads wait; on other devices."""
USUAL_WIDTH = 1024
"""Hidden size assumed of a model whose configuration does not name it."""
LOGITS_SHARE = 1 / 8
"""Share of the memory that the longest row's forward leaves free, for the logits of a piece of the head."""
RESERVED_PART = 2**28
"""Maximum number of bytes that are reserved in one piece."""


def choose_batching(trial: Trial, before: Batching | None = None, also: Sequence[Encoded] = ()) -> tuple[Batching, str]:
    """Choose a layout in which the model's losses are those of single rows, and how many tokens go into one forward.

    The choice is the one with the least work, which follows from the rows' lengths, so that every start chooses alike;
    on a GPU, among the sizes that fit into its memory. Random state and gradients stay untouched.

    Args:
        before: what this run chose earlier, which it goes on with if it is still exact.
        also: rows that will be laid out in the same way, but do not count in the choice.
    Returns:
        the batching, and a line that says what was chosen, and why not what was requested.
    """
    if sequence_ranks(trial.accelerator) > 1:
        padded = dataclasses.replace(trial, config=dataclasses.replace(trial.config, batching="padded"))
        exact, _ = exact_batchings(padded, also)
        earlier = before if before and _still_exact(before, exact) else None
        return in_parts(trial, earlier or with_sized_pieces(trial, exact)[0])
    exact, reasons = exact_batchings(trial, also)
    if before and _still_exact(before, exact):
        batching, why = before, ", as before"
    else:
        exact, why = with_sized_pieces(trial, exact), ""
        if trial.config.micro_batch_size != "auto":
            batching = dataclasses.replace(exact[0], rows=int(trial.config.micro_batch_size))
        else:
            batching, why = chosen(trial, exact)
    size = f"{batching.rows} examples" if batching.rows else f"{batching.tokens:,} tokens"
    what = WHAT[batching.layout] + (", in a cache" if batching.way.behind_cache else "")
    line = f"batching {batching.layout} ({what}), up to {size} a forward{why}"
    return batching, "; ".join([line, *(f"not {reason}" for reason in reasons)])


def _still_exact(before: Batching, exact: Sequence[Batching]) -> bool:
    """Whether an earlier choice is one of the exact batchings, of whatever size."""
    size = {name: getattr(before, name) for name in ("tokens", "rows", "most_logits")}
    return before in (dataclasses.replace(batching, **size) for batching in exact)


def chosen(trial: Trial, exact: Sequence[Batching]) -> tuple[Batching, str]:
    """Choose one of the exact batchings, and its limit of tokens; also returns a phrase that says how."""
    tried = ""
    if trial.accelerator.device.type in UNTRIED:
        sizes = [dataclasses.replace(b, tokens=tokens) for b in exact for tokens in b.way.cpu_tokens]
    elif forwards_alone(trial.accelerator):
        sizes, tried = within_memory(trial, exact, TRIED_ON_DEVICE), " that fit into memory"
    else:
        # if a forward failed on one rank, the others would wait; and DeepSpeed's hooks on blocks that it gathers
        # whole (experts) would reduce gradients of weights, which a trial's backward does not compute
        sizes = expected_to_fit(trial, exact, TRIED_ON_DEVICE)
        tried = " (not tried: ranks share the weights)"
    return least_work(trial, sizes), f", the least work of {len(sizes)} sizes{tried}"


def least_work(trial: Trial, candidates: Sequence[Batching]) -> Batching:
    """Return the smallest size, of the layout with the least work for a step, whose work exceeds the least by at most
    ALIKE. Among equals the first counts, so that every start chooses alike."""
    works = {batching: _work(trial, batching) for batching in candidates}
    least = min(candidates, key=works.__getitem__)
    alike = [b for b in candidates if dataclasses.replace(b, tokens=least.tokens) == least]
    return min((b for b in alike if works[b] <= (1 + ALIKE) * works[least]), key=lambda b: b.tokens)


def _work(trial: Trial, batching: Batching) -> float:
    some, ranks = trial.spread(), row_groups(trial.accelerator)[0]
    base = trial.accelerator.unwrap_model(trial.model).config.get_text_config(decoder=True)
    width = getattr(base, "hidden_size", None) or USUAL_WIDTH
    on_cpu = trial.accelerator.device.type == "cpu"
    fixed = CPU_FORWARD_TOKENS * torch.get_num_threads() if on_cpu else FORWARD_TOKENS
    return batching.work(some, ranks, width, fixed)


def with_sized_pieces(trial: Trial, exact: Sequence[Batching]) -> list[Batching]:
    """Return the exact batchings with the pieces of the head `pieces` as large as this device has room for.

    Each piece reads and writes the gradient of the head's weights, so that a few large ones take less time. On a CPU
    and where room is scarce, pieces hold MOST_LOGITS, as `plan` predicts.
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
            f"out of device memory: not even {sizes[0]:,} tokens fit (the longest has {len(longest.input_ids):,}, "
            f"example {longest.index}); add --gradient-checkpointing or --adapter lora, or lower --max-length"
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
        in_cache=batching.way.behind_cache,
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


def recorded(settings: Sequence[str], batching: Batching) -> dict[str, Any]:
    """The record in a checkpoint and in the run's folder; `settings` are `--batching` and `--micro-batch-size`."""
    return {"asked": list(settings), "chosen": dataclasses.asdict(batching)}


def restored(record: dict[str, Any] | None, settings: Sequence[str]) -> Batching | None:
    """The recorded batching; None if the settings are others now, or the record is damaged or another version's."""
    if not record or record.get("asked") != list(settings) or not isinstance(record.get("chosen"), dict):
        return None
    try:
        batching = Batching(**record["chosen"])
    except (TypeError, ValueError):  # it names a layout, a head or a field that there is not
        return None
    counts = [count for count in (batching.tokens, batching.rows, batching.most_logits) if count is not None]
    return batching if all(type(count) is int and count > 0 for count in counts) else None


def write(
    accelerator: Accelerator, run_dir: RunDir, settings: Sequence[str], batching: Batching, job: list[Any]
) -> None:
    """Record what a run has chosen, so that a run killed before its first checkpoint resumes with it. `job` is what the
    choice was made for, besides the launch, in a form that JSON can hold."""
    record = {**recorded(settings, batching), "layout": layout_of(accelerator), "job": job}
    text = json.dumps(record, indent=2) + "\n"

    def write_record() -> None:
        if run_dir.batching.is_dir():
            raise UserError(f"{run_dir.batching}: a folder stands where the batching is recorded; take it away")
        write_atomically(run_dir.batching, text)

    decided_by_main(accelerator, write_record)


def read(accelerator: Accelerator, run_dir: RunDir, job: list[Any]) -> dict[str, Any] | None:
    """The record of what the run in this folder chose for this job under this launch; None if none can be read."""

    def read_record() -> dict[str, Any] | None:
        try:
            text = run_dir.batching.read_text(encoding="utf-8") if run_dir.batching.is_file() else "null"
            record = json.loads(text)
        except (OSError, ValueError, RecursionError):  # broken: the choice is made again and shown
            return None
        current = {"layout": layout_of(accelerator), "job": job}
        return record if isinstance(record, dict) and current.items() <= record.items() else None

    return decided_by_main(accelerator, read_record)
