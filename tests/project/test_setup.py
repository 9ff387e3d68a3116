"""setup.sh asks pip for the torch that fits the machine, and for what training needs or, with --test, tests too.

What .ci/run takes for the lowest and newest versions is what pyproject.toml says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from places import ROOT

PYTHON = f"""#!/bin/sh
# makes no environment and installs nothing: it writes down what it was asked for
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"-m pip --version") ;;
    *"-m pip "*) echo "$DS_BUILD_OPS $DS_IGNORE_CUDA_DETECTION $*" >>"$ASKED"
        case "$*" in
            *" wheel "*) [ -z "$SLOW" ] || exec sleep 300 ;;
            *"$REFUSED"*) [ -z "$REFUSED" ] || exit 1 ;;
        esac ;;
    *"-m compileall "* | *"import torch._dynamo"* | *"import deepspeed"* | *"import accel_sft.cli"*)
        echo "bytecode$PYTHONDONTWRITEBYTECODE $*" >>"$ASKED" ;;
    *_base_executable*) echo "$0" ;;
    *importlib.metadata*) [ -n "$TORCH" ] && echo "$TORCH" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
NVIDIA = """#!/bin/sh
case "$*" in
    -L) echo "GPU 0: NVIDIA H100" ;;
    *driver_version*) echo "DRIVER"; echo "DRIVER" ;;
    *compute_cap*) echo "CAPABILITY" ;;
esac
"""
KERNEL_MODULE = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (dvs-builder@U22)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
USUAL, CPU, OLDER = "torch==2.13.0", "torch==2.13.0+cpu", "torch==2.13.0+cu126"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Checkout:
    """A copy of what setup.sh reads, on a machine with this NVIDIA driver (None: no nvidia-smi)."""

    def __init__(self, folder: Path, driver: str | None = None, capability: str = "9.0", module: str = "") -> None:
        self.folder, self.asked = folder, folder / "asked"
        version_file = folder / "nvidia-version"
        if module:
            version_file.write_text(module)
        text = (ROOT / "setup.sh").read_text()
        assert "\nNVIDIA=/proc/driver/nvidia/version\n" in text
        program(folder / "setup.sh", text.replace("NVIDIA=/proc/driver/nvidia/version", f"NVIDIA={version_file}"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        shutil.copytree(ROOT / "tasks", folder / "tasks")
        program(folder / "bin" / "python", PYTHON)
        gpu = NVIDIA.replace("DRIVER", driver or "").replace("CAPABILITY", capability)
        program(folder / "bin" / "nvidia-smi", gpu if driver is not None else "#!/bin/sh\nexit 1\n")

    def setup(self, *arguments: str, status: int = 0, **variables: str) -> tuple[list[str], str]:
        """Run setup.sh; returns what it asked pip for and compiled since then, line by line, and its output."""
        self.asked.write_text("")
        environment = {name: value for name, value in os.environ.items() if name != "DEVICE"}
        environment |= {"PYTHON": str(self.folder / "bin" / "python"), "ASKED": str(self.asked), **variables}
        environment |= {"PATH": f"{self.folder / 'bin'}:{environment['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
        command = ["bash", self.folder / "setup.sh", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == status, done.stdout + done.stderr
        return self.asked.read_text().splitlines(), done.stdout + done.stderr

    def torch(self, **variables: str) -> list[str]:
        """Which torch setup.sh installs, after `uninstall` if it removes one."""
        lines = [line for line in self.setup(**variables)[0] if "-m pip " in line and " torch" in line]
        return [line.split()[-1] if " install " in line else "uninstall" for line in lines]


@pytest.mark.parametrize(
    ("driver", "capability", "device", "present", "torch"),
    [
        (None, "", "", "", [CPU]),
        ("580.65.06", "9.0", "", "", [USUAL]),
        ("570.124.06", "9.0", "", "", [OLDER]),
        ("580.65.06", "7.0", "", "", [OLDER]),  # CUDA 13 has no kernels for Volta
        ("no answer", "no answer", "", "", [USUAL]),
        # for another machine
        (None, "", "gpu", "", [USUAL]),
        (None, "", "cu126", "", [OLDER]),
        ("580.65.06", "9.0", "cpu", "", [CPU]),
        # one of another kind is replaced
        ("580.65.06", "9.0", "", "2.13.0+cpu", ["uninstall", USUAL]),
        ("580.65.06", "9.0", "", "2.13.0", []),
        ("580.65.06", "9.0", "", "2.6.0+cu124", []),
        ("580.65.06", "7.0", "", "2.13.0", ["uninstall", OLDER]),
        ("580.65.06", "12.0", "", "2.13.0+cu126", ["uninstall", USUAL]),
        (None, "", "", "2.13.0", []),  # it has kernels for CPUs as well
        (None, "", "cpu", "2.13.0", ["uninstall", CPU]),
    ],
)
def test_torch_is_the_build_for_driver_and_gpu(tmp_path, driver, capability, device, present, torch):
    assert Checkout(tmp_path, driver, capability).torch(DEVICE=device, TORCH=present) == torch


def test_driver_is_read_from_the_kernel_module_too(tmp_path):
    assert Checkout(tmp_path, module=KERNEL_MODULE).torch() == [OLDER]


def test_gpu_newer_than_its_driver_supports_is_refused(tmp_path):
    lines, output = Checkout(tmp_path, "570.124.06", "12.0").setup(status=1)
    assert lines == []
    assert "the NVIDIA driver is 570; torch 2.13.0 needs 580 for this GPU: update it" in output


def test_training_comes_without_what_only_tests_need(tmp_path):
    lines, _ = Checkout(tmp_path).setup()
    *_, packages = (line for line in lines if " install " in line)
    assert packages.endswith(" -e . -e tasks/chat -e tasks/math -e tasks/ner")
    assert "--no-build-isolation" in packages
    assert not any("compileall" in line for line in lines)
    assert len([line for line in lines if line.startswith("bytecode ")]) == 3, "bytecode of torch, then of the rest"
    assert all("--no-compile" in line for line in lines if " install " in line)
    assert all(line.startswith("0 1 ") for line in lines if "-m pip " in line), (
        "DeepSpeed would look for a CUDA toolkit"
    )
    (wheel,) = (line for line in lines if " wheel " in line)
    assert wheel.endswith("; sys_platform == 'linux'")


def test_test_option_adds_the_rest_and_it_stays(tmp_path):
    checkout = Checkout(tmp_path)
    checkout.setup()
    assert checkout.setup(TORCH="2.13.0+cpu")[0] == []
    lines, _ = checkout.setup("--test", TORCH="2.13.0+cpu")
    assert any(" -e .[test] -e tasks/chat " in line for line in lines)
    assert any("compileall -qq -j 0 " in line for line in lines)
    assert checkout.setup(TORCH="2.13.0+cpu")[0] == []
    (tmp_path / "pyproject.toml").open("a").write("\n")
    assert any(" -e .[test] " in line for line in checkout.setup(TORCH="2.13.0+cpu")[0])


def test_failed_installation_leaves_no_job_behind(tmp_path):
    lines, output = Checkout(tmp_path).setup(status=1, REFUSED="torch==", SLOW="yes")  # it waits for the jobs' output
    assert "torch could not be installed; see pip's message above" in output
    assert not any("-e ." in line for line in lines)


def test_only_an_empty_environment_of_someone_else_is_used(tmp_path):
    checkout = Checkout(tmp_path)
    (tmp_path / ".venv").mkdir()  # of a set-up that was ended at once
    assert any(" -e . " in line for line in checkout.setup()[0])
    shutil.rmtree(tmp_path / ".venv")
    (tmp_path / ".venv" / "lib").mkdir(parents=True)
    assert "is not one that setup.sh made" in checkout.setup(status=1)[1]
    assert (tmp_path / ".venv" / "lib").exists()


def test_unknown_option_and_device_are_refused(tmp_path):
    checkout = Checkout(tmp_path)
    assert "--tests: there is one option, --test" in checkout.setup("--tests", status=1)[1]
    assert "DEVICE=tpu: gpu, cpu or a build of torch, such as cu126" in checkout.setup(status=1, DEVICE="tpu")[1]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]


def dependencies(which):
    script = str(ROOT / ".ci" / "dependencies.py")
    return subprocess.check_output([sys.executable, script, which], text=True).splitlines()


def test_lowest_tested_versions_are_the_lower_bounds():
    lowest = dict(line.split("==") for line in dependencies("lowest"))
    assert dependencies("newest") == list(lowest) == [dependency.name for dependency in DEPENDENCIES]
    for dependency in DEPENDENCIES:
        assert dependency.specifier.contains(lowest[dependency.name])
        below = [bound for bound in dependency.specifier if bound.operator == ">="]
        assert [Version(bound.version) for bound in below] == [Version(lowest[dependency.name])]


def test_libraries_used_beyond_their_promises_are_bounded_above():
    bounded = {each.name for each in DEPENDENCIES if any(bound.operator == "<" for bound in each.specifier)}
    as_transformers_bounds_it = {"huggingface-hub"}
    assert bounded == {"accelerate", "deepspeed", "peft", "transformers"} | as_transformers_bounds_it
    for dependency in DEPENDENCIES:
        assert dependency.specifier.contains(version(dependency.name), prereleases=True), "not what is tested here"
