"""Systems that are not Linux: Windows is refused in a line, macOS trains in one process without DeepSpeed."""

import sys

import pytest
from fake_plugins import accel_sft
from places import CONFIGS

from accel_sft.api.config import TrainConfig
from accel_sft.launch.audit import audit
from accel_sft.launch.info import launch_of_yaml


def without(folder, *modules, platform=sys.platform):
    """A folder on the path of a Python that says to run on another system, and has not these modules."""
    lines = [f"sys.modules[{name!r}] = None" for name in modules]
    (folder / "sitecustomize.py").write_text("\n".join(["import sys", f"sys.platform = {platform!r}", *lines]))
    return folder


@pytest.mark.parametrize("arguments", ["--help", "math --max-steps 2", "tasks"])
def test_windows_is_refused_in_a_line_that_names_wsl(tmp_path, arguments):
    site = without(tmp_path, "fcntl", "resource", "termios", platform="win32")
    result = accel_sft(*arguments.split(), site=site)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: accel_sft runs on Linux")
    assert "WSL" in line


@pytest.mark.parametrize(("file", "kind"), [("z2", "DeepSpeed"), ("z3_offload", "DeepSpeed"), ("fsdp2", "FSDP")])
def test_what_macos_has_not_is_told_in_a_line(monkeypatch, file, kind):
    launch = launch_of_yaml(CONFIGS / f"{file}.yaml")
    monkeypatch.setattr(sys, "platform", "darwin")
    (finding,) = audit(TrainConfig(), launch, devices=0)
    assert finding.level == "error"
    assert f"{kind} does not run on macOS: start it without accelerate launch" in str(finding)


def test_one_process_trains_without_deepspeed(tmp_path):
    (tmp_path / "site").mkdir()
    site = without(tmp_path / "site", "deepspeed")
    job = ("math", "--max-steps", "2", "--train-examples", "60", "--eval-limit", "8")
    result = accel_sft(*job, "--output-dir", str(tmp_path / "run"), site=site)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
