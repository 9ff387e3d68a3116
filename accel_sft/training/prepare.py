"""From settings to the data of a run: its source, the examples as tokens, the plan of steps."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.checkpoint.checkpoint import replacing
from accel_sft.data.chat import Encoding
from accel_sft.data.conversation import conversation, read_split
from accel_sft.data.step_plan import StepPlan
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.collectives import by_each_rank, decided_by_main
from accel_sft.models.load import find_source
from accel_sft.models.tiny import build_tiny
from accel_sft.training.assembly import Assembly, assemble

_TINY_EXAMPLES = 1 << 15
"""The most training examples that the tokenizer of `tiny` is made from: more hardly change it, and slow every start."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The data of a run, and what its model is made from; the same on every rank."""

    assembly: Assembly
    validation_examples: Sequence[Any]
    train: Encoding
    validation: Encoding
    plan: StepPlan

    @property
    def lines(self) -> list[str]:
        """Lines for the console: which examples were left out or cut, then the size of the job."""
        train, validation, plan, config = self.train, self.validation, self.plan, self.assembly.config
        tokens, supervised = int(plan.lengths.sum()), int(plan.supervised.sum())
        evaluated = f"{len(validation.kept):,}"
        if (limit := config.eval_limit) and limit < len(validation.kept):
            evaluated = f"{limit:,} of {evaluated}"
        merged = self.assembly.source.adapter and config.adapter == "none"
        how = "the adapter is merged into its base, and all weights are trained (to go on with it: --adapter)"
        return [
            *([how] if merged else []),
            *train.lines(),
            *validation.lines(),
            f"{len(train.kept):,} training examples ({tokens:,} tokens, {supervised:,} supervised), "
            f"{evaluated} validation; {plan.total_steps:,} steps of {plan.global_batch_size}",
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
        """Tokens of the longest answer in either split, end of turn included: as many are generated at most."""
        return max(int(split.kept.supervised.max()) for split in (self.train, self.validation))

    def fingerprint(self) -> str:
        """SHA-256 of both splits' tokens, in order: a resumed run must read the same."""
        both = self.train.kept.fingerprint + self.validation.kept.fingerprint
        return hashlib.sha256(both.encode()).hexdigest()


def prepare_data(accelerator: Accelerator, run_dir: RunDir, task: Task, config: TrainConfig) -> Prepared:
    """Read the task's splits, find the model's source (building `tiny`), tokenize, and plan the steps.

    Raises:
        UserError: data, template or model that cannot be used.
    """
    train_examples, validation_examples = _read_splits(accelerator, task)
    if config.model == "tiny" and not config.init_from:
        base = run_dir.base
        if not base.exists() or not run_dir.has_trained():  # a fresh start must not meet an earlier one's tokenizer
            with replacing(accelerator, base) as partial:
                decided_by_main(accelerator, lambda: build_tiny(partial, _texts(task, train_examples), config.seed))
        source = find_source(config, str(base))
    else:
        source = find_source(config)
    assembly = assemble(accelerator, task, config, source)
    train = assembly.encode(train_examples, "train")
    validation = assembly.encode(validation_examples, "validation")
    if config.max_steps is None and round(config.epochs * len(train.kept)) == 0:
        raise UserError(f"--epochs {config.epochs:g}: not one of {len(train.kept)} examples; ask for more")
    plan = StepPlan(
        train.kept.lengths,
        train.kept.supervised,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
    return Prepared(assembly, validation_examples, train, validation, plan)


def _read_splits(accelerator: Accelerator, task: Task) -> list[Sequence[Any]]:
    """Both splits. An error of one rank is raised on all of them, before any of them writes a file."""
    found: list[Sequence[Any]] = []
    by_each_rank(lambda: found.extend(read_split(task, split) for split in ("train", "validation")))
    return found


def _texts(task: Task, examples: Sequence[Any]) -> list[str]:
    """Each message and target of the examples, or of enough of them from all over the data."""
    some = range(0, len(examples), -(-len(examples) // _TINY_EXAMPLES))
    pairs = (conversation(task, examples, "train", index) for index in some)
    return [text for turns, target in pairs for text in (*(turn["content"] for turn in turns), target)]
