"""What must hold on GPUs, checked by real launches: curves, faults, memory, speed. docs/first-hour-gpu.md explains it.

    bash tests/gpu/run [--gpus N] [--minutes 10] [--check NAME ...] [--again] [--state FOLDER] [--tiny] [--list]

Each check is one or several `accelerate launch` of the README's own command, on as many processes as --gpus says. The
checks come in the order of what they are worth per second. What a check found is written into the state folder as soon
as it is known: after one that was cut off, or had no minutes left, the same command goes on with the next. A check
begins only if its expected time is left. `--tiny` shrinks models and runs on a CPU too, on two processes: that tries
these checks, not the GPU. A check that cannot be tried here says why, and is tried again by the next call. Exit status
0 if no check that has run says NO.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import cost_checks
import curve_checks
import fault_checks
import kernel_checks
from launches import ROOT, Machine
from suite import CHECKS, Check

from accel_sft.io.files import write_atomically

MODULES = (curve_checks, fault_checks, kernel_checks, cost_checks)
"""Each has registered its checks with `suite.check`."""
TINY_SECONDS = 20
KEPT_BYTES = 2**20
"""Size above which a file of a failed check's runs is not kept: traces, weights and checkpoints are."""


def table(found: dict[str, dict]) -> str:
    """The checks in order as Markdown: whether each holds, what was measured, its seconds."""
    lines = ["| check | holds | measured | s |", "|---|---|---|---|"]
    for check in CHECKS:
        result = found.get(check.name, {"holds": "not run yet", "measured": check.claim, "seconds": 0})
        measured = " ".join(result["measured"].split()).replace("|", "/")
        lines.append(f"| {check.name} | {result['holds']} | {measured} | {result['seconds']:.0f} |")
    return "\n".join(lines)


def about(environment: dict[str, str]) -> tuple[str, int]:
    """The cards and the versions, and how many cards there are, asked in a process of its own: this one never holds
    memory on a card."""
    code = (
        "import torch, importlib.metadata as m\n"
        "count = torch.cuda.device_count() if torch.cuda.is_available() else 0\n"
        "name = f'{count} x {torch.cuda.get_device_name()}' if count else 'no GPU'\n"
        "packages = 'torch transformers accelerate deepspeed peft'.split()\n"
        "print(', '.join([name, *(f'{each} {m.version(each)}' for each in packages)]))\n"
        "print(count)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    if answer.returncode:
        raise SystemExit(
            f"this Python cannot run accel_sft:\n{answer.stderr[-2000:]}\nname another in PYTHON, or wheels in WHEELS"
        )
    card, count = answer.stdout.splitlines()[-2:]
    return card, int(count)


def read(kept: Path) -> dict[str, dict]:
    """The results in a state file that can be written, those of checks that are still there and were tried; {} before
    there are any.

    Raises:
        SystemExit: it is broken, or its folder cannot be used.
    """
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        found = json.loads(kept.read_text()) if kept.exists() else {}
        found = {check.name: found[check.name] for check in CHECKS if "holds" in found.get(check.name, {})}
        found = {name: result for name, result in found.items() if result["holds"] != "not tried"}
        write(kept, found)
        return found
    except OSError as error:
        raise SystemExit(f"{kept}: cannot be kept there ({error.strerror}); name another folder with --state") from None
    except (ValueError, TypeError, AttributeError):
        raise SystemExit(f"{kept}: holds no results of these checks; remove it, or name another --state") from None


def write(kept: Path, found: dict[str, dict]) -> None:
    write_atomically(kept, json.dumps(found, indent=1, ensure_ascii=False))


def keep_failed(machine: Machine, target: Path) -> None:
    """Pack the small files of the runs of a check that failed: what they printed, logs, settings, results."""
    with tarfile.open(target, "w:gz") as archive:
        for name in dict.fromkeys(machine.made):
            for file in [machine.folder / f"{name}.log", *(machine.folder / name).rglob("*")]:
                if file.is_file() and file.stat().st_size <= KEPT_BYTES:
                    archive.add(file, file.relative_to(machine.folder))


def plan(checks: list[Check], seconds: dict[str, int], minutes: float) -> str:
    """Which checks are begun within so many minutes, as a sentence."""
    left, fitting = 60 * minutes, []
    for check in checks:
        if seconds[check.name] <= left:
            left -= seconds[check.name]
            fitting.append(check.name)
    expected = sum(seconds[check.name] for check in checks) / 60
    sentence = f"{len(checks)} checks are still to be run, in about {expected:.0f} minutes; "
    return f"{sentence}into --minutes {minutes:g} fit {len(fitting)}: {', '.join(fitting) or 'none'}"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, metavar="N", help="Processes of a launch (default: one on each GPU).")
    parser.add_argument("--minutes", type=float, default=10, help="No check begins that would not end within these.")
    names = [check.name for check in CHECKS]
    parser.add_argument("--check", action="append", choices=names, metavar="NAME", help="These only.")
    parser.add_argument("--again", action="store_true", help="Also those that have been run.")
    parser.add_argument("--state", type=Path, default=ROOT / "runs" / "gpu-checks", help="Where results are kept.")
    parser.add_argument("--tiny", action="store_true", help="Small enough for a CPU: to try these checks.")
    parser.add_argument("--list", action="store_true", help="The checks in order, their seconds; run none.")
    return parser.parse_args()


