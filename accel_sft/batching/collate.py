"""Makes the tensors of one forward: its rows stand in one sequence after a shared prefix, or in a padded batch.

Tensors are made on the current device; set it by `with device:` around a call.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from accel_sft.api.errors import first_line
from accel_sft.chat.encoded import Encoded, Pair
from accel_sft.models.cascade import PrefixedRows


@dataclasses.dataclass(frozen=True)
class Batch:
    """One forward: the model's arguments, and the targets of its kept logits.

    Attributes:
        keep: positions whose logits predict a target, as indices (E,) in one sequence or as a mask (B, T) over padded
            rows.
        targets: token ids to predict, in the order of `keep`, (E,).
        head: name in `loss.HEADS` of the function that computes logits and loss.
        most_logits: maximum number of logits that the head `pieces` holds at once; None: MOST_LOGITS.
        prefix: ids (1, P) of tokens that are read into a cache before the rows; `input_ids` does not have them.
    """

    inputs: dict[str, Any]
    keep: torch.Tensor
    targets: torch.Tensor
    head: str = "labelled"
    most_logits: int | None = None
    prefix: torch.Tensor | None = None


def empty(pad_token_id: int) -> Batch:
    """A forward without a target, still connected to the weights, for a rank that has no rows left."""
    return _tensors({"input_ids": np.full((1, 2), pad_token_id)}, np.zeros(1, np.int64), np.zeros(0, np.int64))


def in_one_sequence(rows: Sequence[Encoded], prefix: int = 0) -> Batch:
    """A forward of one sequence: the first `prefix` tokens, which all rows share and which predict no target, then the
    remaining tokens of each row. The arguments do not separate the rows yet."""
    own = np.array([len(row.input_ids) for row in rows]) - prefix
    ends = prefix + own.cumsum()
    total = ends[-1]
    tokens = itertools.chain(rows[0].input_ids[:prefix], *(row.input_ids[prefix:] for row in rows))
    ids, position, learnt = np.fromiter(tokens, np.int64, total), np.arange(total), np.zeros(total, dtype=bool)
    position[prefix:] -= np.repeat(ends - own - prefix, own)
    predicting = np.arange(-1, total - 1)  # the position whose logits predict each token
    for row, end in zip(rows, ends.tolist(), strict=True):
        begin = end - len(row.input_ids)  # where the row would begin if it repeated the prefix
        for span in row.learnt:
            learnt[begin + span.start : begin + span.stop] = True
        if isinstance(row, Pair):  # the rejected answer continues the prompt, not the chosen answer
            rejected, prompt = begin + row.prompt_length, row.forks_at
            position[rejected:end] -= row.prompt_length - prompt
            predicting[rejected] = begin + prompt - 1
    (targets,) = learnt.nonzero()
    return _tensors({"input_ids": ids[None], "position_ids": position[None]}, predicting[targets], ids[targets])


def row_by_row(rows: Sequence[Encoded], prefix: int) -> Batch:
    """A forward in one sequence, with the arguments that make attention run row by row."""
    batch = in_one_sequence(rows, prefix)
    if len(rows) > 1 or isinstance(rows[0], Pair):  # for a single row, plain causal attention is right
        batch.inputs["rows"] = prefixed_rows(rows, prefix)
        # a placeholder: a model that is given a mask makes none. verify.py detects a model that ignores `rows`.
        batch.inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return batch


def prefixed_rows(rows: Sequence[Encoded], prefix: int) -> PrefixedRows:
    """Where rows lie in one sequence after their prefix. In attention, a pair is two rows: its prompt with the chosen
    answer, and the same tokens of the prompt again with the rejected answer."""
    placed, begin = [], 0  # of each row in attention: where it begins, its size, of it repeated, what is skipped then
    for row in rows:
        if isinstance(row, Pair):
            chosen, prompt = row.prompt_length - prefix, row.forks_at - prefix
            skipped = chosen - prompt
            placed += [(begin, chosen, 0, 0), (begin, len(row.input_ids) - prefix - skipped, prompt, skipped)]
        else:
            placed.append((begin, len(row.input_ids) - prefix, 0, 0))
        begin += len(row.input_ids) - prefix
    begins, sizes, repeated, skipped = np.array(placed).T[:, :, None]
    step = np.arange(sizes.max())
    at = np.minimum(step, sizes - 1)
    own = (begins + at + skipped * (at >= repeated)).ravel()
    (back,), (again,) = (mask.ravel().nonzero() for mask in ((repeated <= step) & (step < sizes), step < repeated))
    return PrefixedRows(prefix, len(step), *_on_device(own, back, again))


def varlen(rows: Sequence[Encoded]) -> Batch:
    """A forward of rows (no pairs) that stand one after another, with their bounds for FlashAttention."""
    batch, lengths = in_one_sequence(rows), [len(row.input_ids) for row in rows]
    (bounds,) = _on_device(np.array([0, *np.cumsum(lengths)], dtype=np.int32))
    longest = max(lengths)
    batch.inputs.update(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest, max_length_k=longest)
    return batch


def padded(rows: Sequence[Encoded], pad_token_id: int, blank: Encoded | None = None) -> Batch:
    """A forward of a batch of rows, padded at the right, with the rows' images.

    A `blank` image goes after the shortest row's last token, where no token that predicts a target sees it. It connects
    the forward to the image layers, with a gradient of zero.
    """
    ids, images = [row.input_ids for row in rows], [row.images for row in rows]
    if blank:
        at = min(range(len(rows)), key=lambda number: len(ids[number]))
        ids[at], images[at] = ids[at] + blank.input_ids, blank.images
    shape = (len(ids), max(map(len, ids)))
    input_ids, attention_mask = np.full(shape, pad_token_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    keep, targets = np.zeros(shape, dtype=bool), []
    for number, tokens in enumerate(ids):
        input_ids[number, : len(tokens)] = tokens
        attention_mask[number, : len(tokens)] = 1
    for number, row in enumerate(rows):
        for span in row.learnt:
            keep[number, span.start - 1 : span.stop - 1] = True
            targets += row.input_ids[span.start : span.stop]
    if not targets:  # there is only a blank image: one logit connects the loss, which is zero, to the weights
        keep[0, 0] = True
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if pictured := next(filter(None, images), None):
        inputs |= pictured.origin.inputs.tensors(ids, images, shape)
    return _tensors(inputs, keep, np.asarray(targets, np.int64))


def behind_cache(rows: Sequence[Encoded], prefix: int, pad_token_id: int) -> Batch:
    """A forward of the rows' own tokens, padded; they follow a cache of the `prefix` tokens that all rows share."""
    own = [
        row._replace(
            input_ids=row.input_ids[prefix:],
            prompt_length=row.prompt_length - prefix,
            earlier=tuple((begin - prefix, end - prefix) for begin, end in row.earlier),
        )
        for row in rows
    ]
    batch = padded(own, pad_token_id)
    (ids,) = _on_device(np.array([rows[0].input_ids[:prefix]]))
    return dataclasses.replace(batch, inputs={**batch.inputs, "attention_mask": None}, prefix=ids)


def _tensors(inputs: dict[str, np.ndarray], keep: np.ndarray, targets: np.ndarray) -> Batch:
    keep_tensor, target_ids, *tensors = _on_device(keep, targets, *inputs.values())
    return Batch({"attention_mask": None, **dict(zip(inputs, tensors, strict=True))}, keep_tensor, target_ids)


def _on_device(*arrays: np.ndarray) -> list[torch.Tensor]:
    """The arrays as tensors on the current device. For a GPU they are copied from pinned memory, without waiting."""
    device = torch.empty(0).device
    tensors = map(torch.from_numpy, arrays)  # on the CPU, whatever the current device is
    if device.type == "cuda":
        return [_pinned(tensor).to(device, non_blocking=True) for tensor in tensors]
    return [tensor.to(device) for tensor in tensors]


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy, or the tensor itself if no memory can be pinned; the error would look like GPU out-of-memory."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        warnings.warn(f"host memory cannot be pinned ({first_line(error)}): copying batches takes longer", stacklevel=1)
        return tensor
