"""What a release holds, and that it works far from the checkout, which an editable installation would not show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from places import ROOT

import accel_sft

pytestmark = pytest.mark.long  # a release's checks
PROJECTS = {"accel_sft": ROOT} | {f"accel_sft_{task}": ROOT / "tasks" / task for task in ("chat", "math", "ner")}
REPORT = ROOT / "accel_sft" / "tools" / "report"
LAUNCH_FILES = ROOT / "accelerate_configs"


def run(*command, **options) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


BUILD_SDISTS = """
import os, sys
from setuptools import build_meta
built, *sources = sys.argv[1:]
for source in sources:
    os.chdir(source)
    build_meta.build_sdist(built)
"""


@pytest.fixture(scope="module")
def sdists(tmp_path_factory) -> list[Path]:
    """The source distributions of accel_sft and its tasks, built from copies: what a build leaves would stay in the
    checkout."""
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("sdists")
    for name, folder in PROJECTS.items():
        (sources / name).mkdir()
        for path in (path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
            shutil.copy(path, sources / name)
        if (folder / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(folder / name, sources / name / name, symlinks=True, ignore=ignored)
    shutil.copytree(LAUNCH_FILES, sources / "accel_sft" / LAUNCH_FILES.name)  # a link inside the package leads here
    run(sys.executable, "-c", BUILD_SDISTS, built, *(sources / name for name in PROJECTS))
    return sorted(built.iterdir())


@pytest.fixture(scope="module")
def wheels(sdists, tmp_path_factory) -> list[Path]:
    """The wheels, built from the source distributions as `python -m build` does."""
    built = tmp_path_factory.mktemp("wheels")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", built, *sdists)
    return sorted(built.iterdir())


def fresh_environment(folder: Path) -> Path:
    """The scripts of a virtual environment whose libraries are this one's, for torch takes minutes."""
    venv.create(folder, with_pip=False, symlinks=True)
    paths = {name: sysconfig.get_path(name, "venv", {"base": str(folder)}) for name in ("scripts", "purelib")}
    # .pth files in a folder that a .pth file names are not read: what is installed editable here is not found there
    Path(paths["purelib"], "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Path(paths["scripts"])


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory) -> Path:
    """The scripts of an environment in which the wheels are."""
    folder = tmp_path_factory.mktemp("environment")
    scripts = fresh_environment(folder)
    pip = (scripts / "python", "-m", "pip", "install", "-q", "--no-deps", "--no-index")
    run(*pip, "--ignore-installed", *wheels, env=outside(folder))
    return scripts


def outside(home: Path) -> dict[str, str]:
    """The environment of a user with this home, who has no checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ACCEL_SFT_", "HF_"))}
    return {**kept, "HOME": str(home), "COLUMNS": "100"}


def test_releases_hold_every_module_and_data_file_and_no_tests(sdists, wheels):
    assert [path.name for path in sdists] == [f"{name}-{accel_sft.__version__}.tar.gz" for name in PROJECTS]
    with tarfile.open(sdists[0]) as archive:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "accel_sft/launch_files/z2.yaml"} <= names
    assert {name.partition("/")[0] for name in names if "/" in name} == {"accel_sft", "accel_sft.egg-info"}
    assert [path.name for path in wheels] == [f"{name}-{accel_sft.__version__}-py3-none-any.whl" for name in PROJECTS]
    held = {name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()}
    expected = {"accel_sft_math.py"}
    for name, folder in PROJECTS.items():
        files = [*(folder / name).rglob("*.py"), *(folder / name).rglob("*.yaml"), *(folder / name).rglob("*.jinja")]
        expected |= {path.relative_to(folder).as_posix() for path in files}
    for folder in ("page", "vega"):
        expected |= {f"accel_sft/tools/report/{folder}/{path.name}" for path in (REPORT / folder).iterdir()}
    expected |= {f"accel_sft/launch_files/{path.name}" for path in LAUNCH_FILES.iterdir()}
    assert expected - held == set()
    assert {name for name in held if ".dist-info/" not in name} - expected == set()


def test_installed_wheels_train_with_their_own_launch_file(installed, tmp_path):
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    user = {"cwd": work, "env": outside(home)}
    where = "import accel_sft, accel_sft_chat; print(accel_sft.__file__, accel_sft_chat.__file__)"
    assert all(
        Path(path).is_relative_to(installed.parent) for path in run(installed / "python", "-c", where, **user).split()
    )
    assert "Usage: accel-sft" in run(installed / "accel-sft", "--help", **user)
    tasks = run(installed / "accel-sft", "tasks", **user)
    assert all(name in tasks for name in ("chat", "math", "ner"))
    for path in LAUNCH_FILES.iterdir():
        name = path.stem if path.suffix == ".yaml" else path.name
        assert run(installed / "accel-sft", "launch-file", name, **user) == path.read_text(encoding="utf-8")
    assert "Recommended" in run(installed / "accel-sft", "plan", "math", "--gpus", "2", "--gpu-memory", "24", **user)
    (work / "ddp.yaml").write_text(run(installed / "accel-sft", "launch-file", "ddp", **user))
    launch = (installed / "python", "-m", "accelerate.commands.launch", "--config_file", "ddp.yaml")
    short = ("--max-steps", "2", "--eval-every", "off", "--output-dir", "run")
    run(*launch, "--main_process_port", "0", "-m", "accel_sft", "math", *short, **user)
    assert (work / "run" / "final" / "model.safetensors").is_file()


def test_commands_of_the_tutorial_run(tmp_path):
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    commands = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(commands) == 6
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    shutil.copytree(ROOT / "accel_sft", checkout / "accel_sft", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    scripts = fresh_environment(tmp_path / "environment")
    offline = dict.fromkeys(("PIP_NO_INDEX", "PIP_DISABLE_PIP_VERSION_CHECK", "PIP_NO_COMPILE"), "1")
    offline["PIP_NO_BUILD_ISOLATION"] = "0"  # pip reads it so: without isolation
    path = os.pathsep.join((str(scripts), os.environ["PATH"]))
    env = {**outside(tmp_path), **offline, "PATH": path, "VIRTUAL_ENV": str(scripts.parent)}
    printed = [run("bash", "-euc", command, cwd=checkout, env=env) for command in commands]
    assert "Successfully installed accel-sft-evenness-0.1.0" in printed[2]
    assert re.search(r"\b8 passed|\b9 passed", printed[3])
    assert (checkout / "runs/evenness/report.md").is_file()
    assert (checkout / "runs/evenness/final/model.safetensors").is_file()
