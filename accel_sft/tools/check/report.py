"""Formats an audit's report for the terminal, as JSON or as an HTML page: findings, figures of splits and steps, and
rows as the model reads them."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel_sft.chat.encoded import Encoded
from accel_sft.data.step_plan import StepPlan
from accel_sft.data.token_store import StoredEncoding
from accel_sft.io import terminal
from accel_sft.io.files import PAGE_MARK
from accel_sft.io.findings import counted
from accel_sft.io.text import one_line, printable
from accel_sft.rows.rows import example_name
from accel_sft.tools.check.findings import GRADES, DataFinding, FoundRow

ROWS, _PAGE_ROWS = 5, 200
"""Maximum number of a finding's rows that the terminal shows, and maximum for the HTML page."""
_OPENED, _CLOSED = "⟦", "⟧"
"""Marks around the tokens that carry loss."""
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_END = 400
"""Number of characters shown at each end of a long prompt or answer; the middle is left out."""
_UNWRAPPED, _PAGE_COLUMNS = 10_000, 120
"""Widths in characters: for output that is not a terminal (wider than any line), and for the HTML page."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A row to be printed; its text has marks around the tokens that carry loss."""

    where: str
    tokens: int
    supervised_tokens: int
    text: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of an audit of a task's data for a model.

    Attributes:
        findings: sorted, the gravest first.
        splits: maps a split to its `split_figures`.
        steps: `step_figures`; None if the training split cannot be used.
        notes: lines on how the data was read, such as what the chat template did.
    """

    task: str
    model: str
    findings: list[DataFinding]
    splits: dict[str, dict[str, int]]
    steps: dict[str, float] | None
    notes: list[str]
    examples: list[Shown]

    def count(self, grade: str) -> int:
        return sum(finding.grade == grade for finding in self.findings)

    def failed(self, strict: bool) -> bool:
        """Whether there are errors; with `strict`, whether there are errors or warnings."""
        return bool(self.count("error") or (strict and self.count("warning")))

    @property
    def verdict(self) -> str:
        """How many errors, warnings and notes there are, in words."""
        counts = [counted(self.count(grade), grade) for grade in GRADES if self.count(grade)]
        return ", ".join(counts) or "nothing was found that needs fixing"

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            **{f"{grade}s": self.count(grade) for grade in ("error", "warning")},
            **dataclasses.asdict(self),
            "findings": [finding.as_dict() for finding in self.findings],
        }


def split_figures(encoding: StoredEncoding | None, rows: int, repeats: dict[str, int]) -> dict[str, int]:
    """Count a split's rows (`rows` includes unreadable ones). If any row could be tokenized, also count the tokens of
    the rows that training uses."""
    if encoding is None:
        return {"rows": rows, "used": 0, "left_out": rows, **repeats}
    kept = encoding.kept
    return {
        "rows": rows,
        "used": kept.examples,
        "left_out": rows - kept.examples,
        "cut": len(encoding.cut),
        **repeats,
        "tokens": int(kept.lengths.sum(dtype=np.int64)),
        "tokens_with_loss": int(kept.supervised.sum(dtype=np.int64)),
        "median_row_tokens": int(np.median(kept.lengths)),
        "longest_row_tokens": int(kept.lengths.max()),
        "longest_answer_tokens": int(kept.answers.max()),
    }


def step_figures(plan: StepPlan) -> dict[str, float]:
    """The numbers of steps, rows and tokens in a step plan. Means over rows weight each data source by its share."""
    return {
        "steps": plan.total_steps,
        "global_batch_size": plan.global_batch_size,
        "epochs": plan.epoch(plan.total_steps),
        "tokens_per_epoch": round(plan.epoch_rows * plan.mean(plan.lengths)),
        "supervised_tokens_per_epoch": round(plan.epoch_rows * plan.mean(plan.supervised)),
    }


def shown_rows(encoding: StoredEncoding, tokenizer: Any, count: int) -> list[Shown]:
    """The first rows of a split, to be printed."""
    return [
        Shown(
            example_name(encoding.examples, encoding.split, row.index),
            len(row.input_ids),
            row.supervised_tokens,
            "\n".join(_marked(tokenizer, sequence) for sequence in row.sequences),
        )
        for row in encoding.kept[:count]
    ]


def _marked(tokenizer: Any, row: Encoded) -> str:
    """The row's text with special tokens, and with marks where loss begins and ends. Long parts lose their middle."""
    begins = {span.start for span in row.learnt}
    bounds = sorted({0, len(row.input_ids), *begins, *(span.stop for span in row.learnt)})
    # some tokenizers drop the space before a text's first word, so each part is decoded with all text before it
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    texts = [tokenizer.decode(row.input_ids[:bound], **options) for bound in bounds]
    marked = ""
    for begin, before, text in zip(bounds, texts, texts[1:], strict=False):
        part = text[len(before) :]
        if (left_out := len(part) - 2 * _END) > 0:
            part = f"{part[:_END]} … {left_out:,} characters … {part[-_END:]}"
        marked += f"{_OPENED}{part}{_CLOSED}" if begin in begins else part
    return marked


