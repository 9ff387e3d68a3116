"""The run's own weights here: their greedy answers, their log-probabilities, and those of weights that are rounded."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.chat.encoded import Encoded, end_of_turn_ids
from accel_sft.evaluation.backend import Generated
from accel_sft.evaluation.evaluator import Evaluation, Evaluator
from accel_sft.evaluation.left_padded import generate
from accel_sft.models.architecture import arguments
from accel_sft.models.load import load_model
from accel_sft.models.merge import merge
from accel_sft.models.source import Source, as_it_began, began_with, find_source

_BLOCK = 32
"""Weights that share a scale in llama.cpp's Q8_0 and Q4_0."""


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
        kept = [*ids[:-1]] if ids and ids[-1] in self.ends else [*ids]
        return self.tokenizer.decode(kept, skip_special_tokens=True)

    def ids(self, text: str, *, ended: bool) -> list[int]:
        """The token ids of a server's answer; if it ended, with the token that ends answers."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id] if ended else ids

    def log_probs(self, prompt: list[int], answer: list[int], model: Any = None) -> torch.Tensor:
        """The log-probabilities of every token at each place of the answer, and at the place behind it."""
        model = self.model if model is None else model
        ids = torch.tensor([[*prompt, *answer]], device=model.device)
        places = len(answer) + 1
        kept = {"logits_to_keep": places} if "logits_to_keep" in arguments(model) else {}
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **kept).logits[0, -places:]
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
        base = as_it_began(find_source(began_with(self.source, self.record)), self.source, self.record)
        yield self._loaded(base)

    def roundings(self) -> Iterator[tuple[str, Any]]:
        """The model as servers round it, by name: one at a time, for adapters their sum with the base."""
        dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        for name, dtype in dtypes.items():
            if self.model.dtype != dtype:
                yield name, self._whole().to(dtype)
        ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "bfloat16 weights": lambda weight: weight.bfloat16().float(),
            "float16 weights": lambda weight: weight.half().float(),
            "8-bit weights": lambda weight: _in_blocks(weight, 127),
            "4-bit weights": lambda weight: _in_blocks(weight, 7),
        }
        for name, way in ways.items():
            model = self._whole().float()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.copy_(way(parameter))
            yield name, model

    def _whole(self) -> Any:
        if self.source.adapter:
            made = merge(self.source, self.tokenizer, "float32", trust_remote_code=self.config.trust_remote_code)
            return made.model.to(self.accelerator.device)
        return self._loaded(self.source)

    def _loaded(self, source: Source) -> Any:
        how: dict[str, Any] = {"precision": self.accelerator.mixed_precision, "deepspeed": False}
        return load_model(source, self.config, tokenizer=self.tokenizer, **how).to(self.accelerator.device).eval()


def _in_blocks(weight: torch.Tensor, levels: int) -> torch.Tensor:
    """Weights rounded to whole multiples of a scale that a block of them shares."""
    if weight.shape[-1] % _BLOCK:
        return weight
    blocks = weight.reshape(-1, _BLOCK)
    scale = (blocks.abs().amax(-1, keepdim=True) / levels).clamp_min(1e-12)
    return ((blocks / scale).round() * scale).reshape(weight.shape)
