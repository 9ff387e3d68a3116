"""tests/gpu/run: each check is gone through on two CPU ranks; results are kept whole, or refused in a line."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import checks
import forked
import psutil
import pytest
import suite
from launches import MARK, Failed, Machine, NotTried, Run
from limits import wait_for
from places import ROOT

GPU = ROOT / "tests" / "gpu"
QUICK = {"launch z3", "killed rank"}
"""Run by default: one that compares launches, one that harms a rank."""
NEED_PROCESSES = {"killed rank", "failed rank", "stopped rank", "stuck rank", "told to stop", "restarted", "compiled"}
"""Checks whose launches are not forked: forks show no environment by which ranks and what they leave are found."""
GPUS_ONLY = {"attention", "liger", "fp16", "offload without nvcc", "offloaded"}


def script(*arguments, **environment):
    """tests/gpu/run with `fp16`, which under --tiny launches nothing."""
    command = ["bash", str(GPU / "run"), "--tiny", "--check", "fp16", *map(str, arguments)]
    env = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env)


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
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checks")


@pytest.fixture(scope="module")
def machines(folder):
    """A machine of two processes that forks, and one that does not, with folders of their own."""
    found = {}
    for kind in (Forked, Machine):
        (folder / kind.__name__).mkdir()
        found[kind] = kind(folder=folder / kind.__name__, tiny=True, processes=2)
    return found


@pytest.mark.parametrize(
    "check",
    [pytest.param(each, id=each.name, marks=[] if each.name in QUICK else pytest.mark.long) for each in suite.CHECKS],
)
def test_a_check_holds_on_two_cpu_ranks_or_says_what_it_needs(machines, check):
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


def test_a_rank_that_does_not_end_as_promised_is_a_no(tmp_path, monkeypatch):
    """The check of a killed rank, of a launch that nobody watches: its other rank waits for ever."""
    machine = Machine(folder=tmp_path, tiny=True, processes=2)
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
    holds, measured = check.try_on(machine)
    assert holds == "NO"
    assert "1 processes had stayed" in measured
    assert [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)] == []


def called(monkeypatch, state, *arguments):
    """The exit status of a call in this process, which asks torch nothing."""
    monkeypatch.setattr(checks, "about", lambda environment: ("no GPU", 0))
    monkeypatch.setattr(sys, "argv", ["checks.py", "--tiny", "--state", str(state), *arguments])
    with pytest.raises(SystemExit) as ended:
        checks.main()
    return ended.value.code


def test_results_are_kept_and_not_made_again_but_what_was_not_tried_is(tmp_path, monkeypatch, capsys):
    gone = {"a check of before": {"holds": "NO", "measured": "-", "seconds": 1}}
    (tmp_path / "tiny-2.json").write_text(json.dumps(gone))
    first = script("--state", tmp_path)
    assert first.returncode == 0, first.stderr
    assert "| fp16 | not tried | needs a GPU | 0 |" in first.stdout
    assert called(monkeypatch, tmp_path, "--check", "fp16") == 0
    assert "1 checks are still to be run" in capsys.readouterr().out
    done = {"fp16": {"holds": "yes", "measured": "a loss", "seconds": 7}}
    (tmp_path / "tiny-2.json").write_text(json.dumps(done))
    assert called(monkeypatch, tmp_path, "--check", "fp16") == 0
    again = capsys.readouterr().out
    assert "fp16: half precision" not in again
    assert "| fp16 | yes | a loss | 7 |" in again


@pytest.mark.parametrize("content", ["{", "[]", '{"fp16": 1}'])
def test_results_that_are_broken_are_told_in_a_line(tmp_path, content):
    kept = tmp_path / "tiny-2.json"
    kept.write_text(content)
    with pytest.raises(SystemExit, match=r"tiny-2\.json: holds no results of these checks; remove it"):
        checks.read(kept)
    assert kept.read_text() == content


def test_a_state_that_is_no_folder_and_wheels_that_are_none_are_told_in_a_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot be kept there"):
        checks.read(tmp_path / "file" / "tiny-2.json")
    assert "no wheels in this folder" in script(WHEELS=str(tmp_path)).stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--check", "lauch z3"], "there is no check 'lauch z3'; did you mean launch z3"),
        (["--check", "xyzzy"], "there is no check 'xyzzy'; --list names all"),
        (["--minutes", "0"], "0: give more than 0"),
        (["--minutes", "nan"], "nan: give more than 0"),
    ],
)
def test_a_value_that_cannot_be_is_told_in_a_line(arguments, told, tmp_path, monkeypatch, capsys):
    assert called(monkeypatch, tmp_path, *arguments) == 2
    assert told in capsys.readouterr().err


def test_more_processes_than_cores_are_refused_without_a_gpu(tmp_path, monkeypatch):
    assert called(monkeypatch, tmp_path, "--gpus", "9999").startswith("--gpus 9999: give 1 or more, at most ")


def test_a_default_call_says_what_fits_into_its_minutes():
    """The checks of the README's job and of the most used launches come first, and fit."""
    told = checks.plan(suite.CHECKS, {check.name: check.seconds for check in suite.CHECKS}, 10)
    assert " fit " in told
    begun = told.partition(" fit ")[2]
    for name in ("ddp", "launch z2", "launch z3", "attention kernels"):
        assert f" {name}," in begun
    assert "The same command then goes on." in told
    assert sum(check.seconds for check in suite.CHECKS) <= 60 * 60  # the page says: an hour
    page = (ROOT / "docs" / "first-hour-gpu.md").read_text(encoding="utf-8")
    for check in suite.CHECKS:
        assert f"`{check.name}`" in page or f"`{check.name.split()[0]} ...`" in page


