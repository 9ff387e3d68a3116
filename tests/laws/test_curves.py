"""Law 1 on real launches: one curve for every layout (test_layouts.py has all of them)."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from conftest import accel_sft, finished
from reference_job import CUTS_WEIGHTS, FP32, JOB, LAYOUTS, ONCE, layout, own_task, same_curve

MARKS = {
    "tp": CUTS_WEIGHTS,
    # tests/laws/test_layouts.py checks their curves too
    "ddp": pytest.mark.long,
    "z2_offload": pytest.mark.long,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in LAYOUTS if name != "plain"])
def test_every_layout_draws_the_same_curve(launched, name):
    same_curve(layout(launched, "plain").lines(), layout(launched, name).lines())


PIECES = """
import accel_sft.batching.loss
accel_sft.batching.loss.MOST_LOGITS = 2000  # which its small vocabulary exceeds
"""


def test_head_in_pieces_draws_the_same_curve(launched, tmp_path):
    arguments = (own_task(tmp_path, PIECES), *JOB[1:], *ONCE, "--batching", "shared")
    run = launched("in pieces", *arguments, yaml="z3", launcher=FP32)
    assert json.loads((run.run_dir / "result.json").read_text())["batching"]["head"] == "pieces"
    same_curve(layout(launched, "plain").lines(), run.lines())


def test_two_machines_draw_the_same_curve(launched, tmp_path):
    with socket.socket() as free:  # one that both launchers name
        free.bind(("127.0.0.1", 0))
        place = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free.getsockname()[1]))
    alone = layout(launched, "plain")

    def machine(rank):
        flags = ("--machine_rank", str(rank), "--num_processes", "2", *place, *FP32)
        return accel_sft(*JOB, *ONCE, yaml="multinode_z3", launcher=flags, run_dir=tmp_path / "run")

    with ThreadPoolExecutor() as pool:
        other = pool.submit(machine, 1)
        time.sleep(1)  # starting a process by fork changes this one's environment for a moment
        first, second = machine(0), other.result()
    assert (first.status, second.status) == (0, 0), first.output + second.output
    assert "on 2 machines" in first.output
    same_curve(alone.lines(), first.lines())


# exchange and backward overlap by default on GPUs alone
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=pytest.mark.long) for stage in (2, 3)])
def test_overlapping_deepspeed_draws_the_same_curve(launched, tmp_path, stage):
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    zero |= {"reduce_bucket_size": 2 * 10**8, "stage3_gather_16bit_weights_on_model_save": stage == 3}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": False}}))
    content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_machines": 1}
    content |= {"num_processes": 2, "deepspeed_config": {"deepspeed_config_file": str(tmp_path / "ds.json")}}
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(content))
    options = LAYOUTS[f"z{stage}"]
    plain = launched(f"z{stage} without overlap", *JOB, *ONCE, "--micro-batch-size", "2", **options)
    job = (*JOB, *ONCE, "--micro-batch-size", "2")
    overlapping = finished(*job, run_dir=tmp_path / "run", yaml=str(tmp_path / "launch"))
    written = json.loads((tmp_path / "run/run.json").read_text())["launch"]["deepspeed_config"]
    assert written["zero_optimization"]["overlap_comm"] is True
    same_curve(plain.lines(), overlapping.lines())


@pytest.mark.nvme
@pytest.mark.timeout(1500)
def test_states_on_disk_draw_the_same_curve(launched, tmp_path):
    folder = str(tmp_path / "disk")
    disk = ("--offload_param_nvme_path", folder, "--offload_optimizer_nvme_path", folder)
    run = launched("z3_nvme", *JOB, *ONCE, yaml="z3_nvme", launcher=(*FP32, *disk))
    same_curve(layout(launched, "plain").lines(), run.lines())
    assert not list((tmp_path / "disk").glob("*-*")), "swap files were left behind"
