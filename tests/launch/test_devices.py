"""A launch file for two processes trains on as many as the machine has GPUs; the count of GPUs is planted."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest
from conftest import finished
from places import CONFIGS, SUPPORT
from reference_job import FP32, JOB, ONCE, layout, same_curve

from accel_sft.api.config import TrainConfig
from accel_sft.launch import environment, start
from accel_sft.launch.audit import audit
from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.machine_state import nvidia_gpus
from accel_sft.launch.parallelism import fitted
from accel_sft.tools.compare.settings import product


def planted(gpus, **more):
    environment = {"PLANTED_GPUS": f"{gpus}", "PYTHONPATH": str(SUPPORT)}
    return {"module": "planted_gpus", "environment": environment, **more}


def one_line(run):
    return " ".join(run.output.split())


@pytest.mark.parametrize("file", ["z2", pytest.param("z3", marks=pytest.mark.long)])
def test_file_for_two_processes_trains_on_one_gpu(launched, tmp_path, file):
    run = finished(*JOB, *ONCE, **planted(1, yaml=file, launcher=FP32, run_dir=tmp_path / "run"))
    same_curve(layout(launched, "plain").lines(), run.lines())
    assert f"{file}.yaml: 2 processes requested, but this machine has 1 GPU" in one_line(run)
    record = json.loads((tmp_path / "run/run.json").read_text())["launch"]
    assert record["processes"] == 1
    assert record["threads_per_process"] == environment.usable_cores()
    finished("evaluate", "math", "--model", str(tmp_path / "run"), **planted(1, yaml=file, launcher=FP32))


def read(file, *flags):
    return launch_of_yaml(CONFIGS / f"{file}.yaml", *flags)


@pytest.mark.parametrize(
    ("file", "flags", "devices", "ranks"),
    [
        ("z2", (), 1, 1),
        ("z2", (), 0, 2),
        ("fsdp2", (), 1, 1),
        ("z2", ("--num_processes", "4"), 3, 4),  # asked for by name
        ("hsdp", (), 2, 4),
        ("multinode_z3", ("--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--num_processes", "4"), 1, 4),
    ],
)
def test_ranks_fitted_to_devices(file, flags, devices, ranks):
    assert fitted(read(file, *flags), devices).world_size == ranks


@pytest.mark.parametrize(
    ("file", "devices", "note"),
    [
        ("hsdp", 2, "accelerate_configs/fsdp2.yaml, which runs on 2 GPUs"),
        ("tp", 4, "2 of this machine's 4 GPUs are used: to use more, add --num_processes 4 --parallelism_config_tp"),
        ("hsdp", 9, "4 of this machine's 9 GPUs are used: to use more, add --num_processes 8"),
        ("ddp", 2, ""),
    ],
)
def test_unused_gpus_are_counted_in_groups(file, devices, note, monkeypatch):
    monkeypatch.setattr("accel_sft.launch.audit.audit_compilers", lambda needed, devices: [])
    lines = [str(finding) for finding in audit(TrainConfig(), read(file), devices)]
    assert [note in line for line in lines] == [True] * bool(note), lines


@pytest.mark.parametrize(
    ("named", "left"),
    [(None, "abc"), ("", ""), ("-1", ""), ("2,0", "ca"), ("7", ""), ("GPU-1f0e,GPU-77aa", "ab")],
)
def test_tools_count_the_gpus_that_a_launch_would_see(named, left, monkeypatch):
    memory = SimpleNamespace(total=2**30)
    answers = {"SystemGetDriverVersion": "580.1", "DeviceGetCount": 3, "DeviceGetMemoryInfo": memory}
    for name, answer in {"Init": None, "Shutdown": None, **answers}.items():
        monkeypatch.setattr(f"pynvml.nvml{name}", lambda *_, answer=answer: answer)
    monkeypatch.setattr("pynvml.nvmlDeviceGetHandleByIndex", "abc".__getitem__)
    monkeypatch.setattr("pynvml.nvmlDeviceGetName", str)
    monkeypatch.setattr("pynvml.nvmlDeviceGetCudaComputeCapability", lambda _: (9, 0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert "".join(gpu["name"] for gpu in nvidia_gpus()[1]) == left
    for typed in ([], ["2"]):
        (setting,), _ = product("math", {"z2": CONFIGS / "z2.yaml"}, typed, [], {}, [])
        assert setting.launch["processes"] == (1 if len(left) == 1 and not typed else 2)


def test_rank_beyond_the_devices_ends_before_it_forms_a_group(monkeypatch):
    monkeypatch.setattr(start, "device_count", lambda: 1)
    launch = read("z2")
    for rank, ending in (("1", SystemExit), ("0", None)):
        variables = launch.environment | {"LOCAL_RANK": rank, "RANK": rank}
        monkeypatch.setattr(os, "environ", variables | {"OMP_NUM_THREADS": "1"})
        monkeypatch.setattr(start, "launch_of_this_process", lambda: launch)
        environment.share_cores()
        if ending:
            with pytest.raises(SystemExit) as left:
                start.begin()
            assert not left.value.code
            assert os.environ["WORLD_SIZE"] == "2"
        else:
            assert start.begin().world_size == 1
            assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "1"
            assert os.environ["OMP_NUM_THREADS"] == str(environment.usable_cores())
    assert "torch.distributed" not in sys.modules or not sys.modules["torch.distributed"].is_initialized()
