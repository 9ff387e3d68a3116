"""Every command of the tutorial, in order, in a fresh environment without a network."""

import os
import re
import shutil
import subprocess
import sysconfig
import venv

import pytest
from places import ROOT

PAGE = ROOT / "docs/tutorial.md"


def fresh_environment(folder):
    """A virtual environment whose libraries are this one's; what is installed goes into it."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (site / "libraries.pth").write_text("\n".join(dict.fromkeys(here)) + "\n")
    offline = dict.fromkeys(("PIP_NO_INDEX", "PIP_DISABLE_PIP_VERSION_CHECK", "PIP_NO_COMPILE"), "1")
    offline["PIP_NO_BUILD_ISOLATION"] = "0"  # pip reads it so: without isolation
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**env, **offline, "PATH": path, "VIRTUAL_ENV": str(folder)}


@pytest.mark.long
def test_commands_of_the_tutorial_run(tmp_path):
    commands = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(commands) == 6
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    shutil.copytree(ROOT / "accel_sft", checkout / "accel_sft", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    env = fresh_environment(tmp_path / "environment")
    printed = []
    for command in commands:
        done = subprocess.run(["bash", "-euc", command], cwd=checkout, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        printed.append(done.stdout)
    assert "Successfully installed accel-sft-evenness-0.1.0" in printed[2]
    assert re.search(r"\b8 passed|\b9 passed", printed[3])
    assert (checkout / "runs/evenness/report.md").is_file()
    assert (checkout / "runs/evenness/final/model.safetensors").is_file()
