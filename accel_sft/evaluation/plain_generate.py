"""Greedy answers by transformers' own `generate`, for models that take no shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from accel_sft.data.chat import Encoded, end_of_turn_ids
from accel_sft.io.heartbeat import heartbeat


def greedy(tokenizer: Any, model: Any, max_new_tokens: int) -> Any:
    """Settings for greedy answers; they override sampling and penalties in the model's own generation settings."""
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(end_of_turn_ids(tokenizer, model.generation_config)),
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )


def _heartbeat_criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    """A stopping criterion that never stops; it is called after every token."""
    heartbeat()
    return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(
    model: Any, tokenizer: Any, settings: Any, batch: Sequence[Encoded], device: torch.device
) -> list[list[int]]:
    """Answers' token ids (end-of-turn included), one per example, from left-padded prompts in one batch."""
    longest = max(example.prompt_length for example in batch)
    rows = [example.input_ids[: example.prompt_length] for example in batch]
    input_ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)  # (B, T)
    criteria = StoppingCriteriaList([_heartbeat_criterion])
    output = model.generate(
        input_ids=input_ids, attention_mask=mask, generation_config=settings, stopping_criteria=criteria
    )
    ends = set(settings.eos_token_id)
    answers = []
    for ids in output[:, longest:].tolist():
        stop = next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1)
        answers.append(ids[: stop + 1])
    return answers
