"""Tasks that make trouble on the last rank amid training: `accel_sft troubles.py:CLASS`.

TROUBLE_RUN is the folder of the run: trouble comes once its metrics.jsonl has three steps, in a forward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_sft_math import Math

STEPS_BEFORE = 3


def _in_forwards(look: Callable[[int], None]) -> None:
    """Call `look` with the number of tokens before each forward of training that the last rank makes."""
    import torch

    run, amid = Path(os.environ["TROUBLE_RUN"]), False

    def before(module: Any, inputs: Any) -> None:
        nonlocal amid
        if isinstance(module, torch.nn.Embedding) and torch.is_grad_enabled():
            file = run / "metrics.jsonl"
            amid = amid or (file.exists() and file.read_text().count('"loss"') >= STEPS_BEFORE)
            if amid:
                look(inputs[0].numel())

    if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        torch.nn.modules.module.register_module_forward_pre_hook(before)


@dataclass(kw_only=True)
class _Troubled(Math):
    """Math whose last rank calls `trouble` with a forward's number of tokens, amid training."""

    def dataset(self, split: str) -> Any:
        if split == "train":
            _in_forwards(self.trouble)
        return super().dataset(split)


@dataclass(kw_only=True)
class Stuck(_Troubled):
    """Math whose last rank never comes back amid training."""

    def trouble(self, tokens: int) -> None:
        self.ponder()

    def ponder(self) -> None:
        Path(os.environ["TROUBLE_RUN"] + ".began").touch()
        while True:
            time.sleep(0.05)


@dataclass(kw_only=True)
class Cramped(_Troubled):
    """Math whose last rank runs out of device memory amid training, in forwards of more than half of the tokens that
    its first one then had, and after a resume as well."""

    def trouble(self, tokens: int) -> None:
        import torch

        room = Path(os.environ["TROUBLE_RUN"] + ".room")
        if not room.exists():
            room.write_text(str(tokens // 2))
        if tokens <= int(room.read_text()):
            return
        if torch.cuda.is_available():  # more than the card has: the error is CUDA's own
            torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
        raise torch.OutOfMemoryError("out of memory, imitated where there is no GPU")
