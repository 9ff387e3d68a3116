"""Verifies, before step 1, which batchings a model computes exactly: shared prefixes, packed, or only padded."""

import bisect
import dataclasses
import fnmatch
import itertools
from collections import Counter
from collections.abc import Sequence

import torch

from accel_sft.api.errors import UserError, first_line
from accel_sft.batching.collate import Batch
from accel_sft.batching.device_memory import forwards_alone, out_of_memory
from accel_sft.batching.forward_layouts import LAYOUTS, Layout
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import available_heads, nll, nll_sum
from accel_sft.batching.trial import Trial
from accel_sft.chat.encoded import Encoded
from accel_sft.launch.collectives import any_rank, first_reason
from accel_sft.models.architecture import (
    REFUSALS,
    arguments,
    attentions,
    beyond_text,
    limited_layers,
    without_adapter,
)
from accel_sft.models.prefix_attention import install

CHECKED_ROWS, CHECKED_AMONG = 3, 256
RANDOM_TOKENS = 512
"""Number of tokens compared to find out if training is random: enough for experts drawn at random to differ."""
TOLERANCE, REDUCED_TOLERANCE = 1e-3, 0.25
"""Nats per token by which the loss may differ between layouts, in float32 and in reduced precision. Rows that see each
other or stand at wrong positions differ by more, even in a random model; that rows do not see each other is also
checked to the bit."""
ROUNDING, REDUCED_ROUNDING, LOOKS = 1e-5, 1e-2, 3
"""Share of the largest loss by which a token's loss may differ between two equal forwards where nothing is random, in
float32 and in reduced precision (a busy machine may round otherwise); and how often such forwards are compared."""
GRADIENT, REDUCED_GRADIENT = 1e-2, 0.25
"""Share by which loss and gradients behind a cache may differ from those of padded rows, in float32 and in reduced
precision: a gradient that does not reach the prefix is missing whole."""
NOISE = 4
"""Tolerance, as a multiple of the noise between identical forwards."""
FEWEST_LOGITS = 1
"""Maximum number of logits that the head `pieces` holds at once in a check, so that its pieces are the smallest."""
IMAGES = "rows hold images, whose placeholders are alike where the images are not, and whose positions have two axes"
"""Reason, in messages, why rows with images are padded."""
UNLIMITED = 2**31
"""Maximum number of tokens in one forward until a limit is chosen."""


