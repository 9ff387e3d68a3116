"""Verifies, before step 1, which batchings a model computes exactly: shared prefixes, packed, or only padded."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch
from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.batching.collate import Batch
from accel_sft.batching.forward_layouts import LAYOUTS, Layout
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import available_heads, nll
from accel_sft.data.chat import Encoded
from accel_sft.launch.collectives import any_rank, first_reason

CHECKED_ROWS, CHECKED_AMONG = 3, 256
TOLERANCE, REDUCED_TOLERANCE = 1e-3, 0.25
"""Nats a token may differ by between layouts, in float32 and in reduced precision. Examples that see each other, or
stand at wrong positions, differ by more even in a random model; that they do not see each other is held to the bit."""
ROUNDING, REDUCED_ROUNDING, LOOKS = 1e-5, 1e-2, 3
"""By how much of its loss a token's may differ from one forward to the next where nothing is random: a machine may
round otherwise when it is busy. Forwards that must be alike are looked at so many times."""
NOISE = 4
"""How many times as large as what differs without any change a difference may be that is laid to rounding."""
FEWEST_LOGITS = 1
"""Held at once by a head in pieces while it is checked: pieces as small as can be."""
UNLIMITED = 2**31
"""Tokens in one forward while no limit is chosen."""


def exact_batchings(
    accelerator: Accelerator,
    model: torch.nn.Module,
    config: TrainConfig,
    examples: Sequence[Encoded],
    pad_token_id: int,
    train: bool,
) -> tuple[list[Batching], list[str], str | None]:
    """The batchings that the model computes exactly, of the layouts asked for; and why not the others.

    Args:
        examples: the longest row that is to be laid out among them.
    Returns:
        batchings without a limit of tokens, at least one; `layout: reason` of each layout that is not exact; and where
        the model has dropout in training, None without any.
    """
    unwrapped = accelerator.unwrap_model(model)
    names = list(dict.fromkeys(layout.name for layout in LAYOUTS))
    asked = names if config.batching == "auto" else names[names.index(config.batching) :]
    heads = available_heads(unwrapped, accelerator.device)
    longest = max(len(example.input_ids) for example in examples)
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
        lean = dataclasses.replace(whole, head="everywhere" if heads[0].everywhere else "labelled")
        alone = [
            sum(nll(model, way.batch([row], *where)).sum().item() for row in rows)
            for way, rows in zip((whole, lean), trials, strict=True)
        ]
        for name in asked:
            if found and (name == "packed" or config.batching != "auto"):  # sharing includes packing
                continue
            (layouts, reason), before = _layouts_for(unwrapped, name, longest, dropout), len(found)
            for layout in layouts:
                layout.prepare()
                for head in heads:
                    batching = Batching(name, UNLIMITED, attention=layout.attention, head=head.name)
                    # ranks that came to different answers would run different forwards
                    mine = [differs(batching, *trial) for trial in zip(alone, trials, strict=True)]
                    reason = first_reason(next(filter(None, mine), None))
                    if not reason and layout.one_sequence:
                        leaks = [_see_each_other(model, batching, rows, where, rounding) for rows in trials]
                        reason = "a change in one row changes another" if any(leaks) else None
                    if not reason:
                        found.append(batching)
                        break
            if len(found) == before:
                reasons.append(f"{name}: {reason}")
    model.train(was_training)
    return found or [whole], reasons, dropout


def _layouts_for(
    model: torch.nn.Module, name: str, longest: int, dropout: str | None
) -> tuple[list[Layout], str | None]:
    """The layouts of this name to try on the model; or none, and why."""
    implementation = str(getattr(model.config, "_attn_implementation", None))
    layouts = [layout for layout in LAYOUTS if layout.name == name and layout.takes(implementation)]
    if not layouts:
        return [], f"attention {implementation} cannot be told who sees whom; sdpa and flex_attention can"
    reason = layouts[0].reason_unsupported(model, longest)
    if not reason and dropout and layouts[0].shares:
        reason = f"rows of a step would share their dropout ({dropout})"
    return [] if reason else layouts, reason


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
        if not any_rank(not _farthest(first, again) <= rounding):
            return False
    return True


def _farthest(first: torch.Tensor, again: torch.Tensor) -> float:
    """The largest difference of two losses of a token, as a share of the largest loss; NaN is the largest."""
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
        together = nll(model, batch, FEWEST_LOGITS)
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
        before, after = (nll(model, each, FEWEST_LOGITS) for each in (batch, changed))
        sources = torch.arange(len(after), device=after.device) if batch.sources is None else batch.sources
        later = batch.keep[sources] > last
        unchanged.append(before[later])
        if not any_rank(not torch.equal(before[later], after[later])):
            return False
    noise = max(_farthest(one, other) for one, other in itertools.pairwise(unchanged))
    return any_rank(not _farthest(before[later], after[later]) <= min(rounding, NOISE * noise))
