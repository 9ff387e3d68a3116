"""Holds what the checks of one report share; facts that take long to find out are found once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from accel_sft.api.errors import UserError
from accel_sft.launch.deepspeed_ops import operators
from accel_sft.launch.info import Launch, launch_of_yaml
from accel_sft.launch.parallelism import fitted, sized
from accel_sft.tools.doctor import torch_facts
from accel_sft.tools.doctor.driver import Driver, ask_driver
from accel_sft.tools.doctor.torch_facts import TorchFacts


@dataclasses.dataclass
class Machine:
    """What the user asked of the report, and what its checks have found out so far.

    Attributes:
        launch_files: the launch files in the report's table.
        runs: the folder that runs would be written to.
        build: whether to compile DeepSpeed's operators.
        network: whether to ask the hub.
        progress: makes a context in which the terminal shows the given text as what is waited for; nothing if empty.
        unusable: why "devices", "ranks" or an operator cannot be used here, by these names. Checks write it, and the
            table of launch files reads it.
    """

    launch_files: Sequence[Path]
    runs: Path = Path("runs")
    build: bool = False
    network: bool = False
    progress: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    unusable: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def torch(self) -> TorchFacts:
        return torch_facts.find()

    @functools.cached_property
    def driver(self) -> Driver | None:
        return ask_driver()

    @property
    def devices(self) -> int:
        """Number of accelerators that torch sees."""
        return self.torch.device_count

    def launch(self, file: Path) -> Launch:
        """What this file would start here: a process for each GPU of each machine; without GPUs, as many as it says.

        Raises:
            UserError: the file cannot be read, or the launcher would refuse it.
        """
        return fitted(launch_of_yaml(file, *self.flags(file)), self.devices)

    def flags(self, file: Path) -> tuple[str, ...]:
        """The launcher's flag that starts one process for each GPU; empty if the file does so, or without GPUs, or if
        the file's groups of ranks do not fit here (the audit then names another file)."""
        asked = fitted(launch_of_yaml(file), self.devices)
        wanted = self.devices * asked.machines
        differs = wanted > asked.world_size or (asked.machines > 1 and wanted < asked.world_size)
        return sized(asked, wanted) if self.devices and differs else ()

    def users(self, operator: str) -> list[str]:
        """The names, without suffix, of the launch files that need an operator."""
        found = []
        for file in self.launch_files:
            with contextlib.suppress(UserError):  # the table of launch files reports such a file
                if operator in operators(self.launch(file)):
                    found.append(file.stem)
        return found
