"""A job for tests that stop it: the steps it has done, and a run that is not stopped."""

from __future__ import annotations

import json

STEPS = 40
JOB = ("math", "--max-steps", str(STEPS), "--global-batch-size", "10", "--validation-examples", "7", "--seed", "7")
JOB += ("--train-examples", "500", "--max-new-tokens", "6", "--micro-batch-size", "5")
JOB += ("--eval-every", "20", "--save-every", "15")
LAUNCHES = {"plain": "", "ddp": "ddp", "z2": "z2"}


def steps_done(run_dir):
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("}")), default=0)


def whole(launched, name):
    yaml = LAUNCHES[name]
    options = {"yaml": yaml, "launcher": ("--mixed_precision", "no")} if yaml else {}
    return launched(f"{name}, {STEPS} steps", *JOB, **options)