def exact_batchings(trial: Trial, also: Sequence[Encoded]) -> tuple[list[Batching], list[str], str | None]:
    """Find the batchings that the model computes exactly, among the layouts asked for, and why it fails the others.

    Args:
        also: rows that will be laid out besides the trial's examples; the longest of all rows is tried.
    Returns:
        batchings without a limit of tokens, at least one; `layout: reason` for each layout that is not exact; and where
        the model has dropout in training, None if it has none.
    Raises:
        UserError: ranks would wait for each other's images for ever.
    """
    config, model, accelerator = trial.config, trial.model, trial.accelerator
    unwrapped = accelerator.unwrap_model(model)
    names = list(dict.fromkeys(layout.name for layout in LAYOUTS))
    asked = names if config.batching == "auto" else names[names.index(config.batching) :]
    heads = available_heads(unwrapped, accelerator.device)
    tolerance, rounding = (TOLERANCE, ROUNDING) if trial.in_float32 else (REDUCED_TOLERANCE, REDUCED_ROUNDING)
    row_sets = _row_sets([*trial.examples, *also])
    longest = max(len(row.input_ids) for row in row_sets[-1])
    # the fallback: every model is trained with padded rows; if they differ from single ones, the model itself makes
    # them differ (a router's capacity, noise)
    whole = Batching("padded", UNLIMITED, head="everywhere")
    # the longest row's logits everywhere might not fit, and what this row checks does not depend on the head
    lean = whole if heads == ["everywhere"] else dataclasses.replace(whole, head="labelled")
    found: list[Batching] = []
    reasons: list[str] = []
    dropout = None
    was_training = model.training
    pictured = any(row.images for row in (*trial.examples, *also))
    if pictured:
        *others, only = asked
        asked, reasons = [only], [f"{' or '.join(others)}: {IMAGES}"] if others else []
    with torch.no_grad(), torch.random.fork_rng():
        model.train()
        if trial.train:
            some = trial.batch(lean, enough(trial.examples))
            dropout = _dropout(unwrapped, _is_random(model, some, rounding))
        model.eval()
        if trial.blank and not forwards_alone(accelerator):
            _refuse_image_by_image(trial, lean, row_sets)
        alone = [
            sum(nll_sum(model, trial.batch(way, [row])).item() for row in rows)
            for way, rows in zip((whole, lean), row_sets, strict=True)
        ]
        for name in asked:
            sequences = any(batching.way.one_sequence for batching in found)  # sharing includes packing
            if found and (config.batching != "auto" or (name == "packed" and sequences)):
                continue
            layouts, reason = _layouts_for(unwrapped, name, longest, dropout)
            exact: list[Batching] = []
            for layout in layouts:
                before = reason
                if layout.attention == "cache":
                    if exact:  # a cache takes a sequence's place where there is none
                        continue
                    if cannot := _not_behind_a_cache(trial, layout, row_sets):
                        reason = f"{before}; and behind a cache: {cannot}"
                        continue
                if layout.attention == "rows":
                    install(accelerator.device)
                if layout.attention == "causal" and pictured:  # a mask may tell an image's tokens from a text's
                    continue
                if layout.attention == "mask" and "causal" in (batching.attention for batching in exact):
                    continue  # the same with more work
                for head in heads:
                    batching = Batching(name, UNLIMITED, attention=layout.attention, head=head)
                    # ranks that came to different answers would run different forwards
                    mine = [
                        _differs(trial, batching, loss, rows, tolerance)
                        for loss, rows in zip(alone, row_sets, strict=True)
                    ]
                    reason = first_reason(next(filter(None, mine), None))
                    # no head mixes rows, but some add in no fixed order; the plain one repeats its bits
                    plain = dataclasses.replace(batching, head=lean.head)
                    if not reason and layout.one_sequence:
                        leaks = [_see_each_other(trial, plain, rows, rounding) for rows in row_sets]
                        reason = "a change in one row changes another" if any(leaks) else None
                        if not reason and _ignores_positions(trial, plain, row_sets[-1]):
                            reason = "the model ignores the positions that it is given"
                    elif not reason and layout.attention in ("causal", "cache"):
                        leaks = [_sees_padding(trial, plain, rows, rounding) for rows in row_sets]
                        reason = "what stands in padding changes a row" if any(leaks) else None
                    if not reason and layout.attention == "cache":
                        mine = [_goes_wrong_behind(trial, batching, rows) for rows in row_sets]
                        reason = first_reason(next(filter(None, mine), None))
                    if not reason:
                        exact.append(batching)
                        break
                if reason and layout.attention == "cache":
                    reason = f"{before}; and behind a cache: {reason}"
            found += exact
            if not exact:
                reasons.append(f"{name}: {reason}")
    model.train(was_training)
    return found or [whole], reasons, dropout


def _refuse_image_by_image(trial: Trial, batching: Batching, row_sets: Sequence[Sequence[Encoded]]) -> None:
    """Raise UserError if the layers that read images are called more often for more images. Where ranks gather weights
    together, a rank with more images than another would wait for ever."""
    base = without_adapter(trial.accelerator.unwrap_model(trial.model))
    calls: Counter[str] = Counter()
    owners = {name.rpartition(".")[0] for name in beyond_text(base)}
    hooks = [
        base.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        for name in sorted(owners)
    ]
    found = []
    for rows in ([], *row_sets):
        calls.clear()
        nll(trial.model, trial.batch(batching, rows))
        found.append(dict(calls))
    for hook in hooks:
        hook.remove()
    if any(each != found[0] for each in found):
        raise UserError(
            f"{type(base).__name__} reads images one after the other, so that under ZeRO-3 and FSDP ranks with other "
            "numbers of images would wait for ever; launch with accelerate_configs/z2.yaml or ddp.yaml"
        )


