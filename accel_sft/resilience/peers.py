"""Tells every rank why another rank failed, even on another machine, and even while the main thread waits in C.

A launcher ends the ranks of its own machine only, and NCCL does not notice that a rank of another machine has ended.
So a rank that fails writes its reason into the launcher's key-value store, where a thread of each rank reads it. A rank
that is killed writes nothing. So each rank also has a TCP connection to rank 0: after a kill the kernel closes it.
Needs no torch until the store is opened.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from accel_sft.io.terminal import terminal
from accel_sft.io.text import one_line
from accel_sft.launch.launcher import restarts

POLL_SECONDS = 0.5
EXPLAIN_SECONDS = 5.0
"""After a rank's connection has ended, other ranks of its machine have this many seconds to report how the rank ended.
Ranks that wait in C report it `signals.UNHANDLED_SECONDS` after their launcher's SIGTERM."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""Makes the kernel probe the other machine after 20 quiet seconds, and give up after 60. This is needed because a
machine that loses power closes no connection."""
SHARE_SECONDS = 3.0
"""Maximum number of seconds that a failing rank waits for the store to accept its reason. If the store's machine has
lost power, a call to the store takes a quarter of an hour."""
_LONGEST, _FAREWELL = 1000, b"."


class Peers:
    """The other ranks of this launch: the `store` that all ranks share (None if it cannot be reached), and the first
    `failure` of another rank, as a sentence ("" until a failure is known)."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.store, self.failure = _store(), ""
        self._lines: dict[int, socket.socket] = {}  # rank -> connection: on rank 0 to all others, else to 0
        self._hub: socket.socket | None = None  # rank 0's listening socket
        self._over = threading.Event()
        self._thread = _started(self._watch) if self.store is not None else None
        atexit.register(self.leave)
        os.register_at_fork(after_in_child=self._close)  # a child would keep the connections of a dead rank alive

    def publish(self, rank: int, host: str, message: str) -> None:
        """If there is a store, write a rank's failure into it. The store keeps only the first failure of a launch."""

        def share() -> None:
            with contextlib.suppress(RuntimeError):  # the store may have ended with the launcher
                self.store.compare_set("failure", "", json.dumps([rank, host, one_line(message, _LONGEST)]))

        if self.store is not None:
            _started(share).join(SHARE_SECONDS)

    def leave(self) -> None:
        """Say farewell: from now on, the end of this rank does not count as a failure. A second call does nothing."""
        self._over.set()
        if self._thread:
            self._thread.join(2 * POLL_SECONDS)  # an unfinished call to the store would abort the process as it exits
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(_FAREWELL)
        self._close()

    def _close(self) -> None:
        for line in (*self._lines.values(), *([self._hub] if self._hub else [])):
            line.close()
        self._lines = {}

    def _watch(self) -> None:
        called = False
        while not self._over.wait(POLL_SECONDS if called else POLL_SECONDS / 5):
            with contextlib.suppress(RuntimeError):  # see publish()
                if not called and (self.rank == 0 or self.store.check(["hub"])):
                    called = True
                    begin = self._call if self.rank else self._answer
                    begin()
                if not self.failure and self.store.check(["failure"]):
                    self._learn(*json.loads(self.store.get("failure")))

    def _learn(self, rank: int, host: str, message: str) -> None:
        if rank != self.rank:
            self.failure = f"rank {rank}{f' on {host}' if several_machines() else ''}: {message}"

    def _answer(self) -> None:
        """On rank 0: accept the connections of other ranks, each in a thread of its own."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        hub = self._hub = socket.create_server(("", 0), family=family, backlog=self.ranks, dualstack_ipv6=both)
        self.store.set("hub", json.dumps([_own_address(), hub.getsockname()[1], socket.gethostname()]))

        def greet(line: socket.socket) -> None:
            line.settimeout(10)
            try:
                rank, host = json.loads(line.recv(_LONGEST))
            except (OSError, ValueError, TypeError):  # not a rank, but perhaps a port scanner
                line.close()
            else:
                self._listen(rank, host, line)

        def accept() -> None:
            with contextlib.suppress(OSError):  # the hub is closed
                while True:
                    _started(greet, hub.accept()[0])

        _started(accept)

    def _call(self) -> None:
        """On other ranks: connect to rank 0."""
        address, port, host = json.loads(self.store.get("hub"))
        address = address or os.environ["MASTER_ADDR"]
        try:
            line = socket.create_connection((address, port), timeout=10)
            line.sendall(json.dumps([self.rank, socket.gethostname()]).encode())
        except OSError as error:
            problem = f"rank {self.rank} cannot connect to rank 0 at {address}:{port} ({error})"
            effect = "if one of the two is killed, the run ends only after --hang-timeout seconds"
            print(f"note: {problem}; {effect}", file=terminal(), flush=True)
        else:
            _started(self._listen, 0, host, line)

    def _listen(self, rank: int, host: str, line: socket.socket) -> None:
        """Wait for the end of a rank's connection. If the rank sent no farewell, and no other rank explains its end,
        report a failure. Calls to the store come last, because they block if the store's machine is lost."""
        self._lines[rank] = line
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, number in KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on macOS
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
        with contextlib.suppress(OSError):  # reset, or the other machine no longer answers
            if line.recv(1):
                return
        if not self._over.wait(EXPLAIN_SECONDS) and not self.failure:
            message = "ended without an error message, or its machine was lost; see the output of its launcher"
            self._learn(rank, host, message)
            self.publish(rank, host, message)


def _started(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="peers", daemon=True)
    thread.start()
    return thread


_joined: Peers | None = None
_joining = threading.Lock()


def joined() -> Peers:
    """The peers of this process, connected on first use; waits at most 20 seconds for the store."""
    global _joined
    with _joining:
        _joined = _joined or Peers()
    return _joined


def several_machines() -> bool:
    """Whether the launch has ranks on other machines."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") != os.environ.get("WORLD_SIZE", "")


def tell(message: str) -> None:
    """Tell ranks of other machines why this rank fails, even if this rank is not connected yet. Ranks of this machine
    read its error.json."""
    if _joined or ("RANK" in os.environ and several_machines() and _agent_store()):
        joined().publish(joined().rank, socket.gethostname(), message)


def leave() -> None:
    """Say farewell to the other ranks, if this rank is connected to them."""
    if _joined:
        _joined.leave()


def failure_elsewhere(seconds: float) -> str:
    """In a launch over several machines, the first failure of a rank; "" if none becomes known within `seconds`."""
    until = time.monotonic() + seconds
    while _joined and several_machines():
        if _joined.failure or time.monotonic() >= until:
            return _joined.failure
        time.sleep(POLL_SECONDS / 5)
    return ""


def _agent_store() -> bool:
    """Whether the store belongs to the launcher, and so exists before any rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own_address() -> str:
    """This machine's address as seen from the store's machine; "" on that machine, whose address is MASTER_ADDR."""
    store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # for datagrams, this chooses a route and sends nothing
            own = str(probe.getsockname()[0])
            return "" if own in (address[0], "127.0.0.1", "::1") else own
    return ""


def _store() -> Any:
    """The launcher's key-value store; None if it cannot be reached."""
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    try:
        store = TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=20), wait_for_workers=False)
    except (RuntimeError, ValueError, OSError):
        return None
    # A launcher's own store survives a restart of the ranks. Any other store is new after each restart, and the
    # machines may disagree on the count: under c10d only the machine that lost a rank counts the restart.
    return PrefixStore(f"watch-{restarts() if _agent_store() else 0}", store)
