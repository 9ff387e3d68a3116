"""Seconds from the command to the first optimizer step, by phase, with the built-in model and the task `math`.

    python benchmarks/startup.py [--launch NAME ...] [--rounds 3] [--imports] [--smoke] [-- OPTION ...]

Launches take turns: without a launcher, ZeRO-2 on one process, ZeRO-2 on two. Each starts once with an empty cache and
once with what the first start kept. Options after `--` go to the trainer. The table has medians of rank 0 over the
rounds; a round before them reads all files once, and compiles DeepSpeed's operators. With `--imports`, each launch
starts once more with `-X importtime`, which lists the imported packages by phase (and makes imports a little slower).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import smoke

HERE = Path(__file__).parent
FIRST_STEP = str(HERE / "contestants" / "first_step.py")
ZERO2 = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
ZERO2 += [str(HERE.parent / "accelerate_configs" / "z2.yaml"), "--num_processes"]
CPU = "CPU seconds of all its processes"
TOTALS = ("in all", CPU)
SMALL = ["--train-examples", "200", "--validation-examples", "10", "--batching", "padded"]
LAUNCHES = {"no launcher": [sys.executable], "z2, one process": [*ZERO2, "1"], "z2, two processes": [*ZERO2, "2"]}


def start(
    launch: list[str], options: list[str], cache: str, importtime: bool = False
) -> tuple[dict[str, float], list[str]]:
    """The phases of one start with their seconds, in order, and the lines that it printed (`-X importtime`'s too)."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        environment = {**os.environ, "FIRST_STEP_FOLDER": folder, "ACCEL_SFT_CACHE": cache}
        command = [*launch, FIRST_STEP, "math", "--output-dir", f"{folder}/run", *options]
        if importtime:
            environment["PYTHONPROFILEIMPORTTIME"] = "1"
            command.append("--debug")  # without it, standard error goes to the run's folder
        with log.open("wb") as file:
            started, used = time.time(), used_by_children()
            status = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False).returncode
        said = log.read_text(errors="replace").splitlines()
        answer = Path(folder, "rank-0.json")
        if status or not answer.exists():
            raise SystemExit("\n".join([" ".join(command), *said[-30:]]))
        rank = json.loads(answer.read_text())
    if rank["uncalled"]:
        print(f"{command}: never called before the first step: {', '.join(rank['uncalled'])}", file=sys.stderr)
    before = {"launcher and interpreter": rank["began"] - started}
    counted = {"in all": rank["stepped"] - started, CPU: used_by_children() - used}
    return {**before, **rank["parts"], **counted}, said


def used_by_children() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def first_and_second(name: str, options: list[str]) -> dict[str, dict[str, float]]:
    """The phases of a launch's start with an empty cache, and of a second start."""
    with tempfile.TemporaryDirectory() as cache:
        return {f"{name}, {which}": start(LAUNCHES[name], options, cache)[0] for which in ("first", "again")}


def packages(lines: list[str]) -> dict[str, dict[str, float]]:
    """{phase: {package: seconds}} of the imports; each module's own time counts for its package."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    within = ["launcher and interpreter"]
    for line in lines:
        if not line.startswith("import time:"):
            continue
        if line.startswith("import time: #"):
            part = line.removeprefix("import time: #").strip()
            within = [*within, part] if part else within[:-1]
        elif "|" in line and "self [us]" not in line:
            own, _, module = line.removeprefix("import time:").split("|")
            found[within[-1]][module.strip().split(".")[0]] += int(own) / 1e6
    return found


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--launch", action="append", choices=LAUNCHES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--imports", action="store_true")
    parser.add_argument("options", nargs="*", help="The trainer's options, after `--`.")
    args = smoke.parse(parser, launch=["no launcher"], rounds=1)
    options = [*SMALL, *args.options] if args.smoke else args.options
    launches = args.launch or list(LAUNCHES)
    runs: list[dict[str, dict[str, float]]] = []
    for number in range(args.smoke, args.rounds + 1):
        run = {which: found for name in launches for which, found in first_and_second(name, options).items()}
        if number:
            runs.append(run)
    starts = list(runs[0])
    phases = list(dict.fromkeys(phase for run in runs for name in starts for phase in run[name] if phase not in TOTALS))
    print("| seconds | " + " | ".join(starts) + " |")
    print("|---|" + "---|" * len(starts))
    for phase in [*TOTALS, *phases]:
        medians = [statistics.median(run[name].get(phase, 0.0) for run in runs) for name in starts]
        if max(medians) >= 0.005:
            print(f"| {phase} | " + " | ".join(f"{seconds:.2f}" for seconds in medians) + " |")
    for name in launches if args.imports else ():
        print(f"\nImports, {name}: seconds by phase and package (0.05 s and more; all processes of it together)\n")
        with tempfile.TemporaryDirectory() as cache:
            lines = start(LAUNCHES[name], options, cache, importtime=True)[1]
        for phase, each in packages(lines).items():
            shown = sorted(((s, package) for package, s in each.items() if s >= 0.05), reverse=True)
            if shown:
                print(f"- {phase}: {sum(each.values()):.2f} ({', '.join(f'{p} {s:.2f}' for s, p in shown)})")


if __name__ == "__main__":
    main()
