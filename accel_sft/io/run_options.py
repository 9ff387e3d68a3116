"""The settings of a task in a run's record, which other commands take over; its files only where asked for."""

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, NAMES_A_FILE, Setting
from accel_sft.io.files import mapping


def recorded_options(
    record: Mapping[str, Any],
    task_settings: Sequence[Setting],
    given: Collection[str] | None,
    where: str,
    *,
    same_data: bool,
) -> dict[str, Any]:
    """The values that a run's record has for the settings of its task, except for those that are given.

    Args:
        given: names of settings; None: the command takes none.
        where: how the command names the run, for errors.
        same_data: whether files that the record names are to be read.
    Raises:
        UserError: the settings name files and `same_data` is not set; a run's folder may be someone else's, and name
            any file of this machine. Or the record hides a value as a secret, and `given` could have it; or a value of
            the record is none that the setting may have now.
    """
    before = record["task_options"]
    mine = [s for s in task_settings if s.name in before.keys() - {*(given or ())}]
    hidden = [s for s in mine if HIDDEN in str(before[s.name])]
    flags = " and ".join(s.flag for s in hidden)
    if hidden and (given is not None or any(s.required for s in hidden)):
        raise UserError(f"{where}: secrets are not in its record; give {flags} again")
    if hidden:
        print(f"note: {where}: secrets are not in its record, so the default of {flags} is used", file=sys.stderr)
    mine = [s for s in mine if s not in hidden]
    if problems := [line for s in mine if (line := s.problem(before[s.name]))]:
        raise UserError(*(f"{line}; so says the run.json of {where}" for line in problems))
    files = [s for s in mine if NAMES_A_FILE.search(s.name) and before[s.name] != s.default]
    if files and not same_data:
        named = " ".join(f"{s.flag} {shlex.quote(str(before[s.name]))}" for s in files)
        why = "its record names files, and those of a record are not read unasked"
        fix = "add --same-data" if given is None else f"add --same-data, or {named}, or name others"
        raise UserError(f"{where}: {why}; {fix}")
    return {s.name: before[s.name] for s in mine}


def names_files(record: Mapping[str, Any] | None) -> bool:
    """Whether a run's record names files of its task's."""
    options = mapping((record or {}).get("task_options"))
    return any(value and NAMES_A_FILE.search(name) for name, value in options.items())
