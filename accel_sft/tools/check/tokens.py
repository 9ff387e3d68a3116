"""Checks all tokens of a split as arrays (doubled BOS, unknown tokens, ends of turns, labels) and hashes whole rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from accel_sft.batching.layouts import Batching
from accel_sft.chat.encoded import Encoded
from accel_sft.data.token_store import Columns, TokenStore
from accel_sft.tools.check.findings import Findings
from accel_sft.tools.check.texts import hash64

_COLLATED = 2048
"""About how many rows of a split have their collated labels compared with their answers."""
_TOGETHER = 64
"""Rows collated in one batch for that comparison."""


@dataclasses.dataclass(frozen=True)
class TokenFacts:
    """Facts about the rows of a TokenStore: one array entry for each row, in the store's order.

    Attributes:
        indices: the example's index in the split.
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
    stops = np.array(sorted(eos_ids))
    bos, unknown_id = (getattr(tokenizer, name, None) for name in ("bos_token_id", "unk_token_id"))
    if unknown_id in {bos, tokenizer.pad_token_id, *eos_ids}:  # GPT-2 uses one token for all these roles
        unknown_id = None
    parts = [_facts_of(columns, bos, unknown_id, stops) for columns in store.columns()]
    facts = TokenFacts(*map(np.concatenate, zip(*parts, strict=True)))
    for hashes in (facts.prompts, facts.rows):
        hashes[store.pictured] ^= store.image_hashes()
    return facts


def _facts_of(columns: Columns, bos: int | None, unknown_id: int | None, stops: np.ndarray) -> tuple[np.ndarray, ...]:
    prompts, indices, offsets, ids, earlier_offsets, earlier = columns
    starts, ends_at = offsets[:-1], offsets[1:]
    prompt_ends = np.where(prompts > 1, starts + prompts, ends_at)  # raw text has no prompt: it is compared whole
    second = ids[np.minimum(starts + 1, len(ids) - 1)]
    bos_twice = (ids[starts] == bos) & (second == bos) & (ends_at - starts > 1) if bos is not None else starts < 0
    unknown = np.logical_or.reduceat(ids == unknown_id, starts) if unknown_id is not None else starts < 0
    ends = np.isin(ids[ends_at - 1], stops)
    row_of = np.repeat(np.arange(len(starts)), np.diff(earlier_offsets) // 2)  # the row of each earlier answer
    np.logical_and.at(ends, row_of, np.isin(ids[starts[row_of] + earlier[1::2] - 1], stops))
    return indices.copy(), _hashes(ids, starts, prompt_ends), _hashes(ids, starts, ends_at), bos_twice, unknown, ends


def _hashes(ids: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """64 bits of the hash of each span of tokens, uint64."""
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    return np.fromiter((hash64(ids[begin:end]) for begin, end in spans), np.uint64, len(begins))


def report_tokens(facts: TokenFacts, split: str, cut: Sequence[int], tokenizer: Any, findings: Findings) -> None:
    """Report rows whose tokens are wrong.

    Args:
        cut: indices of the examples that were truncated or cut into windows, whose rows need no end of the turn.
    """
    unended = ~facts.ends & ~np.isin(facts.indices, np.array(cut, dtype=np.int64))
    faults = {"D304": unended, "D305": facts.bos_twice, "D306": facts.unknown}
    for code, rows in faults.items():
        for row in np.flatnonzero(rows):
            detail = f"{tokenizer.bos_token} {tokenizer.bos_token}" if code == "D305" else ""
            findings.add(code, split, int(facts.indices[row]), detail)


def report_labels(store: TokenStore, split: str, pad_token_id: int, findings: Findings) -> int:
    """Collate some rows as training does, and report those whose labels are wrong; return how many were collated."""
    some = store.some(_COLLATED)
    for at in range(0, len(some), _TOGETHER):
        rows = some[at : at + _TOGETHER]
        for row, positions in zip(rows, supervised_positions(rows, pad_token_id), strict=True):
            if positions != [at for span in row.learnt for at in span]:
                findings.add("D308", split, row.index)
    return len(some)


def supervised_positions(rows: Sequence[Encoded], pad_token_id: int) -> list[list[int]]:
    """Return the positions of each row's tokens with loss, as the collator sets them; none if its targets differ."""
    batch = Batching("padded", tokens=1).batch(rows, pad_token_id, torch.device("cpu"))
    predicted = [torch.nonzero(mask).flatten() + 1 for mask in batch.keep]
    ids = batch.inputs["input_ids"]
    targets = batch.targets.split([len(row) for row in predicted])
    for row, (positions, wanted) in enumerate(zip(predicted, targets, strict=True)):
        if not torch.equal(ids[row, positions], wanted):
            return [[] for _ in rows]
    return [positions.tolist() for positions in predicted]
