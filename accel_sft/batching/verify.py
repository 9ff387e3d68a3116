"""Verifies, before step 1, which batchings a model computes exactly: losses and gradients of a few rows must equal
those of single rows, and no row may attend to another row."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from accel_sft.api.errors import UserError, first_line
from accel_sft.batching.collate import Batch
from accel_sft.batching.device_memory import forwards_alone, out_of_memory
from accel_sft.batching.layouts import LAYOUTS, WHAT, Batching, Layout
from accel_sft.batching.loss import available_heads, nll, nll_sum
from accel_sft.batching.trial import Trial
from accel_sft.chat.encoded import Encoded
from accel_sft.launch.collectives import any_rank, first_reason
from accel_sft.models.architecture import REFUSALS, beyond_text, without_adapter
from accel_sft.models.prefix_attention import install

CHECKED_ROWS, CHECKED_AMONG = 3, 256
RANDOM_TOKENS = 512
"""Number of tokens on which two equal forwards are compared to detect randomness; enough to reveal random routing."""
HEAD_TOKENS = 256
"""Number of tokens whose full logits are computed to check the heads."""
TOLERANCE, REDUCED_TOLERANCE = 1e-3, 0.25
"""Nats per token by which the loss may differ between layouts, in float32 and in reduced precision. Rows that see each
other or have wrong positions differ by more, even in a random model; a bitwise check finds rows that see each other."""
ROUNDING, REDUCED_ROUNDING = 1e-5, 1e-2
"""Without randomness, a token's loss may differ between two equal forwards by this share of the largest loss, in
float32 and in reduced precision: a busy machine may round differently."""
LOOKS = 3
"""Maximum number of comparisons of a forward with a changed forward."""
GRADIENT, REDUCED_GRADIENT = 1e-2, 0.25
"""Share by which loss and gradients with a cached prefix may differ from those of padded rows, in float32 and in
reduced precision. A gradient that misses the prefix differs by far more."""
NOISE = 4
"""Tolerance, as a multiple of the noise between identical forwards."""
FEWEST_LOGITS = 1
"""Maximum number of logits that the head `pieces` holds at once in a check: 1 makes the pieces as small as possible."""
UNLIMITED = 2**31
"""Maximum number of tokens in one forward until a limit is chosen."""


def exact_batchings(trial: Trial, also: Sequence[Encoded] = ()) -> tuple[list[Batching], list[str]]:
    """Return the requested layouts that the model computes exactly (at least one), as batchings without a token limit,
    and a line `layout: reason` for each requested layout that it does not compute exactly."""
    config, model = trial.config, trial.model
    rows = [*trial.examples, *also]
    row_sets, batchings, reasons = _row_sets(rows), list[Batching](), list[str]()
    requested = [*WHAT] if config.batching == "auto" else [*WHAT][[*WHAT].index(config.batching) :]
    if requested[1:] and any(row.images for row in rows):
        reasons.append(f"{' or '.join(requested[:-1])}: rows hold images, whose placeholders are all alike")
        requested = requested[-1:]
    was_training = model.training
    with torch.no_grad(), torch.random.fork_rng():
        model.eval()
        plain = _plain(trial, row_sets[0][0])
        dropout = _dropout(trial, plain) if trial.train else None
        if trial.blank and not forwards_alone(trial.accelerator):
            _refuse_image_by_image(trial, plain, row_sets)
        alone = [sum(nll_sum(model, trial.batch(plain, [row])).item() for row in rows) for rows in row_sets]
        for name in requested:
            # `shared` in one sequence packs rows too
            if batchings and (config.batching != "auto" or (name == "packed" and batchings[0].way.one_sequence)):
                continue
            batching, reason = _exact_of(name, trial, alone, row_sets, dropout)
            if batching:
                batchings.append(batching)
            else:
                reasons.append(f"{name}: {reason}")
    model.train(was_training)
    # padded rows are always allowed: if they differ from single rows, the model itself is the cause (router capacity)
    return batchings or [plain], reasons


def _exact_of(
    name: str, trial: Trial, alone: Sequence[float], row_sets: Sequence[Sequence[Encoded]], dropout: str | None
) -> tuple[Batching | None, str | None]:
    """The first exact batching of the layouts with this name, or why there is none; `alone` has each row set's loss."""
    if name == "shared" and dropout:
        return None, f"rows of a step would share their dropout ({dropout})"
    if name == "shared" and not any(map(LAYOUTS[0].prefix, row_sets)):
        return None, "rows have no common beginning before their first target"
    model, reason = trial.accelerator.unwrap_model(trial.model), None
    for layout in (layout for layout in LAYOUTS if layout.name == name):
        refusal = layout.refusal(model, row_sets) or _untried(trial, layout)
        problem = refusal
        if not refusal:
            if layout.attention == "rows":
                install(trial.accelerator.device)
            for head in available_heads(model):
                batching = Batching(name, UNLIMITED, attention=layout.attention, head=head)
                if not (problem := _problem(trial, batching, alone, row_sets)):
                    return batching, None
        if layout.behind_cache:
            reason = f"{reason}; and with a cached prefix: {problem}"
        elif not (refusal and reason):  # the reason from a trial says more than the refusal of another layout
            reason = problem
    return None, reason


