"""Where a run's time goes, why its GPU idles, and what energy that takes: by readings and traces of the real form."""

from __future__ import annotations

import json
import math
import types

import pytest

from accel_sft.tracking.idle import WARMUP_STEPS, IdleWatch
from accel_sft.tracking.profiler import traced_steps
from accel_sft.tracking.run_report import energy_text, render_report
from accel_sft.tracking.system import Usage
from accel_sft.tracking.trace import (
    BACKWARD,
    BATCHES,
    COMMUNICATION,
    COPIES,
    FORWARD,
    IDLE,
    OPTIMIZER,
    OTHER,
    PAUSE,
    PREFIX,
    batch_share,
    time_sentence,
    time_spent,
)

MAIN, AUTOGRAD = 7, 8


def event(category, name, begin, end, thread=MAIN, **args):
    """An event of a Chrome trace as torch writes it, of times in milliseconds."""
    about = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread}
    return {**about, "ts": 1000.0 * begin, "dur": 1000.0 * (end - begin), "args": args}


def span(name, begin, end):
    return event("user_annotation", PREFIX + name, begin, end)


def kernel(name, launched, begin, end, number, category="kernel", thread=AUTOGRAD):
    """Something that runs on the GPU, and the call that launched it."""
    call = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync"}[category]
    return [
        event("cuda_runtime", call, launched, launched + 0.01, thread, correlation=number),
        event(category, name, begin, end, "stream 7", correlation=number, device=0, stream=7),
    ]


def step(begin, number=2):
    """A step of 100 ms: 10 of rows and batch, 20 forward, 40 backward, 5 waiting, 15 optimizer, 10 else."""
    return [
        event("user_annotation", f"ProfilerStep#{number}", begin, begin + 100),
        span(BATCHES, begin + 4, begin + 6),  # the rows are divided
        span(BATCHES, begin + 6, begin + 10),
        span(FORWARD, begin + 10, begin + 30),
        event("cpu_op", "aten::mm", begin + 12, begin + 28),
        span(BACKWARD, begin + 30, begin + 70),
        span(COMMUNICATION, begin + 70, begin + 75),
        span(OPTIMIZER, begin + 75, begin + 90),
    ]


@pytest.fixture
def read(tmp_path):
    def spent(*events):
        tmp_path.joinpath("rank0.1.pt.trace.json").write_text(json.dumps({"traceEvents": [{"ph": "M"}, *events]}))
        return time_spent(tmp_path / "rank0.1.pt.trace.json")

    return spent


def milliseconds(parts):
    return {name: round(1000 * seconds, 3) for name, seconds in parts.items()}


def test_the_process_s_time_is_divided_without_a_rest_and_evaluations_are_left_out(read, tmp_path):
    # the second step begins with an evaluation of 50 ms, whose forwards have other names
    later = [
        {**each, "ts": each["ts"] + 50_000.0} if each["name"] != "ProfilerStep#3" else {**each, "dur": 150_000.0}
        for each in step(100, 3)
    ]
    spent = read(*step(0), *later, span(PAUSE, 100, 150), event("user_annotation", "ProfilerStep#4", 250, 260))
    assert (spent["steps"], round(spent["seconds"], 6)) == (2, 0.2)  # the third has no training
    assert milliseconds(spent["process"]) == {
        **{BATCHES: 20, FORWARD: 40, BACKWARD: 80, COMMUNICATION: 10, OPTIMIZER: 30, OTHER: 20}
    }
    assert "device" not in spent
    told = time_sentence({**spent, "rank": 0, "ranks": 2})
    assert told == (
        "where the time of 2 traced steps of rank 0 went in the process (0.1 s each): 40% backward, 20% forward, "
        "15% optimizer, 10% reading rows and making batches, 10% the rest, 5% communication, waiting for other ranks "
        "included"
    )
    alone = time_sentence({**spent, "rank": 0, "ranks": 1})  # who waits for no other rank
    assert alone.endswith("40% backward, 20% forward, 15% optimizer, 15% the rest, 10% reading rows and making batches")
    share = batch_share(tmp_path)
    assert (share["steps"], round(share["batch_seconds"], 6)) == (2, 0.02)


def test_an_exchange_counts_where_nothing_is_computed_beside_it(read):
    """Gradients are reduced while the backward goes on: by gloo, on threads of its own."""
    computed = [event("cpu_op", "aten::mm", 30, 50), event("cpu_op", "aten::add_", 52, 58, AUTOGRAD)]
    spent = read(*step(0), event("user_annotation", "gloo:all_reduce", 40, 65, 99), *computed)
    assert milliseconds(spent["process"])[COMMUNICATION] == 5 + 15
    assert milliseconds(spent["process"])[BACKWARD] == 40 - 15


