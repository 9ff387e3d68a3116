"""A run that is told to stop ends in order and goes on to the same bits; one that lost its launcher writes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import scripts
from conftest import finished
from limits import limit, wait_for
from reference_job import FP32, layout, same_weights
from stopping import JOB, LAUNCHES, steps_done, whole

from accel_sft.io import lock

LONG = pytest.mark.long
LOST = r"rank 1 ended without an error message \(the launcher's .*\); host memory now: "


def same_end(run, run_dir):
    same_weights(run.run_dir, run_dir)
    same_weights(run.run_dir, run_dir, "best")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert losses == [(line["step"], line["loss"]) for line in run.lines()]
    judged = [(line["step"], line["accuracy"]) for line in lines if "eval_loss" in line]
    assert judged == [(line["step"], line["accuracy"]) for line in run.lines("eval_loss")]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("ddp", signal.SIGTERM),
        pytest.param("z2", signal.SIGTERM, marks=LONG),
        pytest.param("plain", signal.SIGINT, marks=LONG),
    ],
)
def test_signal_ends_the_step_with_a_resumable_checkpoint(launched, tmp_path, own_machine, name, number):
    run, run_dir = whole(launched, name), tmp_path / "run"
    with own_machine.started("run", LAUNCHES[name], *JOB[1:], "--profile", launcher=FP32) as launch:
        launch.until_step(3)
        rank = launch.rank(1) if LAUNCHES[name] else launch.process
        rank.send_signal(number)  # of two ranks to one alone: both learn of it
        status = launch.process.wait()
    said = (tmp_path / "run.log").read_text()
    assert status == (128 + number if name == "plain" else 1), said
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "interrupted"
    step = steps_done(run_dir)
    assert f"stopped by {number.name} after step {step}, with a checkpoint" in result["error"]
    continued = rf"to continue: \S+ .*-m accel_sft math --output-dir {run_dir} .*--resume auto$"
    assert re.search(continued, result["error"]), result["error"]
    assert result["error"] in said
    assert (latest := run_dir / "checkpoints" / "latest").read_text() == f"step-{step:06d}\n"
    if step < 5:  # the trace comes after the checkpoint, as the launcher's 30 seconds may be too short for it
        assert all(latest.stat().st_mtime_ns < trace.stat().st_mtime_ns for trace in (run_dir / "profile").iterdir())
    finished(*run.arguments, "--resume", "auto", run_dir=run_dir, **run.options)
    same_end(run, run_dir)


PATCHED = """
import os, signal
from accel_sft.launch.environment import prepare_environment

prepare_environment()
from accel_sft.__main__ import main
from accel_sft.checkpoint import checkpoint
from accel_sft.training.trainer import Trainer

between_answers, export = Trainer.between_answers, checkpoint.export

def told_to_stop(trainer):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    between_answers(trainer)

def told_at_the_end(accelerator, model, tokenizer, folder, *more, **settings):
    if folder.name == "final":
        os.kill(os.getpid(), signal.SIGTERM)
    export(accelerator, model, tokenizer, folder, *more, **settings)

"""


@pytest.mark.long
def test_signal_ends_an_evaluation_unless_it_is_ignored(tmp_path):
    run_dir, few = tmp_path / "run", ("--validation-examples", "60", "--eval-batch-size", "1", "--max-steps", "2")
    program = f"{PATCHED}Trainer.between_answers = told_to_stop; main()"
    command = [sys.executable, "-c", program, *JOB, *few, "--output-dir", str(run_dir)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for what a script starts in the background
    try:
        stopped = subprocess.run(command, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert "stopped by SIGTERM after step 0, with a checkpoint" in stopped.stdout + stopped.stderr
    assert not (run_dir / "metrics.jsonl").exists()
    resumed = finished(*JOB, *few, "--resume", "auto", run_dir=run_dir)
    assert [line["step"] for line in resumed.lines("eval_loss")] == [0, 2]


@pytest.mark.long
def test_a_signal_after_the_last_step_lets_the_run_finish(tmp_path):
    few = ("--max-steps", "1", "--eval-every", "off", "--output-dir", str(tmp_path / "run"))
    program = f"{PATCHED}checkpoint.export = told_at_the_end; main()"
    done = subprocess.run([sys.executable, "-c", program, *JOB, *few], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "SIGTERM: the run will write a checkpoint and end; a second signal ends it at once" in done.stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "complete"


TWICE = """
signals.ECHO_SECONDS = float(sys.argv[1])
with signals.StopSignals() as stopping:
    stopping.deferred = True
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("echo_seconds", "launch", "status"),
    [
        ("60", {"TORCHELASTIC_RUN_ID": "none"}, 0),  # the scheduler's and the launcher's count as one
        ("0.01", {"TORCHELASTIC_RUN_ID": "none"}, 128 + signal.SIGTERM),
        ("60", {}, 128 + signal.SIGTERM),
    ],
)
def test_a_second_signal_ends_at_once(echo_seconds, launch, status):
    assert scripts.run(TWICE, echo_seconds, RANK="0", **launch).returncode == status


IMPATIENT = """
from accel_sft.io import terminal
from accel_sft.__main__ import main

terminal.SECONDS_OF_SILENCE = 0.5
main()
"""


