"""Defines what is trained on a GPU: models of published sizes, jobs on them, and the FLOPs per token of a job."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import shapes
from accel_sft.launch.info import launch_of_yaml
from accel_sft.memory import job as memory_job
from accel_sft.memory.flops import model_flops
from accel_sft.memory.model_config import read_config, read_shape

LAUNCH = Path(__file__).parent.parent / "accelerate_configs" / "ddp.yaml"
MODELS = {
    "0.5B": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate": 4864, "tied": True},
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate": 8960, "tied": True},
    "7B": {"hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "intermediate": 18944, "tied": False},
}
for _name, _model in MODELS.items():
    _model["vocabulary"] = 152_064 if _name == "7B" else 151_936
TINY = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocabulary": 4608}

ALL = ("ddp", "z0", "z1", "z2", "z3", "z2_offload", "z3_offload")


@dataclasses.dataclass(frozen=True)
class Job:
    """One job: `length` tokens per row, `batch` rows per step, and `options` of the trainer."""

    model: str
    length: int
    batch: int
    launches: tuple[str, ...] = ALL
    lora: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def adapter(self) -> dict[str, int]:
        return {"r": 8, "lora_alpha": 16}


RECOMPUTED = {"gradient_checkpointing": True}
JOBS = {
    "0.5B full": Job("0.5B", 1024, 16),
    "0.5B LoRA": Job("0.5B", 1024, 16, ("ddp", "z2", "z3"), lora=True),
    "1.5B full": Job("1.5B", 1024, 16),
    "1.5B full, recomputed": Job("1.5B", 1024, 16, ("ddp", "z2", "z3"), options=RECOMPUTED),
    "7B full, recomputed": Job("7B", 1024, 16, ("z2_offload", "z3_offload"), options=RECOMPUTED),
    "7B LoRA": Job("7B", 4096, 4, lora=True),
    "7B LoRA, recomputed": Job("7B", 4096, 4, ("ddp", "z2", "z3"), lora=True, options=RECOMPUTED),
}


def make_model(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a Qwen2 of these sizes with random bf16 weights, and its tokenizer."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    shapes.make_qwen2(
        folder,
        sizes["vocabulary"],
        device="cuda" if torch.cuda.is_available() else "cpu",  # a GPU draws random numbers faster
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=sizes["tied"],
        dtype=torch.bfloat16,
    )


def flops(job: Job, model: Path, answer: int) -> float:
    """Model FLOPs per token of the job with the model in this folder; `answer` tokens of each row are learnt."""
    shape = read_shape(read_config(model), str(model))
    adapter = {"adapter": "lora", "lora_r": job.adapter["r"]} if job.lora else {}
    of = model_flops(memory_job.Job(shape=shape, launch=launch_of_yaml(LAUNCH), device="cuda", **adapter))
    return of.total(job.length, answer, job.length**2 / 2) / job.length
