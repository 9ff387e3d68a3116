"""Prints an audit, on the terminal or as a page: the findings, then the figures, then examples token by token."""

from __future__ import annotations

import io
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel_sft.io import terminal
from accel_sft.io.files import PAGE_MARK
from accel_sft.io.text import one_line
from accel_sft.tools.check.findings import DataFinding, FoundRow
from accel_sft.tools.check.report import Piece, Report, Shown, SplitFigures, StepFigures

ROWS, _PAGE_ROWS = 5, 200
"""Maximum number of a finding's rows that are printed, and that a page lists."""
OPENED, CLOSED = "⟦", "⟧"
"""Marks around the tokens that carry loss, for output without colour."""
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_BAR_CELLS = 32
"""Length of a histogram's longest bar, in terminal cells."""
_UNWRAPPED, _PAGE_COLUMNS = 10_000, 120
"""Width in terminal cells of output that is not a terminal, larger than any line's, and of a page."""
_PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
{PAGE_MARK}check">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>accel-sft check</title>
<body style="color:{{foreground}};background:{{background}}">
<pre style="font-family:ui-monospace,monospace;white-space:pre-wrap">{{code}}</pre>
</body>
</html>
"""


def console_of(stream: TextIO) -> Console:
    """A console that wraps to the width of a terminal, and prints unwrapped and without colour elsewhere."""
    width = terminal.columns() if stream.isatty() else _UNWRAPPED
    return Console(file=stream, highlight=False, width=width, soft_wrap=False)


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
    print_report(report, console, _PAGE_ROWS)
    return console.export_html(code_format=_PAGE, inline_styles=True)


def print_report(report: Report, console: Console, most_rows: int = ROWS) -> None:
    """Print the report, with at most `most_rows` rows of each finding."""
    rows = " and ".join(f"{split.rows:,} {split.split}" for split in report.splits)
    worst = next((finding.grade for finding in report.findings), "")
    verdict = Text(report.verdict, _STYLES.get(worst, "bold green"))
    _print_indented(console, Text(f"check {report.task} with {report.model}: {rows or 'no'} rows", "bold"), 0, 2)
    console.print(verdict)
    for finding in report.findings:
        console.print()
        _print_finding(console, finding, most_rows)
    if report.splits:
        _print_splits(console, report.splits)
    if report.steps:
        _print_steps(console, report.steps)
    if report.notes:
        _heading(console, "How it was read")
        for note in report.notes:
            _print_indented(console, Text(note))
    if report.examples:
        _print_examples(console, report.examples)
    console.print()
    console.print(Text(f"{report.task}: ") + verdict)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold"))


def _print_indented(console: Console, text: Text, indent: int = 2, hanging: int = 0) -> None:
    """Print a wrapped text indented by `indent`, and its further lines by `hanging` more."""
    lines = text.wrap(console, console.width - indent - hanging)
    for number, line in enumerate(lines):
        line.rstrip()
        console.print(Text(" " * (indent + hanging * bool(number))) + line)


def _print_finding(console: Console, finding: DataFinding, most_rows: int) -> None:
    style = _STYLES[finding.grade]
    about = f"{finding.split}: " if finding.split else ""
    about += f"{_counted(finding.count, 'row')}: " if finding.rows and finding.rows[0].where else ""
    also = f" ({finding.also})" if finding.also else ""
    title = Text.assemble((f"{finding.grade} {finding.code}", style), f"  {about}{finding.about.what}{also}")
    _print_indented(console, title, 0, 2)
    for row in finding.rows[:most_rows]:
        _print_indented(console, _row(row), 2, 2)
    if finding.count > most_rows:
        _print_indented(console, Text(f"and {finding.count - most_rows:,} more", "dim"))
    _print_indented(console, Text(f"-> {finding.about.fix}"), 2, 3)


def _row(row: FoundRow) -> Text:
    words = (row.where, f"like {row.like_where}" if row.like else "", row.detail)
    return Text("  ".join(one_line(word, 1000) for word in words if word))


def _print_splits(console: Console, splits: list[SplitFigures]) -> None:
    lines: list[tuple[str, list[str]]] = []

    def line(name: str, numbers: list[int | None]) -> None:
        if any(numbers):
            lines.append((name, ["-" if number is None else f"{number:,}" for number in numbers]))

    for name, field in (
        ("rows", "rows"),
        ("used", "used"),
        ("left out", "left_out"),
        ("cut", "cut"),
        ("different rows", "distinct_rows"),
        ("different prompts", "distinct_prompts"),
        ("rows with another right answer", "other_right_answers"),
        ("tokens", "tokens"),
        ("tokens with loss", "supervised_tokens"),
    ):
        line(name, [getattr(split, field) for split in splits])
    for name in next((split.lengths for split in splits if split.lengths), {}):
        line(f"tokens of a row, {name}", [split.lengths.get(name) for split in splits])
    line("tokens with loss, longest", [split.longest_answer for split in splits])
    _heading(console, "Data")
    console.print(_table(["", *(split.split for split in splits)], [[name, *values] for name, values in lines]))
    for split in splits:
        if len(split.histogram) > 1:
            _heading(console, f"Tokens of a {split.split} row")
            most = max(bar.rows for bar in split.histogram)
            bars = [
                [
                    f"{bar.least:,}" + (f" - {bar.most:,}" if bar.most > bar.least else ""),
                    "█" * max(round(_BAR_CELLS * bar.rows / most), bool(bar.rows)),
                    f"{bar.rows:,}",
                ]
                for bar in split.histogram
            ]
            console.print(_table(["", "", ""], bars, left=2))


def _print_steps(console: Console, steps: StepFigures) -> None:
    _heading(console, "Training")
    times = f"{steps.epochs:.3g}" if steps.epochs < 100 else f"{steps.epochs:,.0f}"
    epochs = f"{times} epoch{'s' * (steps.epochs != 1)}"
    for text in (
        f"{_counted(steps.steps, 'step')} of {steps.global_batch_size:,} rows, {epochs}, on any number of GPUs",
        f"an epoch: {steps.tokens_per_epoch:,} tokens, {steps.supervised_tokens_per_epoch:,} with loss",
        f"a step: {steps.step_tokens:,.0f} tokens, {steps.step_supervised_tokens:,.0f} with loss",
    ):
        _print_indented(console, Text(text))


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _table(header: list[str], rows: list[list[str]], left: int = 1) -> Table:
    """A table whose first `left` columns are aligned left and whose other columns are aligned right."""
    table = Table(box=None, pad_edge=False, show_header=any(header), padding=(0, 2, 0, 0))
    for at, name in enumerate(header):
        table.add_column(name, justify="left" if at < left else "right", no_wrap=True, header_style="dim")
    for row in rows:
        table.add_row(*(Text("  " * (not at) + text) for at, text in enumerate(row)))
    return table


def _print_examples(console: Console, examples: list[Shown]) -> None:
    coloured = console.color_system is not None and not console.no_color
    how = Text("green", "bold black on green") if coloured else Text(f"{OPENED} and {CLOSED}")
    lead = "Examples, as the model reads them; the tokens that carry loss are " + ("" if coloured else "between ")
    console.print()
    console.print(Text.assemble((lead, "bold"), how))
    for shown in examples:
        title = f"{shown.where}: {shown.tokens:,} tokens, {shown.supervised:,} with loss"
        _print_indented(console, Text(title, "dim"))
        _print_indented(console, _example(shown.pieces, coloured), 4)


def _example(pieces: list[Piece], coloured: bool) -> Text:
    """Return the example's text: tokens with loss on two greens, special ones in magenta; uncoloured, between marks."""
    text, inside = Text(), False
    for number, piece in enumerate(pieces):
        if not coloured and piece.supervised != inside:
            text.append(OPENED if piece.supervised else CLOSED)
        inside = piece.supervised
        style = "dim" if not piece.supervised else ("black on green", "black on bright_green")[number % 2]
        if piece.special:
            style = "bold black on magenta" if piece.supervised else "magenta"
        text.append(piece.visible, style if coloured else "")
    return text.append(CLOSED) if inside and not coloured else text
