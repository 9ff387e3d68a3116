"""Chooses a batching that is exact and fits into memory: on a CPU the one with the least work, on a GPU the fastest."""

import dataclasses
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from accel_sft.batching.choice import measured_once
from accel_sft.batching.device_memory import forwards_alone
from accel_sft.batching.fitting import expected_to_fit, with_sized_pieces, within_memory
from accel_sft.batching.forward_layouts import WHAT
from accel_sft.batching.layouts import Batching
from accel_sft.batching.sequence import in_parts
from accel_sft.batching.trial import Trial
from accel_sft.batching.verify import exact_batchings
from accel_sft.chat.encoded import Encoded
from accel_sft.launch.collectives import largest_of_ranks
from accel_sft.launch.describe import device_name, parallelism
from accel_sft.launch.recordable import versions
from accel_sft.launch.tensor_parallel import row_groups
from accel_sft.launch.ulysses import sequence_ranks

UNTIMED = {"cpu"}
"""Types of devices on which no forward is tried or timed."""
TRIED_ON_DEVICE = tuple(2**power for power in range(10, 18))
"""Sizes of a forward, in tokens, that are tried on any other device, up to its memory."""
LOOKS, LONG_SECONDS = 3, 2.0
"""How often a forward is timed; one that takes at least LONG_SECONDS is timed once."""
ALIKE = 0.03
"""Times or work that differ by less than this share count as equal."""
CPU_FORWARD_TOKENS, FORWARD_TOKENS = 64, 1024
"""Fixed cost, in tokens, of a forward and its backward: per thread of a CPU, as all threads wait; on other devices."""
USUAL_WIDTH = 1024
"""Hidden size assumed of a model whose configuration does not name it."""


def choose_batching(trial: Trial, before: Batching | None = None, also: Sequence[Encoded] = ()) -> tuple[Batching, str]:
    """Choose a layout in which the model's losses are those of single rows, and how many tokens go into one forward.

    On a CPU the choice is the one with the least work, which follows from the rows' lengths, so every start chooses
    alike. So it is on other devices if the model has dropout, whose masks depend on the layout, if a forward needs
    other ranks, or if nothing can be kept in the cache; otherwise it is the fastest, measured once and kept there.
    Random state and gradients stay untouched.

    Args:
        before: what this run chose earlier; kept if it is still exact.
        also: rows that will be laid out in the same way, but do not count in the choice.
    Returns:
        the batching, and a line that says what was chosen, and why not what was asked for.
    Raises:
        UserError: not even the smallest forward fits into the device's memory; or the model cannot be trained
            under sequence parallelism, which the launch asks for.
    """
    if sequence_ranks(trial.accelerator) > 1:
        padded = dataclasses.replace(trial, config=dataclasses.replace(trial.config, batching="padded"))
        exact, _, _ = exact_batchings(padded, also)
        kept = before if before and _still_exact(before, exact) else None
        return in_parts(trial, kept or with_sized_pieces(trial, exact)[0])
    exact, reasons, dropout = exact_batchings(trial, also)
    if before and _still_exact(before, exact):
        batching, why = before, ", as before"
    else:
        exact, why = with_sized_pieces(trial, exact), ""
        if trial.config.micro_batch_size != "auto":
            batching = dataclasses.replace(exact[0], rows=int(trial.config.micro_batch_size))
        else:
            batching, why = chosen(trial, exact, dropout)
    size = f"{batching.rows} examples" if batching.rows else f"{batching.tokens:,} tokens"
    what = WHAT[batching.layout] + (", in a cache" if batching.attention == "cache" else "")
    line = f"batching {batching.layout} ({what}), up to {size} a forward{why}"
    return batching, "; ".join([line, *(f"not {reason}" for reason in reasons)])


def _still_exact(before: Batching, exact: Sequence[Batching]) -> bool:
    """Whether an earlier choice is one of the exact batchings, of whatever size. Padded rows with a mask, which earlier
    versions chose where causality hides the padding, are as exact as those without."""
    size = {name: getattr(before, name) for name in ("tokens", "rows", "most_logits")}
    known = [dataclasses.replace(each, **size) for each in exact]
    return before in known + [
        dataclasses.replace(each, attention="mask") for each in known if each.attention == "causal"
    ]


