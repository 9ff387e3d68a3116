"""Compares forwards of a few rows: whether a batching gives their losses and gradients, and no row sees another."""

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from accel_sft.api.errors import first_line
from accel_sft.batching.collate import Batch
from accel_sft.batching.device_memory import out_of_memory
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll
from accel_sft.batching.trial import Trial
from accel_sft.chat.encoded import Encoded
from accel_sft.launch.collectives import any_rank
from accel_sft.models.architecture import REFUSALS

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
UNLIMITED = 2**31
"""Maximum number of tokens in one forward until a limit is chosen."""


def is_random(trial: Trial, batch: Batch) -> bool:
    """Whether two forwards of the same rows differ in training on any rank, every time and by more than rounding."""
    for _ in range(LOOKS):
        first, again = nll(trial.model, batch), nll(trial.model, batch)
        # ranks compare equally often, because their forwards may wait for each other
        if not any_rank(not _farthest(first, again) <= _rounding(trial)):
            return False
    return True


def _rounding(trial: Trial) -> float:
    return ROUNDING if trial.in_float32 else REDUCED_ROUNDING


def _farthest(first: torch.Tensor, again: torch.Tensor) -> float:
    """The largest difference between two losses of a token, as a share of the largest loss; NaN if a loss is NaN."""
    if not len(first):
        return 0.0
    return ((first - again).abs().max() / first.abs().max().clamp(min=1)).item()


def differs(trial: Trial, batching: Batching, alone: float, rows: Sequence[Encoded]) -> str | None:
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
    tolerance = TOLERANCE if trial.in_float32 else REDUCED_TOLERANCE
    wrong = f"its loss is not that of single rows (off by {difference:.2g} nats a token)"
    return None if difference <= tolerance else wrong


def goes_wrong_behind(trial: Trial, batching: Batching, rows: Sequence[Encoded]) -> str | None:
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


def ignores_positions(trial: Trial, batching: Batching, rows: Sequence[Encoded]) -> bool:
    """Whether halving the distances between tokens changes no bit of any loss, on any rank.

    Such a model takes a row behind others to begin at its place in the sequence, not at position 0. Bits are compared
    because in reduced precision positions may change a loss by less than rounding does.
    """
    batch = trial.batch(batching, rows)
    closer = {**batch.inputs, "position_ids": batch.inputs["position_ids"] // 2}
    here, there = (nll(trial.model, dataclasses.replace(batch, inputs=inputs)) for inputs in (batch.inputs, closer))
    return not any_rank(not torch.equal(here, there))


def see_each_other(trial: Trial, batching: Batching, rows: Sequence[Encoded]) -> bool:
    """Whether changing the first row's last token changes a bit of a later row's loss, on any rank."""
    batch, first = trial.batch(batching, rows), rows[0]
    last = len(first.input_ids) - 1
    ids = batch.inputs["input_ids"].clone()
    ids[0, last] = next((token for token in first.input_ids if token != first.input_ids[-1]), 0)
    changed = dataclasses.replace(batch, inputs={**batch.inputs, "input_ids": ids})
    sources = slice(None) if batch.sources is None else batch.sources
    return _changes(trial, batch, changed, batch.keep[sources] > last)


def sees_padding(trial: Trial, batching: Batching, rows: Sequence[Encoded]) -> bool:
    """Whether another token in place of padding changes a bit of a row's loss, on any rank."""
    other = dataclasses.replace(trial, pad_token_id=int(trial.pad_token_id == 0))
    return _changes(trial, trial.batch(batching, rows), other.batch(batching, rows), slice(None))


def _changes(trial: Trial, batch: Batch, changed: Batch, where: torch.Tensor | slice) -> bool:
    """Whether the losses in two forwards differ in a bit at `where`, on any rank.

    On a busy machine even unchanged rows may differ from one forward to the next. A difference that appears every time
    is therefore ignored if it is below rounding and at most NOISE times those differences.
    """
    unchanged: list[torch.Tensor] = []
    for _ in range(LOOKS):
        before, after = (nll(trial.model, each)[where] for each in (batch, changed))
        unchanged.append(before)
        if not any_rank(not torch.equal(before, after)):
            return False
    noise = max(_farthest(one, other) for one, other in itertools.pairwise(unchanged))
    return any_rank(not _farthest(before, after) <= min(_rounding(trial), NOISE * noise))