def test_on_a_gpu_kernels_copies_and_idle_time_add_up_to_all(read):
    spent = read(
        *step(0),
        *kernel("Memcpy HtoD (Pageable -> Device)", 8, 8, 10, 1, "gpu_memcpy", MAIN),
        *kernel("ampere_bf16_s16816gemm_bf16_128x64", 12, 15, 31, 2, thread=MAIN),
        *kernel("softmax_warp_forward", 29, 31, 35, 7, thread=MAIN),  # of the forward, though the backward has begun
        *kernel("ampere_bf16_s16816gemm_bf16_128x64", 31, 35, 60, 3),
        *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 50, 50, 72, 4),
        *kernel("multi_tensor_apply_kernel<FusedAdam>", 76, 80, 84, 5, thread=MAIN),
        *kernel("a kernel of the metrics", 92, 92, 94, 6, thread=MAIN),
    )
    expected = {COPIES: 2, FORWARD: 20, BACKWARD: 25, COMMUNICATION: 12, OPTIMIZER: 4, OTHER: 2, IDLE: 35}
    assert milliseconds(spent["device"]) == expected
    assert sum(expected.values()) == 100
    assert milliseconds(spent["idle"]) == {BATCHES: 8, FORWARD: 5, COMMUNICATION: 3, OPTIMIZER: 11, OTHER: 8}
    told = time_sentence({**spent, "rank": 0, "ranks": 2})
    assert "of rank 0 went on the GPU (0.1 s each): 35% idle, 25% backward, 20% forward, 12% communication" in told
    assert told.endswith(
        "while it was idle (0.035 s a step), the process spent its time on 31% optimizer, 23% reading rows and making "
        "batches, 23% the rest, 14% forward, 9% communication, waiting for other ranks included"
    )


def test_percentages_add_up_to_a_hundred_however_they_round():
    parts = {BATCHES: 1.0, FORWARD: 1.0, BACKWARD: 1.0}
    told = time_sentence({"steps": 1, "seconds": 3.0, "process": parts, "rank": 0, "ranks": 1})
    assert "1 traced step went" in told
    assert sorted(int(part.split("%")[0].split()[-1]) for part in told.split(": ")[1].split(", ")) == [33, 33, 34]


@pytest.mark.parametrize("content", ["", '{"traceEvents": [', "{}", '{"traceEvents": []}'])
def test_a_trace_that_was_cut_off_or_has_no_step_tells_nothing(tmp_path, content):
    (tmp_path / "rank0.1.pt.trace.json").write_text(content)
    assert time_spent(tmp_path / "rank0.1.pt.trace.json") is None
    assert batch_share(tmp_path) is None


@pytest.mark.parametrize("steps", [1, 2])
def test_a_training_too_short_to_be_traced_is_told_so(tmp_path, steps):
    told, reported = [], []
    with traced_steps(tmp_path, 0, 1, told.append, reported.append) as profiler:
        for _ in range(steps):
            profiler.step()
    assert "begins with step 3 of a start" in told[-1]
    assert reported == []


# --- a GPU that idles ---

SECONDS = {FORWARD: 0.2, BACKWARD: 0.3}


def watched(watch, steps, percent=20.0, *, begin=1, spent=None, tokens=64_000, forwards=4, ranks=1, pauses=()):
    """The warnings of steps of a second; a rank's GPU is used by `percent`, rank 0's by 90 where there are others."""
    told = []
    for number in range(begin, begin + steps):
        paused = {PAUSE: 30.0} if number in pauses else {}
        use = [90.0] * (ranks - 1) + [percent(number) if callable(percent) else percent]
        system = [[float(number), 100.0, 1.0, 1.0, each, 1.0, math.nan] for each in use]
        record = {"step": number, "tokens": tokens, "seconds": 1.0}
        seconds = {**SECONDS, **(spent or {}), **paused}
        told.append(watch.step(record, seconds, {BATCHES: forwards + 1}, system))
    return [line for line in told if line]


