"""Makes the tensors of one forward: rows in one sequence behind shared prefixes, or padded in a batch.

Tensors are made on the current device; set it by `with device:` around a call.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from accel_sft.chat.encoded import Encoded
from accel_sft.io.terminal import terminal, wrapped
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.models.cascade import PrefixedRows


@dataclasses.dataclass(frozen=True)
class Batch:
    """One forward: the model's arguments, and what its kept logits are to predict.

    Attributes:
        inputs: `input_ids` and `attention_mask`; for a tree of rows also `position_ids` and what attention needs; for
            padded rows with images also what the processor makes of the images.
        keep: where logits predict a target: indices (P,) in the one sequence, or a mask (B, T) over padded rows.
        sources: for each of E targets, the index in `keep` of the position that predicts it, (E,); None if each kept
            position predicts one target, in order.
        targets: token ids to predict, (E,).
        weights: for each target, how many rows predict it from its position; (E,) float32.
        head: name in `loss.HEADS` of the function that computes logits and loss.
        most_logits: maximum number of logits that the head `pieces` holds at once; None: MOST_LOGITS.
        prefix: ids of tokens that stand before each row and are not among `input_ids`, (1, P); None if there are none.
    """

    inputs: dict[str, Any]
    keep: torch.Tensor
    sources: torch.Tensor | None
    targets: torch.Tensor
    weights: torch.Tensor
    head: str = "labelled"
    most_logits: int | None = None
    prefix: torch.Tensor | None = None


def empty(pad_token_id: int) -> Batch:
    """A forward without a target, still connected to the weights: what a rank runs when it has no rows left."""
    nothing = np.zeros(0, dtype=np.int64)
    ids, keep = np.full((1, 2), pad_token_id), np.zeros(1, dtype=np.int64)
    return _tensors({"input_ids": ids}, keep, None, nothing, nothing)


def tree(rows: Sequence[Encoded], common: Sequence[int], *, masked: bool = True) -> Batch:
    """A forward of rows as a tree of the prefixes that they share: depth first, each token once.

    A token is seen by the tokens after it up to the end of its subtree, so only by rows that contain it.

    Args:
        common: how many leading tokens of each row already stand in the sequence when the row is appended.
        masked: whether a mask separates rows; False where attention separates them in another way.
    """
    total = sum(len(row.input_ids) for row in rows) - sum(common)
    ids, position, source = (np.zeros(total, dtype=np.int64) for _ in range(3))
    end, weight = np.full(total, total, dtype=np.int64), np.zeros(total, dtype=np.float32)
    path = np.zeros(max(len(row.input_ids) for row in rows), dtype=np.int64)  # where each token of this row stands
    length = at = 0
    for row, shared in zip(rows, common, strict=True):
        end[path[shared:length]] = at  # the branch that ends here
        length = len(row.input_ids)
        new = slice(at, at + length - shared)
        path[shared:length] = np.arange(new.start, new.stop)
        ids[new] = row.input_ids[shared:]
        position[new] = np.arange(shared, length)
        source[new] = path[np.arange(shared, length) - 1]
        for span in row.learnt:
            weight[path[span.start : span.stop]] += 1
        at = new.stop
    batch = _in_one_sequence(ids, position, source, weight)
    if masked and (end < total).any():  # plain causal attention serves a single row, without a mask
        batch.inputs["attention_mask"] = dense_mask(*_on_device(end))
    return batch


def behind_prefix(rows: Sequence[Encoded], prefix: int) -> Batch:
    """A forward of rows whose tree branches only once: `prefix` tokens that all share, then each row's own tokens.

    Attention runs row by row (`cascade.PrefixedRows`). The tensors are built by a few array operations, because a
    loop over rows would take noticeable time on a small model.
    """
    lengths = np.array([len(row.input_ids) for row in rows])
    prompts = np.array([max(row.prompt_length, 1) for row in rows])
    own = lengths - prefix
    starts = prefix + own.cumsum() - own
    total = prefix + own.sum()
    tokens = itertools.chain(rows[0].input_ids[:prefix], *(row.input_ids[prefix:] for row in rows))
    ids = np.fromiter(tokens, np.int64, total)
    position, source = np.arange(total), np.arange(-1, total - 1)
    position[prefix:] -= np.repeat(starts - prefix, own)
    source[starts] = prefix - 1
    weight = np.empty(total, dtype=np.float32)
    weight[:prefix] = (prompts[:, None] <= np.arange(prefix)).sum(axis=0)
    weight[prefix:] = position[prefix:] >= np.repeat(prompts, own)
    for row, start in zip(rows, starts, strict=True):
        for begin, end in row.earlier:
            weight[begin : min(end, prefix)] += 1
            weight[start + max(begin - prefix, 0) : start + max(end - prefix, 0)] = 1
    batch = _in_one_sequence(ids, position, source, weight)
    batch.inputs["rows"] = _rows(own, starts, prefix)
    # a placeholder, so that the model makes no mask; verification finds a model that ignores `rows`
    batch.inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return batch


def _in_one_sequence(ids: np.ndarray, position: np.ndarray, source: np.ndarray, weight: np.ndarray) -> Batch:
    """Make a batch of tokens (T,) at their positions; each counts `weight`, predicted by the token at `source`."""
    (labelled,) = weight.nonzero()
    keep, sources = source[labelled], None
    if not (np.diff(keep) > 0).all():  # some position predicts two tokens, or they are not in order
        keep, sources = np.unique(keep, return_inverse=True)
    inputs = {"input_ids": ids[None], "position_ids": position[None]}
    return _tensors(inputs, keep, sources, ids[labelled], weight[labelled])


def dense_mask(end: torch.Tensor) -> torch.Tensor:
    """Return which query sees which key, (1, 1, query, key), from the index where each token's subtree ends."""
    index = torch.arange(len(end), device=end.device)
    return ((index[:, None] >= index[None]) & (index[:, None] < end[None]))[None, None]


