"""Finds the settings that a resumed run changes against its folder's record, although it may not. Needs no torch."""

from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.options import shown
from accel_sft.api.other_names import REMOVED

LAYOUT = frozenset(
    {"micro_batch_size", "eval_batch_size", "output_dir", "save_every", "keep_checkpoints", "resume", "log_every"}
    | {"tracker", "profile", "dry_run", "debug", "attn_implementation", "gradient_checkpointing", "eval_every"}
    | {"patience", "batching", "compile", "deterministic", "force", "on_nonfinite", "hang_timeout"}
    | {"use_liger_kernel", "export_dtype", "tracker_project", "run_name", "generate_with"}
)
"""Settings that decide how a run is executed or observed, not what a step computes: a resume may change them."""

_OF_DATA = frozenset({"template_date", "control_tokens"})
"""Settings that decide which tokens are made. If a record lacks one, it is not compared: if tokens differ, so does the
hash of the data."""


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each setting outside `LAYOUT` that a resumed run (`after`) changes against the record."""
    lines = []
    for key in sorted((before.keys() | after.keys()) - LAYOUT):
        if key in _OF_DATA and key not in before:
            continue
        # a record older than an option stands for the option's default, and one older than --thinking for `template`
        default = "template" if key == "thinking" else getattr(TrainConfig, key, None)
        was, now = before.get(key, default), after.get(key, REMOVED.get(key))
        if was != now:
            flag = f"--{key.replace('_', '-')}"  # `shown` escapes it, as the record may be someone else's
            lines.append(f"{shown(flag)}: the run was started with {shown(str(was))}, not {shown(str(now))}")
    return lines
