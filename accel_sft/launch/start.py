"""The start of a command on each rank: audits the launch, builds the Accelerator, prints launch and settings."""

from __future__ import annotations

from accelerate import Accelerator

from accel_sft.api.adapters import launch_problem
from accel_sft.api.config import EVAL, MODEL, TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.options import settings
from accel_sft.io.terminal import quiet, wrapped
from accel_sft.launch.accelerator import create_accelerator
from accel_sft.launch.audit import audit, refuse
from accel_sft.launch.describe import describe


def start(config: TrainConfig, *, train: bool = True) -> Accelerator:
    """Audit the launch, build its Accelerator, and print the resolved launch and settings once.

    Args:
        train: if False, only the settings that an evaluation uses are shown.
    Raises:
        UserError: every error of the audit.
    """
    findings = audit(config)
    refuse(findings)
    with quiet(None, config.debug) as terminal:
        accelerator = create_accelerator(config)
        if problem := launch_problem(config.adapter, accelerator.distributed_type.value):
            raise UserError(problem)
        if accelerator.is_main_process:
            rows = [row for row in describe(accelerator, config) if train or row[0] != "clipping"]
            width = max(len(name) for name, _ in rows)
            for name, value in rows:
                print(wrapped(f"{name:<{width}}  {value}", width + 2), file=terminal)
            for finding in findings:
                print(wrapped(f"{finding.level}: {finding}"), file=terminal)
            print(wrapped("settings  " + _settings_line(config, train), 10), file=terminal)
            if config.dry_run:
                print("the launch is valid; data and model were not checked", file=terminal)
    return accelerator


def _settings_line(config: TrainConfig, train: bool) -> str:
    """The settings that differ from the trainer's defaults, model and seed always."""
    usual, values = TrainConfig(), config.as_dict()
    if not train:
        used = {setting.name for setting in settings(TrainConfig) if setting.section in (MODEL, EVAL)}
        values = {k: v for k, v in values.items() if k in used | {"max_length", "output_dir"}}
    differing = {k: v for k, v in values.items() if v != getattr(usual, k) or k in ("model", "seed")}
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in differing.items())
