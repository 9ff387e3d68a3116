"""Several machines, on loopback: what docs/multinode.md promises besides the one curve of tests/laws."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest
import scripts
import torch
from launches import background
from places import CONFIGS, ROOT
from stopping import JOB, STEPS, whole

from accel_sft.launch.start import differing_versions
from accel_sft.resilience import exit, peers

LONG = pytest.mark.long
DOCS = ROOT / "docs"
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
    """Two launchers, each of which is a machine with one rank."""
    environment = {**os.environ, **({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if launcher == "torchrun" else {})}
    with contextlib.ExitStack() as stack:
        launches = []
        for rank in ("0", "1"):
            script, *words = (word.format(rank=rank) for word in MACHINES[launcher])
            command = [str(SCRIPTS / script), *words, "-m", "accel_sft", *JOB, "--output-dir", str(run_dir)]
            log = run_dir.with_name(f"run-{rank}.log")
            launches.append(stack.enter_context(background(command, run_dir, log, environment)))
        yield launches


MACHINES_OF_ONE_RANK = """
import torch

for rank in ("1", "2"):
    if os.fork() == 0:
        os.environ["RANK"] = rank
        break
rank, run_dir = os.environ["RANK"], RunDir(Path(sys.argv[1]))
socket.gethostname = lambda: "machine-" + rank
os.environ["TORCHELASTIC_ERROR_FILE"] = str(run_dir.path / f"machine-{rank}" / "0" / "error.json")
Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.mkdir(parents=True)
peers.POLL_SECONDS = peers.EXPLAIN_SECONDS = watchdog.FAILED_SECONDS = 0.1
with exit.ExitHandler(), watchdog.Watchdog(0, run_dir):
    while len(peers.joined()._lines) < (2 if rank == "0" else 1):
        time.sleep(0.05)
    if rank == "0":
        run_dir.write_result({"status": "running"})
        wait_in_c()
    time.sleep(0.2)
    if rank == "1":
        sys.exit(0)
    time.sleep(2.5)  # longer than it would take rank 0 to end because of rank 1
    ENDS
"""


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ("os.kill(os.getpid(), 9)", "ended without an error message, or its machine was lost"),
        pytest.param("raise UserError('out of memory')", "out of memory; continue with", marks=LONG),
    ],
)
def test_rank_in_c_names_the_failed_rank_of_another_machine(tmp_path, ends, message):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}
    (tmp_path / "logs").mkdir()
    program = MACHINES_OF_ONE_RANK.replace("ENDS", ends)
    done = scripts.run(program, tmp_path, **world, RANK="0", LOCAL_RANK="0")
    assert done.returncode == 1
    assert f"Error: rank 2 on machine-2: {message}" in done.stdout
    assert f"rank 2 on machine-2: {message}" in json.loads((tmp_path / "result.json").read_text())["error"]
    record = json.loads((tmp_path / "machine-0" / "0" / "error.json").read_text())
    assert record["message"]["message"].startswith(f"rank 2 on machine-2: {message}")  # for the launcher's summary


WITHOUT_A_STORE = """
import torch

if os.fork() == 0:
    os.environ["RANK"] = "1"
peers.POLL_SECONDS = peers.EXPLAIN_SECONDS = peers.SHARE_SECONDS = watchdog.FAILED_SECONDS = 0.1
with exit.ExitHandler(), watchdog.Watchdog(0):
    while not peers.joined()._lines:
        time.sleep(0.05)
    if os.environ["RANK"] == "0":
        time.sleep(0.3)
        os.kill(int(sys.argv[1]), signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_c()
"""
STORE = """
import sys, torch
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@LONG
def test_lost_machine_is_noticed_even_with_its_store(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as store:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.stdout.readline().strip()}
        world |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        try:  # until the last rank closes the output
            ended = scripts.run(WITHOUT_A_STORE, store.pid, **world)
        finally:
            store.kill()
    assert "Error: rank 0 on " in ended.stdout
    assert "ended without an error message, or its machine was lost" in ended.stdout


def test_a_rank_without_a_store_reports_its_own_error_alone(monkeypatch, capfd):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(peers, "_store", lambda: None)
    monkeypatch.setattr(peers, "_joined", peers.Peers())
    exit.report("Error: out of memory", "out of memory")
    assert capfd.readouterr().err == "[rank 1] Error: out of memory\n"


# test_stopping.py has a rank that is started again on one machine
@LONG
@pytest.mark.parametrize("launcher", MACHINES)
def test_two_machines_restart_after_one_lost_its_rank(launcher, launched, tmp_path):
    run_dir = tmp_path / "run"
    with machines(launcher, run_dir) as both:
        both[0].until_step(18)
        psutil.Process(both[1].process.pid).children()[0].kill()
        ends = [launch.process.wait() for launch in both]
    said = (tmp_path / "run-0.log").read_text()
    assert ends == [0, 0], said + (tmp_path / "run-1.log").read_text()
    assert "resumed" in said
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS
    assert losses == pytest.approx([line["loss"] for line in whole(launched, "plain").lines()], rel=2e-4)


def test_machines_that_differ_in_a_librarys_version_are_named():
    alike = {"python": "3.12.1", "torch": "2.13.0+cu130", "peft": "0.21.2"}
    other = {"python": "3.11.9", "torch": "2.13.0+cpu", "peft": "0.20.0"}
    (line,) = differing_versions([("a", alike), ("a", alike), ("b", other), ("c", {"torch": "2.13.0"}), ("d", alike)])
    assert line.level == "error"
    assert line.what == "peft: 0.21.2 on a, 0.20.0 on b, missing on c"
    assert not [*differing_versions([("a", alike), ("b", {**alike, "python": "3.11.9"})])]


SLURM = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (DOCS / "multinode.md").read_text(), re.S)[1]
SRUN = """#!/bin/bash
echo "$SRUN_CPUS_PER_TASK $TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > HERE/srun
echo "{\\"status\\": \\"${ENDED% *}\\"}" > HERE/run/result.json
exit ${ENDED#* }
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; echo 127.0.0.2; else echo "$@" > HERE/requeued; fi
"""


@pytest.mark.parametrize(("ended", "again"), [("interrupted 1", True), ("failed 1", False)])
def test_slurm_job_is_requeued_only_after_a_signal(tmp_path, ended, again):
    """The script of the documentation, started as sbatch would."""
    for name in ("bin", "run"):
        (tmp_path / name).mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text.replace("HERE", str(tmp_path)))
        (tmp_path / "bin" / name).chmod(0o755)
    script = SLURM.replace("/shared/runs/math", str(tmp_path / "run"))
    path = os.pathsep.join((str(tmp_path / "bin"), str(SCRIPTS), os.environ["PATH"]))
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "64"}
    environment = {**os.environ, **slurm, "PATH": path, "ENDED": ended}
    assert subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment).returncode == int(ended[-1])
    assert (tmp_path / "srun").read_text() == "64 540\n"
    assert (tmp_path / "requeued").exists() == again
