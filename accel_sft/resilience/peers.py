"""Tells every rank why another one failed, also on another machine and while its own main thread waits in C.

A launcher ends the ranks of its own machine only, and NCCL does not notice that a rank of another machine has ended.
So a rank that fails writes its reason into the launcher's key-value store, where a thread of each rank reads it. A rank
that is killed writes nothing; therefore each rank keeps a TCP connection to rank 0, which the kernel closes with it.
Needs no torch until the store is opened.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import secrets
import socket
import threading
import time
from typing import Any

from accel_sft.io.terminal import terminal
from accel_sft.io.text import one_line
from accel_sft.launch.launcher import restarts

POLL_SECONDS = 0.5
EXPLAIN_SECONDS = 5.0
"""Seconds after the end of a connection in which that machine's other ranks may say how the rank ended. Those that wait
in C do so `signals.UNHANDLED_SECONDS` after their launcher's SIGTERM."""
ALIVE_SECONDS = 20
"""Seconds without traffic after which the kernel asks whether the other machine is there; after 60 it gives up."""
SHARE_SECONDS = 3.0
"""Maximum number of seconds that a failing rank waits for the store to take its reason. A call to a store whose machine
has lost its power returns after a quarter of an hour."""
_LONGEST, _FAREWELL = 1000, b"."


class Peers:
    """The other ranks of this launch: the `store` that all share (None if it cannot be reached), and the first
    `failure` of any of them, as a sentence ("" before one is known)."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.store, self.failure = _store(), ""
        self._lines: dict[int, tuple[socket.socket, str]] = {}  # rank -> connection and host
        self._gone: dict[int, tuple[float, str]] = {}  # rank -> when its connection ended, and its host
        self._hub: socket.socket | None = None  # where rank 0 is called
        self._token = secrets.token_hex(16)  # tells ranks from whoever else calls, such as a scanner of ports
        self._called = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers-watch", daemon=True)
        if self.store is not None:
            self._thread.start()
            # apart from the calls to the store, which block if its machine is the one that is lost
            threading.Thread(target=self._listen, name="peers-listen", daemon=True).start()
            atexit.register(self.leave)
            os.register_at_fork(after_in_child=self._close)  # a child would keep the connections of a dead rank alive

    def publish(self, rank: int, host: str, message: str) -> None:
        """Share the failure of a rank, if there is a store; only the first of a launch counts."""
        if self.store is None:
            return

        def share() -> None:
            with contextlib.suppress(RuntimeError):  # the store may have ended with the launcher
                self.store.compare_set("failure", "", json.dumps([rank, host, one_line(message, _LONGEST)]))

        sharing = threading.Thread(target=share, name="peers-share", daemon=True)
        sharing.start()
        sharing.join(SHARE_SECONDS)

    def leave(self) -> None:
        """Say farewell: that this rank ends is no failure from now on. A second call does nothing."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2 * POLL_SECONDS)  # an unfinished call to the store would abort the process as it exits
        for line, _ in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(_FAREWELL)
        self._close()

    def _close(self) -> None:
        for line in (*(line for line, _ in self._lines.values()), *([self._hub] if self._hub else [])):
            line.close()
        self._lines = {}

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS if self._called else POLL_SECONDS / 5):
            with contextlib.suppress(RuntimeError):  # see publish()
                if self.rank == 0:
                    self._answer()
                elif not self._called and self.store.check(["hub"]):
                    self._call()
                if not self.failure and self.store.check(["failure"]):
                    self._learn(*json.loads(self.store.get("failure")))

    def _learn(self, rank: int, host: str, message: str) -> None:
        if rank != self.rank:
            self.failure = f"rank {rank}{f' on {host}' if several_machines() else ''}: {message}"

    def _answer(self) -> None:
        """On rank 0: take the calls that have come."""
        if self._hub is None:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._hub = socket.create_server(("", 0), family=family, backlog=self.ranks, dualstack_ipv6=both)
            self._hub.setblocking(False)
            place = _own_address(), self._hub.getsockname()[1]
            self.store.set("hub", json.dumps([*place, socket.gethostname(), self._token]))
            self._called = True
        with contextlib.suppress(OSError):  # nobody calls, or this process has no file left for a line
            while True:
                line, _ = self._hub.accept()
                try:
                    line.settimeout(POLL_SECONDS)
                    token, rank, host = json.loads(line.recv(_LONGEST))
                except (OSError, ValueError, TypeError):
                    token = None
                if token == self._token:
                    self._keep(rank, line, host)
                else:
                    line.close()

    def _call(self) -> None:
        """On other ranks: call rank 0."""
        self._called = True
        address, port, host, token = json.loads(self.store.get("hub"))
        address = address or os.environ["MASTER_ADDR"]
        try:
            line = socket.create_connection((address, port), timeout=10)
            line.sendall(json.dumps([token, self.rank, socket.gethostname()]).encode())
        except OSError as error:
            what = f"rank {self.rank} cannot call rank 0 at {address}:{port} ({error})"
            then = "if a rank there is killed, this run ends only after --hang-timeout seconds"
            print(f"note: {what}: {then}", file=terminal(), flush=True)
        else:
            self._keep(0, line, host)

    def _keep(self, rank: int, line: socket.socket, host: str) -> None:
        line.setblocking(False)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # a machine without power closes no connection
            for option, number in (("TCP_KEEPIDLE", ALIVE_SECONDS), ("TCP_KEEPINTVL", ALIVE_SECONDS // 2)):
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), number)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        self._lines[rank] = line, host

    def _listen(self) -> None:
        """Find connections that end without a farewell; share that, if nobody else explains it in time."""
        while not self._over.wait(POLL_SECONDS):
            now = time.monotonic()
            for rank, (line, host) in [*self._lines.items()]:
                try:
                    received = line.recv(1)
                except BlockingIOError:
                    continue
                except OSError:  # reset, or the other machine no longer answers
                    received = b""
                line.close()
                del self._lines[rank]
                if not received:
                    self._gone[rank] = now, host
            for rank, (since, host) in self._gone.items():
                if not self.failure and now - since >= EXPLAIN_SECONDS:
                    message = "ended without an error message, or its machine was lost; its launcher there may say more"
                    self._learn(rank, host, message)
                    self.publish(rank, host, message)


