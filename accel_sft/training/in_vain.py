"""Finds trained weights that no gradient reaches, once, after the first steps: they would be trained in vain."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.checkpoint.partition import SCALES, Partition, partitions
from accel_sft.launch.collectives import gather_numbers
from accel_sft.models.architecture import alike

_UPDATES = 3
"""Updates after which it looks. The first one leaves half of an adapter without a gradient, for its product begins at
zero; where the rate warms up from zero, so does the second."""
_FIRST = 4096
"""Elements of a weight that are looked at before all of it: mostly they have had a gradient, and the rest is not
read."""
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")


class InVain:
    """Looks at the optimizer's states once: an element whose state is zero has had no gradient.

    Attributes:
        found: the weights that are trained in vain, alike ones together; None before it has looked.
    """

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, log: Callable[[str], None]) -> None:
        self._accelerator, self._model, self._optimizer, self._log = accelerator, model, optimizer, log
        self._updates = 0
        self.found: list[str] | None = None

    def look(self, grad_norm: float, *, last: bool) -> None:
        """Called on every rank after each step, with its gradient's norm; at the right one, logs what it finds."""
        self._updates += math.isfinite(grad_norm)  # the others changed nothing
        if self.found is not None or self._updates < (2 if last else _UPDATES):
            return
        unwrapped = self._accelerator.unwrap_model(self._model)
        names = [name for name, parameter in unwrapped.named_parameters() if parameter.requires_grad]
        here = set(self._reached())
        every = gather_numbers([name in here for name in names])
        untouched = [name for name, *ranks in zip(names, *every, strict=True) if not any(ranks)]
        vain, idle = _told_apart(untouched, {*names} - {*untouched})
        self.found = alike(vain)
        if vain:
            adapter = hasattr(unwrapped, "peft_config")
            fix = "name other layers in --lora-target-modules" if adapter else "leave them out with --train-only"
            self._log(
                f"warning: weights without a gradient: {len(vain)} of {len(names)} trained weights got none in "
                f"{self._updates} steps ({', '.join(self.found)}); {fix}"
            )
        if idle:
            self._log(
                f"note: in {self._updates} steps no token has chosen the experts of {', '.join(alike(idle))}; they "
                "learn once one does"
            )

    def _reached(self) -> Iterator[str]:
        """Yield the names of the weights of which this rank has a part that has had a gradient."""
        for partition in partitions(self._accelerator, self._model, self._optimizer):
            parts = list(_parts(partition))
            firsts = torch.stack([part[:_FIRST].any() for _, part in parts]).tolist() if parts else []
            for (name, part), first in zip(parts, firsts, strict=True):
                if first or part.any().item():
                    yield name


def _parts(partition: Partition) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's part of each weight's state: AdamW's second moment, or what another optimizer has."""
    state = partition.state
    scales = state.get(SCALES[-1])  # of states in 8 bits, whose own zero is no zero
    values = state.get(partition.kinds[-1]) if scales is None else scales
    if values is None:
        return
    local = (values.to_local() if hasattr(values, "to_local") else values).detach().reshape(-1)
    for span in partition.spans:
        whole = scales is not None or hasattr(values, "to_local")  # such a tensor is of one weight
        part = local if whole else local[span.offset : span.offset + span.size]
        if part.numel():
            yield span.name, part


def _told_apart(untouched: Iterable[str], reached: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the weights that nothing reaches, and those of experts that no token has chosen: others of them, in the
    same layer, have had a gradient."""
    chosen = {_EXPERT.sub("*", name) for name in reached if _EXPERT.search(name)}
    found: dict[bool, list[str]] = defaultdict(list)
    for name in untouched:
        found[_EXPERT.sub("*", name) in chosen].append(name)
    return found[False], found[True]
