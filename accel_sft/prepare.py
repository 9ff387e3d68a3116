"""From settings to what a run works on: its folder, its examples as tokens, its plan of steps, its record."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_sft import config as configuration
from accel_sft.audit import audit, refuse
from accel_sft.chat import Encoding, conversations, encode, end_of_turn_ids
from accel_sft.checkpoint import checkpoints, decided_by_main, replacing
from accel_sft.config import TrainConfig
from accel_sft.data import StepPlan, micro_batch_examples
from accel_sft.launch import create_accelerator, describe, launch_record
from accel_sft.model import Source, find_source, load_tokenizer
from accel_sft.options import UserError, settings
from accel_sft.report import read_json, read_status, write_atomically, write_result
from accel_sft.task import Task
from accel_sft.terminal import quiet
from accel_sft.tiny import build_tiny

PACKAGES = ("accel-sft", "torch", "accelerate", "transformers", "deepspeed", "peft", "tokenizers")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a run works on, the same on every rank."""

    source: Source
    tokenizer: Any
    validation_examples: Sequence[Any]
    train: Encoding
    validation: Encoding
    plan: StepPlan
    micro_batch_size: int
    eval_limit: int | None = None

    @property
    def lines(self) -> list[str]:
        """What was left out or cut, then the size of the job."""
        train, validation, plan = self.train, self.validation, self.plan
        tokens, supervised = int(plan.lengths.sum()), int(plan.supervised.sum())
        judged = f"{len(validation.kept):,}"
        if self.eval_limit and self.eval_limit < len(validation.kept):
            judged = f"{self.eval_limit:,} of {judged}"
        return [
            *train.lines(),
            *validation.lines(),
            f"{len(train.kept):,} training examples ({tokens:,} tokens, {supervised:,} supervised), "
            f"{judged} validation; {plan.total_steps:,} steps of {plan.global_batch_size}",
        ]

    def counts(self) -> dict[str, int]:
        """The data in numbers, for the run's record and the model card."""
        found = {}
        for encoding in (self.train, self.validation):
            found[f"{encoding.split} examples"] = len(encoding.kept)
            for reason, indices in encoding.left_out.items():
                found[f"{encoding.split} examples {reason}"] = len(indices)
            if encoding.cut:
                found[f"{encoding.split} examples cut"] = len(encoding.cut)
        return {
            **found,
            "training tokens": int(self.plan.lengths.sum()),
            "training supervised tokens": int(self.plan.supervised.sum()),
        }

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer in either split, end of turn included: what is generated at most."""
        return max(example.supervised_tokens for example in (*self.train.kept, *self.validation.kept))

    def fingerprint(self) -> str:
        """SHA-256 of both splits' tokens, in order: every rank, and a resumed run, must read the same."""
        digest = hashlib.sha256()
        for example in (*self.train.kept, *self.validation.kept):
            digest.update(np.asarray([example.prompt_length, *example.input_ids], dtype=np.int32).tobytes())
        return digest.hexdigest()


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide what a run computes."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def start(config: TrainConfig) -> Accelerator:
    """Audit the launch, build its Accelerator, and print once what both resolved to.

    Raises:
        UserError: every error of the audit.
    """
    findings = audit(config)
    refuse(findings)
    with quiet(None, config.debug) as terminal:
        accelerator = create_accelerator(config)
        if config.adapter == "adalora" and accelerator.state.deepspeed_plugin:
            raise UserError(
                "--adapter adalora: it ranks its directions by each step's gradients, which DeepSpeed frees; "
                "launch with accelerate_configs/ddp.yaml, or choose --adapter lora"
            )
        if accelerator.is_main_process:
            rows = describe(accelerator, config)
            width = max(len(name) for name, _ in rows)
            for name, value in rows:
                print(f"{name:<{width}}  {value}", file=terminal)
            for finding in findings:
                print(f"{finding.level}: {finding}", file=terminal)
            print("settings  " + _settings_line(config), file=terminal)
    return accelerator


def _settings_line(config: TrainConfig) -> str:
    """The settings that are not what the bare trainer has, or that were resolved."""
    usual = TrainConfig()
    differing = {k: v for k, v in config.as_dict().items() if v != getattr(usual, k) or k in ("model", "seed")}
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in differing.items())


def claim_run_dir(accelerator: Accelerator, task_name: str, task: Task, config: TrainConfig) -> tuple[Path, bool]:
    """The run's folder, made if need be, the same on every rank; and whether the run in it is finished already.

    Raises:
        UserError: the folder is not empty and `--resume` is off, or it cannot be written.
    """

    def claim() -> tuple[Path, bool]:
        name = config.output_dir or f"runs/{task_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = Path(name).expanduser().absolute()
        try:
            occupied = path.exists() and any(path.iterdir())
            failed_before_it_began = (
                occupied and read_status(path) == "failed" and not (path / "metrics.jsonl").exists()
            )
            if occupied and config.resume == "off" and not failed_before_it_began:
                raise UserError(
                    f"--output-dir {name}: not empty; name another folder, or continue the run in it with --resume auto"
                )
            if occupied and not (path / "run.json").exists() and not (path / "result.json").exists():
                raise UserError(f"--output-dir {name}: not empty, and not a run of accel_sft; name another folder")
            if config.resume not in ("off", "auto") and Path(config.resume).resolve().parent.parent != path.resolve():
                raise UserError(
                    f"--resume {config.resume}: not a checkpoint of the run in --output-dir {name}; "
                    "to start a new run from another one's weights, use --init-from"
                )
            path.mkdir(parents=True, exist_ok=True)
            if read_status(path) is None:  # whatever happens next, the folder is known as a run's
                write_result(path, {"status": "running"})
            (path / "logs").mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"--output-dir {name}: cannot be used ({error.strerror})") from None
        return path, _finished(path, task, config)

    return decided_by_main(accelerator, claim)


