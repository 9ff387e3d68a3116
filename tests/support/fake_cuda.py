"""Lets a torch that is built without CUDA compute on fake CUDA tensors, backward included; no number is computed.

Call `load` before torch is imported, in a process of its own: from then on torch believes that CUDA is there.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("fake_cuda.cpp")


def load() -> None:
    """Compile fake_cuda.cpp, unless an earlier process has, and load it together with torch's libraries."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch = Path(found.origin).parent
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(SOURCE.read_bytes() + version.encode() + str(torch).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"accel_sft_fake_cuda-{os.getuid()}-{digest}.so")
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        into = ("-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch}/include", str(SOURCE), "-o", str(partial))
        libraries = (f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu")
        subprocess.run((os.environ.get("CXX", "g++"), *into, *libraries), check=True)
        partial.replace(library)
    ctypes.CDLL(str(library))


class _Stream(SimpleNamespace):
    """A stream or an event: all that is asked of it is done at once."""

    device = None
    cuda_stream = stream_id = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def wait(self, *arguments: Any) -> None: ...

    wait_event = wait_stream = record = synchronize = wait


def plant(devices: int, memory: int = 80 * 2**30) -> None:
    """Make torch's Python functions about CUDA answer as with `devices` GPUs of `memory` bytes, of compute capability
    9.0 (H100)."""
    import torch
    import torch._dynamo  # it lists torch.cuda's functions, so it must find the real ones
    from torch._subclasses import fake_tensor

    def nothing(*arguments: Any, **options: Any) -> None: ...

    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = cuda.is_bf16_supported = lambda *arguments, **options: True
    cuda.device_count, cuda.current_device = lambda: devices, lambda: 0
    cuda.init = cuda._lazy_init = cuda.set_device = cuda.empty_cache = cuda.synchronize = nothing
    cuda.manual_seed = cuda.manual_seed_all = cuda.set_rng_state = nothing
    cuda.get_rng_state = lambda *arguments: torch.zeros(16, dtype=torch.uint8)
    cuda.get_device_capability = lambda *arguments: (9, 0)
    cuda.get_device_name = lambda *arguments: "NVIDIA H100 80GB HBM3"
    cuda.mem_get_info = lambda *arguments: (memory, memory)
    cuda.memory_reserved = cuda.memory_allocated = lambda *arguments: 0
    cuda.Stream = cuda.Event = cuda.ExternalStream = _Stream
    cuda.current_stream = cuda.default_stream = cuda.stream = torch.accelerator.current_stream = _Stream
    fake_tensor.init_gpu_context = nothing
    fake_tensor.FakeTensorMode.avoid_device_init = True
