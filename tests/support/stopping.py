"""A job for tests that stop it: its ranks, the steps it has done, and a run that is not stopped."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import psutil
from places import launcher

STEPS = 40
JOB = ("math", "--max-steps", str(STEPS), "--global-batch-size", "10", "--validation-examples", "7", "--seed", "7")
JOB += ("--train-examples", "500", "--max-new-tokens", "6", "--micro-batch-size", "5")
JOB += ("--eval-every", "20", "--save-every", "15")
LAUNCHES = {"plain": None, "ddp": "ddp", "z2": "z2"}


def steps_done(run_dir):
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("}")), default=0)


def ranks(process):
    """The processes that train, under any launcher, by rank; all children are remembered, to be killed at the end.

    A process that a rank starts inherits its variables: of those with a rank's number the eldest is the rank.
    """
    children = psutil.Process(process.pid).children(recursive=True)
    process.family += children
    found: dict[int, psutil.Process] = {}
    for child in sorted(children, key=lambda child: child.create_time()):
        with contextlib.suppress(psutil.Error, KeyError):  # it has ended, or is no rank
            found.setdefault(int(child.environ()["RANK"]), child)
    return [found[rank] for rank in sorted(found)] or [psutil.Process(process.pid)]


def whole(launched, name):
    yaml = LAUNCHES[name]
    options = {"yaml": yaml, "launcher": ("--mixed_precision", "no")} if yaml else {}
    return launched(f"{name}, {STEPS} steps", *JOB, **options)


@contextlib.contextmanager
def background(command, log, **options):
    """A command whose output goes to a file; killed in the end with all that it started."""
    with open(log, "ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, **options)
    process.family = []
    try:
        yield process
    finally:
        if process.poll() is None:
            ranks(process)
            process.kill()
        for child in process.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def started(run_dir, yaml=None, *more, module="accel_sft", job=JOB):
    """The job in the background, with `more` for its launcher or itself."""
    command, own = [sys.executable, "-m", "accel_sft"], () if yaml else more
    if yaml:
        command = launcher(yaml, "--mixed_precision", "no", *more, "-m", module)
    return background([*command, *job, *own, "--output-dir", str(run_dir)], f"{run_dir}.log")
