"""Decides how a run ended: its status in a word or two, and a reason, mostly the last line of the run's own message."""

import re
import signal
from pathlib import Path

from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.tools.compare.launching import Ended
from accel_sft.tools.compare.measured import read_object

COMPLETE, FAILED, OUT_OF_MEMORY, HUNG, KILLED, TIME_LIMIT = STATUSES = (
    "complete",
    "failed",
    "out of memory",
    "hung",
    "killed",
    "time limit",
)
NOT_RUN = "not run"
_MESSAGES = {
    OUT_OF_MEMORY: re.compile(
        r"out of (device )?memory|OutOfMemoryError|can't allocate memory|^MemoryError", re.I | re.M
    ),
    HUNG: re.compile(r"nothing has moved for \d+ seconds"),
    KILLED: re.compile(r"(was|were) killed \(signal 9"),
}
"""Patterns of messages by the status that they reveal: messages of the trainer, torch and the launcher."""
_WAITING = re.compile(r".{1,200}: \d+ s so far")
_TAIL_BYTES = 1 << 16


def outcome(ended: Ended, run_dir: RunDir, log: Path, limit_seconds: float) -> tuple[str, str]:
    """Return how a launch ended: one of STATUSES, and the reason, which is "" if the run is complete."""
    result, printed = read_object(run_dir.result), _tail(log)
    if ended.over_time:
        return TIME_LIMIT, f"not done after {limit_seconds / 60:g} minutes (--time-limit)"
    if result.get("status") == "complete" and ended.returncode == 0:
        return COMPLETE, ""
    message = result["error"] if isinstance(result.get("error"), str) else _last_message(printed)
    reason = one_line((message.strip().splitlines() or ["it printed nothing"])[-1], LONGEST_ERROR)
    told = message if result.get("error") else printed
    # a killed process writes no message, and other ranks may not know how it ended, but the launcher's summary does
    unexplained = not result.get("error") or "ended without an error message" in message
    if ended.returncode == -signal.SIGKILL or (unexplained and "SIGKILL" in printed):
        return KILLED, "killed (signal 9, which the kernel sends when memory runs out)"
    for status, words in _MESSAGES.items():
        if words.search(told):
            return status, reason
    if ended.returncode < 0:
        return FAILED, f"ended by {signal.Signals(-ended.returncode).name}: {reason}"
    return FAILED, reason


def waited_for(log: Path) -> str:
    """The log's last line if it says what the run waits for, such as operators that compile (`io.terminal.waiting`);
    else ""."""
    last = next(reversed(_tail(log).rstrip().splitlines()), "") if log.is_file() else ""
    return one_line(last) if _WAITING.fullmatch(last) else ""


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _last_message(printed: str) -> str:
    """Return the text of the first "Error: " line, which is ours, else Python's last exception, else the last line."""
    if own := re.search(r"^Error: (.*)", printed, re.M):
        return own[1]
    raised = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt)\b.*", printed, re.M)
    lines = [line for line in printed.splitlines() if line.strip()]
    return (raised or lines or [""])[-1]