def varlen(rows: Sequence[Encoded]) -> Batch:
    """Rows one after another, with their bounds for FlashAttention."""
    batch, lengths = tree(rows, [0] * len(rows), masked=False), [len(row.input_ids) for row in rows]
    (bounds,) = _on_device(np.array([0, *np.cumsum(lengths)], dtype=np.int32))
    longest = max(lengths)
    batch.inputs.update(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest, max_length_k=longest)
    return batch


def _rows(sizes: np.ndarray, starts: np.ndarray, prefix: int) -> PrefixedRows:
    """Return `PrefixedRows` for rows of `sizes` own tokens that begin at `starts`, behind a common `prefix`."""
    longest = int(sizes.max())
    step = np.arange(longest)
    own = (starts - prefix)[:, None] + np.minimum(step, sizes[:, None] - 1)
    (back,) = (step < sizes[:, None]).ravel().nonzero()
    count = int(sizes.sum())
    bounds = np.array([*[0] * bool(prefix), *starts, prefix + count], dtype=np.int32)
    ends = np.array([0, count], dtype=np.int32)
    cut, placed, segments, behind = _on_device(own.ravel(), back, bounds, ends)
    return PrefixedRows(prefix, longest, cut, placed, segments, behind)


def padded(rows: Sequence[Encoded], pad_token_id: int, blank: Encoded | None = None) -> Batch:
    """A forward of rows one below the other, padded at the right.

    Targets are found by position, so a pad token that equals the end-of-turn token is never supervised. Images are read
    only here, just before their forward. The model computes positions by itself.

    Args:
        blank: a blank image, put behind the shortest row's last token, where no token that predicts anything sees it;
            the forward is then connected to the layers that read images, with a gradient of zero.
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
    if not targets:  # the rows are a blank image alone: one logit connects the loss, which is zero, to the weights
        keep[0, 0] = True
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if pictured := next(filter(None, images), None):
        inputs |= pictured.origin.inputs.tensors(ids, images, shape)
    return _tensors(inputs, keep, None, np.asarray(targets, np.int64), np.ones(len(targets), np.float32))


def behind_cache(rows: Sequence[Encoded], prefix: int, pad_token_id: int) -> Batch:
    """A forward of the rows' own tokens, padded, behind `prefix` tokens that all share and that predict no target."""
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


def _tensors(
    inputs: dict[str, np.ndarray],
    keep: np.ndarray,
    sources: np.ndarray | None,
    targets: np.ndarray,
    weights: np.ndarray,
) -> Batch:
    """A `Batch` of tensors, made of arrays."""
    keep_tensor, target_ids, row_weights, *tensors = _on_device(keep, targets, weights, *inputs.values())
    source = None if sources is None else _on_device(sources)[0]
    named = {"attention_mask": None, **dict(zip(inputs, tensors, strict=True))}
    return Batch(named, keep_tensor, source, target_ids, row_weights)


def _on_device(*arrays: np.ndarray) -> list[torch.Tensor]:
    """Return the arrays as tensors on the current device. A GPU copies them from pinned memory, so that the host does
    not wait until the GPU has done all earlier work."""
    device = torch.empty(0).device
    tensors = map(torch.from_numpy, arrays)  # on the CPU, whatever is the current device
    if device.type == "cuda":
        return [_pinned(tensor).to(device, non_blocking=True) for tensor in tensors]
    return [tensor.to(device) for tensor in tensors]


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, or the tensor itself where the system pins no more: its words for that would be
    taken for a GPU without memory."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        _say_unpinned(one_line(str(error), LONGEST_ERROR))
        return tensor


@functools.cache
def _say_unpinned(reason: str) -> None:
    print(wrapped(f"host memory cannot be pinned ({reason}): copies of batches take longer"), file=terminal())
