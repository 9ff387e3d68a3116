"""tests/gpu/run: each check is gone through on two CPU ranks; results are kept, or refused in a line."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tarfile

import checks
import forked
import psutil
import pytest
import suite
from launches import MARK, Machine, NotTried, Run
from limits import wait_for
from places import ROOT

GPU = ROOT / "tests" / "gpu"
QUICK = {"launch z3", "killed rank"}
"""Run by default: one that compares launches, one that harms a rank."""
NEED_PROCESSES = {"killed rank", "failed rank", "stopped rank", "stuck rank", "told to stop", "restarted", "compiled"}
"""Checks whose launches are not forked: forks show no environment by which ranks and what they leave are found."""
GPUS_ONLY = {"attention", "liger", "fp16", "offload without nvcc", "offloaded"}


class Forked(Machine):
    """A machine whose launches import nothing again (tests/support/forked.py)."""

    def train(self, name, yaml, *options, launcher=(), processes=0, task="math", environment=None, seconds=0):
        command = self.command(name, yaml, options, launcher, processes or self.processes, task)
        self.made.append(name)
        printed = self.folder / f"{name} printed"
        printed.mkdir(exist_ok=True)
        done = forked.run((forked.LAUNCH, *command), {**self.environment, **(environment or {})}, printed)
        return Run(self.folder / name, done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """A machine of two processes that forks, and one that does not, with folders of their own."""
    folders = {kind: tmp_path_factory.mktemp(kind.__name__) for kind in (Forked, Machine)}
    return {kind: kind(folder=folder, tiny=True, processes=2) for kind, folder in folders.items()}


@pytest.mark.parametrize(
    "check",
    [pytest.param(each, id=each.name, marks=[] if each.name in QUICK else pytest.mark.long) for each in suite.CHECKS],
)
def test_check_holds_on_cpu_ranks_or_says_what_it_needs(machines, check):
    machine = machines[Machine if check.name in NEED_PROCESSES else Forked]
    if check.name == "launch hsdp":  # two groups of two
        machine = dataclasses.replace(machine, processes=4)
    holds, measured = check.try_on(machine)
    if check.name in GPUS_ONLY:
        assert (holds, measured) == ("not tried", "needs a GPU")
    elif holds == "not tried":
        assert "offload" in check.name or "nvme" in check.name  # a compiler or a header is missing
    else:
        assert holds == "yes", measured


def test_rank_that_outlives_its_launch_is_a_no(tmp_path, monkeypatch):
    """The check of a killed rank, of a launch that nobody watches: its other rank waits for ever."""
    left = (
        "import os, subprocess, sys, time; run = sys.argv[1]; os.makedirs(run)\n"
        "ranks = [subprocess.Popen(['sleep', '60'], env={**os.environ, 'RANK': str(n)}, start_new_session=True)\n"
        "         for n in range(2)]\n"
        "with open(run + '/metrics.jsonl', 'w') as file: file.write(3 * '{\"loss\": 1}\\n')\n"
        "ranks[1].wait(); sys.exit(1)"
    )
    monkeypatch.setattr(Machine, "command", lambda self, name, *_: ("-c", left, str(self.folder / name)))
    monkeypatch.setattr("launches.LAUNCHER", (sys.executable,))
    monkeypatch.setattr("launches.LEAVING_SECONDS", 0.5)
    (check,) = (each for each in suite.CHECKS if each.name == "killed rank")
    holds, measured = check.try_on(Machine(folder=tmp_path, tiny=True, processes=2))
    assert (holds, "1 processes had stayed" in measured) == ("NO", True)
    assert [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)] == []


def called(monkeypatch, state, *arguments):
    """The exit status of a call in this process, which asks torch nothing."""
    monkeypatch.setattr(checks, "about", lambda environment: ("no GPU", 0))
    monkeypatch.setattr(sys, "argv", ["checks.py", "--tiny", "--state", str(state), *arguments])
    with pytest.raises(SystemExit) as ended:
        checks.main()
    return ended.value.code


def test_script_keeps_results_and_repeats_only_what_was_not_tried(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny-2.json").write_text('{"a check of before": {"holds": "NO", "measured": "-", "seconds": 1}}')
    command = ["bash", str(GPU / "run"), "--tiny", "--check", "fp16", "--state", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable})
    assert first.returncode == 0, first.stderr
    assert "| fp16 | not tried | needs a GPU | 0 |" in first.stdout
    assert called(monkeypatch, tmp_path, "--check", "fp16") == 0
    assert "1 checks are still to be run" in capsys.readouterr().out
    (tmp_path / "tiny-2.json").write_text('{"fp16": {"holds": "yes", "measured": "a loss", "seconds": 7}}')
    assert called(monkeypatch, tmp_path, "--check", "fp16") == 0
    again = capsys.readouterr().out
    assert "0 checks are still to be run" in again
    assert "| fp16 | yes | a loss | 7 |" in again


@pytest.mark.parametrize("content", ["{", "[]", '{"fp16": 1}'])
def test_broken_results_are_refused_and_stay(tmp_path, content):
    (tmp_path / "tiny-2.json").write_text(content)
    with pytest.raises(SystemExit, match=r"tiny-2\.json: holds no results of these checks; remove it"):
        checks.read(tmp_path / "tiny-2.json")
    assert (tmp_path / "tiny-2.json").read_text() == content
    with pytest.raises(SystemExit, match="cannot be kept there"):
        checks.read(tmp_path / "tiny-2.json" / "tiny-2.json")


def test_page_has_every_check_and_an_hour_is_enough():
    page = (ROOT / "docs" / "first-hour-gpu.md").read_text(encoding="utf-8")
    for check in suite.CHECKS:
        assert f"`{check.name}`" in page or f"`{check.name.split()[0]} ...`" in page
    assert sum(check.seconds for check in suite.CHECKS) <= 60 * 60
    begun = checks.plan(suite.CHECKS, {check.name: check.seconds for check in suite.CHECKS}, 10)
    assert all(f" {name}," in begun for name in ("ddp", "launch z2", "launch z3", "attention kernels"))


def test_failed_checks_are_results_and_their_output_is_packed(tmp_path, monkeypatch, capsys):
    def fail(machine):
        run = machine.folder / "a run"
        run.mkdir()
        (machine.folder / "a run.log").write_text("what it printed")
        (run / "result.json").write_text("{}")
        (run / "model.safetensors").write_bytes(bytes(checks.KEPT_BYTES + 1))
        machine.made.append("a run")
        raise KeyError("peak_device_memory_gib")

    def lack(machine):
        raise NotTried("no aio")

    listed = [
        suite.Check("broken", "it is not", 1, 1, 1, fail),
        suite.Check("without aio", "it is there", 1, 1, 1, lack),
        suite.Check("for many", "it is for many", 1, 1, 9, fail),
    ]
    monkeypatch.setattr(checks, "CHECKS", listed)
    assert called(monkeypatch, tmp_path) == 1
    printed = capsys.readouterr().out
    assert "| broken | NO | KeyError: 'peak_device_memory_gib' | 0 |" in printed
    assert "| without aio | not tried | no aio | 0 |" in printed
    assert "| for many | not tried | needs 9 GPUs, --gpus is 2 | 0 |" in printed
    with tarfile.open(tmp_path / "failed-tiny-2-broken.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["a run.log", "a run/result.json"]
    assert json.loads((tmp_path / "tiny-2.json").read_text())["broken"]["holds"] == "NO"


def test_call_that_is_stopped_leaves_no_process(tmp_path):
    command = [sys.executable, str(GPU / "checks.py"), "--tiny", "--check", "killed rank", "--state", str(tmp_path)]
    environment = {**os.environ, "STARTED_BY_THIS_TEST": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:

        def alive():
            started = psutil.process_iter(["environ", "status"])
            ours = [p for p in started if (p.info["environ"] or {}).get("STARTED_BY_THIS_TEST") == str(tmp_path)]
            return [p for p in ours if p.info["status"] != psutil.STATUS_ZOMBIE and p.pid != process.pid]

        wait_for(lambda: process.poll() is not None or any(MARK in p.info["environ"] for p in alive()))
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1
        assert alive() == []
        assert b"stopped by SIGTERM; the same command goes on" in process.stdout.read()
