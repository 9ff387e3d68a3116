"""Changes to a finished run's folder, which `accel-sft verify` has to find, and what makes its records agree again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path

from safetensors.torch import load_file, save_file

from accel_sft.io import manifest
from accel_sft.io.run_dir import RunDir, step_of
from accel_sft.io.run_record import made_by, write_manifest
from accel_sft.tracking.metrics_file import chained


def lines_of(run: RunDir) -> list[str]:
    return run.metrics.read_text().splitlines(keepends=True)


def edit_lines(run: RunDir, change: Callable[[list[str]], None]) -> None:
    lines = lines_of(run)
    change(lines)
    run.metrics.write_text("".join(lines))


def edit_json(path: Path, **values) -> None:
    """Set values in a JSON file; a name's `__` goes into a mapping."""
    content = json.loads(path.read_text())
    for name, value in values.items():
        *outer, last = name.split("__")
        reduce(dict.__getitem__, outer, content)[last] = value
    path.write_text(json.dumps(content, indent=2) + "\n")


def edit_yaml(run: RunDir, name: str, value: object) -> None:
    lines = run.settings.read_text().splitlines()
    assert any(line.startswith(f"{name}: ") for line in lines), name
    run.settings.write_text("\n".join(f"{name}: {value}" if x.startswith(f"{name}: ") else x for x in lines) + "\n")


def edit_tensor(file: Path, kind: str = "") -> None:
    """Add a little to one number of the first tensor of this kind."""
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.startswith(kind))
    tensors[name].view(-1)[0] += 0.001
    save_file(tensors, file, {"format": "pt"})


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def edit_checkpoint(run: RunDir, step: int, kind: str) -> None:
    """Change a checkpoint and write its manifest anew."""
    folder = run.checkpoint(step)
    edit_tensor(next(path for path in manifest.paths(folder) if path.suffix == ".safetensors"), kind)
    manifest.write(folder, manifest.about(folder))


def drop_checkpoint(run: RunDir, step: int) -> None:
    shutil.rmtree(run.checkpoint(step))


def make_agree(run: RunDir) -> None:
    """Write every digest, chain and manifest of the folder anew, so that its records agree with what was changed."""
    maker = made_by(run.read_record())
    lines = [(json.loads(line)["step"], line.encode()) for line in lines_of(run)]
    saved = run.all_checkpoints()
    for at, folder in enumerate(saved):
        until = [line for step, line in lines if step <= step_of(folder)]
        before = {path.name: manifest.identity(path) for path in saved[:at]}
        evidence = {"chain": reduce(chained, until, ""), "made_by": maker, "before": before}
        manifest.write(folder, {**manifest.about(folder), **evidence})
    about = {"chain": reduce(chained, (line for _, line in lines), ""), "made_by": maker}
    write_manifest(run, run.result.read_text(), about)
