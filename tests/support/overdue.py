"""Ends a test that hangs at its time limit, shows the stacks of all processes that it started, and kills them.

The limit is pytest-timeout's (`timeout` in pyproject.toml, or a mark of the test), on a slow machine a longer one
(limits.py). If the test's own process waits in C code, it handles no signal: then pytest's `faulthandler_timeout` ends
it later.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess

import psutil
import pytest
import pytest_timeout
from limits import limit, measure

STARTED_BY = "ACCEL_SFT_STARTED_BY_TESTS"
"""Environment variable with the process id of the tests, by which orphaned processes are found."""
DUMP_SECONDS = 5
"""Time that a process has to write its stacks and end."""


def pytest_configure() -> None:
    measure()
    os.environ[STARTED_BY] = str(os.getpid())
    os.environ["PYTHONFAULTHANDLER"] = "1"  # at SIGABRT, Python writes the stacks of its threads to stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def pytest_report_header() -> str:
    return f"limits of time: {limit(1):.1f} times those of the reference machine"


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """When the time is up, end the processes first, while they still hang, and then let pytest-timeout act."""
    pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=limit(settings.timeout)))
    if callable(fail := signal.getsignal(signal.SIGALRM)):

        def when_overdue(number, frame):
            __tracebackhide__ = True
            if settings.disable_debugger_detection or not pytest_timeout.is_debugging():
                item.add_report_section("call", "processes", end_processes())
            fail(number, frame)

        signal.signal(signal.SIGALRM, when_overdue)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Also end the processes of a test that failed by its own time limit (`subprocess.TimeoutExpired`)."""
    if call.excinfo and call.excinfo.errisinstance(subprocess.TimeoutExpired):
        pytest_timeout.pytest_timeout_cancel_timer(item)  # it would fire during the report
        item.add_report_section(call.when, "processes", end_processes())


def end_processes() -> str:
    """End all processes that this one started; returns what they are. Each writes its stacks to its own stderr."""
    own = psutil.Process()
    started = {process.pid: process for process in own.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(STARTED_BY) == str(own.pid):
                started[process.pid] = process
    lines = []
    for process in started.values():
        with contextlib.suppress(psutil.Error):
            lines.append(f"process {process.pid}, {' '.join(process.cmdline())[:300]}")
            process.send_signal(signal.SIGABRT)
    for process in psutil.wait_procs(started.values(), DUMP_SECONDS)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return "\n".join(lines)
