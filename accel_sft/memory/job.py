"""Defines `Job`: the model, launch and sizes of a training run, from which memory and speed are predicted."""

import dataclasses
import math

from accel_sft.api.limits import STATE_BYTES
from accel_sft.launch.info import Launch
from accel_sft.memory.shape import ALL_LINEAR, ModelShape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by the name of its type."""
REDUCED = {"bf16": 2, "fp16": 2}
"""Bytes of one element in the computing type, by the launch's precision; 4 for any other precision."""
IN_4_BITS = 0.5 + (1 + 4 / 256) / 64
"""Bytes of one element in NF4: half a byte, plus an 8-bit scale for every 64 elements and a 4-byte scale for every 256
of those scales."""
AS_CONFIGURED: tuple[str, ...] = ("adapter", "lora_r", "lora_dropout", "use_dora", "lora_modules_to_save")
AS_CONFIGURED += ("lora_target_parameters", "load_in_4bit", "optimizer", "dtype", "gradient_checkpointing", "compile")
AS_CONFIGURED += ("ema_decay", "train_only")
"""Attributes of a job that have the name and the value of an option."""
MOST_LOGITS = 2**25
"""Maximum number of logits (tokens times vocabulary) that a head in pieces holds at a time: 128 MiB in float32, and
about three times that in a backward."""


def pinned(size: float) -> float:
    """Bytes of the block that torch pins in host memory for `size` bytes: the next power of two."""
    return 2.0 ** math.ceil(math.log2(size)) if size > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training run, as far as memory and speed depend on it.

    Attributes:
        device: `cuda` or `cpu`; with `cpu`, ranks train in host memory.
        stored_bytes: bytes of one element in the weight files.
        train_only: the value of `--train-only`; memory is counted as if all weights were trained, an upper bound.
        tokens: tokens in the largest forward of a rank, padding included; `supervised_tokens` of them have a loss.
        rows, pixels: rows in that forward, and pixel values of its images, as the processor makes them.
        head: `labelled`, `everywhere` or `pieces`, as in `batching.loss.HEADS`.
        copied_keys: keys that rows after a shared prefix attend to (the prefix's and their own), summed over rows;
            attention may copy these keys, see `copies`. 0: no prefix.
        in_cache: whether rows continue from the KV cache of their prefix.
        eval_rows: number of answers generated in one batch at an evaluation during the run; 0: none.
        eval_tokens: tokens of the longest of these answers with its prompt; 0: as many as a row of the forward has.
        saves: whether checkpoints are written.
    """

    shape: ModelShape
    launch: Launch
    device: str
    dtype: str = "auto"
    stored_bytes: int = 2
    adapter: str = "none"
    lora_r: int = 8
    target_modules: str = ALL_LINEAR
    lora_dropout: float = 0.0
    use_dora: bool = False
    lora_modules_to_save: str | None = None
    lora_target_parameters: str | None = None
    load_in_4bit: bool = False
    train_only: str | None = None
    optimizer: str = "adamw"
    ema_decay: float | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    tokens: int = 2048
    supervised_tokens: int = 2048
    rows: int = 1
    pixels: int = 0
    head: str = "pieces"
    copied_keys: int = 0
    in_cache: bool = False
    eval_rows: int = 64
    eval_tokens: int = 0
    saves: bool = True

    @property
    def ranks(self) -> int:
        return self.launch.world_size

    @property
    def local_ranks(self) -> int:
        return self.launch.local_world_size

    @property
    def precision(self) -> str:
        return self.launch.precision[0]

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def is_frozen(self) -> bool:
        return self.adapter != "none"

    @property
    def autocast(self) -> bool:
        """Whether autocast computes in reduced precision with float32 weights, as in one process and under DDP."""
        return self.launch.backend not in ("deepspeed", "fsdp") and self.computes_bytes < 4

    @property
    def copies(self) -> bool:
        """Whether attention copies a shared prefix for each row and each head: always with a cache, otherwise only on
        GPUs in float32 (models/cascade.py)."""
        return self.in_cache or (not self.on_cpu and self.computes_bytes > 2)

    @property
    def prefix_and_own(self) -> tuple[int, int]:
        """Number of tokens of the cached prefix (0: there is none), and of a padded row after the prefix."""
        if not (self.in_cache and self.copied_keys and self.rows > 1):
            return 0, math.ceil(self.tokens / max(self.rows, 1))
        prefix = (self.copied_keys - self.tokens) // (self.rows - 1)
        return prefix, self.copied_keys // self.rows - prefix

    @property
    def computes_bytes(self) -> int:
        """Bytes of one element in the matrix products."""
        return REDUCED.get(self.precision, 4)

    @property
    def sums_bytes(self) -> int:
        """Bytes of one element of the gradients that DeepSpeed accumulates over a step's forwards."""
        return 4 if self.launch.sums_in_float32 else self.computes_bytes

    @property
    def trained(self) -> int:
        """Number of trained parameters; DoRA's magnitudes, a few percent of an adapter, are left out."""
        if not self.is_frozen:
            return self.shape.parameters - (0 if self.train_only else self.shape.other)
        return self.adapter_matrices + self.shape.saved(self.lora_modules_to_save)

    @property
    def adapter_matrices(self) -> int:
        return self.shape.trained(
            self.adapter, self.lora_r, self.target_modules, self.lora_target_parameters, self.lora_modules_to_save
        )

    @property
    def parameters(self) -> int:
        """Number of all parameters, an adapter's included."""
        return self.shape.parameters + (self.trained if self.is_frozen else 0)

    def rounding(self, itemsize: float) -> float:
        """By what factor pinned host memory is larger than the matrices in it, at `itemsize` bytes per element: torch
        pins a block for each matrix. An adapter's matrices are too small to matter. 1 if ranks train on the CPU."""
        if self.on_cpu:
            return 1.0
        sizes = [(count, itemsize * elements) for count, elements in self.shape.tensors()]
        return sum(count * pinned(size) for count, size in sizes) / sum(count * size for count, size in sizes)

    def weights_bytes(self, itemsize: int) -> float:
        """Bytes of all weights; a weight that is not in 4 bits takes `itemsize` bytes."""
        quantized = self.shape.linear if self.load_in_4bit else 0
        return itemsize * (self.parameters - quantized) + IN_4_BITS * quantized

    def moments_bytes(self, itemsize: int) -> float:
        """Bytes of the optimizer's state, if a trained weight takes `itemsize` bytes."""
        size = STATE_BYTES[self.optimizer] * self.trained
        return size if self.optimizer == "adamw-8bit" else size * itemsize / 4

    @property
    def loaded_bytes(self) -> int:
        """Bytes of one element of the base model's weights when they are loaded (in the run: `models.load._dtype`)."""
        if self.dtype != "auto":
            return BYTES[self.dtype]
        reduced = self.launch.backend == "deepspeed" or self.adapter != "none"
        return self.computes_bytes if reduced else 4
