"""The optimizers of `--optimizer`: bytes of state per element, and backends that exclude them. Needs no torch."""

import dataclasses
from collections.abc import Mapping

_OWN_STATES = (
    "a checkpoint has its state by parameter, and DeepSpeed steps slices of many parameters at once; "
    "launch with accelerate_configs/ddp.yaml, or choose --optimizer adamw"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerType:
    """What the checks of settings and launch, and the estimates of memory, need to know of an optimizer.

    Attributes:
        matrix_bytes, other_bytes: bytes of optimizer state for each element of a trained matrix within the blocks (or
            of an adapter), and for each element of any other trained parameter.
        package: the package that the optimizer needs besides torch; None: no other.
        launch_problems: accelerate's name of a backend, mapped to why this type cannot train on it and what to do.
    """

    matrix_bytes: float = 8
    other_bytes: float = 8
    package: str | None = None
    launch_problems: Mapping[str, str] = dataclasses.field(default_factory=dict)


OPTIMIZERS: dict[str, OptimizerType] = {
    "adamw": OptimizerType(),
    "adamw-8bit": OptimizerType(
        matrix_bytes=2 + 2 * 4 / 256,  # two moments: each a byte an element, and a float32 scale for 256 elements
        other_bytes=2 + 2 * 4 / 256,
        package="bitsandbytes",
        launch_problems={
            "DEEPSPEED": _OWN_STATES,
            "FSDP": "bitsandbytes steps whole parameters, and FSDP has shards of them; launch with "
            "accelerate_configs/ddp.yaml, or choose --optimizer adamw",
        },
    ),
    "muon": OptimizerType(
        matrix_bytes=4,
        launch_problems={
            "DEEPSPEED": "it makes each update orthogonal as a whole matrix, and DeepSpeed steps slices of many; "
            "launch with accelerate_configs/ddp.yaml, or choose --optimizer adamw",
            "FSDP": "its products of sharded matrices are rounded otherwise than those of whole ones; launch with "
            "accelerate_configs/ddp.yaml, or choose --optimizer adamw",
        },
    ),
}