def _untried(trial: Trial, layout: Layout) -> str | None:
    """Why the trial of a layout is skipped in this run; None if the layout is tried."""
    if layout.behind_cache and trial.config.compile:
        return "--compile would compile the blocks again"
    if layout.behind_cache and not forwards_alone(trial.accelerator):
        return "its backward cannot be tried if ranks share the weights"
    return None


def _plain(trial: Trial, row: Encoded) -> Batching:
    """Padded rows with the first head whose loss equals that of logits at every token, tried on HEAD_TOKENS tokens."""
    exhaustive = Batching("padded", UNLIMITED, head="everywhere")
    if not row.images:  # a row must keep all placeholders of its images
        row = Encoded(row.index, row.input_ids[:HEAD_TOKENS], 1)
    expected = nll_sum(trial.model, trial.batch(exhaustive, [row])).item()
    for head in available_heads(trial.accelerator.unwrap_model(trial.model)):
        plain = dataclasses.replace(exhaustive, head=head)
        if plain == exhaustive or not first_reason(_differs(trial, plain, expected, [row])):
            return plain
    return exhaustive


def _problem(
    trial: Trial, batching: Batching, alone: Sequence[float], row_sets: Sequence[Sequence[Encoded]]
) -> str | None:
    """Why the model does not compute rows exactly in this batching; None if it does. All ranks return the same."""
    mine = [_differs(trial, batching, loss, rows) for loss, rows in zip(alone, row_sets, strict=True)]
    if reason := first_reason(next(filter(None, mine), None)):
        return reason
    if batching.way.one_sequence:
        if any(_see_each_other(trial, batching, rows) for rows in row_sets):
            return "a change in one row changes another row's loss"
        if _ignores_positions(trial, batching, row_sets[-1]):
            return "the model ignores position_ids"
        return None
    if batching.attention != "mask" and any(_sees_padding(trial, batching, rows) for rows in row_sets):
        return "the padding token changes a row's loss"
    if batching.way.behind_cache:
        mine = [_goes_wrong_behind(trial, batching, rows) for rows in row_sets]
        return first_reason(next(filter(None, mine), None))
    return None


def _refuse_image_by_image(trial: Trial, batching: Batching, row_sets: Sequence[Sequence[Encoded]]) -> None:
    """Raise UserError if the image layers are called more often for more images: ranks would wait for each other."""
    base = without_adapter(trial.accelerator.unwrap_model(trial.model))
    of_images = {base.get_submodule(name.rpartition(".")[0]) for name in beyond_text(base)}
    calls = list[int]()

    def count(module: torch.nn.Module, _: Any) -> None:
        calls[-1] += module in of_images

    hook = register_module_forward_pre_hook(count)
    for rows in ([], *row_sets):
        calls.append(0)
        nll(trial.model, trial.batch(batching, rows))
    hook.remove()
    if len({*calls}) > 1:
        raise UserError(
            f"{type(base).__name__} reads images one by one: ranks with fewer images would hang under ZeRO-3 and FSDP; "
            "launch with accelerate_configs/z2.yaml or ddp.yaml"
        )


def _shortest(examples: Sequence[Encoded]) -> list[Encoded]:
    return sorted(examples[:CHECKED_AMONG], key=lambda example: (len(example.input_ids), example.index))


def enough(examples: Sequence[Encoded]) -> list[Encoded]:
    """Return the shortest of the first CHECKED_AMONG rows: as many as have RANDOM_TOKENS tokens together, or all."""
    among = _shortest(examples)
    totals = list(itertools.accumulate(len(row.input_ids) for row in among))
    return among[: bisect.bisect_left(totals, RANDOM_TOKENS) + 1]


def _row_sets(examples: Sequence[Encoded]) -> list[list[Encoded]]:
    """Two sets of rows: short rows (with images, if any row has them); and a row without images and the longest row."""
    among = _shortest([row for row in examples if row.images] or examples)
    longest = max(examples, key=lambda example: (len(example.input_ids), example.index))
    beside = next((row for row in _shortest(examples) if not row.images), among[0])
    return [among[:CHECKED_ROWS], [beside, longest]]


def _dropout(trial: Trial, plain: Batching) -> str | None:
    """The name of a module or setting with dropout, or a phrase if only random losses reveal it; else None."""
    trial.model.train()
    batch = trial.batch(plain, enough(trial.examples))
    is_random = any_rank(not _farthest(nll(trial.model, batch), nll(trial.model, batch)) <= _rounding(trial))
    trial.model.eval()
    model = trial.accelerator.unwrap_model(trial.model)
    modules = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout) and module.p > 0)
    settings = (name for name in ("attention_dropout", "attn_pdrop") if getattr(model.config, name, 0))
    return next(itertools.chain(modules, settings), "its forward is random in training" if is_random else None)


