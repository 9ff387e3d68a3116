"""Writes a checkpoint's trained weights and optimizer state, by parameter, and reads them under any parallelism.

Under every backend each rank owns spans of flattened parameters, in float32, and AdamW's two moments (or another
optimizer's state) of the same elements. The rank writes each span under its parameter's name and offset. Nothing is
gathered; after a change of parallelism, each rank reads the elements that it owns then. Files are safetensors; numbers
are read back bit for bit.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from accel_sft.api.errors import UserError
from accel_sft.checkpoint.partition import (
    AVERAGE,
    IN_8_BITS,
    MOMENTS,
    SCALES,
    Partition,
    Span,
    by_rows,
    flat,
    partitions,
)
from accel_sft.io import manifest
from accel_sft.io.heartbeat import heartbeat
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.memory.estimate import FILE_BYTES

SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's loss scaler that change during training."""

TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
TYPES |= {torch.int32: "I32", torch.uint8: "U8", torch.int8: "I8", torch.bool: "BOOL"}
"""Names of element types in safetensors files."""

Extra = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors other than parameters and optimizer state, equal on all ranks: kind -> name -> tensor."""


Piece = dict[str, torch.Tensor]
"""The content of one checkpoint file: tensors in host memory by key."""


class HostCopy(dict[str, torch.Tensor]):
    """A checkpoint's tensors, copied to host memory, by key. The next checkpoint overwrites the copies, because copying
    into new memory takes several times as long. If the system cannot pin memory, `refused` is the reason, and copies
    are slower."""

    refused: str | None = None

    def place(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host buffer to copy the tensor into; it is pinned if the tensor is on a GPU."""
        if key not in self:
            pinned = _on_gpu(tensor) and self.refused is None
            try:
                self[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            except RuntimeError as error:  # from cudaHostAlloc, for example at a memory limit
                if not pinned:
                    raise
                self.refused = one_line(str(error), LONGEST_ERROR)
                return self.place(key, tensor)
        return self[key]


class Averages:
    """Float32 averages of the tensors that the optimizer updates. Under ZeRO it updates this rank's float32 copies.

    Averages start as copies of the first weights. Update t (from 0) multiplies the averages by d = min(decay, (1 + t) /
    (10 + t)) and adds 1 - d times the weights, as TensorFlow's ExponentialMovingAverage does. With a constant decay of
    0.999, the first weights would still make up 60% of the averages after 500 steps.
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, decay: float) -> None:
        self.accelerator, self.model, self.optimizer, self.decay = accelerator, model, optimizer, decay
        self.updates = 0  # so far; saved in checkpoints
        self._stepped = [partition.tensor for partition in partitions(accelerator, model, optimizer)]
        self.tensors = [flat(tensor).to(torch.float32, copy=True) for tensor in self._stepped]  # order of `partitions`
        self._plain: list[torch.Tensor | None] = []

    def update(self) -> None:
        """Update the averages; call this after each optimizer step that has changed the weights."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for average, tensor in zip(self.tensors, self._stepped, strict=True):
            average.lerp_(flat(tensor).float(), 1 - decay)

    def put_in(self) -> None:
        """Have the model compute with the averages until `take_out`, which restores every bit; all ranks call this.
        Under DeepSpeed the averages are copied to the forwards' weights; otherwise averages and weights are swapped."""
        masters = []
        for partition, average in zip(self._partitions(), self.tensors, strict=True):
            if partition.copied:
                masters.append((partition.tensor, partition.tensor.data))
                partition.tensor.data = average.view_as(partition.tensor)
                self._plain.append(None)
                continue
            weights = flat(partition.tensor)
            plain = weights.clone()
            weights.copy_(average)
            if plain.dtype == average.dtype:  # swapped into the average's memory; 16-bit weights need a copy
                average.copy_(plain)
                plain = average
            self._plain.append(plain)
        for master, own in masters:
            master.data = own

    def take_out(self) -> None:
        """Have the model compute with its own weights again."""
        for partition, average, plain in zip(self._partitions(), self.tensors, self._plain, strict=True):
            if plain is not None:
                weights = flat(partition.tensor)
                averaged = weights.clone()
                weights.copy_(plain)
                if plain is average:
                    average.copy_(averaged)
        self._plain.clear()

    def _partitions(self) -> Iterator[Partition]:
        return partitions(self.accelerator, self.model, self.optimizer, writing=True)


def copied(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    extra: Extra | None = None,
    averages: Averages | None = None,
    memory: HostCopy | None = None,
) -> Iterator[Piece]:
    """Yield copies of this rank's spans, file by file; every rank must consume all of them, in its main thread. With
    `memory`, copying is asynchronous: read no piece before the last one has been yielded. Without it, each piece is
    complete when yielded and owns its tensors."""
    piece: Piece = {}
    size, on_gpu = 0, accelerator.device.type == "cuda"

    def copy(key: str, tensor: torch.Tensor) -> None:
        nonlocal size
        place = torch.empty(tensor.shape, dtype=tensor.dtype) if memory is None else memory.place(key, tensor)
        piece[key] = place.copy_(tensor, non_blocking=memory is not None)
        size += tensor.nbytes

    for number, partition in enumerate(partitions(accelerator, model, optimizer)):
        averaged = {AVERAGE: averages.tensors[number]} if averages else {}
        for span in partition.spans if partition.written else []:
            moments = {key: partition.state[key] for key in partition.kinds if key in partition.state}
            for kind, tensor in {"weights": partition.tensor, **moments, **averaged}.items():
                # copy now: with NVMe offload, `tensor` is in memory only until the next partition
                copy(_key(kind, span), flat(by_rows(tensor))[span.offset : span.offset + span.size])
            for key in SCALES:
                if key in partition.state:
                    copy(_key(key, span), partition.state[key])
            if "step" in partition.state:
                copy(_key("step", span), torch.tensor([float(partition.state["step"])], dtype=torch.float64))
            if size >= FILE_BYTES:
                yield piece
                piece, size = {}, 0
    if accelerator.is_main_process:
        for kind, tensors in (extra or {}).items():
            for name, tensor in tensors.items():
                copy(f"{kind}:0:{name}", tensor)
    if on_gpu:
        torch.cuda.synchronize(accelerator.device)
    if piece:
        yield piece


def write(pieces: Iterable[Piece], folder: Path, rank: int) -> manifest.Entries:
    """Write each piece to the disk, as a file of this rank; returns the files' sizes and SHA-256."""
    files = {}
    for number, piece in enumerate(pieces):
        name = f"rank-{rank:04d}-{number:03d}.safetensors"
        files[name] = manifest.write_hashed(folder / name, _safetensors(piece))
        piece.clear()  # before the next piece is copied: without `memory`, two pieces would exist together
    return files


def _safetensors(piece: Piece) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file, without copies; the library's own writer cannot hash while it writes.
    Tensors with larger elements come first, so that each is aligned, as the format requires."""
    ordered = sorted(piece.items(), key=lambda item: -item[1].itemsize)
    header, end = {}, 0
    for key, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for _, tensor in ordered:
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def read(accelerator: Accelerator, model: Any, optimizer: Any, folder: Path, averages: Averages | None = None) -> None:
    """Read what `write` wrote to `folder` under any parallelism; every rank calls this. The folder has a manifest."""
    stored, counted = _Stored(folder), set()
    for number, partition in enumerate(partitions(accelerator, model, optimizer, writing=True)):
        for span in partition.spans:
            stored.copy("weights", span, partition.tensor)
            if averages:
                stored.copy(AVERAGE, span, averages.tensors[number])
        steps = {span: stored.step(span) for span in partition.spans}
        stepped = [span for span in partition.spans if steps[span]]
        if stepped:
            made = int(max(steps.values()))
            partition.begin_state(made)
            if hasattr(partition.optimizer, "ds_opt_adam") and id(partition.optimizer) not in counted:
                counted.add(id(partition.optimizer))
                _count_up(partition.optimizer, made)
        for span in stepped:
            for key in partition.kinds:
                stored.copy(key, span, partition.state[key])
            for key in SCALES:
                if key in partition.state:
                    partition.state[key].copy_(stored.tensor(key, span.name))


def read_extra(folder: Path) -> Extra:
    """The `extra` tensors of a checkpoint."""
    extra: dict[str, dict[str, torch.Tensor]] = {}
    stored = _Stored(folder)
    for kind, name in stored.places:
        if kind not in ("weights", "step", AVERAGE, *MOMENTS, *IN_8_BITS, *SCALES):
            extra.setdefault(kind, {})[name] = stored.tensor(kind, name)
    return extra


def _count_up(optimizer: Any, steps: int) -> None:
    """Run this many steps of DeepSpeed's CPU Adam on a tensor of zeros. In each step the optimizer multiplies
    the powers of its betas once. If it began at a later step, it would compute the powers directly, with other bits."""
    # the group has the run's betas; under accelerate, the optimizer's `defaults` has DeepSpeed's
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    zeros = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, beta1, beta2, 1e-8, 0.0, True, *zeros)


def loss_scale(accelerator: Accelerator, model: Any) -> dict[str, float]:
    """The state of the float16 loss scaler; {} in other precisions."""
    if accelerator.scaler is not None:
        return dict(accelerator.scaler.state_dict())
    scaler = _deepspeed_scaler(accelerator, model)
    return {key: getattr(scaler, key) for key in SCALE if isinstance(getattr(scaler, key, None), int | float)}


def set_loss_scale(accelerator: Accelerator, model: Any, saved: dict[str, float]) -> None:
    """Restore the loss scaler's state. If another library saved it, the scaler starts anew, and skips some steps."""
    if accelerator.scaler is not None:
        if saved.keys() == accelerator.scaler.state_dict().keys():
            accelerator.scaler.load_state_dict(saved)
        return
    scaler = _deepspeed_scaler(accelerator, model)
    for key in saved.keys() & set(SCALE):
        if hasattr(scaler, key):
            setattr(scaler, key, saved[key])


def _deepspeed_scaler(accelerator: Accelerator, model: Any) -> Any:
    if accelerator.distributed_type != DistributedType.DEEPSPEED or accelerator.mixed_precision != "fp16":
        return None
    return getattr(model.optimizer, "loss_scaler", None) or getattr(model.optimizer, "loss_scale_config", None)


class _Stored:
    """The spans of all files of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.places: dict[tuple[str, str], dict[int, tuple[int, Any, str]]] = {}
        for path in manifest.paths(folder):  # only the checkpoint's own files
            try:
                file: Any = safe_open(path, framework="pt")
                for key in file.keys():  # noqa: SIM118, not a mapping
                    kind, start, name = key.split(":", 2)
                    first, *more = file.get_slice(key).get_shape()  # only `extra` tensors have more dimensions
                    self.places.setdefault((kind, name), {})[int(start)] = (first * math.prod(more), file, key)
            except (SafetensorError, ValueError) as error:
                raise UserError(
                    f"{path}: not a file that accel_sft wrote ({one_line(str(error), LONGEST_ERROR)}); resume another "
                    "checkpoint, or start a new run"
                ) from None

    def copy(self, kind: str, span: Span, into: Any) -> None:
        """Copy the span's saved elements of this kind to the span's place in the tensor `into`."""
        heartbeat()
        rows = by_rows(into)
        target, copied = flat(rows)[span.offset : span.offset + span.size], 0
        for start, (size, file, key) in self.places.get((kind, span.name), {}).items():
            begin, end = max(start, span.start), min(start + size, span.start + span.size)
            if begin < end:
                part = file.get_slice(key)[begin - start : end - start]
                target[begin - span.start : end - span.start].copy_(part)
                copied += end - begin
        if rows is not into:
            into.detach().copy_(rows.redistribute(placements=into.placements))
        if copied != span.size:
            raise UserError(
                f"{self.folder}: has {kind} for only {copied:,} of {span.size:,} elements of {span.name}: another "
                "model or version wrote this checkpoint; start a new run with --init-from"
            )

    def tensor(self, kind: str, name: str) -> torch.Tensor:
        """The tensor of this kind and name, which was saved whole, not in spans."""
        ((_, file, key),) = self.places[kind, name].values()
        tensor: torch.Tensor = file.get_tensor(key)
        return tensor

    def step(self, span: Span) -> float:
        """How often the optimizer had updated the span's parameter."""
        places = self.places.get(("step", span.name), {}).values()
        return max((file.get_tensor(key).item() for _, file, key in places), default=0.0)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _key(kind: str, span: Span) -> str:
    return f"{kind}:{span.start}:{span.name}"
