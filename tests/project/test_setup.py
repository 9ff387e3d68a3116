"""setup.sh asks pip for the torch that fits the machine, and for nothing that would need a CUDA toolkit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

PYTHON = f"""#!/bin/sh
# makes no environment and installs nothing: it writes down what it was asked for
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip --version") ;;
    "-m pip "*) echo "$DS_BUILD_OPS $DS_IGNORE_CUDA_DETECTION $*" >>"$ASKED" ;;
    *"-m compileall "*) echo "$*" >>"$ASKED"; exit 1 ;;
    *_base_executable*) echo "$0" ;;
    *importlib.metadata*) exit 1 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
NVIDIA = """#!/bin/sh
case "$*" in
    -L) echo "GPU 0: NVIDIA H100" ;;
    *driver_version*) echo "DRIVER"; echo "DRIVER" ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def asked(folder: Path, driver: str | None) -> list[str]:
    """What setup.sh would install on a machine with this NVIDIA driver (None: no GPU), and compile, line by line."""
    shutil.copy(ROOT / "setup.sh", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "tasks", folder / "tasks")
    program(folder / "bin" / "python", PYTHON)
    if driver is not None:
        program(folder / "bin" / "nvidia-smi", NVIDIA.replace("DRIVER", driver))
    environment = os.environ | {"PYTHON": str(folder / "bin" / "python"), "ASKED": str(folder / "asked")}
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    done = subprocess.run(["bash", folder / "setup.sh"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "asked").read_text().splitlines()


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="for a machine without a GPU")
@pytest.mark.parametrize(
    ("driver", "torch"),
    [
        (None, "torch==2.13.0+cpu"),
        ("580.65.06", "torch==2.13.0"),
        ("595.10", "torch==2.13.0"),
        ("570.124.06", "torch==2.13.0+cu126"),
        ("no answer", "torch==2.13.0"),
    ],
)
def test_torch_is_the_build_for_the_machine_and_its_driver(tmp_path, driver, torch):
    first, then, compiled = asked(tmp_path, driver)
    assert first.split()[-1] == torch
    assert "-e tasks/chat -e tasks/math -e tasks/ner" in then
    assert first.startswith("0 1 "), "DeepSpeed would look for a CUDA toolkit"
    assert "--no-compile" in first
    assert "--no-compile" in then
    assert compiled.endswith(f"compileall -qq -j 0 {tmp_path / '.venv' / 'lib'}")
