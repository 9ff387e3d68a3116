"""A rank that stops answering is named with its place within the set timeout, and nobody waits for it any longer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from conftest import CONFIGS, accel_sft
from fake_plugins import install
from models import make_tiny

from accel_sft import pulse, sealed, shards, watch
from accel_sft.config import TrainConfig
from accel_sft.optim import adamw

TIMEOUT = 6
PAST = 30
"""Seconds after the timeout in which everything must be over."""
JOB = ("--max-steps", "400", "--global-batch-size", "4", "--validation-examples", "4", "--max-new-tokens", "4")
JOB += ("--micro-batch-size", "2", "--save-every", "2", "--hang-timeout", str(TIMEOUT))
STUCK = '''
import os, time
from dataclasses import dataclass
from pathlib import Path
from accel_sft_math import Math as Shipped

@dataclass(kw_only=True)
class Stuck(Shipped):
    """Math that never comes back on the last rank."""

    def dataset(self, split):
        self.stand("dataset")
        return super().dataset(split)

    def score(self, example, text):
        self.stand("score")
        return super().score(example, text)

    def stand(self, method):
        if os.environ.get("RANK", "1") == "1" and os.environ["STUCK_IN"] == method:
            Path("BEGAN").touch()
            self.ponder()

    def ponder(self):
        while True:
            time.sleep(0.05)
'''


def stuck(tmp_path, method):
    (tmp_path / "site").mkdir()
    source = STUCK.replace("BEGAN", str(tmp_path / "began"))
    install(tmp_path / "site", "accel-sft-stuck", "stuck = accel_sft_stuck:Stuck", source)
    environment = {"PYTHONPATH": str(tmp_path / "site"), "STUCK_IN": method}
    return {"environment": environment, "launcher": ("--mixed_precision", "no")}


@pytest.mark.parametrize(("method", "yaml"), [("score", "z2"), ("dataset", "ddp")])
def test_a_rank_that_stands_still_is_named_with_its_place_and_stack(tmp_path, method, yaml):
    run = accel_sft("stuck", *JOB, yaml=yaml, run_dir=tmp_path / "run", **stuck(tmp_path, method))
    took = time.time() - (tmp_path / "began").stat().st_mtime
    assert run.status == 1
    said = " ".join(run.output.split())
    assert "rank 1 stands in ponder (" in said
    assert "accel_sft_stuck.py:" in said
    assert "go on with --resume auto" in said
    assert "rank 0 stands" not in said
    assert took < TIMEOUT + PAST
    stack = (tmp_path / "run" / "logs" / "hang-rank-1.txt").read_text()
    assert "in ponder" in stack
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed"
    assert "ponder" in result["error"]


def test_an_evaluation_that_stands_still_shows_the_stack_at_the_terminal(tmp_path):
    model = make_tiny(tmp_path / "model")
    command = ("evaluate", "stuck", "--model", str(model), "--validation-examples", "4", "--max-new-tokens", "4")
    run = accel_sft(*command, "--hang-timeout", "5", yaml="ddp", **stuck(tmp_path, "score"))
    assert run.status == 1
    assert time.time() - (tmp_path / "began").stat().st_mtime < 5 + PAST
    said = " ".join(run.output.split())
    assert "Error: nothing has moved for" in said
    assert "rank 1 stands in ponder (" in said
    assert "rank 0 stands" not in said
    assert said.count("in ponder File") == said.count("Timeout (0:00:05)!") == 1


AT_WORK = """
import sys, time
from pathlib import Path
from accel_sft import watch

watch.GRACE_SECONDS = 0.5
with watch.Watch(2, Path(sys.argv[1]), lambda message: None) as watched:
    until = time.monotonic() + 4.5
    while time.monotonic() < until:  # a task's dataset() that computes, or loads from afar
        if sys.argv[2] == "computes":
            sum(range(20000))
            time.sleep(0.02)
        else:
            Path(sys.argv[1], "loaded").write_bytes(bytes(16384))
            time.sleep(0.25)
    print("went on", flush=True)
    if sys.argv[2] == "computes":
        time.sleep(60)
    with watched.closely():
        while True:
            sum(range(20000))
"""


@pytest.mark.parametrize("what", ["computes", "loads"])
def test_to_be_at_work_is_to_get_on_but_where_it_is_watched_closely(tmp_path, what):
    command = [sys.executable, "-c", AT_WORK, str(tmp_path), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PAST)
    assert done.returncode == 1
    assert done.stdout.startswith("went on\nError: nothing has moved for 2 seconds")


def test_a_run_that_gets_on_leaves_no_stacks(tmp_path):
    file = tmp_path / "hang-rank-0.txt"
    with watch.Watch(1, tmp_path) as watched, watched.closely():
        until = time.monotonic() + PAST
        while not (file.exists() and file.stat().st_size):  # it has stood still
            assert time.monotonic() < until
            time.sleep(0.01)
        pulse.beat()
        time.sleep(0.6)
    assert not list(tmp_path.iterdir())


IN_C = """
import sys, time
from pathlib import Path
from accel_sft import watch

