"""The settings of tools that take a task: the trainer's, and those of a single command."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from accel_sft.api.config import EVAL, MODEL, RUN, TrainConfig
from accel_sft.api.options import chosen, flag_of, option

_model, _eval, _run = (functools.partial(option, section=name) for name in (MODEL, EVAL, RUN))
_TOOLS = "Check", "Plan", "Rehearsal", "Sampling"
_check, _plan, _rehearse, _sample = (functools.partial(option, section=name, basic=True) for name in _TOOLS)
_OF_WEIGHTS = (
    *("base", "offload", "dtype", "attn_implementation", "trust_remote_code", "chat_template", "max_length"),
    *("eval_batch_size", "template_date", "control_tokens", "seed", "revision"),
)
"""Settings of `evaluate` and `sample` that would have no effect on a server (`--url`), but for sampling's seed."""
_OF_SERVERS = "key_from", "timeout"


@dataclasses.dataclass(kw_only=True)
class EvaluateConfig(TrainConfig):
    """The settings of `evaluate`. The command line offers only some of the trainer's; the rest keep their defaults."""

    of_weights: ClassVar[tuple[str, ...]] = _OF_WEIGHTS
    model: str = _model(
        "", basic=True, help="Folder of a run, weights or an adapter, or a hub id; with --url, the model's name there."
    )
    url: str | None = _model(None, basic=True, help="Score an OpenAI-compatible server: http://127.0.0.1:8000/v1.")
    key_from: str | None = _model(
        None, basic=True, help="Variable with the server's API key; default: ACCEL_SFT_API_KEY."
    )
    timeout: int = _model(600, min=1, basic=True, help="Maximum seconds for one answer of the server.")
    base: str | None = _model(None, basic=True, help="Also evaluate this model; auto: the run's initial model.")
    offload: str | None = _eval(
        None, basic=True, choices=("host", "disk"), help="Where to keep weights that do not fit on the GPU."
    )
    output_dir: str | None = _run(None, basic=True, help="A new folder for result.json, report.md and the answers.")

    def problems(self) -> list[str]:
        flags = ", ".join(map(flag_of, chosen(self, self.of_weights if self.url else _OF_SERVERS)))
        if self.url:
            lines = [f"--url: a server has its own weights and settings; leave {flags} out"] if flags else []
        else:
            lines = [] if self.model else ["--model: a value is needed"]
            lines += [f"{flags} cannot be used without --url"] if flags else []
        return lines + super().problems()


@dataclasses.dataclass(kw_only=True)
class SampleConfig(EvaluateConfig):
    """The settings of `sample`: some of its own, and those of `evaluate` that name and load a model."""

    of_weights = tuple(name for name in _OF_WEIGHTS if name != "seed")
    samples: int = _sample(8, min=1, max=10_000, help="Answers to sample for each prompt.")
    temperature: float = _sample(1.0, min=0.01, help="Sampling temperature; 1 leaves the distribution unchanged.")
    top_p: float = _sample(1.0, min=0.01, max=1, help="Sample from the likeliest tokens with this total probability.")
    rows: int | None = _sample(None, min=1, help="Sample for N training examples, always the same; default: for all.")
    keep: str = _sample("all", choices=("all", "best", "pairs"), help="Write all answers, a right one, or a pair.")
    prefer: str = _sample("shortest", choices=("shortest", "likeliest"), help="Which right answer --keep best writes.")
    threshold: float | None = _sample(None, help="Main metric of a right answer; default: 1, or 0 if lower is better.")

    def problems(self) -> list[str]:
        lines = ["--thinking keep: thinking cannot be written to OUT; add --thinking off"] * (self.thinking == "keep")
        unused = self.keep != "best" and self.prefer != "shortest"
        return [*lines, *["--prefer cannot be used without --keep best"] * unused, *super().problems()]


@dataclasses.dataclass(kw_only=True)
class PlanConfig(TrainConfig):
    """The settings of `plan`: some of its own, and all of the trainer's, so that it accepts any training command."""

    gpus: int | None = _plan(None, min=0, max=1024, help="GPUs per machine; 0: train on CPU; default: this machine's.")
    gpu_memory: float | None = _plan(None, min=0, help="GiB per GPU; default: this machine's.")
    host_memory: float | None = _plan(None, min=0, help="GiB of host memory; default: this machine's free memory.")
    launch: str | None = _plan(
        None, help="Launch file: a path, or a shipped file's name; may be repeated. Default: every shipped file."
    )
    details: bool = _plan(False, help="Show each phase's memory by component (always for one launch file).")
    json: bool = _plan(False, help="Print JSON.")


@dataclasses.dataclass(kw_only=True)
class CheckConfig(TrainConfig):
    """The settings of `check`: some of its own, and all of the trainer's, so that it accepts any training command."""

    strict: bool = _check(False, help="Exit with status 1 on warnings too, not only on errors.")
    score: bool = _check(True, help="Score every example's target with the task's score().")
    show: int = _check(2, min=0, max=1000, help="Training examples to print, with the tokens that carry loss marked.")
    html: str | None = _check(None, help="Write the report to this file, as one HTML page.")
    json: bool = _check(False, help="Print the report as JSON, and nothing else, on standard output.")


@dataclasses.dataclass(kw_only=True)
class RehearseConfig(TrainConfig):
    """The settings of `rehearse`: some of its own, and all of the trainer's, so that it takes any training command."""

    launch: str | None = _rehearse(
        None, help="Launch file of the real run: path or shipped file's name. Default: one process, no launch file."
    )
    keep: bool = _rehearse(False, help="Keep the rehearsal's folder; after a failure it is always kept.")
    json: bool = _rehearse(False, help="Print JSON, and nothing else, on standard output.")
