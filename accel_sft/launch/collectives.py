"""Collectives with which all ranks agree: one rank decides, or each rank's value is gathered.

Every rank must call them in the same order; every rank gets the same answer.
"""

import datetime
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather, gather_object

from accel_sft.api.errors import UserError
from accel_sft.io.heartbeat import exchange

Result = TypeVar("Result")

WITHOUT_LIMIT = datetime.timedelta(days=20)
"""Timeout of a process group in which a rank may wait without limit. It cannot be much longer: torch's store counts
milliseconds in 32 bits."""


def by_each_rank(work: Callable[[], Result | None]) -> list[Result]:
    """Call `work` on every rank; return all results, by rank. On UserErrors, all ranks raise that of the lowest one."""
    mine: tuple[Any, Any]
    try:
        mine, wrong = (work(), None), None
    except UserError as error:
        mine, wrong = (None, error.problems), error
    every = gather_object([mine])
    for _, problems in every:
        if problems:
            raise UserError(*problems) from wrong  # `--debug` shows this rank's error with its traceback
    return [result for result, _ in every]


def decided_by_main(accelerator: Accelerator, decide: Callable[[], Result]) -> Result:
    """Call `decide` on rank 0, and return its result, or raise its UserError, on every rank."""
    return by_each_rank(lambda: decide() if accelerator.is_main_process else None)[0]


def first_reason(mine: str | None) -> str | None:
    """The reason of the lowest rank that has one; None if no rank has one."""
    return next(filter(None, gather_object([mine])), None)


def any_rank(mine: bool) -> bool:
    """Whether `mine` is true on at least one rank."""
    return bool(largest_of_ranks(mine))


def largest_of_ranks(mine: float) -> float:
    """The largest of all ranks' numbers."""
    return max(numbers[0] for numbers in gather_numbers([mine]))


def largest(readings: dict[str, Result], prefix: str = "") -> dict[str, Result]:
    """Map each name, with `prefix` before it, to the largest of all ranks' readings; to None if no rank has one."""
    every = gather_object([readings])
    return {prefix + k: max((e[k] for e in every if e[k] is not None), default=readings[k]) for k in readings}


@exchange()
def gather_numbers(mine: list[float]) -> list[list[float]]:
    """Return every rank's numbers, by rank, with a single collective. All ranks must pass equally many numbers.

    The numbers are exchanged as float64: integers up to 2**53 are exact.
    """
    state = PartialState()
    if state.num_processes == 1:
        return [list(map(float, mine))]
    every: list[list[float]] = gather(torch.tensor([mine], device=state.device, dtype=torch.float64)).tolist()
    return every


class Team:
    """All ranks, and the ranks of this machine, which share its files."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank, self.is_main = accelerator.process_index, accelerator.is_main_process
        local = gather_object([accelerator.local_process_index])
        self._firsts = [*itertools.accumulate((rank if place == 0 else 0 for rank, place in enumerate(local)), max)]
        self.first = self._firsts[self.rank]
        self.local_ranks = [rank for rank, first in enumerate(self._firsts) if first == self.first]

    all = staticmethod(by_each_rank)

    def firsts(self, work: Callable[[], Result]) -> list[Result]:
        """Call `work` on the first rank of each machine; returns, by rank, the result on that rank's machine."""
        every = self.all(lambda: work() if self.rank == self.first else None)
        return [every[first] for first in self._firsts]
