"""Which ways of laying out rows this very model computes exactly, found out on it before the first step (laws 1, 2)."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from accel_sft.api.config import TrainConfig
from accel_sft.batching.collate import HEADS, Batch
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import fused_kernel, nll
from accel_sft.data.chat import Encoded
from accel_sft.models.prefix_attention import install

CHECKED_ROWS, CHECKED_AMONG = 3, 256
TOLERANCE, REDUCED_TOLERANCE = 1e-3, 0.25
"""Nats a token may differ by between layouts, in float32 and in reduced precision. Examples that see each other, or
stand at wrong positions, differ by more even in a random model; that they do not see each other is held to the bit."""
ROUNDING, REDUCED_ROUNDING, LOOKS = 1e-5, 1e-2, 3
"""By how much of its loss a token's may differ from one forward to the next where nothing is random: a machine may
round otherwise when it is busy. Forwards that must be alike are looked at so many times."""
NOISE = 4
"""How many times as large as what differs without any change a difference may be that is laid to rounding."""
UNLIMITED = 2**31
"""Tokens in one forward where nobody has chosen a number."""


def exact_batchings(
    accelerator: Accelerator,
    model: torch.nn.Module,
    config: TrainConfig,
    examples: Sequence[Encoded],
    pad_token_id: int,
    train: bool,
) -> tuple[list[Batching], list[str], str | None]:
    """What the model can take of what was asked for, or else of what comes after it; and why not the others.

    Args:
        examples: the longest row that is to be laid out among them.
    Returns:
        batchings without a limit of tokens, at least one; `layout: reason` of each layout that is not exact; and where
        the model has dropout in training, None without any.
    """
    unwrapped = accelerator.unwrap_model(model)
    layouts = ["shared", "packed", "padded"]
    asked = layouts if config.batching == "auto" else layouts[layouts.index(config.batching) :]
    heads = _heads(unwrapped, accelerator.device)
    full = accelerator.mixed_precision == "no" and config.dtype in ("auto", "float32")
    rounding = ROUNDING if full else REDUCED_ROUNDING
    trials = _trials(examples)
    where = pad_token_id, accelerator.device
    differs = functools.partial(_differs, model, where=where, tolerance=TOLERANCE if full else REDUCED_TOLERANCE)
    # padded rows are what every model is trained with; numbers that differ are its own (a router's capacity, noise)
    whole = Batching("padded", UNLIMITED, head="everywhere")
    found, reasons = [], []
    was_training = model.training
    with torch.no_grad(), torch.random.fork_rng():
        model.train()
        one = whole.batch(trials[0][:1], *where)
        dropout = _dropout(unwrapped, _is_random(model, one, rounding)) if train else None
        model.eval()
        # the longest row's logits everywhere might not fit; what it is there for does not depend on the head
        lean = dataclasses.replace(whole, head="labelled" if "labelled" in heads else "everywhere")
        alone = [
            sum(nll(model, way.batch([row], *where)).sum().item() for row in rows)
            for way, rows in zip((whole, lean), trials, strict=True)
        ]
        for layout in asked:
            if found and (layout == "packed" or config.batching != "auto"):  # sharing includes packing
                continue
            reason, before = _reason_unsupported(unwrapped, layout, examples), len(found)
            if layout == "shared" and dropout and not reason:
                reason = f"rows of a step would share their dropout ({dropout})"
            for attention in () if reason else _attentions(unwrapped, layout):
                if attention == "rows":
                    install()
                for head in heads:
                    batching = Batching(layout, UNLIMITED, attention=attention, head=head)
                    # ranks that came to different answers would run different forwards
                    mine = [differs(batching, *trial) for trial in zip(alone, trials, strict=True)]
                    reason = next(filter(None, gather_object(mine)), None)
                    if not reason and layout != "padded":
                        leaks = [_see_each_other(model, batching, rows, where, rounding) for rows in trials]
                        reason = "a change in one row changes another" if any(leaks) else None
                    if not reason:
                        found.append(batching)
                        break
            if len(found) == before:
                reasons.append(f"{layout}: {reason}")
    model.train(was_training)
    return found or [whole], reasons, dropout


def arguments(model: torch.nn.Module) -> set[str]:
    """Names that the causal model's forward takes, below an adapter."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(base.forward).parameters)


def _heads(model: torch.nn.Module, device: torch.device) -> list[str]:
    if "logits_to_keep" not in arguments(model):
        return ["everywhere"]
    return [head for head in HEADS if head != "fused" or fused_kernel(device)]


def _attentions(model: torch.nn.Module, layout: str) -> tuple[str, ...]:
    """Ways of telling the model's attention who sees whom; none: it cannot be told."""
    implementation = str(getattr(model.config, "_attn_implementation", None))
    if layout == "padded":
        return ("mask",)
    if implementation.startswith("flash"):
        return ("varlen",) if layout == "packed" else ()
    return {"sdpa": ("rows", "mask"), "flex_attention": ("blocks",)}.get(implementation, ())


