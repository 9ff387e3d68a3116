"""`Finding`: what an audit of the launch, or a check of the doctor, has found."""

import dataclasses
import functools

from accel_sft.io.text import one_line


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of the audit, with its remedy. An `error` stops the run, a `warning` or a `note` is printed."""

    level: str
    what: str
    fix: str

    def __str__(self) -> str:
        text = f"{self.what}: {self.fix}"
        return one_line(text, len(text))  # a key of a file may hold a line break


LEVELS = ("error", "warning", "note")
error, warning, note = (functools.partial(Finding, level) for level in LEVELS)
