"""What survivors say of a rank that is gone, by how it ended."""

from __future__ import annotations

import json
import sys

import pytest
import scripts

from accel_sft.launch.collectives import gather_numbers
from accel_sft.resilience import ranks
from accel_sft.training.step import OutOfMemory, reduce_step

LAUNCHER = """
import subprocess

started = [
    subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": str(rank + 4), "LOCAL_RANK": str(rank)})
    for rank, code in enumerate(sys.argv[1:])
]
started[0].wait()  # whoever reaps the other takes away how it ended
"""
SURVIVOR = """
other = [p for p in psutil.Process().parent().children() if p.pid != psutil.Process().pid]
while any(p.status() != psutil.STATUS_ZOMBIE for p in other):
    time.sleep(0.02)
print(ranks.lost_ranks(Path("ATTEMPT")))
"""
GONE = "rank 5 ended without an error message (the launcher's summary may name a signal); host memory now: "
KILLED = "import os; os.kill(os.getpid(), 9)"

SIGNALLED = """
signals.UNHANDLED_SECONDS = 0.5
run_dir = RunDir(Path("ATTEMPT"))
run_dir.write_result({"status": "running"})
with exit.ExitHandler(), signals.StopSignals() as stopping:
    stopping.run_dir, stopping.deferred, stopping.to_continue = run_dir, "STATE" == "deferred", "the command"
    other = [p for p in psutil.Process().parent().children() if p.pid != psutil.Process().pid]
    while any(p.status() != psutil.STATUS_ZOMBIE for p in other):
        time.sleep(0.02)
    os.kill(os.getppid(), signal.SIGUSR1)
    wait_in_c()
"""
SIGNALLING = """
def tell(number, frame):
    started[1].wait()  # a launcher that misses a rank sends the others SIGTERM
    time.sleep(0.3)
    started[0].send_signal(signal.SIGTERM)

signal.signal(signal.SIGUSR1, tell)
"""
RECORDING = """
os.environ["TORCHELASTIC_ERROR_FILE"] = "ATTEMPT/1/error.json"
with exit.ExitHandler(): raise UserError("out of device memory")
"""


@pytest.mark.parametrize(
    ("state", "ends", "message"),
    [
        ("as it starts", KILLED, GONE),
        ("deferred", scripts.PREAMBLE + RECORDING, "another rank failed: out of device memory"),
    ],
)
def test_rank_in_c_names_its_lost_rank_on_sigterm(tmp_path, state, ends, message):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    survivor = scripts.PREAMBLE + SIGNALLED.replace("STATE", state)
    codes = [code.replace("ATTEMPT", str(tmp_path)) for code in (survivor, ends)]
    environment = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "one", "WORLD_SIZE": "2"}
    environment["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "0" / "error.json")
    done = scripts.run(SIGNALLING + LAUNCHER, *codes, **environment)
    assert done.stdout.startswith(f"Error: {message}"), done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["error"].startswith(message)
    assert result["error"].endswith("; to continue: the command") == (state == "as it starts")


def test_interrupted_rank_does_not_look_killed_to_others(tmp_path):
    (tmp_path / "0").mkdir()
    environment = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "0" / "error.json"), "WORLD_SIZE": "2"}
    done = scripts.run("with exit.ExitHandler(): raise KeyboardInterrupt('by SIGTERM')", **environment)
    assert (done.returncode, done.stderr) == (130, "by SIGTERM\n")
    assert json.loads((tmp_path / "0" / "error.json").read_text())["message"]["message"] == "by SIGTERM"


def test_rank_in_an_engine_or_exchange_or_behind_its_device_waits():
    for file in ("torch/cuda/streams.py", "deepspeed/runtime/zero/stage3.py", "deepspeed/comm/comm.py"):
        frames = {}
        exec(compile("import sys\ndef wait(): return sys._getframe()", f"/x/site-packages/{file}", "exec"), frames)
        assert ranks.waits(frames["wait"]())
    states = []

    class Number:
        def __float__(self):
            states.append(ranks.waits(sys._getframe()))
            return 1.0

        def tolist(self):
            return [float(self)]

        def __len__(self):
            return 1

    assert gather_numbers([Number()]) == [[1.0]]
    assert reduce_step(Number(), OutOfMemory(), 0, [])[0] == [1.0]
    assert states == [True, True]
    assert not ranks.waits(sys._getframe())


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([KILLED, "pass"], GONE.replace("rank 5", "rank 5 and rank 6")),
        (["from pathlib import Path; Path('ATTEMPT/1/error.json').write_text('{}')"], ""),
    ],
)
def test_lost_ranks_are_those_without_a_record(tmp_path, ends, message):
    (tmp_path / "1").mkdir()
    codes = [code.replace("ATTEMPT", str(tmp_path)) for code in [scripts.PREAMBLE + SURVIVOR, *ends]]
    done = scripts.run(LAUNCHER, *codes, LOCAL_WORLD_SIZE=str(len(codes)))
    assert done.stdout.startswith(message), done.stderr
    assert bool(done.stdout.strip()) == bool(message)
