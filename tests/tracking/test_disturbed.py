"""Steps in which a run was disturbed are marked, with what changed; on a quiet machine nothing is."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from fake_nvml import Nvml
from fake_plugins import accel_sft

from accel_sft.io.run_dir import RunDir
from accel_sft.launch import host_memory, machine_state
from accel_sft.launch.machine_state import CoreClock, gpu_state, others_gib, slowed_by
from accel_sft.tools.compare.measured import measure
from accel_sft.tracking.disturbed import KEY, disturbed_segments, in_words, marks, sentences, share
from accel_sft.tracking.system import NewReading, Reading, Readings

OTHERS = "other processes took # of 2 cores"
NOTHING = Reading()
QUIET = NOTHING._replace(cpu_percent=190.0, busy_cores=1.95, idle_cores=0.05, stolen_cores=0.0, held_cores=0.0)
GPU = {"gpu_clock_mhz": 1200.0, "gpu_clock_share": 1200 / 1980, "gpu_slowed_by": 0.0, "gpu_others_gib": 0.0}


# --- what is read ---


@pytest.fixture
def system(tmp_path, monkeypatch):
    """`system(path, text)` writes a file of /proc or /sys."""
    monkeypatch.setattr(host_memory, "SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3})

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/self/cgroup", "0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return write


def ticks(of_core_0, of_core_3):
    rest = "9 9 9 9 9 9 9 9 9 9\n"  # those of cores that this process may not use do not count
    return f"cpu  {rest}cpu0 {of_core_0}\ncpu1 {rest}cpu2 {rest}cpu3 {of_core_3}\ncpu30 {rest}intr 1 2 3\n"


def test_allowed_cores_divide_into_busy_idle_and_stolen(system):
    assert all(map(math.isnan, CoreClock().since()))  # no /proc/stat, as on macOS
    system("proc/stat", ticks("0 0 0 0 0 0 0 0 0 0", "100 0 0 0 0 0 0 0 0 0"))
    clock = CoreClock()
    assert all(map(math.isnan, clock.since()))  # not a tick has passed
    system("proc/stat", ticks("50 10 20 0 20 7 7 0 0 0", "100 0 0 60 0 0 0 40 0 0"))
    assert clock.since()[:3] == pytest.approx((0.8, 0.8, 0.4))
    system("proc/stat", "cpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert clock.since()[0] != 0  # a counter of its own, which went back: no reading
    system("proc/stat", "cpu9 1 1 1 1 1 1 1 1 1 1\n")
    assert all(map(math.isnan, CoreClock().since()))


@pytest.mark.parametrize(
    ("groups", "folder", "line"),
    [("0::/\n", "", "throttled_usec"), ("3:cpu,cpuacct:/\n", "cpu,cpuacct/", "throttled_time")],
)
def test_cpu_quota_is_counted_in_both_control_group_versions(system, monkeypatch, groups, folder, line):
    now = iter([10.0, 12.0])
    monkeypatch.setattr(machine_state.time, "monotonic", lambda: next(now))
    unit = 1_000_000 if line == "throttled_usec" else 1_000_000_000
    system("proc/self/cgroup", groups)
    system(f"sys/fs/cgroup/{folder}cpu.stat", f"nr_periods 5\n{line} {unit}\n")
    system("proc/stat", ticks("0 0 0 0 0 0 0 0 0 0", "0 0 0 0 0 0 0 0 0 0"))
    clock = CoreClock()
    system(f"sys/fs/cgroup/{folder}cpu.stat", f"nr_periods 9\n{line} {2 * unit}\n")
    system("proc/stat", ticks("100 0 0 0 0 0 0 0 0 0", "100 0 0 0 0 0 0 0 0 0"))
    assert clock.since() == pytest.approx((2.0, 0.0, 0.0, 0.5))


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({}, ""),
        ({"CurrentClocksEventReasons": 0x4}, ""),  # every GPU at full load runs into its usual limit
        ({"CurrentClocksEventReasons": 0x4, "PowerManagementLimit": 400_000}, "power cap"),
        ({"CurrentClocksEventReasons": 0x48}, "heat, slowdown by hardware"),
        ({"CurrentClocksEventReasons": 0x20, "ClockInfo": 1900}, ""),
        ({"CurrentClocksEventReasons": None}, ""),
    ],
)
def test_gpu_slowdown_counts_only_its_real_causes(answers, why):
    state = gpu_state(Nvml(**answers), None)
    assert slowed_by(state.reasons) == why
    assert math.isnan(state.mhz) == (answers == {"CurrentClocksEventReasons": None})


def test_memory_of_others_needs_this_process_in_the_drivers_list():
    sibling = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        listed = {os.getpid(): 2**30, 2**22 + 1: 3 * 2**30, 2**22 + 2: None}
        assert others_gib(Nvml(ComputeRunningProcesses=listed), None) == 3.0
        del listed[os.getpid()]
        assert math.isnan(others_gib(Nvml(ComputeRunningProcesses=listed), None))  # numbers of another namespace
        assert math.isnan(others_gib(Nvml(ComputeRunningProcesses=None), None))
        mine = {os.getpid(): 1, sibling.pid: 2**31}  # as of a process that this one starts
        assert others_gib(Nvml(ComputeRunningProcesses=mine), None) == 0.0
    finally:
        sibling.communicate(b"")


# --- what is marked ---


def test_nothing_is_marked_on_a_quiet_machine():
    quiet = (
        QUIET,
        NOTHING,  # not on Linux
        QUIET._replace(**GPU),  # power capped at the usual limit
        QUIET._replace(cpu_percent=1.0, busy_cores=0.01, idle_cores=1.99),
        QUIET._replace(cpu_percent=100.0, busy_cores=9.0, idle_cores=7.0),  # others on cores that the run leaves idle
        QUIET._replace(cpu_percent=185.0, stolen_cores=0.1, held_cores=0.1, gpu_others_gib=0.6),
    )
    assert [marks([one]) for one in quiet] == [{}] * len(quiet)
    sharing = [QUIET._replace(cpu_percent=95.0), NOTHING._replace(cpu_percent=95.0)]  # two ranks share the cores
    assert marks(sharing) == {}


@pytest.mark.parametrize(
    ("read", "words"),
    [
        ({"cpu_percent": 60.0}, "other processes took 1.4 of 2 cores"),
        (
            {"stolen_cores": 0.4, "busy_cores": 1.6, "cpu_percent": 160.0},
            "a hypervisor took for other machines (steal) 0.4 of 2 cores",
        ),
        ({"held_cores": 0.5}, "a container's CPU quota held back 0.5 of 2 cores"),
        (GPU | {"gpu_slowed_by": 4.0}, "rank 0's GPU ran at 1,200 of 1,980 MHz (power cap)"),
        (GPU | {"gpu_others_gib": 3.25}, "other processes had 3.2 GiB of rank 0's GPU"),
    ],
)
def test_what_slows_a_machine_down_is_marked_in_words(read, words):
    assert [in_words(*mark) for mark in marks([QUIET._replace(**read)]).items()] == [words]
    (there,) = marks([QUIET, NOTHING._replace(cpu_percent=0.0), QUIET._replace(**read)])  # on a second machine
    assert "rank 2's" in there


def test_readings_across_a_start_or_pause_have_none_before_them():
    readings = Readings()
    samples = [QUIET._replace(sample=number) for number in (1, 1, 2, 2, 3, 4)]
    pauses = [False, False, False, True, False, False]
    new = [readings.new([sample], pause) for sample, pause in zip(samples, pauses, strict=True)]
    first, second, third, fourth = QUIET._replace(sample=1), samples[2], samples[4], samples[5]
    assert new == [
        {0: NewReading(first, None)},  # of the start
        {},
        {0: NewReading(second, first)},
        {},
        {0: NewReading(third, None)},  # of the pause in the step before
        {0: NewReading(fourth, third)},
    ]
    assert readings.new([], False) == {}


# --- segments of steps ---


def lines_of(readings, seconds=1.0):
    """Training lines from what is read in their steps: cores taken, 0 for nothing, None without a reading."""
    written = []
    for step, taken in enumerate(readings, 1):
        line = {"step": step, "loss": 1.0, "seconds": seconds, "tokens": 64}
        written.append(line if taken is None else line | {KEY: {OTHERS: taken} if taken else {}})
    return written


def test_segments_show_steps_and_means():
    lines = lines_of([*[0] * 119, None, *[1.2, None, 1.6] * 20, 1.4, *[0] * 100])
    (segment,) = disturbed_segments(lines)
    assert str(segment) == "steps 120 to 181: other processes took 1.4 of 2 cores"
    assert share(lines, [segment]) == pytest.approx(62 / len(lines))
    (one,) = disturbed_segments(lines_of([0, 1.0, 1.0, 0, 1.0, 0, 0, 1.0]))
    assert (one.first, one.last) == (2, 5)  # one reading in between is no end, two are


def test_short_and_single_readings_make_no_segment():
    assert disturbed_segments(lines_of([0, 1.0, 1.0, 0, 0, 1.0, 0])) == []
    assert disturbed_segments(lines_of([*[1.0] * 3, *[0] * 400])) == []
    many = disturbed_segments(lines_of([*[1.0] * 4, 0, 0, *[1.0] * 5, 0, 0] * 4))
    assert len(many) == 8
    assert len(sentences(many)) == 5
    odd = [None, 5, {"a#": None, "b": "1", "c": [], "d": True}]  # lines that were changed by hand
    assert disturbed_segments([{"step": 1, KEY: value} for value in odd]) == []


def test_a_comparison_names_the_steps_unless_they_are_few(tmp_path):
    for name, taken, first in (("much", 8, 33), ("little", 3, 38)):
        (tmp_path / name).mkdir()
        lines = lines_of([*[0] * (40 - taken), *[1.0] * taken])
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        disturbances = measure(RunDir(tmp_path / name), 3)["disturbed"]
        assert disturbances == ([f"steps {first} to 40: other processes took 1.0 of 2 cores"] if taken == 8 else [])


@pytest.mark.long
def test_a_busy_process_is_told_in_output_and_files_of_a_run(tmp_path):
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        options = ("--max-steps", "40", "--eval-every", "off", "--save-every", "off", "--output-dir", "run")
        done = accel_sft("math", *options, cwd=tmp_path)
    finally:
        for process in beside:
            process.kill()
            process.wait()
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("disturbed: steps ")]
    assert "other processes took" in line
    result, report = (json.loads((tmp_path / "run/result.json").read_text()), (tmp_path / "run/report.md").read_text())
    assert all(f"- {words}" in report for words in result["disturbed"])
    assert measure(RunDir(tmp_path / "run"), 3)["disturbed"]
