"""Checks of tests/gpu on what goes wrong: signals, ranks that are killed, fail, hang or have too little memory."""

from __future__ import annotations

import signal
import time

from launches import Failed, Launch, Machine, Run
from suite import FLOAT32, TROUBLES, agree, check, ddp_float32

SECONDS = 20
"""Seconds after a rank's end in which all others must be gone; with --tiny three times as many, as CPUs are shared."""


def launches(machine: Machine) -> tuple[str, ...]:
    """Those under which ranks wait in different places: in reductions of a backward, and amid forwards."""
    return ("ddp",) if machine.tiny else ("ddp", "z3", "fsdp2")


def over_soon(machine: Machine, launch: Launch, since: float, within: float = SECONDS) -> tuple[Run, float]:
    """The launch once it has failed, and the seconds from `since` (a time of the system's clock) to its end."""
    within = 3 * within if machine.tiny else within
    run = launch.ended(within + 60)
    took = time.time() - since
    if run.status == 0 or run.left or took > within:
        raise Failed(f"{run.folder.name} ended with {run.status} after {took:.1f} s, {run.left} processes had stayed")
    return run, took


@check("killed rank", value=8, seconds=110, least=2)
def killed_rank(machine: Machine) -> str:
    """After SIGKILL of a rank all others end within seconds and name it."""
    results = []
    for yaml in launches(machine):
        with machine.started(f"killed under {yaml}", yaml, *machine.endless()) as launch:
            launch.until_step(3)
            launch.rank(machine.last).send_signal(signal.SIGKILL)
            run, took = over_soon(machine, launch, time.time())
        run.says(rf"Error: rank {machine.last} (was killed \(signal 9|ended without an error message)")
        results.append(f"{yaml}: all over {took:.1f} s after it")
    return ", ".join(results)


def troubled(machine: Machine, task: str, name: str, yaml: str, *options: str) -> tuple[Run, float]:
    """A run of a task of troubles.py until its end, and the seconds from the trouble's beginning to that."""
    environment = {"TROUBLE_RUN": str(machine.folder / name)}
    with machine.started(
        name, yaml, *machine.endless(*options), task=f"{TROUBLES}:{task}", environment=environment
    ) as launch:
        began = machine.folder / f"{name}.began"
        launch.until(began.exists, "the planned trouble")
        return over_soon(machine, launch, began.stat().st_mtime, SECONDS + (40 if "--hang-timeout" in options else 0))


@check("failed rank", value=7, seconds=110, least=2)
def failed_rank(machine: Machine) -> str:
    """After an error on one rank the others end within seconds, and it is told."""
    results = []
    for yaml in launches(machine):
        run, took = troubled(machine, "Failing", f"failed under {yaml}", yaml)
        run.says("an error that a check planned")
        results.append(f"{yaml}: all over {took:.1f} s after it")
    return ", ".join(results)


def hang_timeout(machine: Machine) -> str:
    return "8" if machine.tiny else "20"


@check("stopped rank", value=5, seconds=80, least=2)
def stopped_rank(machine: Machine) -> str:
    """After SIGSTOP of a rank the run ends by --hang-timeout and names it."""
    job = machine.endless("--hang-timeout", hang_timeout(machine))
    with machine.started("stopped", "ddp", *job) as launch:
        launch.until_step(3)
        rank = launch.rank(machine.last)
        rank.send_signal(signal.SIGSTOP)
        run, took = over_soon(machine, launch, time.time(), SECONDS + 40)
    sentence = run.says(rf"rank {machine.last} does not respond \(process {rank.pid}, which is stopped\)")
    if blamed := [rank for rank in range(machine.last) if f"rank {rank} is stuck" in run.output]:
        raise Failed(f"ranks {blamed} are blamed too, which waited for it")
    return f"{sentence}; all over {took:.1f} s after it"


@check("stuck rank", value=5, seconds=80, least=2)
def stuck_rank(machine: Machine) -> str:
    """A rank that hangs in Python is named with its line and stack, and no other."""
    run, took = troubled(machine, "Stuck", "stuck", "ddp", "--hang-timeout", hang_timeout(machine))
    sentence = run.says(rf"rank {machine.last} is stuck in ponder \(\S+troubles.py:\d+\)")
    if "rank 0 is stuck" in run.output:
        raise Failed("rank 0 is blamed too, which waited for it")
    if "in ponder" not in (run.folder / "logs" / f"hang-rank-{machine.last}.txt").read_text():
        raise Failed(f"its stack is not in logs/hang-rank-{machine.last}.txt")
    return f"{sentence}; all over {took:.1f} s after it"


@check("one rank without room", value=6, seconds=90)
def one_rank_without_room(machine: Machine) -> str:
    """Where one rank has too little device memory, the step is repeated in smaller forwards, or a resume has those."""
    task, results = f"{TROUBLES}:Cramped", []
    for yaml in ("ddp", "z3"):
        name = f"cramped under {yaml}"
        launch = {"launcher": FLOAT32, "task": task, "environment": {"TROUBLE_RUN": str(machine.folder / name)}}
        run = machine.train(name, yaml, *machine.short(), **launch)
        if run.status:
            run.says("it keeps to [0-9,]+ tokens a forward")
            run = machine.train(name, yaml, *machine.short(), "--resume", "auto", **launch)
            how = "ended with a limit, which the resumed run kept to"
        else:
            run.says("the step is repeated with at most [0-9,]+ tokens a forward")
            how = "repeated the step"
        results.append(f"{yaml} {how}; {agree(ddp_float32(machine), [run], 2e-5)}")
    return "; ".join(results)


def undisturbed(machine: Machine) -> Run:
    return machine.once("undisturbed", lambda: machine.train("undisturbed", "ddp", *disturbable(machine)).expect())


def disturbable(machine: Machine) -> tuple[str, ...]:
    """A job that is long enough to be disturbed after its first checkpoint."""
    return machine.job(40, "--save-every", "4")


def at_first_checkpoint(launch: Launch) -> None:
    launch.until(lambda: any((launch.folder / "checkpoints").glob("step-*")), "a checkpoint")


@check("told to stop", value=6, seconds=80)
def told_to_stop(machine: Machine) -> str:
    """After SIGTERM a run writes a checkpoint, and resumed it ends as if undisturbed."""
    job = disturbable(machine)
    whole = undisturbed(machine)
    with machine.started("told to stop", "ddp", *job) as launch:
        at_first_checkpoint(launch)
        launch.process.send_signal(signal.SIGTERM)
        stopped = launch.ended(120)
    stopped.expect(1).says("stopped by SIGTERM after step [0-9]+, with a checkpoint")
    steps = len(stopped.losses)
    resumed = machine.train("told to stop", "ddp", *job, "--resume", "auto")
    # a GPU's kernels add up in any order unless --deterministic: the curve is held, not the bits
    return f"stopped after step {steps}; {agree(whole, [resumed], 1e-3)}"


@check("restarted", value=4, seconds=80)
def restarted(machine: Machine) -> str:
    """After SIGKILL of a rank under --max_restarts a run goes on by itself to the same end."""
    job = (*disturbable(machine), "--resume", "auto")
    whole = undisturbed(machine)
    with machine.started("restarted", "ddp", *job, launcher=("--max_restarts", "1")) as launch:
        at_first_checkpoint(launch)
        launch.rank(machine.last).send_signal(signal.SIGKILL)
        run = launch.ended(300)
    return agree(whole, [run], 1e-3)
