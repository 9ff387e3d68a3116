"""Checks whether the machine is as fast as on other days: other work, steal, quotas, clocks, links to the GPUs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator

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
_FACTS = ("mhz", "celsius", "slow_celsius", "watts", "usual_watts", "busy_percent", "link", "full_link")
_WAYS = ("from pinned", "to pinned", "from pageable", "to pageable")
_FIXES = {
    "power cap": "nvidia-smi -pl raises its power limit",
    "clocks set by a person": "nvidia-smi -rgc and nvidia-smi -rac take the setting back",
    "heat": "look at its fans, dust, and the air around it",
    "slowdown by hardware": "nvidia-smi -q -d PERFORMANCE says why: mostly heat, or the power supply and its cables",
}
"""What to do by the words of `machine_state.REASONS`."""


def other_work(machine: Machine) -> Iterator[Finding]:
    """Watch what other processes, and a hypervisor's other machines, take of the cores, where /proc/stat tells."""
    import psutil

    def used() -> dict[str, float]:
        """CPU seconds so far of each process that may be read, by its name and number."""
        every = [each.info for each in psutil.process_iter(["name", "pid", "cpu_times"])]
        return {f"{each['name']} ({each['pid']})": sum(each["cpu_times"][:2]) for each in every if each["cpu_times"]}

    cores, before, began = CoreClock(), used(), time.process_time()
    time.sleep(SECONDS)
    busy, idle, stolen, _ = cores.since()
    if math.isnan(busy):
        return
    shares = {name: (seconds - before.get(name, seconds)) / SECONDS for name, seconds in used().items()}
    count, others = busy + idle + stolen, max(busy - (time.process_time() - began) / SECONDS, 0.0)
    words = f"other processes take {others:.1f} of {count:.0f} cores, load {os.getloadavg()[0]:.1f}"
    if others >= LOST * count:
        most = sorted(shares, key=lambda name: -shares[name])[:3]
        named = ", ".join(f"{name} {shares[name]:.1f}" for name in most if shares[name] >= LOST)
        fix = "end them, or measure later: measurements are slower beside them"
        yield warning(f"{words}; most of them: {named}" if named else words, fix)
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
    for folder in host_memory.cgroups("cpu"):
        periods, out = (host_memory.field(folder / "cpu.stat", f"nr_{name}") for name in ("periods", "throttled"))
        if periods:
            words = f"the container's CPU quota ran out in {out / periods:.0%} of its periods so far"
            fix = "raise it (--cpus of docker, limits.cpu of Kubernetes), or set none"
            yield warning(words, fix) if out >= LOST * periods else ok(words)


def gpus(machine: Machine) -> Iterator[Finding]:
    """Report each GPU's clock at work, its bandwidth to the host, on which offload depends, and what slows it down."""
    for index, gpu in machine.torch.gpus.items():
        mhz, celsius, slow, watts, usual, busy, link, full = (gpu.get(name, math.nan) for name in _FACTS)
        told = [] if math.isnan(mhz) else [f"{mhz:,.0f} MHz at work, {celsius:.0f} °C"]
        told += [f"{gpu[way]:.3g} GB/s {way} memory" for way in _WAYS if way in gpu]
        yield ok(f"GPU {index}: {', '.join(told) or 'not measured'}")
        why = slowed_by(gpu.get("reasons", math.nan))
        for word, fix in _FIXES.items():
            if word in why:
                yield warning(f"GPU {index} computes at {mhz:,.0f} of {gpu['highest_mhz']:,.0f} MHz: {word}", fix)
        if celsius > slow - _NEAR and "heat" not in why:
            yield warning(f"GPU {index} slows down at {slow:.0f} °C and has {celsius:.0f}", _FIXES["heat"])
        if watts < FULL_POWER * usual and "power cap" not in why:
            yield warning(f"GPU {index} may take {watts:.0f} W, not its usual {usual:.0f}", _FIXES["power cap"])
        others = gpu.get("others_gib", 0.0)
        if busy >= 100 * LOST or others >= OTHERS_GIB:
            what = f"GPU {index} is used by other processes: {busy:.0f}% of the time, {others:.1f} GiB"
            yield warning(what, "nvidia-smi shows by whom; CUDA_VISIBLE_DEVICES chooses other GPUs")
        if (slowest := min(gpu.get(way, math.inf) for way in _WAYS[:2])) < _SLOW_LINK * full:
            what = f"GPU {index} copies {slowest:.1f} GB/s of {full:.0f} that its link could carry"
            fix = "look for other work on host memory; numactl keeps a process to the GPU's socket"
            slot = f"the link runs at {link:.0f}: look at slot, cable and BIOS"
            yield warning(what, slot if link < full else fix)