def _layouts_for(
    model: torch.nn.Module, name: str, longest: int, dropout: str | None
) -> tuple[list[Layout], str | None]:
    """The layouts of this name to try on the model, and the reason why there are none, or none in one sequence, where
    its configuration shows one."""
    implementation = str(getattr(model.config, "_attn_implementation", None))
    named = [
        layout
        for layout in LAYOUTS
        if layout.name == name and fnmatch.fnmatchcase(implementation, layout.implementation)
    ]
    sequences = [layout for layout in named if layout.one_sequence]
    reason = None
    if not sequences and name != "padded":
        others = " and ".join(attentions(model, "sdpa", "flex_attention"))
        other = f"{others} can" if others else "the model has no other"
        reason = f"attention {implementation} cannot be told who sees whom; {other}"
    elif sequences and "position_ids" not in arguments(model):
        reason = "the model takes no positions"
    elif sequences and (limited := limited_layers(model, longest)):
        reason = f"the model has layers of another kind ({limited})"
    if name == "shared" and dropout:
        return [], reason or f"rows of a step would share their dropout ({dropout})"
    return [layout for layout in named if not (reason and layout.one_sequence)], reason


def _shortest(examples: Sequence[Encoded]) -> list[Encoded]:
    return sorted(examples[:CHECKED_AMONG], key=lambda example: (len(example.input_ids), example.index))


def enough(examples: Sequence[Encoded]) -> list[Encoded]:
    """Return the shortest of CHECKED_AMONG rows that together have RANDOM_TOKENS, or all of these."""
    among = _shortest(examples)
    totals = list(itertools.accumulate(len(row.input_ids) for row in among))
    return among[: bisect.bisect_left(totals, RANDOM_TOKENS) + 1]


def _row_sets(examples: Sequence[Encoded]) -> list[list[Encoded]]:
    """Two sets of rows: some short ones; and a short one with the longest, which reaches what short rows do not, such
    as the end of a sliding window.

    The short rows have images, if any rows do; the second set then puts a row without images beside the longest.
    """
    among = _shortest([row for row in examples if row.images] or examples)
    longest = max(examples, key=lambda example: (len(example.input_ids), example.index))
    short: list[Encoded] = []
    for row in among:
        if len(short) < CHECKED_ROWS and not any(_goes_on(row, other) for other in short):
            short.append(row)
    plain = [row for row in _shortest(examples) if not row.images]
    beside = next((row for row in (*plain, *among) if not _goes_on(longest, row)), among[0])
    return [sorted(rows, key=lambda row: (row.input_ids, row.index)) for rows in (short, [beside, longest])]


def _goes_on(row: Encoded, other: Encoded) -> bool:
    """Whether a row is `other` and more, as a chat is after further turns: a tree would append it to that path."""
    length = len(other.input_ids)
    return len(row.input_ids) > length and row.input_ids[:length] == other.input_ids


def _is_random(model: torch.nn.Module, batch: Batch, rounding: float) -> bool:
    """Whether two forwards of the same rows differ in training on any rank, every time and by more than rounding."""
    for _ in range(LOOKS):
        first, again = nll(model, batch), nll(model, batch)
        # ranks compare equally often, because their forwards may wait for each other
        if not any_rank(not _farthest(first, again) <= rounding):
            return False
    return True


def _farthest(first: torch.Tensor, again: torch.Tensor) -> float:
    """The largest difference between two losses of a token, as a share of the largest loss; NaN if a loss is NaN."""
    if not len(first):
        return 0.0
    return ((first - again).abs().max() / first.abs().max().clamp(min=1)).item()


def _dropout(model: torch.nn.Module, is_random: bool) -> str | None:
    """The module or setting that has dropout, or a phrase where only the forward's randomness shows it; None without
    dropout. An adapter's dropout changes nothing before the first step, so randomness does not show it."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            return name
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(model.config, name, 0):
            return name
    return "its forward is random in training" if is_random else None


def _differs(trial: Trial, batching: Batching, alone: float, rows: Sequence[Encoded], tolerance: float) -> str | None:
    """Say why a few rows cannot be computed in this batching, or that their loss differs from `alone`, the sum of their
    losses as single rows; None if all is right."""
    batch = trial.batch(batching, rows)
    try:
        together = nll(trial.model, batch, FEWEST_LOGITS)
    except REFUSALS as error:
        if out_of_memory(error):  # which says nothing about what the model can take
            raise
        return f"the model does not take it ({first_line(error)[:100]})"
    difference = abs(alone - (together * batch.weights).sum().item()) / batch.weights.sum().item()
    wrong = f"its loss is not that of single rows (off by {difference:.2g} nats a token)"
    return None if difference <= tolerance else wrong


def _not_behind_a_cache(trial: Trial, layout: Layout, row_sets: Sequence[Sequence[Encoded]]) -> str | None:
    """Say why rows are not tried behind a prefix's cache; None if they can be."""
    if "past_key_values" not in arguments(trial.accelerator.unwrap_model(trial.model)):
        return "the model takes none"
    if not any(map(layout.prefix, row_sets)):
        return "rows have nothing in common before what they learn"
    if trial.config.compile:
        return "--compile would compile the blocks anew for it"
    if not forwards_alone(trial.accelerator):
        return "its backward cannot be tried where ranks share the weights"
    return None