def chosen(trial: Trial, exact: Sequence[Batching], dropout: str | None) -> tuple[Batching, str]:
    """Choose one of the exact batchings, and its limit of tokens; also returns a phrase that says how."""
    if trial.accelerator.device.type in UNTIMED:
        sizes = [dataclasses.replace(b, tokens=tokens) for b in exact for tokens in b.way.cpu_tokens]
        return least_work(trial, sizes), f", the least work of {len(sizes)} sizes"
    if not forwards_alone(trial.accelerator):
        # if a forward failed on one rank, the others would wait; and DeepSpeed's hooks on blocks that it gathers
        # whole (experts) would reduce gradients of weights, which a trial's backward does not compute
        sizes = expected_to_fit(trial, exact, TRIED_ON_DEVICE)
        return least_work(trial, sizes), f", the least work of {len(sizes)} sizes (not tried: ranks share the weights)"
    sizes = within_memory(trial, exact, TRIED_ON_DEVICE)
    where, batching = f"masks of {dropout} depend on it", None
    if not dropout:
        batching, where = measured_once(trial.accelerator, _decides(trial, exact), lambda: fastest(trial, sizes))
    if batching in sizes:
        return batching, f", the best of {len(sizes)} sizes ({where})"
    return least_work(trial, sizes), f", the least work of {len(sizes)} sizes ({where})"


def fastest(trial: Trial, candidates: Sequence[Batching]) -> Batching:
    """Choose among each layout's best size: the one with the least work, unless timing shows another to be faster.

    The largest forward of each is timed, and scaled to a step by its tokens. Another one wins only if its slowest
    timing beats the fastest of the best so far by more than ALIKE.
    """
    each_layout: dict[tuple[str, str], list[Batching]] = {}
    for batching in candidates:
        each_layout.setdefault((batching.layout, batching.attention), []).append(batching)
    bests = sorted(map(functools.partial(least_work, trial), each_layout.values()), key=functools.partial(_work, trial))
    best, *others = bests
    if not others:
        return best
    took = _step_seconds(trial, best)
    for other in others:
        seconds = _step_seconds(trial, other)
        if seconds[1] < took[0] * (1 - ALIKE):
            best, took = other, seconds
    return best


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
    each = CPU_FORWARD_TOKENS * torch.get_num_threads() if on_cpu else FORWARD_TOKENS
    return batching.work(some, ranks, width, each)


def _step_seconds(trial: Trial, batching: Batching) -> tuple[float, float]:
    """Return the least and the most seconds that a step is expected to take, from timings of its largest forward."""
    ranks, tokens_in = batching.divide(trial.spread(), trial.accelerator.num_processes), batching.way.tokens_in
    largest = max(itertools.chain(*ranks), key=tokens_in)
    in_all = max(sum(map(tokens_in, forwards)) for forwards in ranks) / tokens_in(largest)
    _seconds(trial, batching, largest)  # warms up
    took = [_seconds(trial, batching, largest)]
    while len(took) < LOOKS and took[0] < LONG_SECONDS:
        took.append(_seconds(trial, batching, largest))
    return in_all * min(took), in_all * max(took)


def _seconds(trial: Trial, batching: Batching, rows: list[Encoded]) -> float:
    trial.accelerator.wait_for_everyone()
    started = time.perf_counter()
    trial.run(batching, rows)
    return largest_of_ranks(time.perf_counter() - started)


def _decides(trial: Trial, exact: Sequence[Batching]) -> list[Any]:
    """Everything that a timing depends on: the model's shape, the data, the launch, the machine, the software.

    Free memory is not included: it decides which sizes are tried.
    """
    model, config = trial.accelerator.unwrap_model(trial.model), trial.config
    tokens = hashlib.sha256()
    for example in trial.examples:
        tokens.update(json.dumps([example.prompt_length, example.input_ids, *example.earlier]).encode())
    parameters = [
        [name, list(getattr(each, "ds_shape", each.shape)), str(each.dtype), each.requires_grad]
        for name, each in model.named_parameters()
    ]
    shape = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    settings = [config.global_batch_size, config.gradient_checkpointing, config.compile, config.use_liger_kernel]
    return [
        [shape, parameters, settings, trial.train],
        [tokens.hexdigest(), [dataclasses.asdict(batching) for batching in exact]],
        [parallelism(trial.accelerator), device_name(trial.accelerator), torch.get_num_threads(), versions()],
    ]
