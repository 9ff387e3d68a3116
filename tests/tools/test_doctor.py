"""`accel-sft doctor`: each check in the case where it fires, with real processes, files and stand-in programs."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
from fake_nvml import Nvml
from fake_plugins import accel_sft, install, only_plugins_of
from limits import limit
from places import SUPPORT

from accel_sft import UserError
from accel_sft.io.findings import Finding, worst
from accel_sft.launch import host_memory, machine_state
from accel_sft.launch.deepspeed_ops import OPERATORS
from accel_sft.launch.info import FOLDER
from accel_sft.launch.machine_state import Cores
from accel_sft.tools.doctor import command, gpus, host, launches, software, torch_script
from accel_sft.tools.doctor import machine as machines
from accel_sft.tools.doctor.command import doctor
from accel_sft.tools.doctor.launches import exchange_failure, launch_file
from accel_sft.tools.doctor.machine import LEVELS, LIBRARIES, Machine, TorchFacts, ask, ok, problem, warning

SHIPPED = sorted(FOLDER.glob("*.yaml"))
GPUS = {"version": "2.13.0", "cuda": "13.0", "device_count": 2, "device_names": ["NVIDIA H100"] * 2}
GPU = {"name": "NVIDIA H100", "total": 80 * 2**30, "used": 2**24, "busy": 0}
DRIVER = {"driver": "580.65.06", "driver_cuda": 13000, "driver_gpus": {"0": GPU, "1": GPU}}


def machine(files=SHIPPED, runs=Path("runs"), **facts):
    """One of which torch would tell these facts; the other libraries can be imported."""
    made = Machine(files, runs)
    compiled = {"library": "?", "compiled": True, "failure": "", "locks": []}
    every = {name: dict(compiled) for name in OPERATORS}
    known = {"imports": dict.fromkeys(LIBRARIES, ""), "operators": every} | facts
    vars(made)["torch"] = TorchFacts(**known)
    return made


def program(folder, name, script):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder of stand-in programs, found before all others."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join((str(folder), os.environ["PATH"])))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def levels(findings):
    return [finding.level for finding in findings]


# --- how checks are run ---


def fail(machine):
    yield ok("the first")
    raise RuntimeError("ill")


def misses_a_library(machine):
    import no_such_library  # noqa: F401

    return []


def names_a_mistake(machine):
    raise UserError("RANK is 'a'; unset it; or start one process")


def test_a_check_that_fails_is_a_finding_itself():
    (failed,) = machine().findings("any", fail)
    assert (failed.level, failed.subject) == ("problem", "any")
    assert re.fullmatch(r"the check failed: RuntimeError: ill \(test_doctor.py:\d+\)", failed.what)
    (missing,) = machine().findings("any", misses_a_library)
    assert missing.what.startswith("not checked: no_such_library is missing")
    (mistaken,) = machine().findings("any", names_a_mistake)
    assert (mistaken.what, mistaken.fix) == ("RANK is 'a'; unset it; or start one process", "")


def test_the_worst_of_the_findings_is_that_of_the_report():
    assert worst([], LEVELS) == "ok"
    assert worst([ok("a"), warning("b", "c"), ok("d")], LEVELS) == "warning"
    assert worst([warning("b", "c"), problem("e", "f")], LEVELS) == "problem"


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path):
    script = program(tmp_path, "hangs", f"sleep 600 & echo $! > {tmp_path}/child; echo begun; wait")
    answer = ask([str(script)], 1.0)
    assert (answer.status, answer.out) == (None, "begun\n")
    child, until = int((tmp_path / "child").read_text()), time.monotonic() + limit(60)
    while psutil.pid_exists(child):  # it is not this process's child: nobody here waits until its kill has taken effect
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
                break
        assert time.monotonic() < until
        time.sleep(0.01)


# --- the host ---


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A control group's files; `container(name, text)` writes one."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.current").write_text("0\n")
    monkeypatch.setattr(host_memory, "SYSTEM", tmp_path)
    return lambda name, text: (group / name).write_text(text)


def test_memory_is_what_the_container_leaves(container, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    for gib, level in ((16, "ok"), (2, "warning"), (0.5, "problem")):
        container("memory.max", f"{int(gib * 2**30)}\n")
        (found,) = host.memory(machine())
        assert found.level == level
        assert f"of the container's {gib:.1f} GiB used" in found.what


class Memory:
    available = total = 64 * 2**30


def test_a_container_s_share_of_the_cores_is_what_counts(container, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    container("cpu.max", "100000 100000\n")
    (found,) = host.cores(machine())
    assert found.what.startswith("1 usable of 64 logical (")


def test_other_work_on_the_cores_is_told_with_whose_it_is(container, tmp_path, monkeypatch):
    assert list(host.other_work(machine())) == []  # no /proc/stat
    monkeypatch.setattr(host_memory, "SYSTEM", Path("/"))
    monkeypatch.setattr(host, "WATCHED_SECONDS", 0.5)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        found = next(iter(host.other_work(machine())))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert found.level == "warning"
    assert re.match(r"other processes take \d+\.\d of \d+ cores, load \d+\.\d; most of them: \w+", found.what)


@pytest.mark.parametrize(
    ("cores", "told"),
    [
        (Cores(0.1, 1.9, 0.0, 0.0), ["ok"]),
        (Cores(1.0, 1.0, 0.0, 0.0), ["warning"]),
        (Cores(0.1, 1.6, 0.3, 0.0), ["ok", "warning"]),
    ],
)
def test_what_daemons_take_is_no_warning_and_steal_is(monkeypatch, cores, told):
    monkeypatch.setattr(host, "WATCHED_SECONDS", 0.0001)
    monkeypatch.setattr(host.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(host.CoreClock, "since", lambda self: cores)
    assert levels(host.other_work(machine())) == told


def test_few_open_files_are_a_warning():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        (found,) = host.open_files(machine())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (found.level, found.fix.split(" ", 2)[:2]) == ("warning", ["ulimit", "-n"])
    assert levels(host.open_files(machine())) == ["ok"]


@pytest.mark.parametrize(("gpus", "size", "level"), [(2, "64m", "warning"), (0, "64m", "ok"), (2, "2g", "ok")])
def test_little_shared_memory_is_told_where_nccl_needs_it(tmp_path, gpus, size, level):
    code = f"""