_joined: Peers | None = None
_joining = threading.Lock()


def joined() -> Peers:
    """The peers of this process, which calls them on first use; it waits for the store 20 seconds at most."""
    global _joined
    with _joining:
        _joined = _joined or Peers()
    return _joined


def several_machines() -> bool:
    """Whether the launch has ranks on other machines."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") != os.environ.get("WORLD_SIZE", "")


def tell(message: str) -> None:
    """Tell the other ranks why this one fails, also if it has not called them yet; those of this machine see its
    record."""
    if _joined or ("RANK" in os.environ and several_machines() and _agent_store()):
        joined().publish(joined().rank, socket.gethostname(), message)


def leave() -> None:
    """Say farewell to the other ranks, if this one has called them."""
    if _joined:
        _joined.leave()


def failure_elsewhere(seconds: float) -> str:
    """The first failure of a rank of a launch over several machines; "" if none comes to be known within `seconds`."""
    until = time.monotonic() + seconds
    while _joined and several_machines():
        if _joined.failure or time.monotonic() >= until:
            return _joined.failure
        time.sleep(POLL_SECONDS / 5)
    return ""


def _agent_store() -> bool:
    """Whether the store is the launcher's own, which is there before any rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own_address() -> str:
    """This machine's address as seen from the store's; "" if it is that machine, which all know as MASTER_ADDR."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram: it chooses a route, and sends nothing
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
    # A launcher's own store lives on when it starts ranks again. Any other is new each time, and its ranks count their
    # restarts differently: under c10d only the machine that lost one counts it.
    return PrefixStore(f"watch-{restarts() if _agent_store() else 0}", store)
