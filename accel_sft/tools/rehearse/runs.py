"""Starts the rehearsal's runs (real launches), and reports for each stage whether it holds, or what fails and when."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError, what_and_where
from accel_sft.io.findings import Finding, lines, worst
from accel_sft.io.run_dir import RunDir
from accel_sft.io.terminal import wrapped
from accel_sft.launch.child import kill_all, launch, outcome
from accel_sft.launch.info import Launch, shipped
from accel_sft.launch.parallelism import sized
from accel_sft.tracking.metrics_file import read_lines

STEPS, SAVE_EVERY, EVAL_EVERY = 12, 4, 6
"""Number of optimizer steps: of a rehearsal, between checkpoints, and between evaluations. One of the runs is killed
after its first checkpoint, long before its end."""
RANKS, ROWS, TOKENS = 2, 8, 24
"""Maximum number of ranks, of rows in a step, and of generated tokens in an answer."""
LEAST_RATE = 1e-3
"""Lowest learning rate of a rehearsal, so that a dozen steps change weights of any precision."""
LIMIT_SECONDS = 3600.0
"""Time limit of one launch; the first one with ZeRO may wait for DeepSpeed's operators to compile."""
_POLL_SECONDS = 0.05
_ON_THE_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
TRAINED = re.compile(r"^model +[\d,]+ of [\d,]+ parameters are trained\b", re.M)
"""The line that a run prints once its model is loaded."""
FAILS, WARNS, HOLDS, NOT_REACHED = "fails", "warns", "holds", "not reached"
"""States of a stage. The first two are also levels of findings: the real run would fail, or end with a worse result."""
fails, warns = (functools.partial(Finding, level) for level in (FAILS, WARNS))
STAGES = (
    *("launch", "data", "model", "load", "evaluation", "steps", "trained", "checkpoint", "resume", "export"),
    *("reload", "merge", "generate"),
)
_COLORS = {FAILS: "red", WARNS: "yellow"}
_WIDTH = 12
"""Width of the columns of a stage's name and state."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A launch that has ended: its folder, what it printed, and why it failed, line by line (none if it did not)."""

    dir: RunDir
    output: str
    failure: list[str]

    def lines(self, key: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that contain `key`. Lines of steps contain "loss", those of evaluations
        "eval_loss"."""
        return [line for line in read_lines(self.dir.metrics) if key in line]


def launcher_of(real: Launch | None, file: Path | None) -> tuple[list[str], str]:
    """The command that starts a rehearsal of this launch on CPUs, and how it differs from the real launch."""
    if real is None:
        return [sys.executable], "one process"
    ranks = min(real.world_size, RANKS)
    flags = [*sized(real, ranks)]
    notes = [f"{ranks} CPU rank{'s' * (ranks > 1)} for {real.world_size}"]
    if real.machines > 1:
        flags += ["--num_machines", "1", "--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
    if real.sequence_ranks > ranks:
        flags += ["--parallelism_config_sp_size", f"{ranks}"]
    if real.backend == "fsdp":
        file = shipped()["ddp"]
        notes.append("data parallel (ddp): FSDP does not run on CPUs")
    if real.precision[0] == "fp16":
        flags += ["--mixed_precision", "no"]
        notes.append("in float32: float16 needs a GPU")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    return [*command, "--main_process_port", "0", *flags], ", ".join(notes)


def rehearsed(config: TrainConfig, model: str, longest_answer: int) -> TrainConfig:
    """The real run's resolved settings, with the changes that a rehearsal needs."""
    rows = min(config.global_batch_size or ROWS, ROWS)
    kernels = config.attn_implementation in (None, "eager", "sdpa")
    return dataclasses.replace(
        config,
        model=model,
        init_from=None,
        revision=None,
        output_dir=None,
        max_steps=STEPS,
        epochs=None,
        warmup_steps=None,
        warmup_ratio=0.0,
        learning_rate=max(config.learning_rate or 0.0, LEAST_RATE) if config.learning_rate else 0.0,
        global_batch_size=rows,
        micro_batch_size=config.micro_batch_size if config.micro_batch_size == "auto" else "1",
        eval_every="off" if config.eval_every == "off" else str(EVAL_EVERY),
        eval_limit=min(config.eval_limit or ROWS // 2, ROWS // 2),
        max_new_tokens=min(config.max_new_tokens or longest_answer, TOKENS),
        save_every="off" if config.save_every == "off" else str(SAVE_EVERY),
        keep_checkpoints=f"{STEPS // SAVE_EVERY}",
        attn_implementation=config.attn_implementation if kernels else None,
        compile=False,
        use_liger_kernel=False,
        profile=False,
        dry_run=False,
        force=True,
        tracker="none",
        run_name=None,
        resume="off",
        patience=None,
    )


class Runs:
    """Starts runs with the same command line, each in a folder of its own below `folder`."""

    def __init__(self, launcher: Sequence[str], words: Sequence[str], folder: Path) -> None:
        self.command, self.folder = [*launcher, "-m", "accel_sft", *words], folder

    def start(self, name: str, *more: str, on_poll: Callable[[RunDir], None] = lambda run_dir: None) -> Run:
        """Start a run in the folder `name`, and wait for its end."""
        run_dir, log = RunDir(self.folder / name), self.folder / f"{name}{'-resumed' * bool(more)}.log"
        command = [*self.command, *more, "--output-dir", str(run_dir)]
        ended = launch(command, _ON_THE_CPU, run_dir.path, log, LIMIT_SECONDS, lambda: on_poll(run_dir), _POLL_SECONDS)
        _, reason = outcome(ended, run_dir, log, LIMIT_SECONDS)
        output = log.read_text(encoding="utf-8", errors="replace")
        errors = dict.fromkeys(re.findall(r"^Error: (.*)", output, re.M))
        return Run(run_dir, output, ([*errors] or [reason]) if reason else [])

    def killed(self, name: str) -> Run:
        """Start a run, and kill all of its processes (SIGKILL) as soon as it has a checkpoint."""

        def kill(run_dir: RunDir) -> None:
            if run_dir.all_checkpoints():
                kill_all(run_dir.path)

        return self.start(name, on_poll=kill)


@dataclasses.dataclass
class Stage:
    """A stage of a run: when the real run reaches this stage, what the rehearsal has seen, and what is wrong."""

    stage: str
    state: str = NOT_REACHED
    when: str = ""
    seen: str = ""
    findings: list[Finding] = dataclasses.field(default_factory=list)


class Stages:
    """All stages of a rehearsal; each is shown, line by line, once its state is known."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self.all = {name: Stage(name) for name in STAGES}

    def ended(self, name: str, *findings: Finding, seen: str = "", when: str = "") -> None:
        """Record and show how a stage ended."""
        stage = self.all[name]
        stage.findings += [dataclasses.replace(finding, subject=name) for finding in findings]
        stage.state, stage.seen, stage.when = worst(stage.findings, (FAILS, WARNS, HOLDS)), seen, when or stage.when
        self._show(wrapped(f"{name:<{_WIDTH}}{stage.state:<{_WIDTH}}{seen}".rstrip(), 2 * _WIDTH))
        for finding in findings:
            where = stage.when if finding.level == FAILS else ""
            for line in lines(dataclasses.replace(finding, subject=where), _COLORS, indent=4):
                self._show(line)

    @contextlib.contextmanager
    def reported(self, name: str) -> Iterator[None]:
        """Within this context, an exception becomes a failure of the stage: libraries may raise anything."""
        try:
            yield
        except UserError as error:
            self.ended(name, *map(fails, error.problems))  # not split at "; ", which may not precede a fix
        except Exception as error:  # noqa: BLE001
            self.ended(name, fails(f"unexpected: {what_and_where(error)}"))

    @property
    def failed(self) -> bool:
        """Whether a stage fails."""
        return any(stage.state == FAILS for stage in self.all.values())
