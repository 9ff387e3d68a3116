"""Imitates a device that is short of memory on a CPU: tensors made inside `Device` count against a budget."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAYS = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "driver": lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    "cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuDNN": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
}
"""The errors with which torch and the libraries below it report that they are out of memory."""


class Device(TorchDispatchMode):
    """Counts the bytes of storages that operators allocate inside it, in forwards, backwards and updates: `live` now,
    `peak` at most. Above `budget` bytes an allocation fails, with an error of `WAYS`."""

    def __init__(self, budget: float = float("inf"), way: str = "torch") -> None:
        super().__init__()
        self.budget, self.way, self.live, self.peak = budget, way, 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        theirs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        made = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if _is_plain(leaf) and leaf.untyped_storage()._cdata not in theirs | self.known:
                self._count(leaf.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        if self.live + size > self.budget:
            raise WAYS[self.way]()
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and type(leaf).__name__ != "DTensor"
