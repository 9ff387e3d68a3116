"""Checks the tokens of a split as NumPy arrays (control tokens, ends of turns), and finds repeated rows by hashes of
their tokens. Every training run makes these checks at its start."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_sft.data.token_store import Columns, StoredEncoding, TokenStore
from accel_sft.rows.rows import Rows
from accel_sft.tools.check.findings import DataFinding, Findings
from accel_sft.tools.check.texts import Labels

_NAMED, _DETAILS = 5, 2
"""Maximum number of rows that one warning line names, and maximum number of details in the line."""
_LABEL_TOKENS, _ROWS, _TOGETHER = 16, 5000, 125
"""Answers may be labels if their median length is at most `_LABEL_TOKENS`. At most `_ROWS` answers are read,
`_TOGETHER` at a time."""


@dataclasses.dataclass(frozen=True)
class TokenFacts:
    """Facts about the rows of a TokenStore: one array entry for each row, in the store's order.

    Attributes:
        indices: the example's index in the split.
        prompts, rows: hashes of the prompt's tokens and of all tokens, images included.
        bos_twice: whether the row begins with two BOS tokens.
        unknown: whether the row has the tokenizer's unknown token.
        ends: whether all answers of the row end with a token that ends the turn.
    """

    indices: np.ndarray
    prompts: np.ndarray
    rows: np.ndarray
    bos_twice: np.ndarray
    unknown: np.ndarray
    ends: np.ndarray

    def of_examples(self) -> TokenFacts:
        """Return one entry for each example: the facts about the example's last row, which has all turns. The windows
        of a raw text are hashed together."""
        last = np.append(self.indices[1:] != self.indices[:-1], True)
        facts = TokenFacts(*(getattr(self, field.name)[last] for field in dataclasses.fields(self)))
        rows = np.add.reduceat(self.rows, np.flatnonzero(np.append(True, last[:-1])))
        prompts = np.where(facts.prompts == facts.rows, rows, facts.prompts)
        return dataclasses.replace(facts, prompts=prompts, rows=rows)


def token_facts(store: TokenStore, tokenizer: Any, eos_ids: frozenset[int]) -> TokenFacts:
    """Return the facts about all rows of a split. This reads the tokens once, some megabytes at a time."""
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
    _, prompts, indices, offsets, ids, earlier_offsets, earlier = columns
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
    """A 64-bit BLAKE2 hash (uint64) of each span of tokens. In a billion spans, two collide with probability 1/40."""
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    digests = b"".join(hashlib.blake2b(ids[begin:end].data, digest_size=8).digest() for begin, end in spans)
    return np.frombuffer(digests, np.uint64)


def audit_tokens(encoding: StoredEncoding, tokenizer: Any, eos_ids: frozenset[int], findings: Findings) -> TokenFacts:
    """Report the rows of a split whose tokens are wrong; return `TokenFacts.of_examples()`."""
    split, facts = encoding.split, token_facts(encoding.kept, tokenizer, eos_ids)
    for where, code in (("answers", "D209"), ("texts", "D208")):
        for index in encoding.control_tokens[where]:
            findings.add(code, split, index)
    unended = ~facts.ends & ~np.isin(facts.indices, np.array([*encoding.cut, *encoding.windowed], dtype=np.int64))
    for code, rows in (("D304", unended), ("D305", facts.bos_twice), ("D306", facts.unknown)):
        for index in facts.indices[rows].tolist():
            findings.add(code, split, index)
    return facts.of_examples()


def first_with_same(hashes: np.ndarray) -> np.ndarray:
    """Return for each row the number of the first row with the same hash (its own number if no earlier row has it)."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return first[inverse]


def report_copies(facts: TokenFacts, split: str, findings: Findings, grade: str = "warning") -> np.ndarray:
    """Report examples that repeat an earlier example's prompt and answer; return a mask of these examples."""
    first = first_with_same(facts.rows)
    copies = first < np.arange(len(first))
    for index, other in zip(facts.indices[copies].tolist(), facts.indices[first[copies]].tolist(), strict=True):
        findings.add("D401", split, index, like=(split, other), grade=grade)
    return copies


def report_leaks(validation: TokenFacts, train: TokenFacts, findings: Findings) -> None:
    """Report validation examples whose prompt is also in the training rows."""
    same_prompt, same_row = _found_in(validation.prompts, train.prompts), _found_in(validation.rows, train.rows)
    for code, like in (("D404", same_row), ("D406", np.where(same_row < 0, same_prompt, -1))):
        for row in np.flatnonzero(like >= 0):
            other = "train", int(train.indices[like[row]])
            findings.add(code, "validation", int(validation.indices[row]), like=other)


def _found_in(hashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return for each of `hashes` the number of its first occurrence in `others`; -1 if it does not occur there."""
    values, first = np.unique(others, return_index=True)
    at = np.minimum(np.searchsorted(values, hashes), len(values) - 1)
    return np.where(values[at] == hashes, first[at], -1)


def quick_findings(
    train: StoredEncoding, validation: StoredEncoding, tokenizer: Any, eos_ids: frozenset[int]
) -> list[DataFinding]:
    """Return findings about both splits from their stored tokens, without reading or tokenizing the rows again."""
    findings, facts, labels = Findings(), {}, Labels()
    decode = functools.cache(functools.partial(tokenizer.decode, skip_special_tokens=True))
    for encoding in (train, validation):
        split = encoding.split
        facts[split] = audit_tokens(encoding, tokenizer, eos_ids, findings)
        if np.median(encoding.kept.answers) <= _LABEL_TOKENS:
            for begin in range(0, _ROWS, _TOGETHER):
                for row_tokens in encoding.kept[begin : begin + _TOGETHER]:
                    first = row_tokens.sequences[0]
                    answer = decode(tuple(first.input_ids[first.prompt_length :]))
                    labels.add(split, row_tokens.index, answer.rpartition("</think>")[2])
    labels.report(findings, is_complete=len(validation.kept) <= _ROWS)
    report_copies(facts["validation"], "validation", findings)
    if not shares_rows(validation.examples, train.examples):
        report_leaks(facts["validation"], facts["train"], findings)
    return findings.placed({split.split: split.examples for split in (train, validation)})


def shares_rows(examples: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether a task evaluates some of its training rows on purpose."""
    return isinstance(examples, Rows) and examples.shares_rows(others)


def quick_lines(findings: list[DataFinding], task_name: str) -> list[str]:
    """Return a line for each finding that is not a note, and one with the command for details; [] if all are notes."""
    lines = []
    for finding in findings:
        count, places = finding.count, ", ".join(row.where for row in finding.rows[:_NAMED])
        more = f", and {count - _NAMED:,} more" if count > _NAMED else ""
        if finding.grade != "note":
            details = " and ".join(list(dict.fromkeys(row.detail for row in finding.rows if row.detail))[:_DETAILS])
            unit = "label" if finding.code == "D218" else "row"
            lines.append(
                f"warning {finding.code}: {finding.split}: {count:,} {unit}{'s' * (count != 1)}: {finding.about.what}"
                f"{': ' * bool(details)}{details} ({places}{more}); {finding.about.fix}"
            )
    if lines:
        lines.append(
            f"To list all of these rows and check the data further: accel-sft check {task_name} with this run's options"
        )
    return lines
