"""A test that hangs is ended and says what all of its processes were doing."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import limits
import psutil
from places import SUPPORT

HANGING = """
import pathlib, signal, subprocess, sys, time

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
GRANDCHILD = "import time; open('there', 'w').close(); time.sleep(600)  # in {}"

def hanging():
    process = subprocess.Popen([sys.executable, "-c", CHILD, GRANDCHILD], stderr=subprocess.PIPE)
    while not pathlib.Path("there").exists():
        time.sleep(0.01)
    pathlib.Path("there").unlink()
    return process

def test_that_waits():
    process = hanging()
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # the rest of its time
    process.communicate()

def test_with_a_limit_of_its_own():
    hanging().communicate(timeout=0.1)

def test_behind_it():
    pass
"""
ABORTED = r"\nFatal Python error: Aborted\n\n.*\n"


def test_a_hanging_test_ends_with_the_stacks_of_its_processes_and_leaves_none(tmp_path):
    (tmp_path / "test_hanging.py").write_text(HANGING.format(tmp_path))
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "overdue", "--timeout", "60", str(tmp_path)]
    given = {**os.environ, "PYTHONPATH": str(SUPPORT), limits.SLOWNESS: "1.5"}
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True)
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    first, second = re.split("_ test_with_a_limit_of_its_own _", done.stdout)
    assert "Timeout (>90.0s) from pytest-timeout" in first
    assert "subprocess.TimeoutExpired" in second
    parent, child = rf"process \d+, .*{ABORTED}  File .*subprocess", rf"process \d+, .*{tmp_path}{ABORTED}"
    for said in (first, second):
        assert re.search(parent, said), said
        assert re.search(child, said), said
    commands = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if command and f"# in {tmp_path}" in command[-1]]