watch.SILENT_SECONDS, watch.GRACE_SECONDS = 1.0, 0.5
with watch.Watch(2, Path(sys.argv[1]), lambda message: None) as watched:
    time.sleep(2)
    if watched.rank == 1:
        until = time.monotonic() + 4
        while time.monotonic() < until:
            sum(range(2 * 10**8))  # holds the interpreter for seconds: its watching thread is silent
        Path(sys.argv[1], "done").touch()
    while not Path(sys.argv[1], "done").exists():
        time.sleep(0.1)
"""


def test_a_rank_that_is_at_work_in_c_is_not_taken_for_a_silent_one(tmp_path):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", IN_C, str(tmp_path)], env={**environment, "RANK": rank})
        for rank in ("0", "1")
    ]
    assert [process.wait(60) for process in ranks] == [0, 0]


@pytest.mark.parametrize(("when", "imports"), [("amid steps", 0), ("as it starts", 60)])
def test_a_stopped_process_is_named_and_does_not_keep_the_launcher(tmp_path, when, imports):
    command = [str(Path(sysconfig.get_path("scripts"), "accelerate")), "launch", "--mixed_precision", "no"]
    command += ["--config_file", str(CONFIGS / "ddp.yaml"), "--main_process_port", str(20000 + os.getpid() % 20000)]
    command += ["-m", "accel_sft", "math", *JOB, "--eval-every", "off", "--output-dir", str(tmp_path / "run")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 240
        while not (
            (tmp_path / "run" / "checkpoints" / "step-000002").exists()
            if when == "amid steps"
            else len(psutil.Process(process.pid).children()) == 2
        ):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        (last,) = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
        last.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        process.wait(TIMEOUT + PAST + imports)
        took = time.monotonic() - began
    finally:
        for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if process.poll() is None:
            process.kill()
    said = " ".join((tmp_path / "log").read_text().split())
    assert process.returncode == 1
    assert f"rank 1 says nothing any more (process {last.pid}, which is stopped), last seen in" in said
    assert "rank 0" not in said.split("Error: nothing has moved")[1].split("stacks are in")[0]
    assert TIMEOUT <= took < TIMEOUT + PAST + imports  # as it starts, the other one is still importing torch


SUSPENDED = """
import os, signal, sys, time
from pathlib import Path
from accel_sft import pulse, watch

watch.SILENT_SECONDS, watch.GRACE_SECONDS = 1.0, 0.0
with watch.Watch(2, Path(sys.argv[1]), lambda message: None):
    pulse.beat()
    time.sleep(0.6)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1.0)
    print("went on", flush=True)
    time.sleep(9)
"""


def test_a_process_that_was_suspended_as_a_whole_goes_on_and_one_that_hangs_then_ends(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SUSPENDED, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    said = process.communicate(timeout=PAST)[0]
    assert "went on" in said
    assert process.returncode == 1
    assert "rank 0 stands in <module> (<string>:" in said


UNHEARD = """
import sys, time
from pathlib import Path
from accel_sft import watch

watch.GRACE_SECONDS = 1.0
with watch.Watch(2, Path(sys.argv[1]), lambda message: time.sleep(600)):
    time.sleep(600)
"""


def test_a_disk_that_hangs_too_keeps_neither_the_message_nor_the_end(tmp_path):
    done = subprocess.run([sys.executable, "-c", UNHEARD, str(tmp_path)], capture_output=True, text=True, timeout=PAST)
    assert done.returncode == 1
    assert "nothing has moved for" in done.stdout


def test_files_that_are_written_read_and_hashed_count_as_getting_on(tmp_path):
    def beats_in(call, *arguments):
        before = pulse.beats()
        call(*arguments)
        return pulse.beats() - before

    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(300, 300)
    optimizer = adamw(model, TrainConfig().resolved({}))
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    folder = tmp_path / "state"
    folder.mkdir()
    assert beats_in(shards.write, accelerator, model, optimizer, folder) >= 1
    (folder / "large").write_bytes(bytes(3 * 2**20))  # is read in pieces
    assert beats_in(sealed.seal, folder, {}) >= 3
    assert beats_in(sealed.check, folder) >= 3
    (folder / "large").unlink()
    sealed.seal(folder, {})
    assert beats_in(shards.read, accelerator, model, optimizer, folder) >= 6  # weight and bias, and their moments
