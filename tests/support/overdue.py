"""A test that hangs ends after its limit with the stacks of all processes that it started, and none of them is left.

The limit is pytest-timeout's (`timeout` in pyproject.toml, or a mark of the test). A test whose own process waits in C
sees no signal: pytest's `faulthandler_timeout` ends that process later.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
import subprocess
import time

import psutil
import pytest
import pytest_timeout

STARTED_BY = "ACCEL_SFT_STARTED_BY_TESTS"
"""Environment variable with the process id of the tests, by which a process is found that has lost its parents."""
DUMP_SECONDS = 5
"""For a process to write its stacks and end."""


def pytest_configure() -> None:
    os.environ[STARTED_BY] = str(os.getpid())
    os.environ["PYTHONFAULTHANDLER"] = "1"  # at SIGABRT every Python writes the stacks of its threads to its stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item, settings):
    """What pytest-timeout does when the time is up follows the end of the processes, while all of them still wait."""
    done = yield
    if callable(fail := signal.getsignal(signal.SIGALRM)):

        def when_overdue(number, frame):
            __tracebackhide__ = True
            if settings.disable_debugger_detection or not pytest_timeout.is_debugging():
                item.add_report_section("call", "processes", end_processes())
            fail(number, frame)

        signal.signal(signal.SIGALRM, when_overdue)
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Tests have limits of their own in places."""
    if call.excinfo and call.excinfo.errisinstance(subprocess.TimeoutExpired):
        pytest_timeout.pytest_timeout_cancel_timer(item)  # it would fire amid the report
        item.add_report_section(call.when, "processes", end_processes())


def end_processes() -> str:
    """End all processes that this one started; what each of them was doing."""
    own = psutil.Process()
    found = {process.pid: process for process in own.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(STARTED_BY) == str(own.pid):
                found[process.pid] = process
    for process in found.values():  # none shall react to another's end
        with contextlib.suppress(psutil.Error):
            process.suspend()
    return "\n".join(map(_ended, found.values()))


def _ended(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess), contextlib.ExitStack() as stack:
        said = f"process {process.pid}, {' '.join(process.cmdline())[:300]}\n"
        try:  # a pipe can be read here too, whoever else reads it
            stderr = stack.enter_context(open(f"/proc/{process.pid}/fd/2", "rb", 0, opener=_opened))
            stderr.seek(0, os.SEEK_END) if stat.S_ISREG(os.fstat(stderr.fileno()).st_mode) else stderr.read()
        except OSError as error:
            stderr, said = None, f"{said}(its stderr cannot be read: {error})\n"
        process.send_signal(signal.SIGABRT)
        process.resume()
        until = time.monotonic() + DUMP_SECONDS
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # who started it may wait for it
            process.kill() if time.monotonic() > until else time.sleep(0.01)
        return said + ((stderr.read() or b"").decode(errors="replace") if stderr else "")
    return ""


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
