"""Answers left-padded prompts by transformers' `generate`, and measures how far padding changes its predictions."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList

from accel_sft.io.heartbeat import heartbeat
from accel_sft.models.tokenizer import left_out

CHECKED_TOKENS = 3
"""Number of tokens of each answer that are generated to compare prompts in one batch with each prompt alone."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it before a token is drawn; 0: the most likely token is taken.
        top_p: tokens are drawn from the most likely ones that together have this probability.
        top_k: tokens are drawn from this many of the most likely ones; 0: from all.
        repetition_penalty: factor that makes the logits of earlier tokens smaller; 1: no change.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    def settings(self) -> dict[str, Any]:
        """Arguments of a GenerationConfig that override the model's own settings."""
        chosen = {"do_sample": self.temperature > 0, "num_beams": 1, "repetition_penalty": self.repetition_penalty}
        if self.temperature <= 0:
            return chosen
        return {**chosen, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": None}


GREEDY = Sampling()


def generate(
    model: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    ends: Collection[int],
    pad_token_id: int,
    device: torch.device,
    sampling: Sampling = GREEDY,
    **more: Any,
) -> list[list[int]]:
    """The answers to the prompts, each up to and including the first of `ends`.

    Args:
        more: further arguments of transformers' `generate`, such as inputs besides tokens and mask.
    """
    longest = max(map(len, prompts))
    output = _output(model, prompts, max_new_tokens, ends, pad_token_id, device, sampling, **more)
    answers = []
    for ids in output.sequences[:, longest:].tolist():
        stop = next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1)
        answers.append(ids[: stop + 1])
    return answers


def padding_changes(
    model: Any, prompts: Sequence[list[int]], ends: Collection[int], pad_token_id: int, device: torch.device
) -> float:
    """Return the largest difference, in nats, between predictions for prompts in one batch and for each prompt alone.

    They differ, for example, where recurrent layers or compressed caches take padding for text.
    """
    largest, how = 0.0, (CHECKED_TOKENS, ends, pad_token_id, device)
    together = _output(model, prompts, *how, output_logits=True)
    for number, prompt in enumerate(prompts):
        alone = _output(model, [prompt], *how, output_logits=True)
        for mine, others in zip(alone.logits, together.logits, strict=False):
            largest = max(largest, nats_apart(mine[0], others[number]))
            if mine[0].argmax() != others[number].argmax():  # from here on they answer different texts
                break
    return largest


def nats_apart(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the mean difference of the next token's log-probabilities, weighted by probability; infinity for NaN."""
    alone = expected.double().log_softmax(dim=-1)
    off = (actual.double().log_softmax(dim=-1) - alone).abs()
    return (alone.exp() * off).sum().nan_to_num(nan=math.inf).item()


def _output(
    model: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    ends: Collection[int],
    pad_token_id: int,
    device: torch.device,
    sampling: Sampling = GREEDY,
    **more: Any,
) -> Any:
    """What `generate` of transformers returns."""
    longest = max(map(len, prompts))
    rows = [[pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return model.generate(
        input_ids=torch.tensor(rows, device=device),
        attention_mask=torch.tensor(mask, device=device),
        **more,
        # they override the model's own sampling and penalties, also with None, as a GenerationConfig would not
        **{**left_out(model.generation_config), **sampling.settings()},
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends),
        pad_token_id=pad_token_id,
        use_cache=True,
        return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([_heartbeat_criterion]),
    )


def _heartbeat_criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    """A stopping criterion that never stops; it is called after every token."""
    heartbeat()
    return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
