"""Collectives by which all ranks agree: one rank decides, or each rank's value is gathered.

All of these are collectives: every rank calls them, in the same order, and gets the same answer.
"""

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather, gather_object

from accel_sft.api.errors import UserError
from accel_sft.io.heartbeat import exchange

Result = TypeVar("Result")


def by_each_rank(work: Callable[[], Result]) -> list[Result]:
    """Every rank's result of `work`, by rank; if ranks raise UserError, all ranks raise that of the lowest one."""
    mine: tuple[Any, Any]
    try:
        mine, wrong = (work(), None), None
    except UserError as error:
        mine, wrong = (None, error.problems), error
    every = gather_object([mine])
    for _, problems in every:
        if problems:
            raise UserError(*problems) from wrong  # `--debug` shows it with its traceback
    return [result for result, _ in every]


def decided_by_main(accelerator: Accelerator, decide: Callable[[], Result]) -> Result:
    """What rank 0's `decide` returns, on every rank; its UserError is raised on every rank."""
    return by_each_rank(lambda: decide() if accelerator.is_main_process else None)[0]


def long_work_by_main(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """`decided_by_main` for work of any length: the other ranks wait on the host.

    A collective of GPUs gives up after ten minutes, and keeps its GPU busy while it waits.
    """
    if accelerator.num_processes == 1:
        return work()
    group = torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(days=30))

    def waited_for() -> Result | None:
        try:
            return work() if accelerator.is_main_process else None
        finally:
            torch.distributed.barrier(group)

    return by_each_rank(waited_for)[0]


def first_reason(mine: str | None) -> str | None:
    """The reason of the lowest rank that has one; None if no rank has one."""
    return next(filter(None, gather_object([mine])), None)


def any_rank(mine: bool) -> bool:
    """Whether `mine` is true on at least one rank."""
    return bool(largest_of_ranks(mine))


def all_ranks(mine: bool) -> bool:
    """Whether `mine` is true on every rank."""
    return not any_rank(not mine)


def largest_of_ranks(mine: float) -> float:
    """The largest of all ranks' numbers."""
    return max(numbers[0] for numbers in gather_numbers([mine]))


def largest(readings: dict[str, float | None], prefix: str = "") -> dict[str, float | None]:
    """The largest of all ranks' readings, by name, with `prefix` before each; None where no rank has one."""
    every = gather_object([readings])
    return {prefix + key: max((e[key] for e in every if e[key] is not None), default=None) for key in readings}


@exchange()
def gather_numbers(mine: list[float]) -> list[list[float]]:
    """Every rank's numbers, by rank; all ranks give equally many. It takes one exchange, cheap enough for every step.

    The numbers are exchanged as float64, in which integers up to 2**53 are exact.
    """
    state = PartialState()
    if state.num_processes == 1:
        return [list(map(float, mine))]
    return gather(torch.tensor([mine], device=state.device, dtype=torch.float64)).tolist()


class Team:
    """All ranks, and among them those of this machine, which share its files."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank, self.is_main = accelerator.process_index, accelerator.is_main_process
        local = gather_object([accelerator.local_process_index])
        firsts = [rank for rank, place in enumerate(local) if place == 0]
        self.first = max(first for first in firsts if first <= self.rank)
        self.here = range(self.first, min((first for first in firsts if first > self.rank), default=len(local)))

    all = staticmethod(by_each_rank)

    def firsts(self, work: Callable[[], Result]) -> list[Result]:
        """Call `work` on the first rank of each machine; returns, by rank, the result on that rank's machine."""
        every = self.all(lambda: (self.first, work() if self.rank == self.first else None))
        return [every[first][1] for first, _ in every]
