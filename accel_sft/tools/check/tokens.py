"""Checks all tokens of a split as arrays (doubled BOS, unknown tokens, ends of turns, labels) and hashes whole rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from accel_sft.batching.layouts import Batching
from accel_sft.chat.encoded import Encoded
from accel_sft.data.token_store import Columns, TokenStore
from accel_sft.tools.check.findings import Findings

_CHUNK_TOKENS = 1 << 18
"""Number of tokens processed together, so that temporary arrays take two megabytes each."""
_COLLATED = 2048
"""About how many rows of a split have their collated labels compared with their answers."""
_TOGETHER = 64
"""Rows collated in one batch for that comparison."""


@dataclasses.dataclass(frozen=True)
class TokenFacts:
    """Facts about the rows of a TokenStore: one array entry for each row, in the store's order.

    Attributes:
        indices: the example's index in the encoded split.
        prompts, rows: hashes of the prompt's tokens and of all tokens, images included.
        bos_twice: whether the row begins with two BOS tokens.
        unknown: whether the row has the tokenizer's unknown token.
        ends: whether each answer of the row ends with a token that ends the turn.
    """

    indices: np.ndarray
    prompts: np.ndarray
    rows: np.ndarray
    bos_twice: np.ndarray
    unknown: np.ndarray
    ends: np.ndarray

    def of_last_rows(self) -> TokenFacts:
        """Return the facts about each example's last row, which has all turns of the example."""
        last = np.append(self.indices[1:] != self.indices[:-1], True)
        return TokenFacts(*(getattr(self, field.name)[last] for field in dataclasses.fields(self)))


def token_facts(store: TokenStore, tokenizer: Any, eos_ids: frozenset[int]) -> TokenFacts:
    """Return the facts about all rows of a split; its tokens are read once, some megabytes at a time."""
    factors = np.random.Generator(np.random.Philox(key=0)).integers(
        0, 1 << 64, size=int(store.lengths.max(initial=0)), dtype=np.uint64
    )
    stops = np.array(sorted(eos_ids))
    bos, unknown_id = (getattr(tokenizer, name, None) for name in ("bos_token_id", "unk_token_id"))
    if unknown_id in {bos, tokenizer.pad_token_id, *eos_ids}:  # GPT-2 uses one token for all these roles
        unknown_id = None
    parts = [
        _facts_of(columns, factors, bos, unknown_id, stops) for batch in store.columns() for columns in _chunks(batch)
    ]
    facts = TokenFacts(*map(np.concatenate, zip(*parts, strict=True)))
    for hashes in (facts.prompts, facts.rows):
        hashes[store.pictured] ^= store.image_hashes()
    return facts


def _chunks(columns: Columns) -> Iterator[Columns]:
    prompts, indices, offsets, ids, earlier_offsets, earlier = columns
    row, rows = 0, len(prompts)
    while row < rows:
        end = int(np.searchsorted(offsets, offsets[row] + _CHUNK_TOKENS, side="right")) - 1
        end = min(max(end, row + 1), rows)
        of_ids, of_earlier = (each[row : end + 1] - each[row] for each in (offsets, earlier_offsets))
        yield Columns(
            prompts[row:end],
            indices[row:end],
            of_ids,
            ids[offsets[row] : offsets[end]],
            of_earlier,
            earlier[earlier_offsets[row] : earlier_offsets[end]],
        )
        row = end


def _facts_of(
    columns: Columns, factors: np.ndarray, bos: int | None, unknown_id: int | None, stops: np.ndarray
) -> tuple[np.ndarray, ...]:
    prompts, indices, offsets, ids, earlier_offsets, earlier = columns
    starts, lengths = offsets[:-1], np.diff(offsets)
    positions = np.arange(len(ids)) - np.repeat(starts, lengths)
    prompts = np.where(prompts > 1, prompts, lengths)  # raw text has no prompt: rows are alike if they are equal
    # the sum of tokens times random factors, modulo 2**64, is a universal hash of rows of the same length
    weighed = (ids.astype(np.uint64) + np.uint64(1)) * factors[positions]
    rows = np.add.reduceat(weighed, starts)
    weighed[positions >= np.repeat(prompts, lengths)] = 0
    second = ids[np.minimum(starts + 1, len(ids) - 1)]
    bos_twice = (ids[starts] == bos) & (second == bos) & (lengths > 1) if bos is not None else starts < 0
    unknown = np.logical_or.reduceat(ids == unknown_id, starts) if unknown_id is not None else starts < 0
    ends = np.isin(ids[offsets[1:] - 1], stops)
    row_of = np.repeat(np.arange(len(starts)), np.diff(earlier_offsets) // 2)  # the row of each earlier answer
    np.logical_and.at(ends, row_of, np.isin(ids[starts[row_of] + earlier[1::2] - 1], stops))
    return indices.copy(), np.add.reduceat(weighed, starts), rows, bos_twice, unknown, ends


def report_tokens(
    facts: TokenFacts, split: str, indices: np.ndarray, cut: Sequence[int], tokenizer: Any, found: Findings
) -> None:
    """Report rows whose tokens are wrong.

    Args:
        indices: each encoded example's index in the split.
        cut: indices of the encoded examples that were truncated or cut into windows, and whose rows lack the end of the
            turn for that reason.
    """
    unended = ~facts.ends & ~np.isin(facts.indices, np.array(cut, dtype=np.int64))
    faults = {"D304": unended, "D305": facts.bos_twice, "D306": facts.unknown}
    for code, rows in faults.items():
        for row in np.flatnonzero(rows):
            index = int(indices[facts.indices[row]])
            detail = f"{tokenizer.bos_token} {tokenizer.bos_token}" if code == "D305" else ""
            found.add(code, split, index, detail)


def report_weights(store: TokenStore, split: str, found: Findings) -> None:
    """Report weights that change nothing, because all answers have the same."""
    if len(weights := store.weights()) == 1 and weights != [1.0]:
        found.add("D310", split, detail=f"weight {weights[0]:g}")


def report_labels(store: TokenStore, split: str, indices: np.ndarray, pad_token_id: int, found: Findings) -> int:
    """Collate some rows as training does, and report those whose labels are wrong; return how many were collated."""
    some = store.some(_COLLATED)
    for at in range(0, len(some), _TOGETHER):
        rows = some[at : at + _TOGETHER]
        for row, positions in zip(rows, supervised_positions(rows, pad_token_id), strict=True):
            if positions != [at for span in row.learnt for at in span]:
                found.add("D308", split, int(indices[row.index]))
    return len(some)


def supervised_positions(rows: Sequence[Encoded], pad_token_id: int) -> list[list[int]]:
    """Return the positions of each row's tokens with loss, as the collator sets them; none if its targets differ."""
    batch = Batching("padded", tokens=1).batch(rows, pad_token_id, torch.device("cpu"))
    predicted = [torch.nonzero(mask).flatten() + 1 for mask in batch.keep]
    ids = batch.inputs["input_ids"]
    targets = batch.targets.split([len(each) for each in predicted])
    for row, (positions, wanted) in enumerate(zip(predicted, targets, strict=True)):
        if not torch.equal(ids[row, positions], wanted):
            return [[] for _ in rows]
    return [positions.tolist() for positions in predicted]
