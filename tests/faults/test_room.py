"""What a run will need of disk and host memory is held against what there is before it begins."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from accel_sft import UserError
from accel_sft.checkpoint import background
from accel_sft.io.run_dir import RunDir
from accel_sft.launch import host_memory

GIB = 2**30


def test_a_checkpoint_without_room_is_not_begun(tmp_path, monkeypatch):
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1024, 1024)
    background.check_disk(accelerator, model, RunDir(tmp_path))
    size = 1024 * 1025 * 12  # of weights and AdamW's moments
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(size + 1024 * 1025 * 4) * 4 // 3 - 1))
    with pytest.raises(UserError, match=r"checkpoints need 1 x 16\.0 MiB"):
        background.check_disk(accelerator, model, RunDir(tmp_path), averaged=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size * 4 // 3))
    background.check_disk(accelerator, model, RunDir(tmp_path))
    with pytest.raises(UserError, match=r"checkpoints need 3 x 12\.0 MiB, .* --keep-checkpoints"):
        background.check_disk(accelerator, model, RunDir(tmp_path), checkpoints=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size * 4 // 3 - 1))
    with pytest.raises(UserError, match=r"1 x 12.0 MiB, and other files 4.0 MiB, but only 16.0 MiB are free. Delete"):
        background.check_disk(accelerator, model, RunDir(tmp_path))


@pytest.fixture
def free(tmp_path, monkeypatch):
    """`free(lines, files)`: the free bytes of a machine with these control groups, as the kernel writes them."""
    monkeypatch.setattr(host_memory, "SYSTEM", tmp_path)

    def free_bytes(lines, files):
        meminfo = f"MemTotal:       {64 * 2**20} kB\nMemFree: 1 kB\n"
        own = {"proc/meminfo": meminfo, "proc/self/cgroup": "".join(f"{line}\n" for line in lines)}
        for name, content in {**own, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        return host_memory.free_bytes()

    return free_bytes


def test_container_limit_counts_without_reclaimable_memory(free):
    files = {
        "memory.max": "max\n",
        "memory.current": f"{9 * GIB}\n",
        "job/memory.max": f"{GIB}\n",
        "job/memory.current": f"{GIB // 2}\n",
        "job/memory.stat": f"anon 1\ninactive_file {GIB // 8}\nactive_file {GIB // 8}\n",
        "job/memory.events": "low 0\noom 1\noom_kill 3\n",
        "job/step/memory.max": f"{2 * GIB}\n",
        "job/step/memory.current": f"{GIB // 2}\n",
        "job/step/memory.events": "oom_kill 2\n",  # which the count of its parent includes
    }
    assert free(["0::/job/step"], files) == GIB // 2 + GIB // 4
    assert "0.2 of the container's 1.0 GiB used" in host_memory.describe()
    assert host_memory.describe().endswith("GiB used, processes OOM-killed so far: 3")


@pytest.mark.parametrize(("limit", "limited"), [(GIB, True), (2**63 - 4096, False)])
def test_control_groups_v1_limit_counts_at_its_root(free, limit, limited):
    files = {"limit_in_bytes": f"{limit}\n", "usage_in_bytes": f"{GIB // 4}\n", "stat": "total_inactive_file 0\n"}
    files = {f"memory/memory.{name}": text for name, text in files.items()}
    free_bytes = free(["5:cpu:/", "4:memory:/docker/0a1b", "0::/"], files)
    assert free_bytes == GIB - GIB // 4 if limited else free_bytes > GIB
