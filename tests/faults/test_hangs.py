"""A rank that stops answering is named with its place within the set timeout, and nobody waits for it any longer."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from checkpoints import write
from conftest import accel_sft
from fake_plugins import install
from models import make_tiny
from places import CONFIGS

from accel_sft.api.config import TrainConfig
from accel_sft.checkpoint import shards
from accel_sft.io import manifest
from accel_sft.io.heartbeat import heartbeat, heartbeat_count, heartbeats_only
from accel_sft.io.run_dir import RunDir
from accel_sft.resilience import watchdog
from accel_sft.training.optimizer import new_optimizer

TIMEOUT = 6
PAST = 400
"""Seconds after the timeout in which everything must be over. A collective that nobody watches waits for 1,800. How
soon a watched run ends depends on the machine, which meanwhile imports torch for ten ranks: two cores took 144 s."""
JOB = ("--max-steps", "400", "--global-batch-size", "4", "--validation-examples", "4", "--max-new-tokens", "4")
JOB += ("--train-examples", "100", "--micro-batch-size", "2", "--save-every", "2", "--hang-timeout", str(TIMEOUT))
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


def stuck(folder, method):
    """How to launch a job in which the last rank never comes back from this method of its task."""
    (folder / "site").mkdir()
    source = STUCK.replace("BEGAN", str(folder / "began"))
    install(folder / "site", "accel-sft-stuck", "stuck = accel_sft_stuck:Stuck", source)
    return {"PYTHONPATH": str(folder / "site"), "STUCK_IN": method}


def train_stuck(folder, port, method, yaml):
    launcher = {"yaml": yaml, "launcher": ("--mixed_precision", "no", "--main_process_port", port), "real": True}
    environment = stuck(folder, method) | {"ACCEL_SFT_CACHE": str(folder / "cache")}
    run = accel_sft("stuck", *JOB, run_dir=folder / "run", environment=environment, **launcher)
    return run, time.time() - (folder / "began").stat().st_mtime


def evaluate_stuck(folder, port):
    model = make_tiny(folder / "model")
    command = ("evaluate", "stuck", "--model", str(model), "--validation-examples", "4", "--max-new-tokens", "4")
    launcher = {"yaml": "ddp", "launcher": ("--mixed_precision", "no", "--main_process_port", port), "real": True}
    environment = stuck(folder, "score") | {"ACCEL_SFT_CACHE": str(folder / "cache")}
    run = accel_sft(*command, "--hang-timeout", "5", environment=environment, **launcher)
    return run, time.time() - (folder / "began").stat().st_mtime


def rank_below(launcher, rank):
    """The process of a rank; None before it is there: a fork that has not begun its program has no rank yet."""
    for process in psutil.Process(launcher).children():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(rank):
                return process
    return None


def train_and_stop_a_process(folder, port, when):
    """The launcher's exit status, the process id, what was printed, and the seconds from the stop to the end."""
    command = [str(Path(sysconfig.get_path("scripts"), "accelerate-launch")), "--mixed_precision", "no"]
    command += ["--config_file", str(CONFIGS / "ddp.yaml"), "--main_process_port", port]
    command += ["-m", "accel_sft", "math", *JOB, "--eval-every", "off", "--output-dir", str(folder / "run")]
    environment = {**os.environ, "ACCEL_SFT_CACHE": str(folder / "cache")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=environment)
    try:
        until = time.monotonic() + 240
        while not (
            (folder / "run" / "checkpoints" / "step-000002").exists()
            if when == "amid steps"
            else rank_below(process.pid, 1)
        ):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        last = rank_below(process.pid, 1)
        last.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        process.wait(TIMEOUT + PAST)
        took = time.monotonic() - began
    finally:
        for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if process.poll() is None:
            process.kill()
    return process.returncode, last.pid, (folder / "log").read_text(), took


def side_by_side(tmp_path_factory, **calls):
    """What each call came to, as a future: all are run at once, each in a folder of its own. They mostly wait."""
    with ThreadPoolExecutor(len(calls)) as pool:  # waits for all of them: what follows has the machine to itself
        return {name: pool.submit(call, tmp_path_factory.mktemp(name)) for name, call in calls.items()}


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    ports = [str(10000 + (6 * os.getpid() + number) % 10000) for number in range(6)]  # not those of conftest.accel_sft
    return side_by_side(
        tmp_path_factory,
        score=lambda folder: (folder, *train_stuck(folder, ports[0], "score", "z2")),
        dataset=lambda folder: (folder, *train_stuck(folder, ports[1], "dataset", "ddp")),
        evaluate=lambda folder: evaluate_stuck(folder, ports[2]),
        steps=lambda folder: train_and_stop_a_process(folder, ports[3], "amid steps"),
        start=lambda folder: train_and_stop_a_process(folder, ports[4], "as it starts"),
    )


