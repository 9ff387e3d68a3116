"""Checks what launches need (DeepSpeed's operators, ranks that reach each other), and which launch files work here."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.launch.audit import audit
from accel_sft.launch.deepspeed_ops import OPERATORS, audit_compilers
from accel_sft.launch.deepspeed_ops import operators as operators_of
from accel_sft.launch.info import Launch
from accel_sft.tools.doctor.machine import LIBRARIES, Finding, Machine, ask, ok, problem, script, warning

EXCHANGE_SECONDS = {"gloo": 30, "nccl": 120}
"""Time limit of the all-reduce, once a rank has imported torch. NCCL first probes the machine's links and loads its
kernels, which takes tens of seconds on a busy machine with eight GPUs."""
RANKS_SECONDS = 420.0
"""Time limit for everything that ranks do, including the import of torch."""
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
_RANK_FIXES = {
    "gloo": "make this host's name resolve to one of its addresses (getent hosts $(hostname)); for launches on one "
    "machine, GLOO_SOCKET_IFNAME=lo is enough",
    "nccl": "NCCL_DEBUG=INFO shows where it stops; if GPUs cannot reach each other directly, set NCCL_P2P_DISABLE=1",
}


def operators(machine: Machine) -> Iterator[Finding]:
    """Report the state of each of DeepSpeed's operators."""
    for name, state in machine.torch.operators.items():
        yield from (warning(*lock) for lock in state["locks"])
        obstacles = [*audit_compilers([name], machine.devices)]
        if state["failure"]:
            machine.unusable[name] = f"{name} cannot be loaded"
            fix = f"rm -r {Path(state['library']).parent}: the next launch compiles it anew"
            yield problem(f"{name} is compiled but cannot be loaded: {state['failure']}", fix)
        elif obstacles:  # refused even if the operator is compiled, because a different torch would compile it anew
            for obstacle in obstacles:
                yield warning(f"{name}: {obstacle.what}", obstacle.fix)
        elif state["compiled"]:
            yield ok(f"{name} is compiled")
        else:
            yield ok(f"{name} is not compiled yet ({OPERATORS[name]}): the first launch compiles it")


def exchange(machine: Machine) -> Iterator[Finding]:
    """Let ranks add up numbers: two on the CPU by gloo, which every launch uses, then one on each GPU by NCCL."""
    if machine.torch.failure("torch"):
        return
    for backend, ranks in (("gloo", 2), ("nccl", machine.devices)):
        if not ranks or (backend == "nccl" and not machine.torch.cuda):
            continue
        began = time.monotonic()
        who = f"{ranks} ranks" if ranks > 1 else "one rank"
        if why := exchange_failure(backend, ranks, EXCHANGE_SECONDS[backend]):
            machine.unusable["ranks"] = f"ranks do not reach each other ({backend})"
            yield problem(f"an all-reduce over {who} with {backend} failed: {why}", _RANK_FIXES[backend])
        else:
            yield ok(f"{who} added up numbers by {backend} ({time.monotonic() - began:.0f} s)")


def exchange_failure(backend: str, ranks: int, seconds: int) -> str:
    """Why torchrun's ranks on this machine failed to add up numbers (an all-reduce); "" if they did not fail."""
    answer = ask(script("rank", backend, str(seconds), launcher=(*_TORCHRUN, str(ranks))), RANKS_SECONDS)
    if answer.status == 0:
        return ""
    if answer.status is None or "(SIGALRM)" in answer.error:  # text in torchrun's summary of failed ranks
        return f"no sum within {seconds} s"
    causes = sorted(re.findall(r"^rank \d+: .*", answer.out, re.M))
    return causes[0] if causes else answer.reason("no reason given")


def launch_file(machine: Machine, file: Path) -> Finding:
    """Say whether a launch with this file would work here: `yes`, with any remarks, or `no`, with the reason."""
    why, fix = "", ""
    try:
        # the last library, DeepSpeed, is left out: only some launch files need it
        why = next(filter(None, map(machine.torch.failure, LIBRARIES[:-1])), "")
        why = why or (machine.unusable.get("devices", "") if machine.devices else "")
        if not why:
            launch = machine.launch(file)
            errors = (finding for finding in audit(TrainConfig(), launch, machine.devices) if finding.level == "error")
            if refused := next(errors, None):
                why, fix = re.sub(rf"^{re.escape(str(file))}:? ", "", refused.what), refused.fix
            elif not (why := _unusable(machine, launch)):
                return Finding("yes", _to_know(machine, launch, machine.flags(file)), subject=file.stem)
    except UserError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 - a fault with one file must not hide the other files
        why = f"it could not be checked: {type(error).__name__}: {error}"
    return Finding("no", why, fix, file.stem)


def _unusable(machine: Machine, launch: Launch) -> str:
    """Return why a requirement of a launch (DeepSpeed, its operators, a group of ranks) fails here; "" if none does."""
    if launch.backend == "deepspeed" and (reason := machine.torch.failure("deepspeed")):
        return reason
    compiled = operators_of(launch)
    if unknown := [name for name in compiled if name not in machine.torch.operators]:
        return f"it is not known whether DeepSpeed's operator {unknown[0]} works here"
    needed = [*compiled, *(["ranks"] if launch.world_size > 1 else [])]
    return next((machine.unusable[what] for what in needed if what in machine.unusable), "")


def _to_know(machine: Machine, launch: Launch, flags: Sequence[str]) -> str:
    words = [f"with {' '.join(flags)}"] if flags else []
    if launch.machines > 1:
        words.append(f"needs {launch.machines} machines like this one")
    state = machine.torch.operators
    if missing := [name for name in operators_of(launch) if not state[name]["compiled"]]:
        words.append(f"the first launch compiles {' and '.join(missing)}")
    return "; ".join(words)
