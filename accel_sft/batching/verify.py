"""Verifies, before step 1, which batchings a model computes exactly: shared prefixes, packed, or only padded."""

import bisect
import dataclasses
import fnmatch
import itertools
from collections import Counter
from collections.abc import Sequence

import torch

from accel_sft.api.errors import UserError
from accel_sft.batching.comparisons import (
    UNLIMITED,
    differs,
    goes_wrong_behind,
    ignores_positions,
    is_random,
    see_each_other,
    sees_padding,
)
from accel_sft.batching.device_memory import forwards_alone
from accel_sft.batching.forward_layouts import LAYOUTS, Layout
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import available_heads, nll, nll_sum
from accel_sft.batching.trial import Trial
from accel_sft.chat.encoded import Encoded
from accel_sft.launch.collectives import first_reason
from accel_sft.models.architecture import (
    arguments,
    beyond_text,
    cache_argument,
    limited_layers,
    takes_sdpa,
    without_adapter,
)
from accel_sft.models.prefix_attention import install

CHECKED_ROWS, CHECKED_AMONG = 3, 256
RANDOM_TOKENS = 512
"""Number of tokens compared to find out if training is random: enough for experts drawn at random to differ."""
HEAD_TOKENS = 256
"""Number of tokens whose logits are computed whole to check the heads."""
IMAGES = "rows hold images, whose placeholders are alike where the images are not, and whose positions have two axes"
"""Reason, in messages, why rows with images are padded."""


def exact_batchings(trial: Trial, also: Sequence[Encoded]) -> tuple[list[Batching], list[str]]:
    """Find the batchings that the model computes exactly, among the layouts asked for, and why it fails the others.

    Args:
        also: rows that will be laid out besides the trial's examples; the longest of all rows is tried.
    Returns:
        batchings without a limit of tokens, at least one; and `layout: reason` for each layout that is not exact.
    Raises:
        UserError: ranks would wait for each other's images for ever.
    """
    config, model, accelerator = trial.config, trial.model, trial.accelerator
    unwrapped = accelerator.unwrap_model(model)
    names = list(dict.fromkeys(layout.name for layout in LAYOUTS))
    asked = names if config.batching == "auto" else names[names.index(config.batching) :]
    heads = available_heads(unwrapped)
    row_sets = _row_sets([*trial.examples, *also])
    longest = max(len(row.input_ids) for row in row_sets[-1])
    found: list[Batching] = []
    reasons: list[str] = []
    dropout = None
    was_training = model.training
    pictured = any(row.images for row in (*trial.examples, *also))
    if pictured:
        *others, only = asked
        asked, reasons = [only], [f"{' or '.join(others)}: {IMAGES}"] if others else []
    with torch.no_grad(), torch.random.fork_rng():
        model.eval()
        plain = _plain(trial, heads, row_sets[0][0])
        model.train()
        if trial.train:
            some = trial.batch(plain, enough(trial.examples))
            dropout = _dropout(unwrapped, is_random(trial, some))
        model.eval()
        if trial.blank and not forwards_alone(accelerator):
            _refuse_image_by_image(trial, plain, row_sets)
        alone = [sum(nll_sum(model, trial.batch(plain, [row])).item() for row in rows) for rows in row_sets]
        for name in asked:
            sequences = any(batching.way.one_sequence for batching in found)  # sharing includes packing
            if found and (config.batching != "auto" or (name == "packed" and sequences)):
                continue
            layouts, reason = _layouts_for(unwrapped, name, longest, dropout)
            exact: list[Batching] = []
            for layout in layouts:
                if _is_needless(layout, exact, pictured=pictured):
                    continue
                before = reason
                reason = _not_behind_a_cache(trial, layout, row_sets) if layout.attention == "cache" else None
                if layout.attention == "rows":
                    install(accelerator.device)
                for head in () if reason else heads:
                    batching = Batching(name, UNLIMITED, attention=layout.attention, head=head)
                    reason = _problem(trial, batching, alone, row_sets)
                    if not reason:
                        exact.append(batching)
                        break
                if reason and layout.attention == "cache":
                    reason = f"{before}; and behind a cache: {reason}"
            found += exact
            if not exact:
                reasons.append(f"{name}: {reason}")
    model.train(was_training)
    # the fallback: every model is trained with padded rows; if they differ from single ones, the model itself makes
    # them differ (a router's capacity, noise)
    return found or [plain], reasons