def page_of(report: Report) -> str:
    """The report as one HTML page that needs no network; all text from the data is escaped."""
    console = Console(
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        highlight=False,
        width=_PAGE_COLUMNS,
    )
    _print(report, console, _PAGE_ROWS)
    return console.export_html(inline_styles=True).replace("<head>", f'<head>\n{PAGE_MARK}check">', 1)


def print_report(report: Report, stream: TextIO) -> None:
    """Print the report: on a terminal wrapped to its width, elsewhere unwrapped and without colour."""
    width = terminal.columns() if stream.isatty() else _UNWRAPPED
    _print(report, Console(file=stream, highlight=False, width=width, soft_wrap=False), ROWS)


def _print(report: Report, console: Console, most_rows: int) -> None:
    rows = " and ".join(f"{figures['rows']:,} {split}" for split, figures in report.splits.items())
    worst = next((finding.grade for finding in report.findings), "")
    verdict = Text(report.verdict, _STYLES.get(worst, "bold green"))
    _print_indented(console, Text(f"check {report.task} with {report.model}: {rows or 'no'} rows", "bold"), 0)
    console.print(verdict)
    for finding in report.findings:
        console.print()
        _print_finding(console, finding, most_rows)
    if report.splits:
        _heading(console, "Data")
        _print_splits(console, report.splits)
    if steps := report.steps:
        _heading(console, "Training")
        per_epoch = f"{steps['tokens_per_epoch']:,} tokens, {steps['supervised_tokens_per_epoch']:,} with loss"
        size = f"{counted(int(steps['steps']), 'step')} of {steps['global_batch_size']:,} rows on any number of GPUs"
        _print_indented(console, Text(f"{size}, {steps['epochs']:.3g} epochs of {per_epoch}"))
    if report.notes:
        _heading(console, "How the data was read")
        for note in report.notes:
            _print_indented(console, Text(note))
    if report.examples:
        _print_examples(console, report.examples)
    console.print()
    console.print(Text(f"{report.task}: ") + verdict)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold"))


def _print_indented(console: Console, text: Text, indent: int = 2) -> None:
    for line in text.wrap(console, console.width - indent):
        line.rstrip()
        console.print(Text(" " * indent) + line)


def _print_finding(console: Console, finding: DataFinding, most_rows: int) -> None:
    about = f"{finding.split}: " if finding.split else ""
    about += f"{counted(finding.count, 'row')}: " if finding.rows and finding.rows[0].where else ""
    also = f" ({finding.also})" if finding.also else ""
    grade = f"{finding.grade} {finding.code}", _STYLES[finding.grade]
    _print_indented(console, Text.assemble(grade, f"  {about}{finding.about.what}{also}"), 0)
    for row in finding.rows[:most_rows]:
        _print_indented(console, _row(row))
    if finding.count > most_rows:
        _print_indented(console, Text(f"and {finding.count - most_rows:,} more", "dim"))
    _print_indented(console, Text(f"-> {finding.about.fix}"))


def _row(row: FoundRow) -> Text:
    words = (row.where, f"like {row.like_where}" if row.like else "", row.detail)
    return Text("  ".join(one_line(word, 1000) for word in words if word))


def _print_splits(console: Console, splits: dict[str, dict[str, int]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for split in splits:
        table.add_column(split, justify="right")
    for name in dict.fromkeys(itertools.chain(*splits.values())):
        numbers = [figures.get(name, 0) for figures in splits.values()]
        if any(numbers):
            table.add_row(f"  {name.replace('_', ' ')}", *(f"{number:,}" for number in numbers))
    console.print(table)


def _print_examples(console: Console, examples: Sequence[Shown]) -> None:
    _heading(console, f"Examples as the model reads them, with marks: {_OPENED}tokens that carry loss{_CLOSED}")
    for shown in examples:
        title = f"{shown.where}: {shown.tokens:,} tokens, {shown.supervised_tokens:,} with loss"
        _print_indented(console, Text(title, "dim"))
        text = Text(printable(shown.text).replace("\n", "⏎\n"))
        text.highlight_regex(f"{_OPENED}[^{_CLOSED}]*{_CLOSED}", "black on green")
        _print_indented(console, text, 4)
