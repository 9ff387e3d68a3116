"""Tasks that make trouble on the last rank amid training, and one that looks on: `accel_sft troubles.py:CLASS`.

TROUBLE_RUN is the folder of the run: trouble comes once its metrics.jsonl has three steps, in a forward.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_sft_chat import Chat
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
class Failing(_Troubled):
    """Math whose last rank raises an error amid training."""

    def trouble(self, tokens: int) -> None:
        Path(os.environ["TROUBLE_RUN"] + ".began").touch()
        raise ValueError("an error that a test planned")


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


class _Watching:
    """Writes what a rank sees amid training into the folder WATCHED: switches of attention, the dtypes of what adapters
    are given, and torch's pinned host memory."""

    def dataset(self, split: str) -> Any:
        if split == "train":
            _watch(Path(os.environ["WATCHED"]))
        return super().dataset(split)  # type: ignore[misc]


@dataclass(kw_only=True)
class WatchedSums(_Watching, Math):
    """Math that is watched."""


@dataclass(kw_only=True)
class Watched(_Watching, Chat):
    """Chat that is watched."""


def _watch(folder: Path) -> None:
    import torch

    seen: dict[str, Any] = {"adapters_given": []}

    def before(module: Any, inputs: Any, *_: Any) -> None:
        # an adapter's first matrix is called by name: peft's own classes differ by the type of the adapted layer
        if torch.is_grad_enabled() and id(module) in adapted:
            given = str(inputs[0].dtype)
            seen["adapters_given"] = sorted({*seen["adapters_given"], given})
        elif hasattr(module, "lora_A"):
            adapted.update(id(each) for each in module.lora_A.values())
        elif isinstance(module, torch.nn.Embedding) and torch.is_grad_enabled():
            seen["cudnn_attention"] = torch.backends.cuda.cudnn_sdp_enabled()
            seen["cudnn_attention_last"] = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
            if torch.cuda.is_available() and hasattr(torch.cuda, "host_memory_stats"):
                stats = torch.cuda.host_memory_stats()
                seen["pinned"] = {key: stats[key] for key in stats if key.endswith("bytes.peak")}
            file = folder / f"rank-{os.environ.get('RANK', '0')}.json"
            file.with_suffix(".new").write_text(json.dumps(seen))
            file.with_suffix(".new").replace(file)

    adapted: set[int] = set()
    torch.nn.modules.module.register_module_forward_pre_hook(before)
