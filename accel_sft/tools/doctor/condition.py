"""Checks whether the machine is as fast as on other days: other work, steal, quotas, clocks, links to the GPUs."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator

from accel_sft.launch import host_memory
from accel_sft.launch.machine_state import FULL_POWER, CoreClock, cpu_clock, slowed_by
from accel_sft.tools.doctor.check import Finding, ok, warning
from accel_sft.tools.doctor.machine import Machine
from accel_sft.tracking.disturbed import LOST, OTHERS_GIB, SLOW_CLOCK

SECONDS = 1.0
"""How long the cores are watched."""
_NEAR = 5
"""Degrees below the temperature at which a GPU slows down from which on there is a warning."""
_SLOW_LINK = 0.5
"""Share of what its link could carry below which copies from pinned memory are slow; 0.8 to 0.9 is usual."""
_COOL, _POWER = "look at its fans, dust, and the air around it", "nvidia-smi -pl raises its power limit"
_MENDS = {"power cap": _POWER, "heat": _COOL, "person": "nvidia-smi -rgc and nvidia-smi -rac take the setting back"}
_MENDS["hardware"] = "nvidia-smi -q -d PERFORMANCE says why: mostly heat, or the power supply and its cables"


def other_work(machine: Machine) -> Iterator[Finding]:
    """Watch what other processes, and a hypervisor's other machines, take of the cores, where /proc/stat tells."""
    import psutil

    cores, shares = CoreClock(), {}
    processes = [each for each in psutil.process_iter(["name"]) if each.pid != os.getpid()]
    for each in processes:
        with contextlib.suppress(psutil.Error):
            each.cpu_percent(None)
    began = time.process_time()
    time.sleep(SECONDS)
    busy, idle, stolen, _ = cores.since()
    if math.isnan(busy):
        return
    for each in processes:
        with contextlib.suppress(psutil.Error):  # it has ended
            shares[f"{each.info['name']} ({each.pid})"] = each.cpu_percent(None) / 100
    count, others = busy + idle + stolen, max(busy - (time.process_time() - began) / SECONDS, 0.0)
    words = f"other processes take {others:.1f} of {count:.0f} cores, load {os.getloadavg()[0]:.1f}"
    if others >= LOST * count:
        most = sorted((name for name in shares if shares[name] >= LOST), key=lambda name: -shares[name])[:3]
        named = ", ".join(f"{name} {shares[name]:.1f}" for name in most)
        yield warning(f"{words}: {named}".rstrip(": "), "end them or wait: what is measured meanwhile is slower")
    else:
        yield ok(words)
    if stolen >= LOST * max(busy + stolen, 1.0):
        what = f"a hypervisor takes {stolen:.1f} of {count:.0f} cores for other machines (steal)"
        yield warning(what, "ask for cores of your own, or for another host")


def clock(machine: Machine) -> Iterator[Finding]:
    """Report the clock of a core at work, and its governor; nothing on virtual machines, which do not tell."""
    until = time.monotonic() + 0.2  # governors raise the clock within some ten milliseconds
    while time.monotonic() < until:
        pass
    now, highest, governor = cpu_clock()
    words = f"{now:,.0f} of {highest:,.0f} MHz at work, governor {governor}"
    if now < SLOW_CLOCK * highest:
        yield warning(words, "cpupower frequency-set -g performance; else look at heat, mains power and the BIOS")
    elif not math.isnan(now):
        yield ok(words)


def quota(machine: Machine) -> Iterator[Finding]:
    """Report how often the container's CPU quota ran out; nothing without one."""
    stats = [folder / "cpu.stat" for folder in host_memory.cgroups("cpu")]
    for periods, out in (
        [host_memory.field(file, f"nr_{name}") for name in ("periods", "throttled")] for file in stats
    ):
        if periods:
            words = f"the container's CPU quota ran out in {out / periods:.0%} of its periods so far"
            mend = "raise it (--cpus of docker, limits.cpu of Kubernetes), or set none"
            yield warning(words, mend) if out >= LOST * periods else ok(words)


def gpu_states(machine: Machine) -> Iterator[Finding]:
    """Report what slows down a GPU that computes, and who else uses it; nothing without NVML."""
    calm = []
    for index, gpu in machine.torch.gpus.items():
        wrong = [*_slowed(f"GPU {index}", gpu)]
        yield from wrong
        calm += [gpu] if "mhz" in gpu and not wrong else []
    if calm:
        clocks, heat = _span(gpu["mhz"] for gpu in calm), _span(gpu.get("celsius", math.nan) for gpu in calm)
        yield ok(f"nothing slows down {len(calm)} of {len(machine.torch.gpus)} at work: {clocks} MHz, {heat} °C")


def _slowed(name: str, gpu: dict[str, float]) -> Iterator[Finding]:
    def known(field: str) -> float:
        return gpu.get(field, math.nan)

    if why := slowed_by(known("reasons")):
        mend = "; ".join(mend for word, mend in _MENDS.items() if word in why)
        yield warning(f"{name} computes at {known('mhz'):,.0f} of {known('highest_mhz'):,.0f} MHz: {why}", mend)
    if known("celsius") > known("slow_celsius") - _NEAR and "heat" not in why:
        what = f"{name} is at {known('celsius'):.0f} °C after a second, and slows down at {known('slow_celsius'):.0f}"
        yield warning(what, _COOL)
    if known("watts") < FULL_POWER * known("usual_watts") and "power cap" not in why:
        yield warning(f"{name} may take {known('watts'):.0f} W, not its usual {known('usual_watts'):.0f}", _POWER)
    if known("busy_percent") >= 100 * LOST or known("others_gib") >= OTHERS_GIB:
        memory = f", with {known('others_gib'):.1f} GiB" if known("others_gib") > 0 else ""
        what = f"{name} is used by other processes, in {known('busy_percent'):.0f}% of the time{memory}"
        yield warning(what, "nvidia-smi shows by whom; CUDA_VISIBLE_DEVICES chooses other GPUs")


def copies(machine: Machine) -> Iterator[Finding]:
    """Report the bandwidth between host and GPUs, on which offload depends, and links that are slow."""
    gpus = {index: gpu for index, gpu in machine.torch.gpus.items() if "to pinned" in gpu}
    if gpus:
        ways = [
            f"{way} GPU {_span(gpu[f'{way} {kind}'] for gpu in gpus.values())} GB/s {kind}"
            for kind in ("pinned", "pageable")
            for way in ("to", "from")
        ]
        yield ok(", ".join(ways))
    for index, gpu in gpus.items():
        slowest, link, full = (
            min(gpu["to pinned"], gpu["from pinned"]),
            *(gpu.get(n, math.nan) for n in ("link", "full_link")),
        )
        if slowest < _SLOW_LINK * full:
            what = f"GPU {index}: {slowest:.1f} GB/s from or to pinned memory, of {full:.0f} that its link could carry"
            if link < full:
                what += f"; it runs at {link:.0f}"
            mend = (
                "look at slot, cable and BIOS"
                if link < full
                else "look for other work on memory and GPU; numactl keeps to its socket"
            )
            yield warning(what, mend)


def _span(values: Iterable[float]) -> str:
    """The smallest and the largest number, or one if they are alike."""
    found = [*values]
    return " to ".join(
        dict.fromkeys(f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in (min(found), max(found)))
    )
