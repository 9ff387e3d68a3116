"""What pip installs from a wheel works far from the checkout, which an editable installation would not show."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = {"accel_sft": ROOT} | {f"accel_sft_{task}": ROOT / "tasks" / task for task in ("chat", "math", "ner")}
REPORTING = ROOT / "accel_sft" / "reporting"
LAUNCH_FILES = ROOT / "accelerate_configs"


def run(*command, **options) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> list[Path]:
    """The wheels of accel_sft and its tasks, built from copies: a build folder would stay in the checkout, and into the
    next wheel go the files that were deleted since."""
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    for name, folder in PROJECTS.items():
        (sources / name).mkdir()
        for path in (path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
            shutil.copy(path, sources / name)
        if (folder / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(folder / name, sources / name / name, symlinks=True, ignore=ignored)
    shutil.copytree(LAUNCH_FILES, sources / "accel_sft" / LAUNCH_FILES.name)  # a link inside the package leads here
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", built, *(sources / name for name in PROJECTS))
    return sorted(built.iterdir())


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory) -> Path:
    """The scripts of an environment in which the wheels are, and from this one all else, for torch takes minutes."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    paths = {name: sysconfig.get_path(name, "venv", {"base": str(folder)}) for name in ("scripts", "purelib")}
    # .pth files in a folder that a .pth file names are not read: what is installed editable here is not found there
    Path(paths["purelib"], "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (Path(paths["scripts"], "python"), "-m", "pip", "install", "-q", "--no-deps", "--no-index")
    run(*pip, "--ignore-installed", *wheels, env=outside(folder))
    return Path(paths["scripts"])


def outside(home: Path) -> dict[str, str]:
    """The environment of a user with this home, who has no checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ACCEL_SFT_", "HF_"))}
    return {**kept, "HOME": str(home), "COLUMNS": "100"}


def test_wheels_hold_every_module_and_data_file(wheels):
    held = {name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()}
    expected = {"accel_sft_math.py"}
    for name, folder in PROJECTS.items():
        files = [*(folder / name).rglob("*.py"), *(folder / name).rglob("*.yaml")]
        expected |= {path.relative_to(folder).as_posix() for path in files}
    expected.add("accel_sft/checking/page.html")
    for folder in ("page", "vega"):
        expected |= {f"accel_sft/reporting/{folder}/{path.name}" for path in (REPORTING / folder).iterdir()}
    expected |= {f"accel_sft/launch_files/{path.name}" for path in LAUNCH_FILES.iterdir()}
    assert expected - held == set()
    assert {name for name in held if ".dist-info/" not in name} - expected == set()


def test_an_installation_from_wheels_trains_in_an_empty_folder(installed, tmp_path):
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    user = {"cwd": work, "env": outside(home)}
    where = "import accel_sft, accel_sft_chat, accel_sft_ner as ner; "
    where += "print(accel_sft.__file__, accel_sft_chat.__file__, ner.__file__)"
    for path in run(installed / "python", "-c", where, **user).split():
        assert Path(path).is_relative_to(installed.parent)
    assert "Usage: accel-sft" in run(installed / "accel-sft", "--help", **user)
    tasks = run(installed / "accel-sft", "tasks", **user)
    assert all(name in tasks for name in ("chat", "math", "ner"))
    for path in LAUNCH_FILES.iterdir():
        assert run(installed / "accel-sft", "launch-file", path.stem, **user) == path.read_text(encoding="utf-8")
    run(installed / "accel-sft", "math", "--max-steps", "2", "--eval-every", "off", "--output-dir", "run", **user)
    assert (work / "run" / "final" / "model.safetensors").is_file()
