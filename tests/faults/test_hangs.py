"""A rank that stops answering is named with its place within the set timeout, and nobody waits for it any longer."""

from __future__ import annotations

import json
import re
import signal
import time

import psutil
import pytest
import scripts
import torch
from accelerate import Accelerator
from checkpoints import write
from conftest import accel_sft
from limits import limit
from reference_job import own_task

from accel_sft.api.config import TrainConfig
from accel_sft.checkpoint import shards
from accel_sft.io import manifest
from accel_sft.io.heartbeat import heartbeat_count
from accel_sft.training.optimizer import new_optimizer

LONG = pytest.mark.long
TIMEOUT = round(limit(6))
PAST = limit(100)
"""Seconds after the timeout in which everything must be over. A collective that nobody watches waits for 1,800."""
JOB = ("--max-steps", "400", "--global-batch-size", "4", "--validation-examples", "4", "--max-new-tokens", "4")
JOB += ("--train-examples", "100", "--micro-batch-size", "2", "--save-every", "2", "--hang-timeout", str(TIMEOUT))
STUCK = """
def score(self, example, text):
    if os.environ["RANK"] == "1":
        pathlib.Path(__file__).with_name("began").touch()
        self.ponder()
    return super().score(example, text)

def ponder(self):
    import time
    while True:
        time.sleep(0.05)
"""


def test_hanging_rank_is_named_with_place_and_stack(tmp_path):
    options = {"yaml": "z2", "launcher": ("--mixed_precision", "no"), "real": True, "run_dir": tmp_path / "run"}
    run = accel_sft(own_task(tmp_path, STUCK), *JOB, **options)
    took = time.time() - (tmp_path / "began").stat().st_mtime
    assert run.status == 1
    said = " ".join(run.output.split())
    assert "rank 1 is stuck in ponder (" in said
    assert "/own.py:" in said
    assert "continue with --resume auto" in said
    assert "rank 0 is stuck" not in said
    assert took < TIMEOUT + PAST
    stack = (tmp_path / "run" / "logs" / "hang-rank-1.txt").read_text()
    assert "in ponder" in stack
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed"
    assert "ponder" in result["error"]


AT_WORK = """
from accel_sft.io.heartbeat import heartbeats_only

class OnAHungDisk(RunDir):
    def write_ended(self, status, error):
        time.sleep(600)

watchdog.GRACE_SECONDS = 0.5
with watchdog.Watchdog(round(limit(2)), OnAHungDisk(Path(sys.argv[1]))):
    until = time.monotonic() + limit(4.5)
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
watchdog.SILENT_SECONDS, watchdog.GRACE_SECONDS = limit(1), 0.5
with watchdog.Watchdog(limit(2), RunDir(Path(sys.argv[1]))) as watched:
    time.sleep(limit(2))
    if watched.rank == 1:
        until = time.monotonic() + limit(4)
        while time.monotonic() < until:
            sum(range(2 * 10**8))  # holds the interpreter for seconds: its watching thread is silent
        Path(sys.argv[1], "done").touch()
    while not Path(sys.argv[1], "done").exists():
        time.sleep(0.1)
"""
STOPPED = """
from accel_sft.io.heartbeat import exchange

watchdog.SILENT_SECONDS, watchdog.GRACE_SECONDS = limit(1), 0.5
with watchdog.Watchdog(limit(2), RunDir(Path(sys.argv[1]))) as watched:
    while not Path(sys.argv[1], "both").exists():
        if watched._answers() and watched._store.check(["0", "1"]):
            Path(sys.argv[1], "both").touch()
        time.sleep(0.1)
    if watched.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with exchange():
        time.sleep(600)
"""
SUSPENDED = """
from accel_sft.io.heartbeat import heartbeat

watchdog.SILENT_SECONDS, watchdog.GRACE_SECONDS = limit(1), 0.0
with watchdog.Watchdog(limit(2)):
    heartbeat()
    time.sleep(limit(0.6))
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(limit(1))
    print("went on", flush=True)
    time.sleep(limit(9))
"""


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run for a program, which ends by itself."""
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.mark.parametrize("what", ["computes", pytest.param("loads", marks=LONG)])
def test_activity_is_progress_until_only_heartbeats_count(run_dir, what):
    done = scripts.run(AT_WORK, run_dir, what)
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "went on")
    message = re.search(r"Error: nothing has moved for (\d+) seconds", done.stdout + done.stderr)
    assert int(message[1]) >= round(limit(2))


@pytest.fixture
def two_ranks(run_dir):
    """`two_ranks(program)`: two processes that share a store, killed in the end."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    both = []

    def start(program):
        both.extend(scripts.started(program, run_dir, **world, RANK=rank) for rank in ("0", "1"))
        return both

    yield start
    for process in both:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_rank_at_work_in_c_is_not_called_silent(two_ranks):
    both = two_ranks(IN_C)
    assert [(*process.communicate(), process.returncode) for process in both] == [("", "", 0)] * 2


def test_stopped_rank_is_named_and_killed(two_ranks):
    first, last = two_ranks(STOPPED)
    said = first.communicate()[0]
    assert f"rank 1 does not respond (process {last.pid}, which is stopped), last seen in" in said
    assert "rank 0" not in said.split("stacks are in")[0]
    assert (first.returncode, last.wait()) == (1, -signal.SIGKILL)


@pytest.mark.long
def test_suspended_process_continues_and_a_later_hang_ends():
    process = scripts.started(SUSPENDED)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    time.sleep(limit(3))
    process.send_signal(signal.SIGCONT)
    said = "".join(process.communicate())
    assert "went on" in said
    assert process.returncode == 1
    assert "rank 0 is stuck in <module> (<string>:" in said
    assert "most recent call first" in said  # without a run, the stack is on the terminal


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


ENDLESS = """
def score(self, example, text):
    while True:
        pass
"""


@pytest.mark.long
def test_endless_score_before_training_is_named_without_a_launcher(tmp_path):
    command = (own_task(tmp_path, ENDLESS), "--hang-timeout", f"{limit(3):.0f}", "--max-steps", "1")
    done = accel_sft(*command, run_dir=tmp_path / "run")
    assert done.status == 1
    assert f"rank 0 is stuck in score ({tmp_path}/own.py:" in done.output
    assert "most recent call first" in next(tmp_path.glob("run/logs/hang-*")).read_text()
