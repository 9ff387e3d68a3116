"""Several machines, on loopback: what docs/multinode.md promises besides the one curve of test_laws.py."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sysconfig
from pathlib import Path

import psutil
import pytest
from places import CONFIGS
from stopping import JOB, STEPS, ranks, steps_done, wait_for, whole

SCRIPTS = Path(sysconfig.get_path("scripts"))
with socket.create_server(("127.0.0.1", 0)) as free:
    PORT = str(free.getsockname()[1])
MACHINES = {
    "accelerate launch": (
        *("accelerate-launch", "--config_file", str(CONFIGS / "multinode_z3.yaml"), "--mixed_precision", "no"),
        *("--main_process_ip", "127.0.0.1", "--main_process_port", PORT, "--machine_rank", "{rank}"),
        *("--max_restarts", "1"),
    ),
    "torchrun": (
        *("torchrun", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_id", "sums"),
        *("--rdzv_endpoint", f"127.0.0.1:{PORT}", "--local_addr", "127.0.0.1", "--max_restarts", "1"),
    ),
}


@contextlib.contextmanager
def machines(launcher, run_dir):
    """Two launchers, each of which is a machine with one rank; killed in the end with all that they started."""
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if launcher == "torchrun" else None
    launches = []
    for rank in ("0", "1"):
        program, *flags = (word.format(rank=rank) for word in MACHINES[launcher])
        command = [str(SCRIPTS / program), *flags, "-m", "accel_sft", *JOB, "--output-dir", str(run_dir)]
        with open(f"{run_dir}-{rank}.log", "wb") as log:
            launches.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        launches[-1].family = []
    try:
        yield launches
    finally:
        for launch in launches:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in [*launch.family, *psutil.Process(launch.pid).children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            launch.kill()
            launch.wait()


# test_stopping.py has a rank that is started again on one machine
@pytest.mark.parametrize("launcher", [pytest.param(name, marks=pytest.mark.long) for name in MACHINES])
def test_two_machines_of_which_one_lost_its_rank_start_again_and_go_on(launcher, launched, tmp_path):
    run_dir = tmp_path / "run"
    with machines(launcher, run_dir) as both:
        wait_for(lambda: steps_done(run_dir) >= 18)
        ranks(both[1])[0].kill()
        ends = [launch.wait(240) for launch in both]
    said = (tmp_path / "run-0.log").read_text()
    assert ends == [0, 0], said + (tmp_path / "run-1.log").read_text()
    assert "resumed" in said
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    expected = [line["loss"] for line in whole(launched, "plain").lines()]
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, rel=2e-4)
