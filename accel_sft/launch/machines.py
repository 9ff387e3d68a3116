"""Compares the machines of a launch at its start: the versions of their libraries, and their clocks."""

import socket
import time
from collections.abc import Iterator, Sequence

from accel_sft.io.findings import Finding, error, warning
from accel_sft.launch.collectives import by_each_rank
from accel_sft.launch.recordable import versions

CLOCK_SECONDS = 30.0
"""Difference between two machines' clocks from which on it is told."""


def compare_machines() -> list[Finding]:
    """Return how the machines of this launch differ. It is a collective, with the same answer on every rank."""
    machines = by_each_rank(lambda: (socket.gethostname(), versions()))
    clocks = by_each_rank(time.time)  # the ranks leave the exchange above together, and so read them together
    return [*differing_versions(machines), *clocks_apart([host for host, _ in machines], clocks)]


def differing_versions(machines: Sequence[tuple[str, dict[str, str]]]) -> Iterator[Finding]:
    """Yield an error for each library that has not one version on all machines (host and versions, by rank).

    Ranks with other code may make other collectives, and then wait for each other for ever. Python's own version may
    differ, and so may the build of a library (`+cu130`): machines may have different GPUs.
    """
    for name in sorted({name for _, found in machines for name in found} - {"python"}):
        hosts: dict[str, dict[str, None]] = {}
        for host, found in machines:
            hosts.setdefault(found.get(name, "missing").split("+")[0], {})[host] = None
        if len(hosts) > 1:
            where = ", ".join(f"{version} on {_listed([*names])}" for version, names in hosts.items())
            yield error(f"{name}: {where}", "install the same version on all machines")


def clocks_apart(hosts: Sequence[str], clocks: Sequence[float]) -> Iterator[Finding]:
    """Yield a warning for each machine whose clock (in seconds since 1970, by rank) is not that of rank 0's machine."""
    for host in dict.fromkeys(hosts):
        seconds = clocks[hosts.index(host)] - clocks[0]
        if abs(seconds) >= CLOCK_SECONDS:
            side = "ahead of" if seconds > 0 else "behind"
            what = f"the clock of {host} is {abs(seconds):,.0f} s {side} that of {hosts[0]}"
            yield warning(what, "training does not depend on it, but logs do; set both by NTP")


def _listed(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