def limited_layers(model: torch.nn.Module, longest: int) -> str | None:
    """What keeps a token of a row so long from seeing all before it in some layers, or carries more than that along:
    the kinds of these layers, as transformers makes caches for them; None: nothing does."""
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        return f"unknown, {type(error).__name__}: {error}"
    kinds = {
        type(layer).__name__.removeprefix("Dynamic")
        for layer in layers
        if type(layer) is not DynamicLayer
        and not (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= longest)
    }
    return ", ".join(sorted(kinds)) or None


def _reason_unsupported(model: torch.nn.Module, layout: str, examples: Sequence[Encoded]) -> str | None:
    """Why the model's architecture or settings rule a layout out, as far as its configuration tells."""
    if layout == "padded":
        return None
    if not _attentions(model, layout):
        implementation = getattr(model.config, "_attn_implementation", None)
        return f"attention {implementation} cannot be told who sees whom; sdpa and flex_attention can"
    if "position_ids" not in arguments(model):
        return "the model takes no positions"
    limited = limited_layers(model, max(len(example.input_ids) for example in examples))
    return f"the model has layers of another kind ({limited})" if limited else None


def _trials(examples: Sequence[Encoded]) -> list[list[Encoded]]:
    """Some short rows; and the shortest with the longest, which reaches what short rows do not, a window's end."""
    among = sorted(examples[:CHECKED_AMONG], key=lambda example: (len(example.input_ids), example.index))
    longest = max(examples, key=lambda example: (len(example.input_ids), example.index))
    trials = [among[:CHECKED_ROWS], [among[0], longest]]
    return [sorted(rows, key=lambda example: (example.input_ids, example.index)) for rows in trials]


def _is_random(model: torch.nn.Module, batch: Batch, rounding: float) -> bool:
    """Whether forwards of the same rows differ in training, on any rank, each time and by more than rounding."""
    for _ in range(LOOKS):
        first, again = nll(model, batch), nll(model, batch)
        # ranks look equally often, for their forwards may wait for each other
        if not any(gather_object([not _farthest(first, again) <= rounding])):
            return False
    return True


def _farthest(first: torch.Tensor, again: torch.Tensor) -> float:
    """The largest difference of two losses of a token, as a share of the largest loss; nan is more than any."""
    if not len(first):
        return 0.0
    return ((first - again).abs().max() / first.abs().max().clamp(min=1)).item()


def _dropout(model: torch.nn.Module, is_random: bool) -> str | None:
    """Where dropout is, as far as modules and configuration tell (an adapter's changes nothing before the first step),
    or that it must be somewhere."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            return name
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(model.config, name, 0):
            return name
    return "its forward is random in training" if is_random else None


def _differs(
    model: torch.nn.Module,
    batching: Batching,
    alone: float,
    rows: Sequence[Encoded],
    *,
    where: tuple[int, torch.device],
    tolerance: float,
) -> str | None:
    """What is wrong with a few rows laid out so, compared with the sum of their losses alone; None if nothing is."""
    batch = batching.batch(rows, *where)
    try:
        together = nll(model, batch, _most_logits(batching))
    except torch.OutOfMemoryError:  # a RuntimeError, and no matter of what the model can take
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"the model does not take it ({str(error).splitlines()[0][:100]})"
    difference = abs(alone - (together * batch.weights).sum().item()) / batch.weights.sum().item()
    return (
        None
        if difference <= tolerance
        else f"its loss is not that of single rows (off by {difference:.2g} nats a token)"
    )


def _see_each_other(
    model: torch.nn.Module,
    batching: Batching,
    rows: Sequence[Encoded],
    where: tuple[int, torch.device],
    rounding: float,
) -> bool:
    """Whether another last token of the first row changes, by so much as a bit, what is said of later rows, on a rank.

    Where it does so each time, and the unchanged rows themselves differ from one forward to the next, as on a busy
    machine, what is below rounding and no more than a few times as large as these differences is none of the change.
    """
    batch, first = batching.batch(rows, *where), rows[0]
    last = len(first.input_ids) - 1
    ids = batch.inputs["input_ids"].clone()
    ids[0, last] = next((token for token in first.input_ids if token != first.input_ids[-1]), 0)
    changed = dataclasses.replace(batch, inputs={**batch.inputs, "input_ids": ids})
    unchanged: list[torch.Tensor] = []
    for _ in range(LOOKS):
        before, after = (nll(model, each, _most_logits(batching)) for each in (batch, changed))
        sources = torch.arange(len(after), device=after.device) if batch.sources is None else batch.sources
        later = batch.keep[sources] > last
        unchanged.append(before[later])
        if not any(gather_object([not torch.equal(before[later], after[later])])):
            return False
    noise = max(_farthest(one, other) for one, other in itertools.pairwise(unchanged))
    return any(gather_object([not _farthest(before[later], after[later]) <= min(rounding, NOISE * noise)]))


def _most_logits(batching: Batching) -> int | None:
    """Pieces of the head as small as can be, where it is computed in pieces."""
    return 1 if batching.head == "pieces" else None
