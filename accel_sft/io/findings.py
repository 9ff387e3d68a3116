"""Defines `Finding`, one result of an audit or a tool, and formats findings for the terminal."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from accel_sft.io.terminal import terminal, wrapped
from accel_sft.io.text import one_line

_LEVEL = 8
"""Width of the column of levels at the terminal."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of an audit or a tool."""

    level: str
    what: str
    fix: str = ""
    """What to do about it; "" if there is nothing to do, or `what` says it."""
    subject: str = ""
    """The check, file or stage that the finding is about; "" if `what` names it."""

    def __str__(self) -> str:
        return _whole_line(f"{self.what}: {self.fix}" if self.fix else self.what)

    def as_dict(self) -> dict[str, str]:
        """The finding as an object of a JSON report."""
        return {name: _whole_line(text) for name, text in vars(self).items()}


LEVELS = ("error", "warning", "note")
"""Levels of a launch's audit: an `error` stops the run, a `warning` or a `note` is only printed."""
error, warning, note = (functools.partial(Finding, level) for level in LEVELS)


def worst(findings: Iterable[Finding], levels: Sequence[str]) -> str:
    """The worst level of the findings; without findings, the last of `levels`, which begins with the worst level."""
    return min((finding.level for finding in findings), key=levels.index, default=levels[-1])


def lines(finding: Finding, colors: Mapping[str, str], indent: int = 0) -> Iterator[str]:
    """The finding as lines for the terminal: its level (`colors` maps levels to colors), subject, what and fix."""
    margin = indent + _LEVEL
    words = ": ".join(filter(None, (finding.subject, finding.what)))
    level = f"{finding.level:<{_LEVEL - 1}} "
    text = wrapped(" " * indent + level + _whole_line(words), margin)
    yield text[:indent] + styled(level, fg=colors.get(finding.level)) + text[indent + len(level) :]
    if finding.fix:
        yield wrapped(" " * margin + f"-> {_whole_line(finding.fix)}", margin + 3)


def styled(text: str, **style: Any) -> str:
    """`text` as `click.style` shows it on a terminal; unchanged without a terminal, or if NO_COLOR is set."""
    return click.style(text, **style) if terminal().isatty() and "NO_COLOR" not in os.environ else text


def counted(count: int, noun: str) -> str:
    """A count in words: "no warnings", "1 warning", "2 warnings"."""
    return f"{count or 'no'} {noun}{'s' * (count != 1)}"


def _whole_line(text: str) -> str:
    """`text` in one line, whatever its length: a file's key or a library's message may hold a line break."""
    return one_line(text, len(text))