def _goes_wrong_behind(trial: Trial, batching: Batching, rows: Sequence[Encoded]) -> str | None:
    """Say why rows cannot be trained behind a prefix's cache, or that loss or gradients of embedded tokens are not
    those of padded rows; None if all is right. A layer may go on from a state that it has cut off from its backward."""
    prefix = batching.way.prefix(rows)
    if not prefix or not trial.train:
        return None
    try:
        loss, gradients = trial.run(batching, rows)
        expected, (whole,) = trial.run(Batching("padded", UNLIMITED, attention="causal", head=batching.head), rows)
    except REFUSALS as error:
        if out_of_memory(error):
            raise
        return f"the model does not take it back ({first_line(error)[:100]})"
    each = whole[:, :prefix].sum(0, keepdim=True), whole[:, prefix:]
    off = [((one - other).norm() / other.norm()).item() for one, other in zip(gradients, each, strict=True)]
    off.append(abs(loss - expected) / abs(expected))
    most = GRADIENT if trial.in_float32 else REDUCED_GRADIENT
    wrong = f"its gradient is not that of padded rows (off by {max(off):.2g} of it)"
    return None if all(share <= most for share in off) else wrong


def _ignores_positions(trial: Trial, batching: Batching, rows: Sequence[Encoded]) -> bool:
    """Whether halving the distances between tokens changes no bit of any loss, on any rank.

    Such a model takes a row behind others to begin at its place in the sequence, not at position 0. Bits are compared
    because in reduced precision positions may change a loss by less than rounding does.
    """
    batch = trial.batch(batching, rows)
    closer = {**batch.inputs, "position_ids": batch.inputs["position_ids"] // 2}
    here, there = (nll(trial.model, dataclasses.replace(batch, inputs=inputs)) for inputs in (batch.inputs, closer))
    return not any_rank(not torch.equal(here, there))


def _see_each_other(trial: Trial, batching: Batching, rows: Sequence[Encoded], rounding: float) -> bool:
    """Whether changing the first row's last token changes a bit of a later row's loss, on any rank."""
    batch, first = trial.batch(batching, rows), rows[0]
    last = len(first.input_ids) - 1
    ids = batch.inputs["input_ids"].clone()
    ids[0, last] = next((token for token in first.input_ids if token != first.input_ids[-1]), 0)
    changed = dataclasses.replace(batch, inputs={**batch.inputs, "input_ids": ids})
    sources = slice(None) if batch.sources is None else batch.sources
    return _changes(trial, batch, changed, batch.keep[sources] > last, rounding)


def _sees_padding(trial: Trial, batching: Batching, rows: Sequence[Encoded], rounding: float) -> bool:
    """Whether another token in place of padding changes a bit of a row's loss, on any rank."""
    other = dataclasses.replace(trial, pad_token_id=int(trial.pad_token_id == 0))
    return _changes(trial, trial.batch(batching, rows), other.batch(batching, rows), slice(None), rounding)


def _changes(trial: Trial, batch: Batch, changed: Batch, where: torch.Tensor | slice, rounding: float) -> bool:
    """Whether the losses in two forwards differ in a bit at `where`, on any rank.

    On a busy machine even unchanged rows may differ from one forward to the next. A difference that appears every time
    is therefore ignored if it is below rounding and at most NOISE times those differences.
    """
    unchanged: list[torch.Tensor] = []
    for _ in range(LOOKS):
        before, after = (nll(trial.model, each, FEWEST_LOGITS)[where] for each in (batch, changed))
        unchanged.append(before)
        if not any_rank(not torch.equal(before, after)):
            return False
    noise = max(_farthest(one, other) for one, other in itertools.pairwise(unchanged))
    return any_rank(not _farthest(before, after) <= min(rounding, NOISE * noise))