CAUSES = {
    "batches": (
        {"spent": {BATCHES: 0.34}},
        "Likely cause: reading rows and making batches takes 34% of a step, on the host",
    ),
    "optimizer": (
        {"spent": {OPTIMIZER: 0.6, BATCHES: 0.25}, "offloaded": ["optimizer", "param"]},
        "Likely cause: the optimizer runs on the host, which takes 60% of a step; a launch file without offload",
    ),
    "other ranks": (
        {"spent": {COMMUNICATION: 0.4}, "ranks": 2},
        "Likely cause: rank 0 waits for other ranks for 40% of a step",
    ),
    "weights on the host": (
        {"spent": {OPTIMIZER: 0.1}, "offloaded": ["optimizer", "param"]},
        "Likely cause: weights are kept on the host and copied for every layer",
    ),
    "small forwards": (
        {"tokens": 1024, "forwards": 8},
        "Likely cause: a forward has 128 tokens, 8 of them a step: launching so small kernels takes longer",
    ),
    "an optimizer that is not offloaded": ({"spent": {OPTIMIZER: 0.4}}, "No cause was measured: batches, optimizer"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_an_idle_gpu_is_told_once_with_its_likely_cause(cause):
    given, expected = dict(CAUSES[cause][0]), CAUSES[cause][1]
    watch = IdleWatch(given.pop("offloaded", ()))
    (told,) = watched(watch, 200, **given)
    whose = "the GPU of rank 1" if given.get("ranks") else "the GPU"
    assert told.startswith(f"{whose} idles: a kernel ran in 20% of the time of steps {WARMUP_STEPS + 1} to ")
    assert ("(of the busiest rank: 90%)" in told) == ("ranks" in given)
    assert expected in told
    assert told.endswith("--profile traces where the time goes")


def test_neither_a_start_nor_an_evaluation_nor_a_busy_gpu_is_warned_of():
    assert watched(IdleWatch(), 200, 60.0) == []
    assert watched(IdleWatch(), 60, lambda number: 5.0 if number <= WARMUP_STEPS else 90.0) == []
    after_pauses = range(12, 200, 2)  # the reading after each is that of the evaluation
    assert watched(IdleWatch(), 190, lambda n: 1.0 if n in after_pauses else 95.0, pauses=after_pauses) == []
    assert watched(IdleWatch(), 200, math.nan) == []


def test_a_gpu_that_begins_to_idle_later_is_told_then():
    watch = IdleWatch()
    assert watched(watch, 100, 90.0) == []
    assert len(watched(watch, 100, 10.0, begin=101)) == 1


# --- energy ---


def test_energy_is_the_sum_of_all_ranks_gpus_and_said_in_words():
    usage, nan = Usage(), math.nan
    assert usage.energy() == (0, 0)
    for rank in (0, 1):
        for number, joules in ((1.0, 10.0), (2.0, 500.0), (3.0, nan)):
            usage.add(rank, [number, 1.0, 1.0, 1.0, 50.0, 1.0, joules])
    usage.add(2, [1.0, 1.0, 1.0, 1.0, nan, 1.0, nan])  # a MIG slice
    assert usage.energy() == (1000.0, 2)
    assert energy_text({"joules": 1.512e6, "gpus": 2}).startswith("0.42 kWh on 2 GPUs, by NVML")
    assert energy_text({"joules": 1000.0, "gpus": 1}).startswith("0.278 Wh on 1 GPU, by NVML")
    assert energy_text(None) == ""


def test_the_report_has_energy_and_time_where_they_are_known():
    spent = {"steps": 3, "seconds": 0.3, "process": {FORWARD: 0.3}, "rank": 0, "ranks": 1}
    page = render_report({"steps": 3, "energy": {"joules": 3.6e6, "gpus": 1}, "time_spent": spent}, [], [])
    assert "| energy | 1 kWh on 1 GPU, by NVML" in page
    assert "With `--profile`, where the time of 3 traced steps went in the process (0.1 s each): 100% forward." in page
    assert "energy" not in render_report({"steps": 3}, [], [])


class Meter:
    """NVML of a GPU that keeps samples of its use, and counts its energy, as pynvml gives them."""

    NVML_GPU_UTILIZATION_SAMPLES = 1

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.samples, self.millijoules = [], 5_000_000

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=2**30)

    def nvmlDeviceGetSamples(self, handle, kind, since):
        found = [
            types.SimpleNamespace(timeStamp=at, sampleValue=types.SimpleNamespace(uiVal=use))
            for at, use in self.samples
            if at > since
        ]
        if not found:
            raise self.NVMLError("Not Found")
        return 1, found

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=77)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self.millijoules


def test_gpu_use_is_the_mean_since_the_last_reading_and_energy_that_since_the_start():
    import torch

    from accel_sft.tracking.system import SYSTEM_FIELDS, SystemSampler

    sampler, meter = SystemSampler(torch.device("cpu"), seconds_between=0.0), Meter()
    sampler._nvml = meter, None
    sampler._joules_before = sampler._joules()
    meter.samples = [(1, 0), (2, 100), (3, 20)]
    meter.millijoules += 90_000

    def read():
        return dict(zip(SYSTEM_FIELDS, sampler.sample(), strict=True))

    first = read()
    assert (first["gpu_percent"], first["gpu_energy_joules"]) == (40.0, 90.0)
    assert read()["gpu_percent"] == 77.0  # no new sample: what the driver says of this moment
    meter.samples += [(4, 10), (5, 20)]
    assert read()["gpu_percent"] == 15.0
