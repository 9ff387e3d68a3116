"""Which layout of rows this very model computes exactly, found out on it before the first step (laws 1 and 2)."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.batching import Batch, Batching
from accel_sft.chat import Encoded
from accel_sft.config import TrainConfig
from accel_sft.loss import nll, nll_sum

CHECKED_ROWS, CHECKED_AMONG = 3, 256
TOLERANCE, REDUCED_TOLERANCE = 1e-3, 0.25
"""Nats a token may differ by between layouts, in float32 and in reduced precision. Examples that see each other, or
stand at wrong positions, differ by more even in a random model; that they do not see each other is held to the bit."""

LARGEST_FORWARD = {"shared": 4096, "packed": 4096, "padded": 8192}
"""Tokens in one forward on a GPU: attention in one sequence grows with its square."""
TRIED_FORWARDS = {"tree": (256, 512, 1024), "rows": (512, 1024, 2048, 4096), "padded": (1024, 4096)}
"""Tokens in one forward that a CPU is tried with: there the fastest is not the largest."""
TRIED_TOKENS, TRIED_SECONDS, MOST_ROUNDS = 2048, 6.0, 3
"""What each rank tries them on, how long all trials may take together, and how often each is tried."""
UNTRIED_FORWARD = {"tree": 1024, "rows": 2048, "padded": 1024}
"""Tokens in one forward of a model too slow for trials."""


def choose_batching(
    accelerator: Accelerator,
    model: torch.nn.Module,
    config: TrainConfig,
    examples: Sequence[Encoded],
    pad_token_id: int,
    *,
    train: bool = True,
    before: Batching | None = None,
) -> tuple[Batching, str]:
    """The fastest layout that this model computes as it does single rows: on a CPU measured, else the first exact one.

    Every rank calls it, with the same examples. No random state is touched.

    Args:
        model: prepared.
        train: whether dropout will be on.
        before: what a resumed run had chosen; kept if it is still exact.
    Returns:
        the batching, and a line that says what was chosen, and why not what was asked for.
    """
    exact, reasons = _exact_layouts(accelerator, model, config, examples, pad_token_id, train)
    if before in (
        dataclasses.replace(batching, tokens=before.tokens, rows=before.rows) for batching in exact if before
    ):
        batching = before
    elif config.micro_batch_size != "auto":
        batching = dataclasses.replace(exact[0], rows=int(config.micro_batch_size))
    elif accelerator.device.type != "cpu":
        batching = exact[0]
    else:
        batching = _fastest(accelerator, model, exact, config, examples, pad_token_id)
    what = {"shared": "one copy of what rows share", "packed": "rows in one sequence", "padded": "padded rows"}
    size = f"{batching.rows} examples" if batching.rows else f"{batching.tokens:,} tokens"
    line = f"batching {batching.layout} ({what[batching.layout]}), up to {size} a forward"
    return batching, "; ".join([line, *(f"not {reason}" for reason in reasons)])


def _exact_layouts(
    accelerator: Accelerator,
    model: torch.nn.Module,
    config: TrainConfig,
    examples: Sequence[Encoded],
    pad_token_id: int,
    train: bool,
) -> tuple[list[Batching], list[str]]:
    """What the model can take of what was asked for, or else of what comes after it; and why not the others."""
    unwrapped = accelerator.unwrap_model(model)
    layouts = ["shared", "packed", "padded"]
    asked = layouts if config.batching == "auto" else layouts[layouts.index(config.batching) :]
    full = accelerator.mixed_precision == "no" and config.dtype in ("auto", "float32")
    differs = functools.partial(
        _differs,
        model=model,
        examples=examples,
        pad_token_id=pad_token_id,
        device=accelerator.device,
        tolerance=TOLERANCE if full else REDUCED_TOLERANCE,
    )
    found, reasons = [], []
    for layout in asked:
        if found and (layout == "packed" or config.batching != "auto"):  # sharing includes packing
            continue
        if reason := _cannot(unwrapped, layout, examples, train):
            reasons.append(f"{layout}: {reason}")
            continue
        for head in (True, False):
            if head and "logits_to_keep" not in _arguments(unwrapped):
                continue
            attention = "padded" if layout == "padded" else "tree"
            batching = Batching(layout, LARGEST_FORWARD[layout], attention=attention, head_where_labelled=head)
            if reason := differs(batching):
                reasons.append(f"{layout}: {reason}")
                continue
            pieces = dataclasses.replace(batching, head_in_pieces=True)
            if head and not differs(pieces, most_logits=1):
                batching = pieces
            by_rows = dataclasses.replace(batching, attention="rows")
            found += [by_rows, batching] if layout != "padded" and not differs(by_rows) else [batching]
            break
    # padded rows are what every model is trained with; numbers that differ are its own (a router's capacity, noise)
    whole = Batching("padded", LARGEST_FORWARD["padded"], attention="padded", head_where_labelled=False)
    return found or [whole], reasons


def _fastest(
    accelerator: Accelerator,
    model: torch.nn.Module,
    exact: Sequence[Batching],
    config: TrainConfig,
    examples: Sequence[Encoded],
    pad_token_id: int,
) -> Batching:
    """The quickest, over all ranks, at going forward through some of the examples; a slow model is not kept waiting."""
    candidates = [dataclasses.replace(b, tokens=tokens) for b in exact for tokens in TRIED_FORWARDS[b.attention]]
    ranks = accelerator.num_processes
    some = _like_a_step(examples, config.global_batch_size or len(examples), exact[0], ranks)

    def seconds(batching: Batching) -> float:
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        for rows in batching.divide(some, accelerator.num_processes)[accelerator.process_index]:
            nll_sum(model, batching.batch(rows, pad_token_id, accelerator.device))
        mine = torch.tensor([time.perf_counter() - started], device=accelerator.device)
        return accelerator.gather(mine).max().item()

    was_training = model.training
    model.eval()
    with torch.no_grad():
        first = [seconds(candidates[0]) for _ in range(2)][1]  # the first time warms up
        rounds = min(int(TRIED_SECONDS / (first * len(candidates))), MOST_ROUNDS)
        took = [[seconds(batching) for batching in candidates] for _ in range(rounds)]
    model.train(was_training)
    if not took:
        untried = [dataclasses.replace(batching, tokens=UNTRIED_FORWARD[batching.attention]) for batching in exact]
        return min(untried, key=lambda batching: batching.computed_tokens(some, accelerator.num_processes))
    fastest = [min(times) for times in zip(*took, strict=True)]
    return candidates[fastest.index(min(fastest))]


def _like_a_step(examples: Sequence[Encoded], count: int, batching: Batching, ranks: int) -> list[Encoded]:
    """Examples from all over the data, as many as a step has, but no more than each rank computes TRIED_TOKENS for."""
    spread = list(examples[:: max(len(examples) // count, 1)])[:count]
    while len(spread) > 1 and batching.computed_tokens(spread, ranks) > TRIED_TOKENS * ranks:
        spread = spread[: len(spread) // 2]
    return spread


def _arguments(model: torch.nn.Module) -> set[str]:
    """Names that the causal model's forward takes, below an adapter."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(base.forward).parameters)


