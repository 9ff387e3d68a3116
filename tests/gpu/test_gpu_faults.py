"""What goes wrong on GPUs: signals, and ranks that are killed, fail, hang or have too little memory."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from launches import FLOAT32, agree

TROUBLES = Path(__file__).with_name("troubles.py")
pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
SECONDS = 20
"""Seconds after a rank's end in which all others must be gone; on CPUs, which ranks share, three times as many."""
LAUNCHES = ["ddp", "z3", "fsdp2"]
"""Ranks wait in different places: in reductions of a backward, and amid forwards."""


@pytest.fixture(autouse=True)
def several(machine):
    if machine.processes < 2:
        pytest.skip("needs 2 GPUs")


def over_soon(machine, launch, since, within=SECONDS):
    """The launch once it has failed, in time after `since` (a time of the system's clock)."""
    within *= 1 if machine.devices else 3
    run = launch.ended(within + 60)
    took = time.time() - since
    print(f"all over {took:.1f} s after it")
    assert run.status != 0
    assert (run.left, took < within) == (0, True), (run.left, took)
    return run


@pytest.mark.parametrize("yaml", LAUNCHES)
def test_killed_rank_ends_and_is_named_by_others(machine, yaml):
    with machine.started(f"killed {yaml}", yaml, *machine.endless()) as launch:
        launch.until_step(3)
        launch.rank(machine.last).send_signal(signal.SIGKILL)
        run = over_soon(machine, launch, time.time())
    run.says(rf"Error: rank {machine.last} ended without an error message")


def troubled(machine, task, name, yaml, *options):
    """A run of a task of troubles.py until its end, soon after the trouble's beginning."""
    more = {"task": f"{TROUBLES}:{task}", "environment": {"TROUBLE_RUN": str(machine.folder / name)}}
    with machine.started(name, yaml, *machine.endless(*options), **more) as launch:
        began = machine.folder / f"{name}.began"
        launch.until(began.exists, "the planned trouble")
        return over_soon(machine, launch, began.stat().st_mtime, SECONDS + (40 if options else 0))


@pytest.fixture
def hang_timeout(machine):
    return ("--hang-timeout", "20" if machine.devices else "8")


def test_stopped_rank_is_named_after_the_hang_timeout(machine, hang_timeout):
    with machine.started("stopped", "ddp", *machine.endless(*hang_timeout)) as launch:
        launch.until_step(3)
        rank = launch.rank(machine.last)
        rank.send_signal(signal.SIGSTOP)
        run = over_soon(machine, launch, time.time(), SECONDS + 40)
    run.says(rf"rank {machine.last} does not respond \(process {rank.pid}, which is stopped\)")
    assert "is stuck" not in run.output, "ranks are blamed that waited for it"


def test_stuck_rank_alone_is_named_with_its_stack(machine, hang_timeout):
    run = troubled(machine, "Stuck", "stuck", "ddp", *hang_timeout)
    run.says(rf"rank {machine.last} is stuck in ponder \(\S+troubles.py:\d+\)")
    assert "rank 0 is stuck" not in run.output
    assert "in ponder" in (run.run_dir / "logs" / f"hang-rank-{machine.last}.txt").read_text()


@pytest.mark.parametrize("yaml", ["ddp", "z3"])
def test_step_without_room_on_one_rank_is_made_smaller(machine, yaml):
    """It is repeated in smaller forwards, or the run ends and a resume has those."""
    name = f"cramped {yaml}"
    launch = {"launcher": FLOAT32, "task": f"{TROUBLES}:Cramped"}
    launch["environment"] = {"TROUBLE_RUN": str(machine.folder / name)}
    run = machine.train(name, yaml, *machine.short(), **launch)
    if run.status:
        run.says("forwards will have at most [0-9,]+ tokens")
        run = machine.train(name, yaml, *machine.short(), "--resume", "auto", **launch)
    else:
        run.says("this step is repeated, and from now on a forward has at most [0-9,]+ tokens")
    agree(machine.reference(), [run], 2e-5)


def test_run_told_to_stop_or_restarted_draws_the_same_curve(machine):
    job = machine.job(40, "--save-every", "4", "--resume", "auto")

    def after_a_checkpoint(name, hit, **launch):
        with machine.started(name, "ddp", *job, **launch) as running:
            running.until(lambda: any((running.folder / "checkpoints").glob("step-*")), "a checkpoint")
            hit(running)
            return running.ended(300)

    whole = machine.train("undisturbed", "ddp", *job).expect()
    stopped = after_a_checkpoint("stopped by a signal", lambda running: running.process.send_signal(signal.SIGTERM))
    stopped.expect(1).says("stopped by SIGTERM after step [0-9]+, with a checkpoint")
    resumed = machine.train("stopped by a signal", "ddp", *job)
    kill = {"hit": lambda running: running.rank(machine.last).send_signal(signal.SIGKILL)}
    restarted = after_a_checkpoint("restarted", **kill, launcher=("--max_restarts", "1"))
    # a GPU's kernels add up in any order unless --deterministic: the curve is held, not the bits
    agree(whole, [resumed, restarted], 1e-3)
