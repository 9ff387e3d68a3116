"""The run's own weights here: their greedy answers, their log-probabilities, and what they began with."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.chat.encoded import Encoded, end_of_turn_ids
from accel_sft.evaluation.evaluator import Evaluation, Evaluator, Generated
from accel_sft.evaluation.left_padded import generate
from accel_sft.models.architecture import arguments
from accel_sft.models.load import load_model
from accel_sft.models.source import Source, as_it_began, began_with, find_source


@dataclasses.dataclass(frozen=True)
class _Given:
    """A backend whose answers are there already, by the example's index."""

    answers: Mapping[int, list[int]]

    def __call__(self, examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
        return Generated([(example, self.answers[example.index]) for example in examples], 1.0, {})


class Reference:
    """What the run's weights say to the first validation examples.

    Args:
        evaluator: the evaluator of these weights.
        most: the largest number of an answer's tokens.
        record: the run's.
    Attributes:
        answers: the greedy answers by the example's index, each with the token that ends it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        evaluator: Evaluator,
        model: Any,
        source: Source,
        record: Mapping[str, Any],
        config: EvaluateConfig,
        most: int,
    ) -> None:
        self.evaluator, self.model, self.source, self.record = evaluator, model, source, record
        self.accelerator, self.config, self.most = accelerator, config, most
        self.tokenizer = evaluator.tokenizer
        self.ends = end_of_turn_ids(self.tokenizer, model.generation_config)
        self.rows = evaluator.answered
        with torch.no_grad():
            self.answers = {row.index: ids for row, ids in evaluator.backend(self.rows, most).answers}

    def scored(self, answers: Mapping[int, list[int]]) -> Evaluation:
        """The task's metrics of these answers, by the example's index."""
        return dataclasses.replace(self.evaluator, backend=_Given(answers)).score_answers({})

    def text(self, ids: Sequence[int]) -> str:
        """The text of an answer as servers write it: without special tokens, and without its end."""
        content = [*ids[:-1]] if ids and ids[-1] in self.ends else [*ids]
        return self.tokenizer.decode(content, skip_special_tokens=True)

    def ids(self, text: str, *, ended: bool) -> list[int]:
        """The token ids of a server's answer; if it ended, with the token that ends answers."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id] if ended else ids

    def log_probs(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """The log-probabilities of every token at each place of the answer, and at the place behind it."""
        ids = torch.tensor([[*prompt, *answer]], device=self.model.device)
        places = len(answer) + 1
        last_places = {"logits_to_keep": places} if "logits_to_keep" in arguments(self.model) else {}
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False, **last_places).logits[0, -places:]
        return logits.float().log_softmax(-1).cpu()

    def continued(self, prompt: list[int], tokens: int, model: Any = None) -> list[int]:
        """The greedy continuation of a prompt, up to the token that ends an answer."""
        model, pad = self.model if model is None else model, self.tokenizer.pad_token_id
        with torch.no_grad():
            return generate(model, [prompt], tokens, self.ends, pad, model.device)[0]

    @contextlib.contextmanager
    def base(self) -> Iterator[Any]:
        """What the run began with: the same model without its adapter, or the weights that were trained."""
        if hasattr(self.model, "disable_adapter"):
            with self.model.disable_adapter():
                yield self.model
            return
        source = as_it_began(find_source(began_with(self.source, self.record)), self.source, self.record)
        precision = self.accelerator.mixed_precision
        base = load_model(source, self.config, tokenizer=self.tokenizer, precision=precision, deepspeed=False)
        yield base.to(self.accelerator.device).eval()