def _cannot(model: torch.nn.Module, layout: str, examples: Sequence[Encoded], train: bool) -> str | None:
    """Why the model's architecture or settings rule a layout out, as far as its configuration tells."""
    if layout == "padded":
        return None
    config = model.config
    attention = getattr(config, "_attn_implementation", None)
    if attention != "sdpa":
        return f"attention {attention} takes no mask of this form, sdpa does"
    if "position_ids" not in _arguments(model):
        return "the model takes no positions"
    other = sorted({kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"})
    window = getattr(config, "sliding_window", None)
    longest = max(len(example.input_ids) for example in examples)
    if other and not (other == ["sliding_attention"] and window and window >= longest):
        return f"the model has layers of {', '.join(other)}"
    if layout == "shared" and train and (dropout := _dropout(model)):
        return f"rows of a step would share their dropout ({dropout})"
    return None


def _dropout(model: torch.nn.Module) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            return name
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(model.config, name, 0):
            return name
    return None


def _differs(
    batching: Batching,
    *,
    model: torch.nn.Module,
    examples: Sequence[Encoded],
    pad_token_id: int,
    device: torch.device,
    tolerance: float,
    most_logits: int | None = None,
) -> str | None:
    """What is wrong with a few rows laid out so, compared with each alone; None if nothing is."""
    among = sorted(examples[:CHECKED_AMONG], key=lambda example: (len(example.input_ids), example.index))
    rows = sorted(among[:CHECKED_ROWS], key=lambda example: (example.input_ids, example.index))
    alone = Batching("padded", batching.tokens, attention="padded", head_where_labelled=False)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            single = [nll(model, alone.batch([row], pad_token_id, device)).sum().item() for row in rows]
            batch = batching.batch(rows, pad_token_id, device)
            try:
                together = nll(model, batch, most_logits)
            except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
                return f"the model does not take it ({str(error).splitlines()[0][:100]})"
            difference = abs(sum(single) - (together * batch.weights).sum().item()) / batch.weights.sum().item()
            if not difference <= tolerance:
                return f"its loss is not that of single rows (off by {difference:.2g} nats a token)"
            if batching.layout != "padded" and _see_each_other(model, batch, together, rows[0], most_logits):
                return "a change in one row changes another"
    finally:
        model.train(was_training)
    return None


def _see_each_other(
    model: torch.nn.Module, batch: Batch, before: torch.Tensor, first: Encoded, most_logits: int | None
) -> bool:
    """Whether another last token of the first row changes, by so much as a bit, what is said of later rows."""
    last = len(first.input_ids) - 1
    ids = batch.inputs["input_ids"].clone()
    ids[0, last] = next((token for token in first.input_ids if token != first.input_ids[-1]), 0)
    changed: dict[str, Any] = {**batch.inputs, "input_ids": ids}
    after = nll(model, dataclasses.replace(batch, inputs=changed), most_logits)
    sources = torch.arange(len(after), device=after.device) if batch.sources is None else batch.sources
    later = batch.keep[sources] > last
    return not torch.equal(before[later], after[later])
