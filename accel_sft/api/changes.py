"""Finds the settings in which a resumed run differs, and may not differ, from what its folder records. No torch."""

from typing import Any

from accel_sft.api.adapters import LORA_ONLY
from accel_sft.api.config import TrainConfig
from accel_sft.api.options import shown

LAYOUT = frozenset(
    {"micro_batch_size", "eval_batch_size", "output_dir", "save_every", "keep_checkpoints", "resume", "log_every"}
    | {"tracker", "profile", "dry_run", "debug", "attn_implementation", "gradient_checkpointing", "eval_every"}
    | {"patience", "batching", "compile", "deterministic", "force", "generate_with", "on_nonfinite", "hang_timeout"}
    | {"use_liger_kernel", "tracker_project", "run_name"}
)
"""Settings that decide how a run is executed or observed, not what a step computes: a resume may change them."""

_SCHEDULE = ("warmup_steps", "decay_ratio", "min_lr_ratio")


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each setting outside `LAYOUT` in which a resumed run differs from what its folder records."""
    lines = []
    defaults = {name: getattr(TrainConfig, name) for name in ("optimizer", *_SCHEDULE, *LORA_ONLY)}
    # version 0.1 did not record these
    unrecorded = {**defaults, "thinking": "template", "template_date": after.get("template_date")}
    unrecorded["control_tokens"] = after.get("control_tokens")  # the data's hash shows a difference
    before = {**unrecorded, **before}
    for key in sorted(before.keys() | after.keys()):
        if key not in LAYOUT and before.get(key) != after.get(key):
            flag, was, now = f"--{key.replace('_', '-')}", before.get(key), after.get(key)  # a stranger's record
            lines.append(f"{shown(flag)}: the run was started with {shown(str(was))}, not {shown(str(now))}")
    return lines