def _finished(run_dir: Path, task: Task, config: TrainConfig) -> bool:
    """Whether the folder's run is complete and is the one asked for now; a changed one is refused later, by name."""
    if config.resume == "off" or read_status(run_dir) != "complete":
        return False
    before = read_json(run_dir / "run.json")
    return not _changes(before, config.as_dict(), _options(task))


def prepare_data(accelerator: Accelerator, run_dir: Path, task: Task, config: TrainConfig) -> Prepared:
    """Read the task's splits, find the model's source (building `tiny`), tokenize, and plan the steps.

    Raises:
        UserError: data, template or model that cannot be used.
    """
    train_examples, validation_examples = read_split(task, "train"), read_split(task, "validation")
    if config.model == "tiny" and not config.init_from:
        base = run_dir / "base"
        if not base.exists() or not checkpoints(run_dir):  # a fresh start must not meet an earlier one's tokenizer
            with replacing(accelerator, base) as partial:
                if accelerator.is_main_process:
                    build_tiny(partial, _texts(task, train_examples), config.seed)
        source = find_source(config, str(base))
    else:
        source = find_source(config)
    tokenizer = load_tokenizer(source, config)
    rules = encoding_rules(tokenizer, source, config)
    train = encode(tokenizer, task, train_examples, "train", **rules)
    validation = encode(tokenizer, task, validation_examples, "validation", **rules)
    if config.max_steps is None and round(config.epochs * len(train.kept)) == 0:
        raise UserError(f"--epochs {config.epochs:g}: not one of {len(train.kept)} examples; ask for more")
    plan = StepPlan(
        [len(example.input_ids) for example in train.kept],
        [example.supervised_tokens for example in train.kept],
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
    rows = micro_batch_examples(
        config.micro_batch_size, int(plan.lengths.max()), config.global_batch_size, accelerator.num_processes
    )
    return Prepared(source, tokenizer, validation_examples, train, validation, plan, rows, config.eval_limit)


def read_split(task: Task, split: str) -> Sequence[Any]:
    """The task's examples of a split; none at all is a UserError."""
    examples = task.dataset(split)
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        raise UserError(
            f"the task's dataset({split!r}) gave {type(examples).__name__}, expected a sequence of examples"
        )
    if not len(examples):
        raise UserError(f"the task's dataset({split!r}) is empty; one example is the least")
    return examples


def _texts(task: Task, examples: Sequence[Any]) -> list[str]:
    pairs = zip(*conversations(task, examples, "train"), strict=True)
    return [text for turns, target in pairs for text in (*(turn["content"] for turn in turns), target)]


def encoding_rules(tokenizer: Any, source: Source, config: TrainConfig) -> dict[str, Any]:
    """What `encode` needs besides the examples: ids that end a turn, and what becomes of long examples."""
    return {
        "eos_ids": end_of_turn_ids(tokenizer, _generation_config(source, config)),
        "max_length": config.max_length,
        "truncation": config.truncation,
    }


def _generation_config(source: Source, config: TrainConfig) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source.weights, trust_remote_code=config.trust_remote_code)
    except OSError:  # a model need not have one; the tokenizer's eos then stands alone
        return None


def write_run_record(
    accelerator: Accelerator, run_dir: Path, task_name: str, task: Task, config: TrainConfig, prepared: Prepared
) -> None:
    """Write `run.json`: what decides the run's mathematics, and how it was launched; on a resume, hold it to that.

    Raises:
        UserError: a resumed run's settings or data differ from what the folder records, one line each.
    """
    record = {
        "task": task_name,
        "config": config.as_dict(),
        "task_options": _options(task),
        "total_steps": prepared.plan.total_steps,
        "micro_batch_size": prepared.micro_batch_size,
        "max_new_tokens": prepared.longest_answer,
        "data": prepared.counts(),
        "data_sha256": prepared.fingerprint(),
        "versions": versions(),
        "launch": launch_record(accelerator),
    }

    def write() -> None:
        path = run_dir / "run.json"
        if path.exists() and checkpoints(run_dir):
            _hold_to(read_json(path), record, run_dir)
        write_atomically(path, json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n")

    if len(set(gather_object([record["data_sha256"]]))) > 1:
        raise UserError(
            f"task {task_name}: ranks got different examples from dataset() (a set's order, an unseeded random?); "
            "make it a pure function"
        )
    decided_by_main(accelerator, write)


def _hold_to(before: dict[str, Any], now: dict[str, Any], run_dir: Path) -> None:
    different = _changes(before, now["config"], now["task_options"])
    if before["task"] != now["task"]:
        different.append(f"task: the run was started with {before['task']}, not {now['task']}")
    if not different and before["data_sha256"] != now["data_sha256"]:
        different.append("the data is not what the run was started with")
    if different:
        raise UserError(
            *different,
            f"{run_dir}: a resumed run computes what it would have without the stop, schedule included; "
            f"give the settings it was started with, or start a new run from its weights: --init-from {run_dir}",
        )


def _options(task: Task) -> dict[str, Any]:
    return {setting.name: getattr(task, setting.name) for setting in settings(type(task))}


def _changes(before: dict[str, Any], config: dict[str, Any], task_options: dict[str, Any]) -> list[str]:
    return configuration.changed({**before["config"], **before["task_options"]}, {**config, **task_options})