from accel_sft.tools.doctor import host
host.SHARED_MEMORY = Path({str(tmp_path)!r})
print(*(finding.level for finding in host.shared_memory(test_doctor.machine(device_count={gpus}))))
"""
    assert in_a_small_disk(tmp_path, size, code) == level


def test_ranks_without_a_launcher_are_a_problem(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    (found,) = machine().findings("variables", host.environment)
    assert (found.level, found.what[:18]) == ("problem", "RANK is not set, M")


# --- folders ---


def in_a_small_disk(folder, size, code):
    """What `code` prints with a new file system of this size mounted at the folder, for itself alone."""
    code = f"from pathlib import Path\nimport test_doctor\n{code}"
    mount = 'mount -t tmpfs -o "size=$0" tmpfs "$1" || exit 77; shift; exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mount, size, str(folder), sys.executable, "-c", code]
    path = os.pathsep.join([str(SUPPORT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ("512k", "problem runs: {}/new/runs cannot be written (No space left on device)"),
        ("100m", "problem runs: 0.10 GiB free in {}"),
        ("1g", "warning runs: 1.00 GiB free in {}"),
    ],
)
def test_a_disk_that_is_full_is_told_before_a_run_is(tmp_path, size, told):
    code = f"""
from accel_sft.tools.doctor import host
for finding in host.disk(test_doctor.machine(runs=Path({str(tmp_path)!r}, "new/runs"))):
    print(finding.level, finding.what)