@pytest.mark.parametrize("method", ["score", "dataset"])
def test_a_rank_that_stands_still_is_named_with_its_place_and_stack(launches, method):
    folder, run, took = launches[method].result()
    assert run.status == 1
    said = " ".join(run.output.split())
    assert "rank 1 is stuck in ponder (" in said
    assert "accel_sft_stuck.py:" in said
    assert "continue with --resume auto" in said
    assert "rank 0 is stuck" not in said
    assert took < TIMEOUT + PAST
    stack = (folder / "run" / "logs" / "hang-rank-1.txt").read_text()
    assert "in ponder" in stack
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["status"] == "failed"
    assert "ponder" in result["error"]


def test_an_evaluation_that_stands_still_shows_the_stack_at_the_terminal(launches):
    run, took = launches["evaluate"].result()
    assert run.status == 1
    assert took < 5 + PAST
    said = " ".join(run.output.split())
    assert "Error: nothing has moved for" in said
    assert "rank 1 is stuck in ponder (" in said
    assert "rank 0 is stuck" not in said
    assert said.count("in ponder File") == said.count("Timeout (0:00:05)!") == 1


@pytest.mark.parametrize("when", ["steps", "start"])
def test_a_stopped_process_is_named_and_does_not_keep_the_launcher(launches, when):
    status, last, log, took = launches[when].result()
    said = " ".join(log.split())
    assert status == 1
    assert f"rank 1 does not respond (process {last}, which is stopped), last seen in" in said
    assert "rank 0" not in said.split("Error: nothing has moved")[1].split("stacks are in")[0]
    assert TIMEOUT <= took < TIMEOUT + PAST


AT_WORK = """
import sys, time
from pathlib import Path
from accel_sft.io.heartbeat import heartbeats_only
from accel_sft.io.run_dir import RunDir
from accel_sft.resilience import watchdog

watchdog.GRACE_SECONDS = 0.5
with watchdog.Watchdog(2, RunDir(Path(sys.argv[1]))):
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
    with heartbeats_only():
        while True:
            sum(range(20000))
"""


IN_C = """
import sys, time
from pathlib import Path
from accel_sft.io.run_dir import RunDir
from accel_sft.resilience import watchdog

watchdog.SILENT_SECONDS, watchdog.GRACE_SECONDS = 1.0, 0.5
with watchdog.Watchdog(2, RunDir(Path(sys.argv[1]))) as watched:
    time.sleep(2)
    if watched.rank == 1:
        until = time.monotonic() + 4
        while time.monotonic() < until:
            sum(range(2 * 10**8))  # holds the interpreter for seconds: its watching thread is silent
        Path(sys.argv[1], "done").touch()
    while not Path(sys.argv[1], "done").exists():
        time.sleep(0.1)
"""


SUSPENDED = """
import os, signal, sys, time
from pathlib import Path
from accel_sft.io.heartbeat import heartbeat, heartbeat_count
from accel_sft.io.run_dir import RunDir
from accel_sft.resilience import watchdog

watchdog.SILENT_SECONDS, watchdog.GRACE_SECONDS = 1.0, 0.0
with watchdog.Watchdog(2, RunDir(Path(sys.argv[1]))):
    heartbeat()
    time.sleep(0.6)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1.0)
    print("went on", flush=True)
    time.sleep(9)
"""


UNHEARD = """
import sys, time
from pathlib import Path
from accel_sft.io.run_dir import RunDir
from accel_sft.resilience import watchdog

watchdog.GRACE_SECONDS = 1.0
class OnAHungDisk(RunDir):
    def write_ended(self, status, error):
        time.sleep(600)

with watchdog.Watchdog(2, OnAHungDisk(Path(sys.argv[1]))):
    time.sleep(600)
"""


def python(source, *arguments):
    """Run the source in a process of its own, which ends by itself; its first argument is a run's folder."""
    (arguments[0] / "logs").mkdir()
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PAST)


