"""`accel-sft doctor`: each check in the case where it fires, with real processes, files and stand-in programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import types
from pathlib import Path

import psutil
import pytest
from fake_nvml import Nvml
from fake_plugins import accel_sft, install
from limits import limit

from accel_sft import UserError
from accel_sft.io.findings import Finding
from accel_sft.launch import host_memory
from accel_sft.launch.deepspeed_ops import OPERATORS
from accel_sft.launch.info import FOLDER
from accel_sft.tools.doctor import command, host, launches, torch_script
from accel_sft.tools.doctor import machine as machines
from accel_sft.tools.doctor.command import doctor
from accel_sft.tools.doctor.launches import exchange_failure, launch_file
from accel_sft.tools.doctor.machine import LIBRARIES, Machine, TorchFacts, ask, ok, problem, warning

SHIPPED = sorted(FOLDER.glob("*.yaml"))
GPUS = {"version": "2.13.0", "cuda": "13.0", "device_count": 2, "device_names": ["NVIDIA H100"] * 2}
GPU = {"name": "NVIDIA H100", "total": 80 * 2**30, "used": 2**24, "busy": 0}
DRIVER = {"driver": "580.65.06", "driver_cuda": 13000, "driver_gpus": {"0": GPU, "1": GPU}}


def machine(files=SHIPPED, runs=Path("runs"), **facts):
    """One of which torch would tell these facts; the other libraries can be imported."""
    made = Machine(files, runs)
    compiled = {"library": "?", "compiled": True, "failure": "", "locks": []}
    every = {name: dict(compiled) for name in OPERATORS}
    usual = {"imports": dict.fromkeys(LIBRARIES, ""), "operators": every}
    vars(made)["torch"] = TorchFacts(**usual | facts)
    return made


def program(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def levels(findings):
    return [finding.level for finding in findings]


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (RuntimeError("ill"), "the check failed: RuntimeError: ill"),
        (UserError("RANK is 'a'; unset it; or start one process"), "RANK is 'a'; unset it; or start one process"),
    ],
)
def test_a_check_that_fails_is_a_finding_itself(error, what):
    def fail(machine):
        yield ok("the first")
        raise error

    (failed,) = machine().findings("any", fail)
    assert (failed.level, failed.subject, failed.what) == ("problem", "any", what)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_program_that_hangs_is_killed_with_what_it_started(tmp_path, interrupted):
    script = program(tmp_path, "hangs", f"sleep 600 & echo $! > {tmp_path}/child; echo begun; wait")
    if interrupted:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ask([str(script)], 600)
    else:
        answer = ask([str(script)], 1.0)
        assert (answer.status, answer.out) == (None, "begun\n")
    child = int((tmp_path / "child").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):  # nobody waits for it but the system
        psutil.Process(child).wait(limit(60))


@pytest.mark.parametrize(
    ("check", "gib", "gpus", "level"),
    [
        *((host.memory, gib, 0, level) for gib, level in ((16, "ok"), (2, "warning"), (0.5, "problem"))),
        *((host.disk, gib, 0, level) for gib, level in ((100, "ok"), (1, "warning"), (0.1, "problem"))),
        *((host.shared_memory, 0.5, gpus, level) for gpus, level in ((2, "warning"), (0, "ok"))),
    ],
)
def test_little_free_memory_or_space_is_named(tmp_path, monkeypatch, check, gib, gpus, level):
    usage = types.SimpleNamespace(free=int(gib * 2**30), total=200 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(host_memory, "free_bytes", lambda: usage.free)
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path)  # there is one
    assert next(check(machine(runs=tmp_path / "new/runs", device_count=gpus))).level == level


def test_ranks_without_a_launcher_are_a_problem(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    (finding,) = machine().findings("variables", host.environment)
    assert (finding.level, finding.what[:18]) == ("problem", "RANK is not set, M")


def test_unwritable_folder_is_a_problem_where_it_is_needed(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACCEL_SFT_CACHE", str(tmp_path / "file" / "cache"))
    findings = {finding.what.split(":")[0]: finding for finding in host.disk(machine(runs=tmp_path / "file" / "runs"))}
    assert findings["runs"].level == "problem"
    assert findings["runs"].fix.endswith("or name another folder with --output-dir")
    assert findings["token cache"].level == "warning"  # a run does without it
    assert not (tmp_path / "runs").exists()


def test_versions_are_held_against_the_package_s_own_bounds(tmp_path, monkeypatch):
    bounds = ("click<1", "psutil>=999", "no-such-package>=1", "pytest>=1", "absent>=1; extra == 'docs'")
    install(tmp_path, "accel-sft", "", module="unused", requires=bounds)
    monkeypatch.syspath_prepend(tmp_path)
    newer, older, missing, rest = host.versions(machine())
    assert newer.level == "warning"
    assert newer.what.endswith("needs <1")
    assert (older.level, older.fix) == ("problem", 'pip install "psutil>=999"')
    assert (missing.level, missing.what) == ("problem", "no-such-package is not installed")
    assert rest.what.startswith("1 libraries within the bounds")
    monkeypatch.setattr(host, "DISTRIBUTION", "no-such-distribution")
    assert levels(host.versions(machine())) == ["warning"]  # only imported


BROKEN = {
    "raise ImportError('no libcudart')": ("torch cannot be imported: ImportError: no libcudart", "cannot be imported"),
    "import os; os.kill(os.getpid(), 4)": ("failed in the step: import torch (ended by SIGILL)", "not be checked"),
    "import time; time.sleep(600)": ("no answer within {} s, in the step: import torch", "not be checked"),
}


@pytest.mark.parametrize("source", BROKEN)
def test_a_torch_that_cannot_be_imported_stops_every_launch_file(tmp_path, monkeypatch, source):
    words, why = BROKEN[source]
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setattr(machines, "import_path", dict)  # it puts the package first, and beside it may be a torch
    package = str(Path(machines.accel_sft.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), package)))
    seconds = round(limit(3))
    facts = machines.torch_facts(seconds)
    broken = machine(**vars(facts))
    (finding,) = host.imports(broken)
    assert finding.level == "problem"
    assert words.format(seconds) in finding.what
    rows = [launch_file(broken, file) for file in SHIPPED]
    assert {row.level for row in rows} == {"no"}
    assert all(why in row.what for row in rows)
    assert list(launches.exchange(broken)) == []


def table_of(machine):
    """What is said of each shipped launch file, by its name."""
    return {file.stem: launch_file(machine, file) for file in SHIPPED}


def working(machine):
    return {name for name, row in table_of(machine).items() if row.level == "yes"}


def test_missing_library_or_fact_stops_what_needs_it():
    without = machine(imports={**dict.fromkeys(LIBRARIES, ""), "deepspeed": "ImportError: ill"})
    assert working(without) & {"ddp", "z2"} == {"ddp"}
    assert table_of(without)["z2"].what == "deepspeed cannot be imported"
    half = machine(fault="no answer within 300 s, in the step: load DeepSpeed's operators", operators={})
    assert levels(host.imports(half)) == ["problem"]
    assert {"ddp", "z2"} <= working(half)
    assert table_of(half)["z2_offload"].what == "it is not known whether DeepSpeed's operator cpu_adam works here"
    assert levels(host.imports(machine())) == ["ok"]


SEEN = GPUS | DRIVER
HIDDEN = SEEN | {"device_count": 0, "device_names": []}
JUDGED = [
    (host.gpus, SEEN, "ok", "2 x NVIDIA H100 (80 GiB); driver 580.65.06"),
    (host.gpus, GPUS, "ok", "2 x NVIDIA H100"),
    (host.gpus, GPUS | {"driver": "580", "driver_gpus": {"0": {"name": "GB10"}}}, "ok", "1 x GB10; torch sees"),
    (host.gpus, SEEN | {"driver_gpus": {"1": GPU | {"used": 9 * 2**30}}}, "ok warning", "0% of the time, 9.0 GiB"),
    (host.gpus, SEEN | {"driver_gpus": {"1": GPU | {"busy": 85}}}, "ok warning", "GPU 1 is in use: 85% of"),
    (host.gpus, {"driver_failure": "Unknown Error"}, "problem", "Unknown Error: restart the machine"),
    (host.gpus, GPUS | {"driver_failure": "Unknown Error"}, "warning ok", "Unknown Error"),
    (host.cuda, SEEN, "ok", "the driver runs up to 13.0"),
    (host.cuda, HIDDEN | {"driver_cuda": 12040}, "problem", "for CUDA 13.0; the driver runs up to 12.4"),
    (host.cuda, HIDDEN | {"cuda": None}, "problem", "torch 2.13.0 is a build without CUDA"),
    (host.cuda, HIDDEN | {"cuda_complaint": "CUDA unknown error"}, "problem", "no GPU: CUDA unknown error"),
    (host.copies, {"copies": {"0": {"from": 26.0, "to": 25.0}}}, "ok", "26 GB/s from pinned memory, 25 GB/s to"),
    (host.copies, {"copies": {"0": {}}}, "ok", "GPU 0: not measured"),
    (host.bf16, {}, "", ""),
    (host.bf16, {"bf16_native": True, "bf16_why": "it has amx_bf16"}, "ok", "name no precision compute in bf16"),
    (host.bf16, {"bf16_why": "this CPU has none"}, "ok", "name no precision compute in float32"),
    (host.bf16, GPUS | {"bf16_why": "V100 has no bf16"}, "warning", "V100 has no bf16"),
]


@pytest.mark.parametrize(("check", "facts", "expected", "words"), JUDGED)
def test_facts_of_driver_and_torch_are_judged(monkeypatch, check, facts, expected, words):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    findings = [*check(machine(**facts))]
    assert levels(findings) == expected.split()
    assert words in "; ".join(map(str, findings))


def test_hidden_gpus_are_no_problem_and_a_broken_one_is(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = machine(**HIDDEN)
    assert list(host.cuda(hidden)) == []
    assert "; torch sees 0 of them (CUDA_VISIBLE_DEVICES hides all)" in next(host.gpus(hidden)).what
    broken = machine(**SEEN, device_failures={"1": "AcceleratorError: no kernel image"})
    assert levels(host.gpus(broken)) == ["ok", "problem"]
    assert not working(broken)


def test_copies_are_timed_both_ways(monkeypatch):
    import torch

    monkeypatch.setattr(torch_script, "COPIED", 1 << 20)
    speeds = torch_script._copies(torch, "cpu", pinned=False)
    assert [*speeds] == ["from", "to"]
    assert all(0.01 < speed < 1000 for speed in speeds.values())


def test_the_driver_is_asked_by_nvml(monkeypatch, tmp_path):
    def told(**answers):
        """What the script tells of a driver whose NVML answers so."""
        facts = {}
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(**answers))
        monkeypatch.setattr(torch_script, "tell", facts.update)
        torch_script._driver()
        return facts

    assert told() == DRIVER | {"driver_gpus": {"0": GPU | {"busy": 7}}}
    sliced = told(MemoryInfo=None, UtilizationRates=None)
    assert sliced["driver_gpus"] == {"0": {"name": "NVIDIA H100"}}
    missing = Nvml.NVMLError_LibraryNotFound("no library")
    for file, failure in (("nvidiactl", {}), (".", {"driver_failure": "no library"})):  # the second is there
        monkeypatch.setattr(torch_script, "NVIDIA", tmp_path / file)
        assert told(Init=missing) == failure


def state(**other):
    return {"library": "/ext/cpu_adam/cpu_adam.so", "compiled": True, "failure": "", "locks": []} | other


@pytest.mark.parametrize(
    ("state", "expected", "words"),
    [
        (state(failure="OSError: ill"), "problem", "rm -r /ext/cpu_adam: the next launch compiles it anew"),
        (state(compiled=False), "ok", "minutes): the first launch compiles it"),
        (state(locks=[["another compiles it", "wait"]]), "warning ok", "another compiles it: wait"),
    ],
)
def test_state_of_an_operator_is_judged(monkeypatch, state, expected, words):
    monkeypatch.delenv("CXX", raising=False)
    of_this = machine(operators={**machine().torch.operators, "cpu_adam": state})
    findings = [finding for finding in launches.operators(of_this) if "async_io" not in finding.what]
    assert levels(findings) == expected.split()
    assert words in str(findings[0])
    assert working(of_this) >= {"z2"}
    row = launch_file(of_this, FOLDER / "z2_offload.yaml")
    assert (row.level == "no") is bool(state["failure"])
    assert state["compiled"] or row.what == "the first launch compiles cpu_adam"


def test_old_compiler_stops_offload_alone(tmp_path, monkeypatch):
    old = program(tmp_path, "old", 'echo "g++ 8.5.0"; echo "Copyright (C) 2018 Free Software Foundation, Inc."')
    monkeypatch.setenv("CXX", str(old))
    poor = machine(operators=dict.fromkeys(OPERATORS, state(compiled=False)))
    findings = [*launches.operators(poor)]
    assert set(levels(findings)) == {"warning"}
    assert findings[0].fix == "install GCC 9 or newer, and name it in CXX"
    assert not working(poor) & {"z2_offload", "z3_offload", "z3_nvme", "z3_twin_flow"}
    assert {"ddp", "z0", "z1", "z2", "z3"} <= working(poor)
    assert table_of(poor)["z2_offload"].what == f"DeepSpeed must compile cpu_adam, but {old} is GCC 8"


@pytest.mark.parametrize(
    ("ranks", "instead", "why"),
    [
        pytest.param("1", "time.sleep(600)", "no sum within {} s", marks=pytest.mark.long),
        ("01", "0", "rank [01]: the sum is wrong"),
    ],
)
def test_ranks_that_do_not_add_up_are_reported_in_time(tmp_path, monkeypatch, ranks, instead, why):
    patch = f"    from torch import distributed\n    distributed.all_reduce = lambda *_: {instead}\n"
    planted = f"import os, time\nif os.environ.get('RANK', '-') in {ranks!r}:\n{patch}"
    (tmp_path / "sitecustomize.py").write_text(planted)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *(path for path in sys.path if path))))
    monkeypatch.setattr(machines, "import_path", dict)
    seconds = round(limit(4))
    assert re.fullmatch(why.format(seconds), exchange_failure("gloo", 2, seconds))
    left = [process for process in psutil.Process().children(recursive=True) if "rank" in process.cmdline()]
    assert not left


def test_ranks_that_cannot_meet_leave_one_process(monkeypatch):
    monkeypatch.setattr(launches, "exchange_failure", lambda *_: "rank 0: no such interface")
    cut = machine()
    (finding,) = launches.exchange(cut)
    assert finding.level == "problem"
    assert finding.what == "an all-reduce over 2 ranks with gloo failed: rank 0: no such interface"
    assert not working(cut)
    vars(cut)["torch"].device_count = 1  # one process on one GPU asks nobody
    assert {"ddp", "z2"} <= working(cut)


@pytest.mark.parametrize(
    ("gpus", "flags"), [(1, ""), (2, ""), (8, "with --num_processes 8")], ids=["one", "two", "eight"]
)
def test_on_gpus_each_file_starts_a_process_for_each(gpus, flags):
    table = table_of(machine(device_count=gpus))
    assert table["fsdp2"] == Finding("yes", flags, subject="fsdp2")
    assert (table["hsdp"].level == "yes") is (gpus == 8)
    assert gpus == 8 or table["hsdp"].fix.startswith("use accelerate_configs/fsdp2.yaml, which runs on")
    assert (table["tp"].level == "yes") is (gpus > 1)
    assert gpus > 1 or table["tp"].fix == "use accelerate_configs/fsdp2.yaml, which runs on 1 GPU"
    wanted = f"with --num_processes {2 * gpus}; " if gpus > 1 else ""
    assert table["multinode_z3"] == Finding("yes", f"{wanted}needs 2 machines like this one", subject="multinode_z3")


def test_a_file_that_the_launcher_would_refuse_is_told(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: DEEPSPED\nnum_processes: 2\n")
    row = launch_file(machine([own]), own)
    assert (row.level, row.what.rpartition(": ")[2]) == ("no", "'DEEPSPED' is not a valid DistributedType")
    assert launch_file(machine([own]), tmp_path / "absent.yaml").level == "no"


def test_the_report_of_this_machine(tmp_path):
    """All real; of the operators one is damaged and one's compilation was killed."""
    if shutil.which("nvidia-smi"):
        pytest.skip("the operators are those of a CPU")
    damaged, lock = tmp_path / "ext/cpu_adam/cpu_adam.so", tmp_path / "ext/async_io/lock"
    for file in (damaged, lock):
        file.parent.mkdir(parents=True)
        file.write_text("no library")
    os.utime(lock, (0, 0))
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"), "CXX": "c++"}
    done = accel_sft("doctor", "--json", "--output-dir", str(tmp_path / "runs"), env=environment, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert (done.returncode, report["level"]) == (1, "problem")
    findings = {}
    for finding in report["findings"]:
        findings.setdefault(finding["subject"], []).append((finding["level"], finding["what"]))
    assert [finding["subject"] for finding in report["findings"] if finding["level"] == "problem"] == ["operators"]
    assert "is compiled but cannot be loaded: ImportError: " in findings["operators"][0][1]
    assert "another process compiles async_io" in findings["operators"][1][1]
    assert lock.exists()
    assert findings["imports"] == [("ok", "torch, accelerate, transformers, peft, deepspeed can be imported")]
    assert findings["GPU"] == [("ok", "none; training runs on the CPU")]
    assert "launch files that name no precision compute in " in findings["bf16"][0][1]
    assert findings["exchange"][0][1].startswith("2 ranks added up numbers by gloo (")
    table = {row["subject"]: (row["level"], row["what"]) for row in report["launch_files"]}
    assert len(table) == len(SHIPPED)
    assert table["ddp"] == table["z2"] == ("yes", "")
    assert (table["fsdp2"][0], table["z2_offload"]) == ("no", ("no", "cpu_adam cannot be loaded"))
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def report(monkeypatch):
    """The command in this process, with these checks and these facts: its status and what it printed."""
    from click.testing import CliRunner

    def run(*findings, arguments=(), **facts):
        monkeypatch.setattr(command, "checks", lambda: {"Machine": {"any": lambda machine: findings}})
        monkeypatch.setattr(Machine, "torch", machine(**facts).torch)
        done = CliRunner().invoke(doctor, arguments)
        return done.exit_code, done.output

    return run


def test_the_exit_status_says_whether_there_is_a_problem(report, tmp_path):
    status, text = report(ok("fi\x1b[2Jne"), warning("few", "more"))
    assert status == 0
    assert "fi\\x1b[2Jne" in text  # it steers no terminal
    counts = r"^(10|11) of 15 launch files work here, on the CPU; no problems, 1 warning\.$"  # one needs libaio
    assert re.search(counts, text, re.M)
    status, text = report(problem("none", "some"))
    assert (status, "1 problem, no warnings." in text) == (1, True)
    assert text.index("  problem any: none\n          -> some\n")
    assert "accelerate launch --config_file ddp.yaml -m accel_sft math" in text
    (tmp_path / "mine.yaml").write_text((FOLDER / "ddp.yaml").read_text())
    _, text = report(arguments=[str(tmp_path / "mine.yaml")], **GPUS | {"device_count": 4})
    assert " of 16 launch files work here, on 4 GPUs; no problems, no warnings." in text
    assert re.search(r"^  yes     mine: with --num_processes 4$", text, re.M)
    assert "accelerate launch --config_file ddp.yaml --num_processes 4 -m accel_sft math" in text


def test_ranks_of_a_launcher_are_refused(monkeypatch, report):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    status, _ = report()
    assert status == 1