def listed() -> str:
    """The checks in their order, with expected seconds."""
    lines = [
        f"{check.seconds:4} s  {check.name:22} {check.claim}" + (f" (needs {check.least} GPUs)" * (check.least > 1))
        for check in CHECKS
    ]
    return "\n".join([*lines, f"{sum(check.seconds for check in CHECKS) / 60:.0f} minutes in all"])


def main() -> None:
    args = options()
    if args.list:
        print(listed())
        return
    until = time.monotonic() + 60 * args.minutes
    # on /tmp: runs hold copies of large models, and nobody wants them kept
    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as folder:
        card, devices = about({**os.environ})
        if not devices and not args.tiny:
            raise SystemExit(f"{card}: no GPU is visible to torch; --tiny runs on a CPU")
        processes = args.gpus if args.gpus is not None else devices or 2
        most = devices or os.cpu_count() or 2
        if not 1 <= processes <= max(most, 2 - bool(devices)):
            raise SystemExit(f"--gpus {processes}: give 1 or more, at most {most}")
        machine = Machine(folder=Path(folder), tiny=args.tiny, processes=processes, devices=devices)
        kept = args.state / f"{'tiny' if args.tiny else 'results'}-{processes}.json"
        found = read(kept)
        due = [check for check in CHECKS if check.name in (args.check or [check.name for check in CHECKS])]
        due = [check for check in due if args.again or check.name not in found]
        seconds = {check.name: TINY_SECONDS if args.tiny else check.seconds for check in due}
        seconds |= {check.name: 0 for check in due if processes < check.least}
        print(f"{time.strftime('%Y-%m-%d')}, {card}; launches of {processes}\n{plan(due, seconds, args.minutes)}")
        for check in due:
            if time.monotonic() + seconds[check.name] > until:
                print(f"{check.name}: no time left for it (about {seconds[check.name]} s)", flush=True)
                continue
            print(f"{check.name}: {check.claim} ...", flush=True)
            began = time.monotonic()
            holds, measured = check.try_on(machine)
            found[check.name] = {
                "holds": holds,
                "measured": measured,
                "seconds": time.monotonic() - began,
                "card": card,
                "processes": processes,
            }
            write(kept, found)
            print(f"{check.name}: {holds} · {measured}", flush=True)
            if holds == "NO":
                archive = args.state / f"failed-{kept.stem}-{check.name.replace(' ', '-')}.tar.gz"
                keep_failed(machine, archive)
                print(f"{check.name}: what its runs printed is in {archive}", flush=True)
    print(f"\n{table(found)}")
    sys.exit(os.EX_OK if all(result["holds"] != "NO" for result in found.values()) else 1)


if __name__ == "__main__":
    # so that launches are ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM; the same command goes on"))
    main()