def _rounding(trial: Trial) -> float:
    return ROUNDING if trial.in_float32 else REDUCED_ROUNDING


def _farthest(first: torch.Tensor, again: torch.Tensor) -> float:
    """The largest difference between two losses of a token, as a share of the largest loss; NaN if a loss is NaN."""
    if not len(first):
        return 0.0
    return ((first - again).abs().max() / first.abs().max().clamp(min=1)).item()


def _differs(trial: Trial, batching: Batching, alone: float, rows: Sequence[Encoded]) -> str | None:
    """Why a few rows cannot be computed in this batching, or how far their loss is from `alone`, the single rows';
    None if the losses agree."""
    batch = dataclasses.replace(trial.batch(batching, rows), most_logits=FEWEST_LOGITS)
    try:
        together = nll(trial.model, batch)
    except REFUSALS as error:
        if out_of_memory(error):  # this says nothing about what the model supports
            raise
        return f"the model's forward fails ({first_line(error)[:100]})"
    difference = abs(alone - together.sum().item()) / len(batch.targets)
    tolerance = TOLERANCE if trial.in_float32 else REDUCED_TOLERANCE
    wrong = f"its loss is not that of single rows (off by {difference:.2g} nats a token)"
    return None if difference <= tolerance else wrong


def _goes_wrong_behind(trial: Trial, batching: Batching, rows: Sequence[Encoded]) -> str | None:
    """Why training after a cached prefix is wrong (a layer may detach its state, for example); None if it is exact."""
    prefix = batching.way.prefix(rows)
    if not prefix or not trial.train:
        return None
    try:
        loss, gradients = trial.run(batching, rows)
        expected, (gradient,) = trial.run(Batching("padded", UNLIMITED, attention="causal", head=batching.head), rows)
    except REFUSALS as error:
        if out_of_memory(error):
            raise
        return f"a training step fails ({first_line(error)[:100]})"
    right = gradient[:, :prefix].sum(0, keepdim=True), gradient[:, prefix:]
    off = [((mine - exact).norm() / exact.norm()).item() for mine, exact in zip(gradients, right, strict=True)]
    off.append(abs(loss - expected) / abs(expected))
    most = GRADIENT if trial.in_float32 else REDUCED_GRADIENT
    wrong = f"its gradient is not that of padded rows (relative difference {max(off):.2g})"
    return None if all(share <= most for share in off) else wrong


def _ignores_positions(trial: Trial, batching: Batching, rows: Sequence[Encoded]) -> bool:
    """Whether the model ignores `position_ids`: halving them changes no bit of any loss, on any rank. Such a model
    counts positions through the whole sequence. In reduced precision, rounding may hide an effect of positions."""
    batch = trial.batch(batching, rows)
    closer = {**batch.inputs, "position_ids": batch.inputs["position_ids"] // 2}
    return not _changes(trial, batch, dataclasses.replace(batch, inputs=closer), slice(None))


def _see_each_other(trial: Trial, batching: Batching, rows: Sequence[Encoded]) -> bool:
    """Whether changing the last token of the first row (or of a pair's chosen answer) changes a bit of the loss of what
    follows, on any rank."""
    batch = trial.batch(batching, rows)
    first = rows[0].sequences[0].input_ids
    last = len(first) - 1
    ids = batch.inputs["input_ids"].clone()
    ids[0, last] = next((token for token in first if token != first[-1]), 0)
    changed = dataclasses.replace(batch, inputs={**batch.inputs, "input_ids": ids})
    return _changes(trial, batch, changed, batch.keep > last)


def _sees_padding(trial: Trial, batching: Batching, rows: Sequence[Encoded]) -> bool:
    """Whether a different padding token changes a bit of a row's loss, on any rank."""
    other = dataclasses.replace(trial, pad_token_id=int(trial.pad_token_id == 0))
    return _changes(trial, trial.batch(batching, rows), other.batch(batching, rows), slice(None))


def _changes(trial: Trial, batch: Batch, changed: Batch, where: torch.Tensor | slice) -> bool:
    """Whether the losses of two forwards differ in any bit at `where`, on any rank. On a busy machine, equal forwards
    may differ too, by noise: a difference is ignored if it is within rounding and within NOISE times that noise."""
    unchanged: list[torch.Tensor] = []
    for _ in range(LOOKS):
        before, after = (nll(trial.model, rows)[where] for rows in (batch, changed))
        unchanged.append(before)
        if not any_rank(not torch.equal(before, after)):
            return False
    noise = max(_farthest(one, other) for one, other in itertools.pairwise(unchanged))
    return any_rank(not _farthest(before, after) <= min(_rounding(trial), NOISE * noise))
