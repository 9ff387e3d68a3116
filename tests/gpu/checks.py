"""What must hold on one GPU, checked in order by real launches: losses, layouts, memory, resuming, signals.

    bash tests/gpu/run [--minutes 10] [--check NAME ...] [--again] [--state FOLDER] [--tiny]

Each check is one or several `accelerate launch` of the README's own command. What a check found is written into the
state folder as soon as it is known: after one that was cut off, or had no minutes left, the same command goes on with
the next. A check begins only if its usual time is left. `--tiny` shrinks models and runs on a CPU too: that tries this
script, not the GPU. Exit status 0 if every check that has run holds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launches import ROOT, Failed, Machine
from suite import CHECKS

from accel_sft.io.files import write_atomically


def table(found: dict[str, dict]) -> str:
    """The checks in order as Markdown: whether each holds, what was measured, its seconds."""
    lines = ["| check | holds | measured | s |", "|---|---|---|---|"]
    for check in CHECKS:
        result = found.get(check.name, {"holds": "not run", "measured": check.claim, "seconds": 0})
        measured = " ".join(result["measured"].split()).replace("|", "/")
        lines.append(f"| {check.name} | {result['holds']} | {measured} | {result['seconds']:.0f} |")
    return "\n".join(lines)


def about(machine: Machine) -> str:
    """The card and the versions, asked in a process of its own: this one never holds memory on the card."""
    code = (
        "import torch, importlib.metadata as m\n"
        "name = torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'\n"
        "packages = 'torch transformers accelerate deepspeed peft'.split()\n"
        "print(name, *(f'{each} {m.version(each)}' for each in packages), sep=', ')"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=machine.environment)
    if said.returncode:
        raise SystemExit(
            f"this Python cannot run accel_sft:\n{said.stderr[-2000:]}\nname another in PYTHON, or wheels in WHEELS"
        )
    return said.stdout.splitlines()[-1]


def read(kept: Path) -> dict[str, dict]:
    """The results in a state file that can be written, those of checks that are still there; {} before there are any.

    Raises:
        SystemExit: it is broken, or its folder cannot be used.
    """
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        found = json.loads(kept.read_text()) if kept.exists() else {}
        found = {check.name: found[check.name] for check in CHECKS if "holds" in found.get(check.name, {})}
        write_atomically(kept, json.dumps(found, indent=1, ensure_ascii=False))
        return found
    except OSError as error:
        raise SystemExit(f"{kept}: cannot be kept there ({error.strerror}); name another folder with --state") from None
    except (ValueError, TypeError, AttributeError):
        raise SystemExit(f"{kept}: holds no results of these checks; remove it, or name another --state") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="No check begins that would not end within these.")
    parser.add_argument("--check", action="append", choices=[check.name for check in CHECKS], help="These only.")
    parser.add_argument("--again", action="store_true", help="Also those that have been run.")
    parser.add_argument("--state", type=Path, default=ROOT / "runs" / "gpu-checks", help="Where results are kept.")
    parser.add_argument("--tiny", action="store_true", help="Small enough for a CPU: to try this script.")
    args = parser.parse_args()

    until = time.monotonic() + 60 * args.minutes
    kept = args.state / ("tiny.json" if args.tiny else "results.json")
    found = read(kept)
    # on /tmp: runs hold copies of large models, and nobody wants them kept
    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as folder:
        machine = Machine(folder=Path(folder), tiny=args.tiny)
        card = about(machine)
        if "no GPU" in card and not args.tiny:
            raise SystemExit(f"{card}: no GPU is visible to torch; --tiny runs on a CPU")
        print(f"{time.strftime('%Y-%m-%d')}, {card}", flush=True)
        for check in CHECKS:
            if (args.check and check.name not in args.check) or (check.name in found and not args.again):
                continue
            if time.monotonic() + (10 if args.tiny else check.seconds) > until:
                print(f"{check.name}: no time left for it (usually {check.seconds} s)", flush=True)
                continue
            print(f"{check.name}: {check.claim} ...", flush=True)
            began = time.monotonic()
            try:
                holds, measured = "yes", check.run(machine)
            except Failed as failure:
                holds, measured = "NO", str(failure)
            except Exception as error:  # noqa: BLE001 - the other checks go on; what stopped this one is its result
                holds, measured = "NO", f"{type(error).__name__}: {error}"
            found[check.name] = {
                "holds": holds,
                "measured": measured,
                "seconds": time.monotonic() - began,
                "card": card,
            }
            write_atomically(kept, json.dumps(found, indent=1, ensure_ascii=False))
            print(f"{check.name}: {holds} · {measured}", flush=True)
    print(f"\n{table(found)}")
    sys.exit(os.EX_OK if all(result["holds"] == "yes" for result in found.values()) else 1)


if __name__ == "__main__":
    main()