def two_ranks_of_which_one_is_in_c(folder):
    (folder / "logs").mkdir()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", IN_C, str(folder)], env={**environment, "RANK": rank})
        for rank in ("0", "1")
    ]
    try:
        return [process.wait(60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def suspended_as_a_whole(folder):
    (folder / "logs").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SUSPENDED, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    return process.communicate(timeout=PAST)[0], process.returncode


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return side_by_side(
        tmp_path_factory,
        computes=lambda folder: python(AT_WORK, folder, "computes"),
        loads=lambda folder: python(AT_WORK, folder, "loads"),
        in_c=two_ranks_of_which_one_is_in_c,
        suspended=suspended_as_a_whole,
        unheard=lambda folder: python(UNHEARD, folder),
    )


@pytest.mark.parametrize("what", ["computes", "loads"])
def test_activity_is_progress_until_only_heartbeats_count(watched, what):
    done = watched[what].result()
    assert done.returncode == 1
    assert done.stdout.startswith("went on\nError: nothing has moved for 2 seconds")


def test_a_rank_that_is_at_work_in_c_is_not_taken_for_a_silent_one(watched):
    assert watched["in_c"].result() == [0, 0]


def test_a_process_that_was_suspended_as_a_whole_goes_on_and_one_that_hangs_then_ends(watched):
    said, status = watched["suspended"].result()
    assert "went on" in said
    assert status == 1
    assert "rank 0 is stuck in <module> (<string>:" in said


def test_a_disk_that_hangs_too_keeps_neither_the_message_nor_the_end(watched):
    done = watched["unheard"].result()
    assert done.returncode == 1
    assert "nothing has moved for" in done.stdout


def test_a_run_that_makes_progress_leaves_no_stacks(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    file = run_dir.stacks(0)
    with watchdog.Watchdog(1, run_dir), heartbeats_only():
        until = time.monotonic() + PAST
        while not (file.exists() and file.stat().st_size):  # it has stood still
            assert time.monotonic() < until
            time.sleep(0.01)
        heartbeat()
        time.sleep(0.6)
    assert not list(run_dir.logs.iterdir())


def test_files_that_are_written_read_and_hashed_send_heartbeats(tmp_path):
    def beats_in(call, *arguments):
        before = heartbeat_count()
        call(*arguments)
        return heartbeat_count() - before

    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(300, 300)
    optimizer = new_optimizer(model, TrainConfig().resolved({}))
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    folder = tmp_path / "state"
    folder.mkdir()
    assert beats_in(write, accelerator, model, optimizer, folder) >= 1
    (folder / "large").write_bytes(bytes(3 * 2**20))  # is read in pieces
    assert beats_in(manifest.write, folder, {}) >= 3
    assert beats_in(manifest.verify, folder) >= 3
    (folder / "large").unlink()
    manifest.write(folder, {})
    assert beats_in(shards.read, accelerator, model, optimizer, folder) >= 6  # weight and bias, and their moments


ASLEEP = """
import time
from accel_sft_math import Math as Stuck
time.sleep(600)
"""


LOOP = ASLEEP.replace("time.sleep(600)", "while True: pass")
ENDLESS = """
import itertools
from dataclasses import dataclass
from accel_sft_math import Math

@dataclass(kw_only=True)
class Stuck(Math):
    def score(self, example, text):
        for _ in itertools.count():
            pass
"""


def importing(folder, *arguments, source=ASLEEP):
    install(folder, "accel-sft-stuck", "stuck = accel_sft_stuck:Stuck", source)
    paths = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "accel_sft", "stuck", *arguments]
    return command, {**os.environ, "TORCHELASTIC_RUN_ID": "one", "RANK": "3", "WORLD_SIZE": "4", "PYTHONPATH": paths}


def test_a_task_that_hangs_as_it_is_imported_is_named(tmp_path):
    command, environment = importing(tmp_path, "--hang-timeout", "2")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "rank 3 is stuck in <module> (" in done.stdout
    assert "accel_sft_stuck.py:4" in done.stdout


@pytest.mark.parametrize(
    ("source", "place"),
    [(LOOP, "<module> (SITE/accel_sft_stuck.py:4)"), (ENDLESS, "score (SITE/accel_sft_stuck.py:")],
    ids=["import", "first score"],
)
def test_a_loop_without_an_end_before_training_is_no_work_also_without_a_launcher(tmp_path, source, place):
    run = ("--hang-timeout", "3", "--max-steps", "1", "--output-dir", str(tmp_path / "run"))
    command, environment = importing(tmp_path, *run, source=source)
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"):
        del environment[name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"rank 0 is stuck in {place.replace('SITE', str(tmp_path))}" in done.stdout
    stacks = [path.read_text() for path in tmp_path.glob("run/logs/hang-*")] or [done.stdout]
    assert "most recent call first" in stacks[0]


def test_a_rank_whose_launcher_is_killed_amid_an_import_ends(tmp_path):
    command, environment = importing(tmp_path)
    script = f"{shlex.join(command)} >/dev/null 2>&1 & echo $!; sleep 3"
    rank = int(subprocess.run(["sh", "-c", script], env=environment, stdout=subprocess.PIPE, text=True).stdout)
    until = time.monotonic() + PAST
    while psutil.pid_exists(rank) and psutil.Process(rank).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.1)
