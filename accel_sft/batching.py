"""How the examples of a step are laid out in forwards: behind the prefixes they share, packed, or padded (law 1).

`shared` and `packed` put the rows of a forward into one sequence. Rows in lexicographic order form a tree: what a row
has in common with the one before it is there already, only the rest is appended. Each token sees its own path through
the tree and nothing else, at the position it has in its own row, so causality makes every row's loss and gradient what
it is alone:

    system prompt, "Split "  -+- "1234="  -+- "12 + 1222"        16 tokens for what would be 30:
                              |            +- "34 + 1200"        a question asked twice and an instruction
                              +- "57="     -+- "50 + 7"          asked three times are computed once

`packed` is the same without anything in common; `padded` is for models whose attention takes no such mask.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from accel_sft.attention import Rows, install
from accel_sft.chat import Encoded


@dataclasses.dataclass(frozen=True)
class Batch:
    """One forward: the model's arguments, and what its kept logits are to predict.

    Attributes:
        inputs: `input_ids` and `attention_mask`, with `position_ids` for a tree of rows.
        keep: where a label is predicted from: positions (P,) of the one sequence, or a mask (B, T) of padded rows.
        sources: index into the P kept positions of each target, (E,); None: one target each, in order.
        targets: token ids to predict, (E,).
        weights: rows that predict this token from this position, (E,) float32.
        head_in_pieces: logits may be computed a part at a time.
    """

    inputs: dict[str, torch.Tensor | None]
    keep: torch.Tensor
    sources: torch.Tensor | None
    targets: torch.Tensor
    weights: torch.Tensor
    head_in_pieces: bool = False


@dataclasses.dataclass(frozen=True)
class Batching:
    """How rows become forwards.

    Attributes:
        layout: `shared`, `packed` or `padded`.
        tokens: computed in one forward at most (a row that is longer has one to itself).
        rows: examples in one forward at most; wins over `tokens`.
        head_where_labelled: the model computes logits for kept positions alone (`logits_to_keep`).
        head_in_pieces: the model's head, called on a part of the tokens, gives that part's logits.
        attention: of rows in one sequence: `tree`, by a mask over the whole of it, or `rows`, row by row behind the one
            prefix that all rows of the forward have in common, whatever the order they stand in (`attention.Rows`).
    """

    layout: str
    tokens: int
    rows: int | None = None
    head_where_labelled: bool = True
    head_in_pieces: bool = False
    attention: str = "tree"

    def __post_init__(self) -> None:
        if self.attention == "rows":
            install()

    def divide(self, examples: Sequence[Encoded], world_size: int) -> list[list[list[Encoded]]]:
        """The forwards of each rank: equally many, of near-equal tokens, empty ones to make up the number.

        The same on every rank; in the order of their size, so that ranks that wait for each other in every forward
        (ZeRO-3) wait for little.
        """
        forwards = self._group(list(examples), world_size)
        sized = sorted(((self._tokens(rows), rows) for rows in forwards), key=lambda pair: -pair[0])
        sized += [(0, [])] * (-len(sized) % world_size)
        ranks: list[list[list[Encoded]]] = [[] for _ in range(world_size)]
        loads = [0] * world_size
        for at in range(0, len(sized), world_size):
            least_first = sorted(range(world_size), key=loads.__getitem__)
            for rank, (tokens, rows) in zip(least_first, sized[at : at + world_size], strict=True):
                ranks[rank].append(rows)
                loads[rank] += tokens
        return ranks

    def _group(self, examples: list[Encoded], world_size: int) -> list[list[Encoded]]:
        """The rows of each forward, over all ranks; a multiple of the ranks where there are rows enough."""
        if self.layout == "shared" and self.attention == "tree":
            examples.sort(key=lambda example: (example.input_ids, example.index))
        else:
            examples.sort(key=lambda example: (-len(example.input_ids), example.index))
        if self.rows:
            count = world_size * math.ceil(math.ceil(len(examples) / world_size) / self.rows)
            return [[examples[row] for row in rows] for rows in np.array_split(np.arange(len(examples)), count)]
        alone = [[example] for example in examples if len(example.input_ids) > self.tokens]
        examples = [example for example in examples if len(example.input_ids) <= self.tokens]
        if not examples:
            return alone
        lengths, common = [len(example.input_ids) for example in examples], self._common(examples)
        count = math.ceil((sum(lengths) - sum(common)) / self.tokens)
        count += -(len(alone) + count) % world_size
        while True:
            ends = _least_largest(lengths, common, count, self.tokens, padded=self.layout == "padded")
            if ends is not None:
                return alone + [examples[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
            count += world_size

    def _common(self, examples: Sequence[Encoded]) -> list[int]:
        """Leading tokens of each row that stand there already when it is its turn."""
        if self.layout != "shared" or not examples:
            return [0] * len(examples)
        if self.attention == "tree":
            return common_prefixes(examples)
        first, last = (pick(examples, key=lambda example: example.input_ids) for pick in (min, max))
        common = min(common_prefixes([first, last])[1], min(len(e.input_ids) for e in examples) - 1)
        return [0] + [common] * (len(examples) - 1)

    def _tokens(self, examples: Sequence[Encoded]) -> int:
        """Tokens that a forward of these examples, in this order, computes."""
        if self.layout == "padded":
            return len(examples) * max((len(example.input_ids) for example in examples), default=0)
        return sum(len(example.input_ids) for example in examples) - sum(self._common(examples))

    def computed_tokens(self, examples: Sequence[Encoded], world_size: int) -> int:
        """Tokens, padding included, that all ranks together compute for a step of these examples."""
        return sum(self._tokens(rows) for rank in self.divide(examples, world_size) for rows in rank)

    def batch(self, examples: Sequence[Encoded], pad_token_id: int, device: torch.device) -> Batch:
        """The tensors of one forward; no example: a connected forward without a target."""
        if not examples:
            batch = _tensors({"input_ids": np.full((1, 2), pad_token_id)}, np.zeros(1, dtype=np.int64), device)
        elif self.layout == "padded":
            batch = _padded(examples, pad_token_id, device)
        else:
            batch = _tree(examples, self._common(examples), device, self.attention == "rows")
        if self.head_where_labelled:
            batch.inputs["logits_to_keep"] = batch.keep
        return dataclasses.replace(batch, head_in_pieces=self.head_in_pieces)


def _least_largest(lengths: list[int], common: list[int], count: int, limit: int, *, padded: bool) -> list[int] | None:
    """Where to end each of at most `count` runs of consecutive rows so that the largest is least; None above `limit`.

    By bisection over the largest allowed, each tried greedily.
    """

    def ends_within(allowed: int) -> list[int] | None:
        ends: list[int] = []
        load = rows = longest = 0
        for at, (length, shared) in enumerate(zip(lengths, common, strict=True)):
            more = longest * (rows + 1) if padded else load + length - shared
            if rows and more <= allowed:
                load, rows = more, rows + 1
                continue
            if rows:
                ends.append(at)
                if len(ends) == count:
                    return None
            load, rows, longest = length, 1, length
        return [*ends, len(lengths)]

    low, high = max(lengths), limit
    best = ends_within(high)
    while best is not None and low < high:
        middle = (low + high) // 2
        ends = ends_within(middle)
        if ends is None:
            low = middle + 1
        else:
            high, best = middle, ends
    return best


def common_prefixes(examples: Sequence[Encoded]) -> list[int]:
    """How many leading tokens each row has in common with the one before it; 0 for the first."""
    found = [0] * min(len(examples), 1)
    for before, row in itertools.pairwise(examples):
        a, b = before.input_ids, row.input_ids
        shorter = min(len(a), len(b))
        low, high = 0, shorter  # rows are compared in halves: slices of lists compare at once
        while low < high:
            middle = (low + high + 1) // 2
            if a[low:middle] == b[low:middle]:
                low = middle
            else:
                high = middle - 1
        found.append(low)
    return found


def _tree(rows: Sequence[Encoded], common: Sequence[int], device: torch.device, by_rows: bool) -> Batch:
    """Rows behind the prefixes they share, depth first, each token once.

    A token is seen by those after it, up to the end of its subtree: by its own path's, and by no other row's.
    """
    total = sum(len(row.input_ids) for row in rows) - sum(common)
    ids, position, source = (np.zeros(total, dtype=np.int64) for _ in range(3))
    end, weight = np.full(total, total, dtype=np.int64), np.zeros(total, dtype=np.float32)
    path = np.zeros(max(len(row.input_ids) for row in rows), dtype=np.int64)  # where each token of this row stands
    length = at = 0
    for row, shared in zip(rows, common, strict=True):
        end[path[shared:length]] = at  # the branch that is left
        length = len(row.input_ids)
        new = slice(at, at + length - shared)
        path[shared:length] = np.arange(new.start, new.stop)
        ids[new] = row.input_ids[shared:]
        position[new] = np.arange(shared, length)
        source[new] = path[np.arange(shared, length) - 1]
        weight[path[max(row.prompt_length, 1) : length]] += 1
        at = new.stop
    (labelled,) = weight.nonzero()
    keep, sources = np.unique(source[labelled], return_inverse=True)
    inputs = {"input_ids": ids[None], "position_ids": position[None]}
    batch = _tensors(inputs, keep, device, sources=sources, targets=ids[labelled], weights=weight[labelled])
    if by_rows and len(rows) > 1:
        batch.inputs["rows"] = _rows([len(row.input_ids) - common[1] for row in rows], common[1], device)
        # stands for a mask that is ready, so that the model makes none; a model that knows no `rows` is found out
        batch.inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    elif (end < total).any():  # else a single row, which plain causal attention serves, without a mask
        index, ends = torch.arange(total, device=device), torch.from_numpy(end).to(device)
        seen = (index[:, None] >= index[None]) & (index[:, None] < ends[None])  # (query, key)
        batch.inputs["attention_mask"] = seen[None, None]
    return batch


def _rows(lengths: list[int], prefix: int, device: torch.device) -> Rows:
    """Where rows with that many tokens of their own stand behind `prefix` others."""
    sizes, longest = np.array(lengths), max(lengths)
    starts = prefix + np.cumsum(sizes) - sizes
    step = np.arange(longest)
    own = starts[:, None] + np.minimum(step, sizes[:, None] - 1)
    (back,) = (step < sizes[:, None]).ravel().nonzero()
    seen = np.tri(longest, prefix + longest, prefix, dtype=bool)
    own, back, seen = (torch.from_numpy(array).to(device) for array in (own.ravel(), back, seen))
    return Rows(prefix, (len(lengths), longest), own, back, seen if prefix else None)


def _padded(rows: Sequence[Encoded], pad_token_id: int, device: torch.device) -> Batch:
    """Rows one below the other, padded at the right.

    What is predicted is found by position, so a pad token that equals the end-of-turn token is never learnt.
    """
    shape = (len(rows), max(len(row.input_ids) for row in rows))
    input_ids, attention_mask = np.full(shape, pad_token_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    keep, targets = np.zeros(shape, dtype=bool), []
    for number, row in enumerate(rows):
        length, begin = len(row.input_ids), max(row.prompt_length, 1)
        input_ids[number, :length] = row.input_ids
        attention_mask[number, :length] = 1
        keep[number, begin - 1 : length - 1] = True
        targets += row.input_ids[begin:]
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    return _tensors(inputs, keep, device, targets=np.asarray(targets), weights=np.ones(len(targets), np.float32))


def _tensors(
    inputs: dict[str, np.ndarray],
    keep: np.ndarray,
    device: torch.device,
    *,
    sources: np.ndarray | None = None,
    targets: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> Batch:
    def tensor(array: np.ndarray | None) -> torch.Tensor:
        return torch.from_numpy(np.zeros(0, np.int64) if array is None else array).to(device, non_blocking=True)

    if sources is not None and len(sources) == len(keep):  # no position predicts two tokens, and np.unique sorts
        sources = None if (np.diff(sources) > 0).all() else sources
    return Batch(
        {"attention_mask": None, **{name: tensor(array) for name, array in inputs.items()}},
        tensor(keep),
        None if sources is None else tensor(sources),
        tensor(targets),
        tensor(weights),
    )
