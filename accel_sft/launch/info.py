"""`Launch`: backend, ZeRO stage, offload, precision and ranks, as this rank sees them."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.text import one_line
from accel_sft.launch.launcher import PRECISION
from accel_sft.launch.rank_environment import DIMENSIONS


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launch as this rank sees it: what the user asked for (flags, yaml, JSON) and what arrived (environment).

    Attributes:
        arguments: the launcher's own flags by name without dashes, such as `num_processes`; empty without a launcher.
        config_file, text, yaml: the `--config_file`, its text and its content.
        json_file, json: the DeepSpeed JSON the yaml names, and its content; None and {} without one.
        environment: this rank's environment variables, among them those that `accelerate launch` sets.
        variable: `ACCELERATE_MIXED_PRECISION` as the user set it, which the launcher overwrites for ranks; "" if unset.
        resolved: the precision chosen for a launch that names none, and the reason (launch/precision.py); else None.
    """

    arguments: Mapping[str, str]
    config_file: Path | None
    text: str
    yaml: Mapping[str, Any]
    json_file: Path | None
    json: Mapping[str, Any]
    environment: Mapping[str, str]
    variable: str = ""
    resolved: tuple[str, str] | None = None

    @property
    def world_size(self) -> int:
        return int(self.environment.get("WORLD_SIZE", 1))

    @property
    def local_world_size(self) -> int:
        return int(self.environment.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def machines(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    @property
    def backend(self) -> str:
        """`deepspeed`, `fsdp`, `megatron`, `ddp` or `plain`: which library runs the ranks."""
        for name in ("deepspeed", "fsdp", "megatron_lm"):
            if self.environment.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true":
                return name.removesuffix("_lm")
        return "ddp" if self.world_size > 1 else "plain"

    @property
    def zero(self) -> Mapping[str, Any]:
        """The JSON's `zero_optimization`, {} in the yaml form."""
        return self.json.get("zero_optimization") or {}

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 without DeepSpeed."""
        if self.backend != "deepspeed":
            return 0
        stage = self.zero.get("stage", 0) if self.json_file else self._deepspeed_variable("ZERO_STAGE", "2")
        if not str(stage).isdecimal():
            raise UserError(f"{self.json_file or self.config_file}: ZeRO stage {one_line(str(stage))}: 0, 1, 2 or 3")
        return int(stage)

    @property
    def shards_weights(self) -> bool:
        """Whether no rank holds the whole model: under ZeRO-3 and FSDP a forward gathers each layer's weights; under
        tensor parallelism each rank computes with its part of them."""
        return self.backend == "fsdp" or self.stage == 3 or self.tensor_ranks > 1

    @property
    def sums_in_float32(self) -> bool:
        """Whether DeepSpeed adds up the bf16 gradients of a step's forwards in float32, as stages 2 and 3 can.

        Stage 2 with an offloaded optimizer does so on the GPU, in the memory that the offload is to free: not there.
        """
        named = (self.json.get("data_types") or {}).get("grad_accum_dtype") or "fp32"
        able = self.stage == 3 or (self.stage == 2 and self.offload("optimizer") == "none")
        return self.precision[0] == "bf16" and able and named == "fp32"

    def offload(self, what: str) -> str:
        """Where `optimizer` or `param` is offloaded to: none, cpu or nvme. FSDP offloads both or neither."""
        if self.backend == "fsdp":
            return "cpu" if self.environment.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true" else "none"
        if self.backend != "deepspeed":
            return "none"
        if self.json_file:
            return str((self.zero.get(f"offload_{what}") or {}).get("device", "none"))
        return self._deepspeed_variable(f"OFFLOAD_{what.upper()}_DEVICE", "none")

    @property
    def offload_ratio(self) -> float:
        """Share of the sub-groups whose optimizer states are offloaded if any are (DeepSpeed's Twin-Flow); 1: all."""
        ratio = (self.zero.get("offload_optimizer") or {}).get("ratio", 1.0) if self.backend == "deepspeed" else 1.0
        try:
            return float(ratio)
        except (TypeError, ValueError):
            return math.nan

    def nvme_path(self, what: str) -> Path:
        """The folder for `optimizer` or `param` under NVMe offload. It is taken from the command line, the yaml or the
        JSON, because the launcher does not hand it over (accelerate 1.15)."""
        key = f"offload_{what}_nvme_path"
        inside = (self.zero.get(f"offload_{what}") or {}).get("nvme_path")
        named = self.arguments.get(key) or (self.yaml.get("deepspeed_config") or {}).get(key) or inside
        return Path(str(named or "nvme_offload"))

    @property
    def parallelism(self) -> dict[str, int]:
        """The size, in ranks, of each dimension of Accelerate's `ParallelismConfig`; {} if the launch names no sizes.

        Raises:
            UserError: a variable set by hand is no number.
        """
        if self.environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
            return {}
        sizes = {}
        for name in DIMENSIONS:
            value = self.environment.get(variable := f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")
            if not value.isdecimal() or int(value) < 1:
                raise UserError(f"{variable} is {value!r}: expected a number of ranks, at least 1")
            sizes[name] = int(value)
        return sizes

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that one copy of the model is sharded over, if it is sharded; fewer than all under HSDP."""
        copies = self.parallelism.get("dp_replicate", 1) if self.backend == "fsdp" else 1
        return max(self.world_size // copies, 1)

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that share the tokens of each row; 1 without sequence parallelism."""
        return self.parallelism.get("sp", 1) if self.backend == "deepspeed" else 1

    @property
    def tensor_ranks(self) -> int:
        """Number of ranks that share each matrix and compute the same rows; 1 without tensor parallelism."""
        return self.parallelism.get("tp", 1) if self.backend == "ddp" else 1

    @property
    def gathers_16bit_weights(self) -> bool:
        if self.json_file:
            return self.zero.get("stage3_gather_16bit_weights_on_model_save") is True
        return self._deepspeed_variable("ZERO3_SAVE_16BIT_MODEL", "false").lower() == "true"

    def json_enabled(self, precision: str) -> str:
        """`true`, `false`, `auto` or `none`: what the JSON says of `bf16` or `fp16`."""
        return str((self.json.get(precision) or {}).get("enabled")).lower()

    @property
    def precision(self) -> tuple[str, str]:
        """The precision (`bf16`, `fp16`, `fp8` or `no`), and what decided it."""
        if named := self.named_precision:
            return named[0], f"from {named[1]}"
        return self.resolved or ("no", "the default")

    @property
    def named_precision(self) -> tuple[str, str] | None:
        """The precision (`bf16`, `fp16`, `fp8` or `no`), and where it is named; None if the launch names none.

        `enabled` true or false in the JSON wins over the command line. The `no` that the launcher gives a rank if the
        user named no precision does not count.
        """
        for name in ("bf16", "fp16"):
            if self.json_enabled(name) == "true":
                return name, f"{self.json_file}"
        asked = self.asked_precision
        wanted = asked[0] if asked else "bf16"
        if wanted in ("bf16", "fp16") and self.json_enabled(wanted) == "false":  # DeepSpeed has no key for fp8
            return "no", f"{self.json_file}"
        return asked

    @property
    def asked_precision(self) -> tuple[str, str] | None:
        """The precision named by the command line, the yaml or a variable, and which of them named it; else None."""
        value = self.environment.get(PRECISION, "no").lower()
        if "mixed_precision" in self.arguments:
            return value, "--mixed_precision"
        if self.yaml.get("mixed_precision") is not None:
            return value, f"{self.config_file}"
        if self.variable:
            return self.variable.lower(), PRECISION
        return (value, "the launcher") if value != "no" else None

    def _deepspeed_variable(self, name: str, default: str) -> str:
        return self.environment.get(f"ACCELERATE_DEEPSPEED_{name}", default)