"""
    assert told.format(tmp_path) in in_a_small_disk(tmp_path, size, code).splitlines()


def test_a_folder_that_cannot_be_written_is_a_problem_where_it_is_needed(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACCEL_SFT_CACHE", str(tmp_path / "file" / "cache"))
    found = list(host.disk(machine(runs=tmp_path / "file" / "runs")))
    told = {finding.what.split(":")[0]: (finding.level, finding.fix) for finding in found}
    assert told["runs"] == ("problem", "make it writable, free space, or name another with --output-dir")
    assert told["token cache"][0] == "warning"  # a run does without it
    assert not (tmp_path / "runs").exists()


def test_a_quota_is_found_by_writing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        found = list(host.disk(machine(runs=tmp_path)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"runs: {tmp_path} cannot be written (File too large)" in [finding.what for finding in found]


def test_compiled_operators_in_a_shared_folder_are_a_warning(monkeypatch):
    assert list(host.shared_operators(machine())) == []
    monkeypatch.setattr(host, "is_local", lambda folder: False)
    assert levels(host.shared_operators(machine())) == ["warning"]


# --- what is installed ---


def test_versions_are_held_against_the_package_s_own_bounds(tmp_path, monkeypatch):
    bounds = ("click<1", "psutil>=999", "no-such-package>=1", "pytest>=1", "absent>=1; extra == 'docs'")
    install(tmp_path, "accel-sft", "", module="unused", requires=bounds)
    monkeypatch.syspath_prepend(tmp_path)
    newer, older, missing, rest = software.versions(machine())
    assert newer.level == "warning"
    assert "is newer than what accel_sft was tested with (<1)" in newer.what
    assert (older.level, older.fix) == ("problem", 'pip install "psutil>=999"')
    assert (missing.level, missing.what) == ("problem", "no-such-package is not installed")
    assert rest.what.startswith("1 libraries within the bounds")


def test_a_package_that_is_only_imported_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(software, "DISTRIBUTION", "no-such-distribution")
    assert levels(software.versions(machine())) == ["warning"]


def test_broken_tasks_are_warnings_unless_there_is_no_other(tmp_path, monkeypatch):
    install(tmp_path, "accel-sft-broken", "broken = accel_sft_broken:Good", "import no_such_module\n")
    with only_plugins_of(tmp_path, monkeypatch):
        broken, none = software.tasks(machine())
        assert (broken.level, none.level) == ("warning", "problem")
        assert "No module named 'no_such_module'" in broken.what
        install(tmp_path, "accel-sft-good", "good = accel_sft_good:Good")
        assert [(finding.level, finding.what) for finding in software.tasks(machine())][1:] == [("ok", "good")]


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path.startswith("/api/models") else 500)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_):
        pass


def test_the_hub_is_asked_only_if_wanted_and_for_a_limited_time(monkeypatch):
    asking = machine()
    assert list(software.hub(asking)) == []
    asking.network = True
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert levels(software.hub(asking)) == ["ok"]
        server.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(software, "NETWORK_SECONDS", 3.0)
        (found,) = software.hub(asking)
        assert (found.level, found.what) == ("warning", "the hub cannot be reached: no answer within 3 s")
    monkeypatch.setattr(software, "NETWORK_SECONDS", 60.0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (found,) = software.hub(asking)
    assert found.what == "the hub cannot be reached: HF_HUB_OFFLINE is set"


# --- torch, asked in a process of its own ---


@pytest.mark.parametrize(
    ("source", "told", "why"),
    [
        (
            "raise ImportError('libcudart.so.13: cannot open')",
            "torch cannot be imported: ImportError: libcudart.so.13: cannot open",
            "torch cannot be imported",
        ),
        ("import os; os.kill(os.getpid(), 4)", "failed in the step: import torch (ended by SIGILL)", "not be asked"),
        ("import time; time.sleep(600)", "no answer within {} s, in the step: import torch", "not be asked"),
    ],
    ids=["broken", "crashes", "hangs"],
)
def test_a_torch_that_cannot_be_imported_is_told_and_no_launch_file_works(tmp_path, monkeypatch, source, told, why):
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setattr(machines, "import_path", dict)  # it puts the package first, and beside it may be a torch
    package = str(Path(machines.accel_sft.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), package)))
    seconds = round(limit(3))
    facts = machines.torch_facts(seconds)
    broken = machine(**vars(facts))
    (found,) = software.imports(broken)
    assert found.level == "problem"
    assert told.format(seconds) in found.what
    rows = [launch_file(broken, file) for file in SHIPPED]
    assert {row.level for row in rows} == {"no"}
    assert all(why in row.what for row in rows)
    assert list(launches.exchange(broken)) == []


def table_of(machine):
    """What is said of each shipped launch file, by its name."""
    return {file.stem: launch_file(machine, file) for file in SHIPPED}


def working(machine):
    return {name for name, row in table_of(machine).items() if row.level == "yes"}


def test_a_fault_behind_the_imports_is_told_and_stops_those_that_need_what_was_not_reached():
    half = machine(fault="no answer within 300 s, in the step: load DeepSpeed's operators", operators={})
    assert levels(software.imports(half)) == ["problem"]
    assert {"ddp", "z2"} <= working(half)
    assert table_of(half)["z2_offload"].what == "it is not known whether DeepSpeed's operator cpu_adam works here"
    assert levels(software.imports(machine())) == ["ok"]


# --- GPUs ---


def test_gpus_are_counted_by_the_driver_and_by_torch(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (both,) = gpus.gpus(machine(**GPUS, **DRIVER))
    assert (both.level, both.what) == ("ok", "2 x NVIDIA H100 (80 GiB); driver 580.65.06")
    (fewer,) = gpus.gpus(machine(**GPUS | {"device_count": 1}, **DRIVER))
    assert "of which torch sees 1" in fewer.what
    assert levels(gpus.cuda(machine(**GPUS, **DRIVER))) == ["ok"]
    (alone,) = gpus.gpus(machine(**GPUS))
    assert alone.what == "2 x NVIDIA H100"
    (shared,) = gpus.gpus(machine(**GPUS, driver="580", driver_gpus={"0": {"name": "GB10"}, "1": {"name": "GB10"}}))
    assert shared.what == "2 x GB10; driver 580"


@pytest.mark.parametrize(
    ("use", "words"), [({"used": 9 * 2**30}, "0% of the time, 9.0 GiB"), ({"busy": 85}, "85% of the time, 0.0 GiB")]
)
def test_a_gpu_that_others_use_is_a_warning(use, words):
    _, busy = gpus.gpus(machine(**GPUS, **DRIVER | {"driver_gpus": {"0": GPU, "1": GPU | use}}))
    assert (busy.level, busy.what) == ("warning", f"GPU 1 is in use: {words}")


def test_a_gpu_that_cannot_compute_stops_every_launch_file():
    ill = machine(**GPUS, **DRIVER, device_failures={"1": "AcceleratorError: no kernel image"})
    assert levels(gpus.gpus(ill)) == ["ok", "problem"]
    assert not working(ill)


@pytest.mark.parametrize(
    ("failure", "fix"), [("Driver/library version mismatch", "restart the machine"), ("Unknown Error", "install the")]
)
def test_a_driver_that_does_not_answer_is_a_problem(failure, fix):
    (found,) = gpus.gpus(machine(driver_failure=failure))
    assert (found.level, found.what) == ("problem", f"the NVIDIA driver does not answer: {failure}")
    assert found.fix.startswith(fix)
    assert levels(gpus.gpus(machine(**GPUS, driver_failure=failure))) == ["warning", "ok"]


NO_GPU = {"device_count": 0, "device_names": []}


@pytest.mark.parametrize(
    ("facts", "driver_cuda", "what"),
    [
        (NO_GPU, 12040, "torch 2.13.0 for CUDA 13.0, the driver runs up to 12.4"),
        (NO_GPU | {"cuda": None}, 13000, "torch 2.13.0 is a build without CUDA: it uses none of the GPUs"),
        (NO_GPU | {"cuda_complaint": "CUDA unknown error"}, 13000, "torch sees no GPU: CUDA unknown error"),
    ],
    ids=["older driver", "build for CPUs", "complaint"],
)
def test_gpus_that_torch_cannot_use_are_a_problem_unless_hidden(monkeypatch, facts, driver_cuda, what):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ill = machine(**GPUS | facts | DRIVER | {"driver_cuda": driver_cuda})
    (found,) = gpus.cuda(ill)
    assert (found.level, found.what) == ("problem", what)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(gpus.cuda(ill)) == []
    assert "hidden from torch" in list(gpus.gpus(ill))[-1].what


COPIES = {"to pinned": 25.0, "from pinned": 26.0, "to pageable": 11.0, "from pageable": 9.0}


def test_slow_copies_between_host_and_gpu_are_a_warning():
    assert list(gpus.copies(machine())) == []
    well, slow = COPIES | {"link": 31.5}, COPIES | {"from pinned": 6.1, "link": 31.5}
    first, second, ill, full = gpus.copies(machine(**GPUS, copies={"0": well, "1": slow, "2": {}}))
    assert levels([first, second, full]) == ["ok"] * 3
    assert first.what == (
        "GPU 0: 25 GB/s to pinned memory, 26 GB/s from pinned memory, "
        "11 GB/s to pageable memory, 9 GB/s from pageable memory"
    )
    assert (ill.level, ill.what) == ("warning", "GPU 1 copies 6.1 GB/s of 32 that its link could carry")
    assert full.what == "GPU 2: not measured"
    assert levels(gpus.copies(machine(**GPUS, copies={"0": COPIES | {"to pinned": 1.0}}))) == ["ok"]  # no link is known


def test_copies_are_timed_and_links_are_read(monkeypatch):
    import torch

    monkeypatch.setattr(torch_script, "COPIED", 1 << 20)
    speeds = torch_script._copies(torch, "cpu", ["pageable"])
    assert [*speeds] == ["from pageable", "to pageable"]
    assert all(0.01 < speed < 1000 for speed in speeds.values())

    nvml = Nvml(MaxPcieLinkWidth=4)
    named = types.SimpleNamespace(get_device_properties=lambda index: types.SimpleNamespace(uuid="GPU-7"))
    monkeypatch.setattr(machine_state, "open_gpu", lambda uuid: (nvml, uuid))
    monkeypatch.setattr("pynvml.NVMLError", Nvml.NVMLError)
    assert torch_script._link(types.SimpleNamespace(cuda=named), 0) == pytest.approx({"link": 15.744})
    nvml.answers["MaxPcieLinkWidth"] = None
    assert torch_script._link(types.SimpleNamespace(cuda=named), 0) == {}


@pytest.fixture
def asked(monkeypatch):
    """`asked(**answers)` gives the facts that the script prints of a driver whose NVML answers so."""

    def facts(count=1, **answers):
        import pynvml

        printed = {}
        memory = types.SimpleNamespace(total=80 * 2**30, used=2**24)
        system = {"SystemGetDriverVersion": "580.65.06", "SystemGetCudaDriverVersion_v2": 13000, "Init": None}
        device = {"Count": count, "HandleByIndex": 0, "Name": "NVIDIA H100", "MemoryInfo": memory}
        device |= {"UtilizationRates": types.SimpleNamespace(gpu=7)}

        def answering(answer):
            def answered(*_):
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return answered

        for name, answer in (system | {f"DeviceGet{name}": value for name, value in device.items()} | answers).items():
            monkeypatch.setattr(pynvml, f"nvml{name}", answering(answer))
        monkeypatch.setattr(torch_script, "tell", lambda **facts: printed.update(facts))
        torch_script._driver()
        return printed

    return facts


def test_the_driver_is_asked_by_nvml(asked, monkeypatch, tmp_path):
    import pynvml

    told = {"driver": "580.65.06", "driver_cuda": 13000, "driver_gpus": {"0": GPU | {"busy": 7}}}
    assert asked() == told
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    sliced = asked(DeviceGetMemoryInfo=refused, DeviceGetUtilizationRates=refused)
    assert sliced["driver_gpus"] == {"0": {"name": "NVIDIA H100"}}
    mismatch = pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert asked(Init=mismatch)["driver_failure"] == str(mismatch)
    missing = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(torch_script, "NVIDIA", tmp_path / "nvidiactl")
    assert asked(Init=missing) == {}  # no driver
    (tmp_path / "nvidiactl").touch()
    assert asked(Init=missing)["driver_failure"] == str(missing)


def test_an_nvcc_of_another_cuda_is_a_warning(programs, tmp_path):
    program(tmp_path / "bin", "nvcc", 'echo "Cuda compilation tools, release 12.4, V12.4.131"')
    assert levels(gpus.cuda(machine(**GPUS, **DRIVER))) == ["ok", "warning"]
    program(tmp_path / "bin", "nvcc", 'echo "Cuda compilation tools, release 13.1, V13.1.2"')
    assert levels(gpus.cuda(machine(**GPUS, **DRIVER))) == ["ok"]


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        ({"bf16_speedup": 5.2}, "ok", "5.2 times as fast as float32"),
        ({"bf16_speedup": 1.1}, "ok", "it saves memory, hardly time"),
        ({"bf16_speedup": 0.25}, "warning", "4.0 times slower than float32"),
        ({"bf16_speedup": 0.01, "bf16_native": False}, "ok", "float32; bf16 would be emulated, 100.0 times slower"),
        ({"bf16_speedup": 0.9, "bf16_native": False, "device_names": ["T4"]}, "warning", "T4 has no bf16"),
    ],
)
def test_whether_bf16_is_fast_is_told_as_measured(facts, level, words):
    (found,) = gpus.bf16(machine(**facts))
    assert found.level == level
    assert words in found.what
    assert list(gpus.bf16(machine())) == []


# --- DeepSpeed's operators ---


def state(**other):
    return {"library": "/ext/cpu_adam/cpu_adam.so", "compiled": True, "failure": "", "locks": []} | other


def test_an_operator_that_cannot_be_loaded_is_a_problem_for_those_that_need_it():
    ill = machine(operators={**machine().torch.operators, "cpu_adam": state(failure="ImportError: undefined symbol")})
    found = [finding for finding in launches.operators(ill) if finding.level == "problem"]
    assert [finding.fix for finding in found] == ["rm -r /ext/cpu_adam, then accel-sft doctor --build"]
    assert (
        "cpu_adam (for z2_offload, z3_nvme, z3_offload, z3_twin_flow) is compiled, and cannot be loaded"
        in found[0].what
    )
    assert working(ill) & {"z2", "z2_offload", "z3_offload"} == {"z2"}


def test_an_operator_not_compiled_yet_is_told_with_what_compiles_it(monkeypatch):
    new = machine(operators=dict.fromkeys(OPERATORS, state(compiled=False)))
    monkeypatch.delenv("CXX", raising=False)
    found = next(launches.operators(new))
    assert (found.level, found.fix[:26]) == ("ok", "accel-sft doctor --build d")
    row = launch_file(new, FOLDER / "z2_offload.yaml")
    assert (row.level, row.what) == ("yes", "the first launch compiles cpu_adam")


def test_a_compiler_that_is_too_old_stops_offload_and_nothing_else(programs, monkeypatch):
    old = program(programs, "old", 'echo "g++ 8.5.0"; echo "Copyright (C) 2018 Free Software Foundation, Inc."')
    monkeypatch.setenv("CXX", str(old))
    poor = machine(operators=dict.fromkeys(OPERATORS, state(compiled=False)))
    found = [*launches.operators(poor)]
    assert set(levels(found)) == {"warning"}
    assert found[0].fix == "GCC 9 or newer is needed; name it in CXX"
    assert next(launches.compiler(poor)).what.startswith("g++ 8.5.0, ninja ")
    assert not working(poor) & {"z2_offload", "z3_offload", "z3_nvme", "z3_twin_flow"}
    assert {"ddp", "z0", "z1", "z2", "z3"} <= working(poor)
    assert table_of(poor)["z2_offload"].what == f"{old} is GCC 8"


def test_no_compiler_is_told_among_the_tools(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert next(launches.compiler(machine())).what.startswith("no C++ compiler, ninja ")


def test_locks_of_compilations_are_told():
    locks = [["warning", "another process compiles cpu_adam", "wait"], ["note", "a lock was left behind", "removed"]]
    found = launches._operator(machine(operators={"cpu_adam": state(locks=locks)}), "cpu_adam", ["z2_offload"])
    assert levels(found) == ["warning", "ok", "ok"]


@pytest.mark.parametrize("breaks", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_operator_is_compiled_as_a_launch_does_or_the_error_is_named(tmp_path, programs, monkeypatch, breaks):
    cxx = 'case "$*" in *-c*) echo "cpu_adam.cpp:1:2: error: no luck" >&2; exit 1 ;; *) exec c++ "$@" ;; esac'
    if breaks:
        monkeypatch.setenv("CXX", str(program(programs, "failing", cxx)))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    library = tmp_path / "cpu_adam" / "cpu_adam.so"
    library.parent.mkdir()
    building = machine(operators={"cpu_adam": state(library=str(library), compiled=False)})
    building.build = True
    (found,) = launches._operator(building, "cpu_adam", ["z2_offload"])
    assert (found.level, library.is_file()) == (("problem", False) if breaks else ("ok", True))
    if breaks:
        assert "could not be compiled: cpu_adam.cpp:1:2: error: no luck" in found.what
        assert "no luck" in (library.parent / "doctor.log").read_text()
        assert launch_file(building, FOLDER / "z2_offload.yaml").what == "cpu_adam cannot be compiled"


# --- ranks ---


@pytest.mark.parametrize(
    ("rank_1_does", "why"),
    [
        pytest.param("time.sleep(600)", "no sum within {} s", marks=pytest.mark.long),
        (
            "from torch import distributed; distributed.all_reduce = lambda *_: time.sleep(600)",
            "no sum within {} s",
        ),
        ("pass\nfrom torch import distributed; distributed.all_reduce = lambda *_: 0", "rank [01]: the sum is wrong"),
        ("os._exit(3)", "rank 1 ended with status 3"),
    ],
    ids=["does not come", "hangs", "adds nothing", "ends"],
)
def test_ranks_that_do_not_add_up_are_told_within_the_time(tmp_path, monkeypatch, rank_1_does, why):
    lines = ["import os, time", "if os.environ.get('RANK') == '1':", f"    {rank_1_does}"]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *(path for path in sys.path if path))))
    monkeypatch.setattr(machines, "import_path", dict)
    seconds = round(limit(4))
    assert re.fullmatch(why.format(seconds), exchange_failure("gloo", 2, seconds))
    left = [process for process in psutil.Process().children(recursive=True) if "rank" in process.cmdline()]
    assert not left


def test_nccl_has_longer_than_gloo_because_it_first_searches_the_machines_links(monkeypatch):
    limits = {}
    monkeypatch.setattr(
        launches, "exchange_failure", lambda backend, ranks, seconds: limits.setdefault(backend, seconds) and ""
    )
    assert levels(launches.exchange(machine(**GPUS))) == ["ok", "ok"]
    assert limits == {"gloo": 30, "nccl": 120}


def test_a_network_that_ranks_cannot_use_is_a_problem_and_one_process_is_left(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    cut = machine()
    (found,) = launches.exchange(cut)
    assert found.level == "problem"
    assert found.what.startswith("2 ranks did not add up numbers by gloo: rank ")
    assert not working(cut)
    vars(cut)["torch"].device_count = 1  # one process on one GPU asks nobody
    assert {"ddp", "z2"} <= working(cut)


# --- launch files ---


@pytest.mark.parametrize(
    ("gpus", "flags"), [(1, ""), (2, ""), (8, "with --num_processes 8")], ids=["one", "two", "eight"]
)
def test_on_gpus_each_file_starts_a_process_for_each(gpus, flags):
    table = table_of(machine(device_count=gpus))
    assert table["fsdp2"] == Finding("yes", flags, subject="fsdp2")
    assert (table["hsdp"].level == "yes") is (gpus == 8)
    assert gpus == 8 or table["hsdp"].fix.startswith("accelerate_configs/fsdp2.yaml runs on")
    assert (table["tp"].level == "yes") is (gpus > 1)
    assert gpus > 1 or table["tp"].fix == "accelerate_configs/ddp.yaml runs on 1 GPU"
    wanted = f"with --num_processes {2 * gpus}; " if gpus > 1 else ""
    assert table["multinode_z3"] == Finding("yes", f"{wanted}needs 2 machines like this one", subject="multinode_z3")


def test_a_file_that_the_launcher_would_refuse_is_told(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: DEEPSPED\nnum_processes: 2\n")
    row = launch_file(machine([own]), own)
    assert (row.level, row.what.rpartition(": ")[2]) == ("no", "'DEEPSPED' is not a valid DistributedType")
    assert launch_file(machine([own]), tmp_path / "absent.yaml").level == "no"


def test_without_deepspeed_the_other_files_work():
    without = machine(imports={**dict.fromkeys(LIBRARIES, ""), "deepspeed": "ImportError: ill"})
    assert working(without) & {"ddp", "z2"} == {"ddp"}
    assert table_of(without)["z2"].what == "deepspeed cannot be imported"


# --- the command ---


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
    found = {}
    for each in report["findings"]:
        found.setdefault(each["subject"], []).append((each["level"], each["what"]))
    assert [each["what"] for each in report["findings"] if each["level"] == "problem"] == [
        what for _, what in found["operators"] if "cpu_adam" in what
    ]
    assert "is compiled, and cannot be loaded: ImportError: " in found["operators"][0][1]
    assert "another process compiles async_io" in found["operators"][1][1]
    assert lock.exists()
    assert found["imports"] == [("ok", "torch, accelerate, transformers, peft, deepspeed can be imported")]
    assert found["GPU"] == [("ok", "none; training runs on the CPU")]
    assert re.search(r"\d+\.\d times (as fast as|slower than) float32", found["bf16"][0][1])
    assert found["exchange"][0][1].startswith("2 ranks added up numbers by gloo (")
    table = {row["subject"]: (row["level"], row["what"]) for row in report["launch_files"]}
    assert len(table) == len(SHIPPED)
    assert table["ddp"] == table["z2"] == ("yes", "")
    assert (table["fsdp2"][0], table["z2_offload"]) == ("no", ("no", "cpu_adam cannot be loaded"))
    assert not (tmp_path / "runs").exists()


def test_the_report_begins_at_once_and_an_interrupt_leaves_nothing_behind(tmp_path):
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    package = str(Path(machines.accel_sft.__file__).parents[1])
    code = "import sys; from accel_sft.__main__ import main; from accel_sft.tools.doctor import machine as m; "
    code += "m.import_path = dict; sys.argv[1:] = ['doctor']; main()"
    paths = os.pathsep.join((str(tmp_path), package, *filter(None, [os.environ.get("PYTHONPATH")])))
    env = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True, env=env) as process:
        for line in process.stdout:
            if re.match(r"  \w+ +tasks: ", line):
                break
        while not (tmp_path / "pid").exists() or not (asked := (tmp_path / "pid").read_text()):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert (process.returncode, "Launch files" in rest) == (130, False)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(asked)).wait(limit(10))
    assert not psutil.pid_exists(int(asked))


@pytest.fixture
def report(monkeypatch):
    """The command in this process, with these checks and these facts: its status and what it printed."""
    from click.testing import CliRunner

    def run(*found, arguments=(), **facts):
        monkeypatch.setattr(command, "checks", lambda: {"Machine": {"any": lambda machine: found}})
        monkeypatch.setattr(Machine, "torch", machine(**facts).torch)
        done = CliRunner().invoke(doctor, arguments)
        return done.exit_code, done.output

    return run


def test_the_exit_status_says_whether_there_is_a_problem(report):
    status, text = report(ok("fine"), warning("few", "more"))
    assert status == 0
    assert re.search(
        r"^(10|11) of 15 launch files work here, on the CPU; no problems, 1 warning\.$", text, re.M
    )  # libaio
    status, text = report(problem("none", "some"))
    assert (status, "1 problem, no warnings." in text) == (1, True)
    assert text.index("  problem any: none\n          -> some\n")
    assert "accelerate launch --config_file ddp.yaml -m accel_sft math" in text


def test_the_command_at_the_end_is_one_for_this_machine(report, tmp_path):
    (tmp_path / "mine.yaml").write_text((FOLDER / "ddp.yaml").read_text())
    _, text = report(arguments=[str(tmp_path / "mine.yaml")], **GPUS | {"device_count": 4})
    assert " of 16 launch files work here, on 4 GPUs; no problems, no warnings." in text
    assert re.search(r"^  yes     mine: with --num_processes 4$", text, re.M)
    assert "accelerate launch --config_file ddp.yaml --num_processes 4 -m accel_sft math" in text


def test_what_a_machine_tells_steers_no_terminal(report):
    _, text = report(ok("a\x1b[2Jb"))
    assert "\\x1b[2J" in text


def test_ranks_of_a_launcher_are_refused(monkeypatch, report):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    status, _ = report()
    assert status == 1
