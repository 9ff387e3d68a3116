"""The part of the audit that every training run makes at its start, from the tokens it already has."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from accel_sft.data.token_store import StoredEncoding
from accel_sft.rows.rows import Rows
from accel_sft.tools.check.findings import DataFinding, Findings
from accel_sft.tools.check.splits import first_with_same, report_leaks
from accel_sft.tools.check.texts import Labels
from accel_sft.tools.check.tokens import report_tokens, token_facts

_NAMED, _DETAILS = 5, 2
"""Maximum number of rows that one line names, and of their details."""
_LABEL_TOKENS, _ROWS, _TOGETHER = 16, 5000, 125
"""If most answers have no more tokens, they may be labels; so many rows of a split are read, some at a time."""


def quick_findings(
    train: StoredEncoding, validation: StoredEncoding, tokenizer: Any, eos_ids: frozenset[int]
) -> list[DataFinding]:
    """Return what can be found from both splits' tokens alone; nothing is tokenized, and no text is read."""
    findings, facts, labels = Findings(), {}, Labels()
    decode = functools.cache(functools.partial(tokenizer.decode, skip_special_tokens=True))
    for encoding in (train, validation):
        split = encoding.split
        facts[split] = token_facts(encoding.kept, tokenizer, eos_ids)
        for where, code in (("answers", "D209"), ("texts", "D208")):
            for index in encoding.control_tokens[where]:
                findings.add(code, split, index)
        report_tokens(facts[split], split, [*encoding.cut, *encoding.windowed], tokenizer, findings)
        if np.median(encoding.kept.answers) <= _LABEL_TOKENS:
            for begin in range(0, _ROWS, _TOGETHER):
                for row_tokens in encoding.kept[begin : begin + _TOGETHER]:
                    answer = decode(tuple(row_tokens.input_ids[row_tokens.prompt_length :]))
                    labels.add(split, row_tokens.index, answer.rpartition("</think>")[2])
    labels.report(findings, is_complete=len(validation.kept) <= _ROWS)
    held_out, trained = facts["validation"].of_last_rows(), facts["train"].of_last_rows()
    for row in np.flatnonzero((first := first_with_same(held_out.rows)) < np.arange(len(first))):
        like = "validation", int(held_out.indices[first[row]])
        findings.add("D401", "validation", int(held_out.indices[row]), like=like)
    examples = validation.examples
    if not (isinstance(examples, Rows) and examples.shares_rows(train.examples)):
        hashes = [held_out.prompts, held_out.rows], [trained.prompts, trained.rows]
        report_leaks(*hashes, held_out.indices, trained.indices, findings)
    return findings.placed({})


def quick_lines(findings: list[DataFinding], task_name: str) -> list[str]:
    """Return a line for each finding that is not a note and, if there is any, one with the command that says more."""
    lines = []
    for finding in findings:
        count, numbers = finding.count, ", ".join(str(row.index) for row in finding.rows[:_NAMED])
        more = f", and {count - _NAMED:,} more" if count > _NAMED else ""
        if finding.grade != "note":
            details = " and ".join(list(dict.fromkeys(row.detail for row in finding.rows if row.detail))[:_DETAILS])
            unit = "label" if finding.code == "D218" else "row"
            lines.append(
                f"warning {finding.code}: {finding.split}: {count:,} {unit}{'s' * (count != 1)}: {finding.about.what}"
                f"{': ' * bool(details)}{details} (example{'s' * (count != 1)} {numbers}{more}); {finding.about.fix}"
            )
    if lines:
        lines.append(f"accel-sft check {task_name}, with this run's options, names every such row and looks further")
    return lines
