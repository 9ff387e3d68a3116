"""Starts a command on each rank: audits the launch, builds the Accelerator, prints launch and settings."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence

from accelerate import Accelerator

from accel_sft.api.config import EVAL, MODEL, TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.limits import TENSOR_PARALLEL, launch_problem
from accel_sft.api.options import settings
from accel_sft.api.task import Task
from accel_sft.io.findings import Finding, error
from accel_sft.io.terminal import quiet, terminal, wrapped
from accel_sft.io.text import printable
from accel_sft.launch.accelerator import create_accelerator
from accel_sft.launch.audit import BY_FILE, audit, refuse
from accel_sft.launch.collectives import by_each_rank
from accel_sft.launch.describe import describe
from accel_sft.launch.environment import device_count, share_cores
from accel_sft.launch.info import Launch, launch_of_this_process
from accel_sft.launch.launcher import PRECISION
from accel_sft.launch.parallelism import fitted
from accel_sft.launch.recordable import recordable, versions

_TOY = "note: training the built-in toy model. For a real one: --model Qwen/Qwen2.5-0.5B-Instruct"
_ALWAYS = "model", "max_length", "global_batch_size", "epochs", "max_steps", "learning_rate", "seed"
"""Settings that are shown even at their defaults."""


def begin() -> Launch:
    """Read the launch of this process. A process whose rank has no accelerator ends here with status 0, so that a
    launch file for two GPUs also runs on one. Call this before anything else reads the number of ranks."""
    launch = launch_of_this_process()
    adapted = fitted(launch, device_count())
    if adapted is not launch:
        if int(os.environ["LOCAL_RANK"]) >= adapted.local_world_size:
            raise SystemExit(0)
        ranks = {name: adapted.environment[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        os.environ.update(ranks)
        share_cores()
    return adapted


def start(
    launch: Launch, config: TrainConfig, task: Task, *, train: bool = True, precision_of_run: str | None = None
) -> tuple[Accelerator, Launch]:
    """Audit a launch, build its Accelerator, and print the findings; in a dry run or an evaluation, also `show` it.

    `launch` is from `begin`; it is returned with its precision. Without `train`, the command is an evaluation.
    """
    # notes, such as on unused GPUs, concern training only
    findings = [finding for finding in audit(config, launch) if train or finding.level != "note"]
    refuse(findings)
    with quiet(None, config.debug) as stream:
        accelerator, launch = create_accelerator(config, launch, train=train, precision_of_run=precision_of_run)
        backend = TENSOR_PARALLEL if launch.tensor_ranks > 1 else accelerator.distributed_type.value
        if problem := launch_problem(config, backend, launch.stage, launch.offload("optimizer")):
            raise UserError(problem)
        if launch.machines > 1:
            findings += differing_versions(by_each_rank(lambda: (socket.gethostname(), versions())))
            refuse(findings)
        if accelerator.is_main_process:
            for finding in findings:
                print(wrapped(f"{finding.level}: {finding}"), file=stream)
    if config.dry_run or not train:
        show(accelerator, launch, config, task, train=train)
    return accelerator, launch


def differing_versions(machines: Sequence[tuple[str, dict[str, str]]]) -> Iterator[Finding]:
    """Yield an error for each library whose version differs by rank; `machines` has hosts and versions by rank.

    Ranks with different code may wait for each other for ever. Python and a library's build (`+cu130`) may differ.
    """
    for name in sorted({name for _, installed in machines for name in installed} - {"python"}):
        hosts: dict[str, str] = {}  # the first host with each version
        for host, installed in machines:
            hosts.setdefault(installed.get(name, "missing").split("+")[0], host)
        if len(hosts) > 1:
            where = ", ".join(f"{version} on {host}" for version, host in hosts.items())
            yield error(f"{name}: {where}", "install the same version on all machines")


def show(
    accelerator: Accelerator, launch: Launch, config: TrainConfig, task: Task, folder: str = "", *, train: bool = True
) -> None:
    """On rank 0, print the run's folder (if there is one), the launch and the settings."""
    if not accelerator.is_main_process:
        return
    launched = describe(accelerator, launch)
    if train and launch.backend == "plain" and not launch.environment.get(PRECISION):
        launched += f"; for several processes: {BY_FILE}"
    lines = [f"run       {folder}: {launched}" if folder else f"launch    {launched}"]
    lines.append(printable(f"settings  {_settings_line(config, task, train)}"))
    for line in lines + ["the launch is valid; data and model were not checked"] * config.dry_run:
        print(wrapped(line, 10), file=terminal())


def _settings_line(config: TrainConfig, task: Task, train: bool) -> str:
    """The settings that differ from the defaults, and those of _ALWAYS, then the task's own. An evaluation shows only
    the settings that it uses."""
    usual, values = TrainConfig().resolved({}), config.as_dict()
    if train:
        del values["output_dir"]  # the line with the run's folder shows it
    else:
        used = {setting.name for setting in settings(TrainConfig) if setting.section in (MODEL, EVAL)}
        values = {k: v for k, v in values.items() if k in used | {"max_length", "thinking", "output_dir"}}
    always = _ALWAYS[1:] if config.init_from else _ALWAYS  # `init_from` names the model
    differing = {k: v for k, v in values.items() if v is not None and (v != getattr(usual, k) or k in always)}
    mine = [setting for setting in settings(type(task)) if getattr(task, setting.name) != setting.default]
    differing |= recordable({setting.name: getattr(task, setting.name) for setting in mine})
    shown = {k.replace("_", "-"): f"{v:g}" if isinstance(v, float) else v for k, v in differing.items()}
    toy = config.model == "tiny" and not config.init_from and any(setting.rows for setting in mine)
    return ", ".join(f"{name} {value}" for name, value in shown.items()) + f"; {_TOY}" * toy
