"""`Job`: what is to be trained, on what, how. Every answer of `plan` (closed form, simulation, probe) is about one."""

import dataclasses

from accel_sft.api.optimizers import OPTIMIZERS
from accel_sft.launch.info import Launch
from accel_sft.memory.shape import ALL_LINEAR, ModelShape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of an element, by the name of its type."""
REDUCED = {"bf16": 2, "fp16": 2}
"""Bytes of a number that computes, by the launch's precision; 4 for any other."""
IN_4_BITS = 0.5 + (1 + 4 / 256) / 64
"""Bytes of an element in NF4: its scale, one for 64 of them, is in 8 bits, with another scale for 256 of these."""
AS_CONFIGURED = ("adapter", "lora_r", "lora_dropout", "use_dora", "lora_init", "lora_modules_to_save")
AS_CONFIGURED += ("lora_target_parameters", "load_in_4bit", "optimizer", "dtype", "gradient_checkpointing")
"""Attributes of a job that are settings of the same name."""
MOST_LOGITS = 2**25
"""Logits that a head in pieces holds at once: `batching.loss.MOST_LOGITS`, which is behind torch's import; a test
compares them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training run, as far as memory and speed depend on it.

    Attributes:
        shape: of the model.
        launch: backend, ZeRO stage, offload, precision and ranks; `Launch.from_yaml` reads one without starting it.
        device: `cuda`, or `cpu`, where ranks train in host memory.
        dtype: as `--dtype` has it.
        stored_bytes: of an element in the weight files.
        adapter, lora_r, lora_dropout, use_dora, lora_init, lora_modules_to_save, lora_target_parameters, load_in_4bit,
            optimizer: as the options of these names have them.
        target_modules: as `--lora-target-modules` has it.
        gradient_checkpointing: whether blocks' activations are computed again in the backward.
        tokens: computed in the largest forward of a rank, padding included.
        supervised_tokens: of these, how many have a loss: rows of the logits.
        rows: examples in that forward.
        head: `labelled`, `everywhere`, `pieces` or `fused`, as `batching.loss.HEADS` has them.
        dense_mask: whether attention takes a mask of tokens by tokens, as the layouts `shared` and `packed` give sdpa.
        eval_rows: answers generated at once during the run; 0: none are.
        eval_tokens: of the longest of them, its prompt included; 0: as many as a row of the forward has.
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
    lora_init: str = "default"
    lora_modules_to_save: str | None = None
    lora_target_parameters: str | None = None
    load_in_4bit: bool = False
    optimizer: str = "adamw"
    gradient_checkpointing: bool = False
    tokens: int = 2048
    supervised_tokens: int = 2048
    rows: int = 1
    head: str = "pieces"
    dense_mask: bool = False
    eval_rows: int = 64
    eval_tokens: int = 0
    saves: bool = True

    @property
    def ranks(self) -> int:
        """Over all machines."""
        return self.launch.world_size

    @property
    def local_ranks(self) -> int:
        """On one machine."""
        return self.launch.local_world_size

    @property
    def precision(self) -> str:
        return self.launch.precision[0]

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def is_frozen(self) -> bool:
        """Whether the base's weights are frozen, under an adapter."""
        return self.adapter != "none"

    @property
    def autocast(self) -> bool:
        """Whether float32 weights compute in a reduced precision: one process and DDP train so. Under DeepSpeed and
        FSDP2 a forward's weights are of that precision."""
        return self.launch.backend not in ("deepspeed", "fsdp") and self.computes_bytes < 4

    @property
    def computes_bytes(self) -> int:
        """Of a number in the matrix products."""
        return REDUCED.get(self.precision, 4)

    @property
    def trained(self) -> int:
        """Parameters that learn."""
        return self._in_matrices + self._beside_matrices

    @property
    def _in_matrices(self) -> int:
        """Of these, those that Muon would step: of matrices within the blocks, or of an adapter."""
        if self.adapter == "none":
            return self.shape.block_matrices
        besides = self.lora_target_parameters, self.lora_modules_to_save
        return self.shape.trained(self.adapter, self.lora_r, self.target_modules, *besides)

    @property
    def _beside_matrices(self) -> int:
        if self.adapter == "none":
            return self.shape.trained() - self.shape.block_matrices
        kept = self.lora_modules_to_save
        lengths = self.shape.lengths(self.target_modules, kept) if self.use_dora else 0
        return lengths + self.shape.saved(kept)

    @property
    def parameters(self) -> int:
        """All, an adapter's included."""
        return self.shape.parameters + (self.trained if self.is_frozen else 0)

    def weights_bytes(self, each: int) -> float:
        """Of all, where an element that is not in 4 bits takes `each`."""
        quantized = self.shape.linear if self.load_in_4bit else 0
        return each * (self.parameters - quantized) + IN_4_BITS * quantized

    def moments_bytes(self, each: int) -> float:
        """Of the optimizer's state, for trained weights of `each` bytes."""
        kind = OPTIMIZERS[self.optimizer]
        size = kind.matrix_bytes * self._in_matrices + kind.other_bytes * self._beside_matrices
        return size if self.optimizer == "adamw-8bit" else size * each / 4

    @property
    def loaded_bytes(self) -> int:
        """Of an element of the base's weights as they are loaded: `models.load._dtype` decides it in the run."""
        if self.dtype != "auto":
            return BYTES[self.dtype]
        reduced = self.launch.backend == "deepspeed" or self.adapter != "none"
        return self.computes_bytes if reduced else 4
