"""A job that is stopped: its ranks, the steps it has done, and the run that was not stopped."""

from __future__ import annotations

import json
import time

import psutil

STEPS = 40
JOB = ("math", "--max-steps", str(STEPS), "--global-batch-size", "10", "--validation-examples", "7", "--seed", "7")
JOB += ("--train-examples", "500", "--max-new-tokens", "6", "--micro-batch-size", "5")
JOB += ("--eval-every", "20", "--save-every", "15")
LAUNCHES = {"plain": None, "ddp": "ddp", "z2": "z2"}


def steps_done(run_dir):
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("}")), default=0)


def wait_for(condition, seconds=240):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.01)


def ranks(process):
    """The processes that train, of whatever launcher; remembered, to be killed in the end."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.family += children
    found = [child for child in children if child.is_running() and "accel_sft" in " ".join(child.cmdline())]
    return sorted(found, key=lambda child: int(child.environ().get("RANK", "0"))) or [psutil.Process(process.pid)]


def whole(launched, name):
    yaml = LAUNCHES[name]
    options = {"yaml": yaml, "launcher": ("--mixed_precision", "no")} if yaml else {}
    return launched(f"{name}, {STEPS} steps", *JOB, **options)
