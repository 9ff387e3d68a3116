"""What all ranks agree on: decided by one of them, or gathered from each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from accel_sft.api.errors import UserError

Result = TypeVar("Result")


def decided_by_main(accelerator: Accelerator, decide: Callable[[], Result]) -> Result:
    """What rank 0's `decide` returns, on every rank; its UserError is raised on every rank."""
    box: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            box[0] = decide()
        except UserError as error:
            box[1] = error.problems
    broadcast_object_list(box)
    if box[1]:
        raise UserError(*box[1])
    return box[0]


class Team:
    """All ranks, and among them those of this machine, which share its files."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank, self.is_main = accelerator.process_index, accelerator.is_main_process
        local = gather_object([accelerator.local_process_index])
        firsts = [rank for rank, place in enumerate(local) if place == 0]
        self.first = max(first for first in firsts if first <= self.rank)
        self.here = range(self.first, min((first for first in firsts if first > self.rank), default=len(local)))

    def all(self, work: Callable[[], Result]) -> list[Result]:
        """Every rank's result of `work`; the UserError of the lowest rank that has one, on all of them."""
        mine: tuple[Any, Any] = (None, None)
        wrong: UserError | None = None
        try:
            mine = (work(), None)
        except UserError as error:
            mine, wrong = (None, error.problems), error
        every = gather_object([mine])
        for _, problems in every:
            if problems:
                raise UserError(*problems) from wrong  # which `--debug` shows with its traceback
        return [result for result, _ in every]

    def firsts(self, work: Callable[[], Result]) -> list[Result]:
        """What the first rank of each machine gets from `work`; for every rank its own machine's, by rank."""
        every = self.all(lambda: (self.first, work() if self.rank == self.first else None))
        return [every[first][1] for first, _ in every]


def largest(readings: dict[str, float | None], prefix: str = "") -> dict[str, float | None]:
    """The largest of all ranks' readings, by name, with `prefix` before each; None where no rank has one."""
    every = gather_object([readings])
    return {prefix + key: max((e[key] for e in every if e[key] is not None), default=None) for key in readings}
