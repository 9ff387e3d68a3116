"""A launch ends with all of its processes, however it ends; how it ended is told from its files and its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from forked_launches import marked

from accel_sft.api.errors import UserError
from accel_sft.io.run_dir import RunDir
from accel_sft.launch import child
from accel_sft.launch.child import Interrupted, launch, outcome, signals_interrupt


def test_nohup_keeps_launches_when_terminal_closes():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_interrupt():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_ends_launch_and_leaves_no_process(tmp_path):
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(Interrupted, match="SIGTERM"):
        launch(sleeps, {}, tmp_path, tmp_path / "log", 60, lambda: signal.raise_signal(signal.SIGTERM))
    assert marked(tmp_path) == []


def test_time_limit_ends_children_that_left_the_session(tmp_path):
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    ended = launch([sys.executable, "-c", script], {}, tmp_path, tmp_path / "log", 1.0, lambda: None)
    assert ended.over_time
    assert marked(tmp_path) == []
    result = outcome(ended, RunDir(tmp_path), tmp_path / "log", 90.0)
    assert result == ("time limit", "not done after 1.5 minutes (--time-limit)")


@pytest.mark.parametrize(
    ("summary", "status"),
    [("Signal 9 (SIGKILL) received by PID 7", "killed"), ("Signal 11 (SIGSEGV) received by PID 7", "failed")],
)
def test_launchers_summary_says_how_a_rank_ended(tmp_path, summary, status):
    (tmp_path / "log").write_text(summary)
    run_dir = RunDir(tmp_path)
    run_dir.write_result({"status": "failed", "error": "rank 1 ended without an error message (the launcher's summary"})
    assert outcome(child.Ended(1, 2.0, False), run_dir, tmp_path / "log", 90.0)[0] == status


def test_process_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.5)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    launch([sys.executable, "-c", stubborn], {}, tmp_path, tmp_path / "log", 1.0, lambda: None)
    assert marked(tmp_path) == []


def test_processes_that_cannot_be_killed_end_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(child, "KILL_SECONDS", 0.2)
    monkeypatch.setattr(psutil.Process, "kill", lambda process: None)  # as on one that waits for a device
    with subprocess.Popen(["sleep", "600"], env={**os.environ, child.MARK: str(tmp_path)}) as process:
        try:
            with pytest.raises(UserError, match=f"process {process.pid} cannot be killed"):
                child.kill_all(tmp_path)
        finally:
            process.kill()
