"""Tokenizer, encoded examples, model and evaluator made from the settings, alike for training and for `evaluate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.task import Task
from accel_sft.data.chat import Encoding
from accel_sft.data.tokenization import SplitEncoder
from accel_sft.evaluation.evaluator import Evaluator
from accel_sft.models.load import Source, encoding_rules, load_model, load_tokenizer


@dataclasses.dataclass(frozen=True)
class Assembly:
    """What `assemble` made. It holds no model: whoever loads one decides when it is freed."""

    accelerator: Accelerator
    task: Task
    config: TrainConfig
    source: Source
    tokenizer: Any
    encode: SplitEncoder

    def load_model(self, total_steps: int = 0) -> Any:
        """The model, not prepared yet; `total_steps` optimizer steps are to come, 0 to evaluate only."""
        return load_model(
            self.source,
            self.config,
            precision=self.accelerator.mixed_precision,
            deepspeed=self.accelerator.state.deepspeed_plugin is not None,
            total_steps=total_steps,
        )

    def evaluator(self, examples: Sequence[Any], encoding: Encoding, *options: Any) -> Evaluator:
        """Of the validation examples and their encoding; `options` are Evaluator's further arguments."""
        return Evaluator(self.accelerator, self.tokenizer, self.task, examples, encoding.kept, self.config, *options)


def assemble(accelerator: Accelerator, task: Task, config: TrainConfig, source: Source) -> Assembly:
    """Load the source's tokenizer and set up the encoding of the task's examples; all ranks together.

    Raises:
        UserError: the tokenizer or its chat template cannot be used.
    """
    tokenizer = load_tokenizer(source, config)
    encode = SplitEncoder(accelerator, tokenizer, task, encoding_rules(tokenizer, source, config))
    return Assembly(accelerator, task, config, source, tokenizer, encode)