def _plain(trial: Trial, heads: Sequence[str], row: Encoded) -> Batching:
    """Padded rows with the head that holds the fewest logits at once, among those whose loss is that of logits at every
    token. They are compared on HEAD_TOKENS of a row, since all of its logits may not fit."""
    whole = Batching("padded", UNLIMITED, head="everywhere")
    if not row.images:  # placeholders of images cannot be cut
        row = row._replace(input_ids=row.input_ids[:HEAD_TOKENS], prompt_length=1, earlier=())
    expected = nll_sum(trial.model, trial.batch(whole, [row])).item()
    others = [dataclasses.replace(whole, head=head) for head in heads if head != whole.head]
    right = (plain for plain in others if not first_reason(differs(trial, plain, expected, [row])))
    return next(right, whole)


def _is_needless(layout: Layout, exact: Sequence[Batching], *, pictured: bool) -> bool:
    """Whether a layout need not be tried, beside those of its name that are exact and with rows that have images."""
    if layout.attention == "cache":  # which takes a sequence's place where there is none
        return bool(exact)
    if layout.attention == "causal":  # a mask may tell an image's tokens from a text's
        return pictured
    return layout.attention == "mask" and "causal" in (batching.attention for batching in exact)  # which is less work


def _problem(
    trial: Trial, batching: Batching, alone: Sequence[float], row_sets: Sequence[Sequence[Encoded]]
) -> str | None:
    """Say why the model does not compute rows exactly in this batching; None if it does. All ranks say the same: with
    different answers they would run different forwards.

    Args:
        alone: the sums of the losses of each set's rows as single rows.
    """
    mine = [differs(trial, batching, loss, rows) for loss, rows in zip(alone, row_sets, strict=True)]
    if reason := first_reason(next(filter(None, mine), None)):
        return reason
    if batching.way.one_sequence:
        if any(see_each_other(trial, batching, rows) for rows in row_sets):
            return "a change in one row changes another"
        blind = ignores_positions(trial, batching, row_sets[-1])
        return "the model ignores the positions that it is given" if blind else None
    if batching.attention != "mask" and any(sees_padding(trial, batching, rows) for rows in row_sets):
        return "what stands in padding changes a row"
    if batching.attention == "cache":
        mine = [goes_wrong_behind(trial, batching, rows) for rows in row_sets]
        return first_reason(next(filter(None, mine), None))
    return None


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
            f"{type(base).__name__} reads images one by one: ranks with fewer images would hang under ZeRO-3 and FSDP; "
            "launch with accelerate_configs/z2.yaml or ddp.yaml"
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
        other = "sdpa can" if takes_sdpa(model) else "the model has no other"
        reason = f"attention {implementation} cannot take a mask of rows; {other}"
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


def _not_behind_a_cache(trial: Trial, layout: Layout, row_sets: Sequence[Sequence[Encoded]]) -> str | None:
    """Say why rows are not tried behind a prefix's cache; None if they can be."""
    if not cache_argument(without_adapter(trial.accelerator.unwrap_model(trial.model)).forward):
        return "the model takes none"
    if not any(map(layout.prefix, row_sets)):
        return "rows have nothing in common before what they learn"
    if trial.config.compile:
        return "--compile would compile the blocks anew for it"
    if not forwards_alone(trial.accelerator):
        return "its backward cannot be tried where ranks share the weights"
    return None
