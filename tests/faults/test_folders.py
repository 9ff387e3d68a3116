"""A run's folder that cannot be written, or no longer, or is gone: one line says so, and the run goes on once it is
back. A full disk is in tests/training/test_guards.py, two runs in one folder in test_stopping.py."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from conftest import finished
from places import launcher

JOB = ("math", "--max-steps", "100", "--global-batch-size", "10", "--train-examples", "60", "--eval-every", "off")
JOB += ("--micro-batch-size", "5", "--save-every", "20", "--seed", "7")
MOUNTING = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
mounting = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*MOUNTING, "true"], capture_output=True).returncode,
    reason="a file system of one's own needs user namespaces",
)
AMID = """
"$@" & run=$!
until grep -qs '"step": 30,' "$0/metrics.jsonl"; do kill -0 $run || exit 99; sleep 0.01; done
{fault} || exit 98
wait $run
"""
"""A shell's lines: the run, a fault as it stands between two checkpoints, the run's exit status."""
READ_ONLY = 'mount --bind "$0" "$0"; until mount -o remount,bind,ro "$0" 2>/dev/null; do sleep 0.02; done'
GONE = 'mv "$0" "$0-elsewhere"'
IS_GONE = "the folder is gone; put it back, then go on with --resume auto"


def command(yaml=None):
    return [*(launcher(yaml, "--mixed_precision", "no") if yaml else [sys.executable]), "-m", "accel_sft"]


def in_a_shell(script, folder, *arguments):
    return subprocess.run([*MOUNTING, script, str(folder), *arguments], capture_output=True, text=True)


@mounting
def test_folder_on_a_read_only_disk_is_refused(tmp_path):
    run_dir = tmp_path / "disk" / "run"
    run_dir.parent.mkdir()
    mounted = 'mount -t tmpfs -o ro tmpfs "$0" && "$@"'
    refused = in_a_shell(mounted, run_dir.parent, *command(), *JOB, "--output-dir", str(run_dir))
    assert refused.returncode == 1
    assert f"Error: --output-dir {run_dir}: cannot be used (Read-only file system)" in refused.stderr
    assert "Traceback" not in refused.stderr


@mounting
@pytest.mark.parametrize(
    ("yaml", "fault", "message"),
    [
        (None, READ_ONLY, "the folder can no longer be written; make it writable, then go on with --resume auto"),
        *(pytest.param(yaml, GONE, IS_GONE, marks=pytest.mark.long) for yaml in (None, "ddp")),
    ],
)
def test_lost_folder_ends_run_and_resume_continues(tmp_path, yaml, fault, message):
    run_dir = tmp_path / "run"
    job = (*JOB, "--output-dir", str(run_dir))
    ended = in_a_shell(AMID.format(fault=fault), run_dir, *command(yaml), *job)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count(f"Error: {run_dir}: {message}\n") == 1, ended.stderr
    said = ended.stderr.split("Error: ")[0]  # torchrun's own follows
    assert "Traceback" not in said
    if fault == GONE:
        (tmp_path / "run-elsewhere").rename(run_dir)
    if yaml is None:
        resumed = finished(*JOB, "--resume", "auto", run_dir=run_dir)
        assert f"resumed {run_dir / 'checkpoints' / 'step-000020'} at step 20 of 100" in resumed.output
        assert [line["step"] for line in resumed.lines()] == list(range(1, 101))


def test_files_cut_off_by_a_kill_are_taken_away(tmp_path):
    run_dir, once = tmp_path / "run", ("math", "--max-steps", "1", "--eval-every", "off", "--train-examples", "60")
    later = ("samples/.step-000004.jsonl.99.tmp", "checkpoints/.latest.99.tmp")
    for names in ((".result.json.99.tmp",), later):
        for name in names:
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (run_dir / name).write_text("{")
        run = finished(*once, "--resume", "auto", run_dir=run_dir)
        assert ("is finished" in run.output) == (names == later)
        assert not list(run_dir.rglob(".*"))