@pytest.mark.long
def test_wait_for_unstarted_ranks_is_reported_and_ends_by_signal(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    left_over = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", IMPATIENT, *JOB, "--output-dir", str(tmp_path / "run")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env={**os.environ, **left_over}, **pipes) as process:
        lines = iter(process.stdout.readline, "")
        message = f"waiting for 2 processes at 127.0.0.1:{port}; unset WORLD_SIZE to start one process"
        assert any(message in line for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(limit(30)) == 128 + signal.SIGTERM


FORKING = """
signals.WATCH_SECONDS, signals.UNHANDLED_SECONDS = 0.2, 0.5
with signals.StopSignals() as stopping:
    stopping.deferred = True
    if (child := os.fork()) == 0:
        time.sleep(60)
    time.sleep(0.5)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    stopping.deferred = False
    time.sleep(1.5)
    assert not stopping.number
"""


def test_tasks_fork_dies_by_a_signal_and_the_rank_lives():
    done = scripts.run(FORKING, TORCHELASTIC_RUN_ID="one")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FAILING = """
def what_became_of_the_others(attempt):
    os.kill(os.getpid(), signal.SIGTERM)
    return "rank 1 was killed"

ranks.lost_ranks = what_became_of_the_others
with exit.ExitHandler(), signals.StopSignals() as stopping:
    stopping.deferred = True
    try:
        raise RuntimeError("Connection closed by peer")
    except RuntimeError:
        stopping.failing()
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        stopping.deferred = False
"""


def test_rank_names_its_lost_rank_despite_sigterm(tmp_path):
    record = tmp_path / "0" / "error.json"
    record.parent.mkdir()
    under_launcher = {"TORCHELASTIC_RUN_ID": "one", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(record)}
    done = scripts.run(FAILING, **under_launcher)
    assert (done.returncode, done.stderr) == (1, "Error: rank 1 was killed\n")
    assert json.loads(record.read_text())["message"]["message"] == "rank 1 was killed"


def test_ranks_whose_launcher_was_killed_end_and_write_nothing_more(tmp_path, own_machine):
    run_dir = tmp_path / "run"
    with own_machine.started("run", "ddp", *JOB[1:], launcher=FP32) as launch:
        launch.until_step(3)
        orphans = [launch.rank(0), launch.rank(1)]
        launch.process.kill()
        launch.process.wait()
        before = {path: path.stat().st_mtime_ns for path in sorted(run_dir.rglob("*")) if "logs" not in path.parts}
        wait_for(lambda: not any(orphan.is_running() for orphan in orphans), seconds=60)
    after = {path: path.stat().st_mtime_ns for path in sorted(run_dir.rglob("*")) if "logs" not in path.parts}
    changed = {str(path.relative_to(run_dir)) for path in before | after if before.get(path) != after.get(path)}
    assert changed <= {"metrics.jsonl"} | {name for name in changed if "tfevents" in name}  # the step they were in


@LONG
def test_ranks_whose_launcher_is_killed_as_they_start_end_too(own_machine):
    with own_machine.started("run", "ddp", *JOB[1:], launcher=FP32) as launch:
        launch.until(lambda: len(psutil.Process(launch.process.pid).children()) == 2, "two ranks")
        time.sleep(0.5)  # they are importing torch
        orphans = [launch.rank(0), launch.rank(1)]
        launch.process.kill()
        launch.process.wait()
        wait_for(lambda: not any(orphan.is_running() for orphan in orphans), seconds=30)


def test_killed_rank_restarts_from_the_last_checkpoint(launched, tmp_path, own_machine):
    run, run_dir = whole(launched, "ddp"), tmp_path / "run"
    with own_machine.started("run", "ddp", *JOB[1:], launcher=(*FP32, "--max_restarts", "1")) as launch:
        launch.until_step(18)
        launch.rank(1).kill()
        status, said = launch.process.wait(), launch.log.read_text()
    assert status == 0, said
    assert "resumed" in said
    assert re.search(f"Error: {LOST}.*; the launcher starts the ranks again", said)
    assert "Traceback (most recent call last):\n  File" not in said.split("Error: rank 1")[0]
    assert "will write a checkpoint" not in said, "nothing will be written: rank 1 is missing"
    assert "to continue:" not in said
    same_end(run, run_dir)


HOLDING = "import sys; from accel_sft.io.lock import lock; lock(sys.argv[1]); print('locked', flush=True); input()"


def test_folder_of_a_live_run_is_refused_until_it_ends(launched, tmp_path, called, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.2)
    run, run_dir = layout(launched, "plain"), tmp_path / "run"
    shutil.copytree(run.run_dir, run_dir)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDING, str(run_dir)], **pipes) as process:
        assert process.stdout.readline() == b"locked\n"
        refused = called(*run.arguments, "--resume", "auto", run_dir=run_dir)
        assert refused.status == 1
        assert "another process is working in this folder" in refused.output
        process.kill()
    before = (run_dir / "metrics.jsonl").read_bytes()
    again = called(*run.arguments, "--resume", "auto", run_dir=run_dir)
    assert (again.status, "is finished" in again.output) == (0, True)
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    lock.release()