def _harm(how):
    def run(machine):
        run = machine.folder / "a run"
        run.mkdir()
        (machine.folder / "a run.log").write_text("what it printed")
        (run / "result.json").write_text("{}")
        (run / "model.safetensors").write_bytes(bytes(checks.KEPT_BYTES + 1))
        machine.made.append("a run")
        raise how

    return run


def test_a_check_that_fails_in_its_own_way_is_a_result_and_what_it_printed_is_packed(tmp_path, monkeypatch, capsys):
    listed = [
        suite.Check("broken", "it is not", 1, 1, 1, _harm(KeyError("peak_device_memory_gib"))),
        suite.Check("without aio", "it is there", 1, 1, 1, lambda machine: (_ for _ in ()).throw(NotTried("no aio"))),
        suite.Check("for many", "it is for many", 1, 1, 9, lambda machine: "never"),
    ]
    monkeypatch.setattr(checks, "CHECKS", listed)
    assert called(monkeypatch, tmp_path) == 1
    said = capsys.readouterr().out
    assert "| broken | NO | KeyError: 'peak_device_memory_gib' | 0 |" in said
    assert "| without aio | not tried | no aio | 0 |" in said
    assert "| for many | not tried | needs 9 GPUs, --gpus is 2 | 0 |" in said
    with tarfile.open(tmp_path / "failed-tiny-2-broken.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["a run.log", "a run/result.json"]
    monkeypatch.setattr(checks, "CHECKS", listed[1:])
    assert called(monkeypatch, tmp_path) == 0


def test_a_call_that_is_told_to_stop_leaves_no_process(tmp_path):
    command = [sys.executable, str(GPU / "checks.py"), "--tiny", "--check", "killed rank", "--state", str(tmp_path)]
    mark = str(tmp_path)
    environment = {**os.environ, "STARTED_BY_THIS_TEST": mark}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:

        def alive():
            found = psutil.process_iter(["environ", "status"])
            ours = [p for p in found if (p.info["environ"] or {}).get("STARTED_BY_THIS_TEST") == mark]
            return [p for p in ours if p.info["status"] != psutil.STATUS_ZOMBIE and p.pid != process.pid]

        wait_for(lambda: process.poll() is not None or any(MARK in p.info["environ"] for p in alive()))
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1
        assert alive() == []
        assert b"stopped by SIGTERM; the same command goes on" in process.stdout.read()


def test_what_a_run_does_not_say_is_a_failure_that_quotes_its_errors():
    run = Run(Path("a run"), 1, "a\nError: of another\nkind\n")
    assert run.says("of another kind") == "of another kind"
    with pytest.raises(Failed, match="does not say 'rank 1', but: Error: of another"):
        run.says("rank 1")
