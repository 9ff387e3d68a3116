"""Answers prompts with images by transformers' `generate`, one at a time, and other prompts by another generator."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from accel_sft.chat.encoded import Encoded, end_of_turn_ids
from accel_sft.evaluation.backend import Generated
from accel_sft.evaluation.division import divide
from accel_sft.evaluation.generate import Generator
from accel_sft.evaluation.left_padded import generate
from accel_sft.tracking.system import peak_memory_gib


class ImageGenerator:
    """A generator that also takes prompts with images. It logs once how it answers them.

    Args:
        generator: answers the prompts without images.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._told = False

    def __call__(self, examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
        """Answer this rank's share of the examples. Every rank must call this with the same examples."""
        pictured = [example for example in examples if example.images]
        if not pictured:
            return self.generator(examples, max_new_tokens)
        texts = [example for example in examples if not example.images]
        before = self.generator(texts, max_new_tokens) if texts else Generated([], 0.0, {})
        accelerator = self.generator.accelerator
        if accelerator.is_main_process and not self._told:
            self.generator.log("answers to prompts with images by transformers' generate, one prompt at a time")
        self._told = True
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        answers: list[tuple[Encoded, list[int]]] = []
        with self.generator.casts_once():
            for ranks in divide(pictured, accelerator.num_processes, 1):
                self.generator.between()
                rows = ranks[accelerator.process_index]
                # with sharded weights, a rank without rows left must take part: it answers any row
                also = next(filter(None, ranks))[:1] if self.generator.sharded and not rows else []
                told = [self._answer(row, max_new_tokens) for row in rows or also]
                answers += zip(rows, told, strict=False)
        seconds = before.seconds + time.perf_counter() - started
        return Generated([*before.answers, *answers], seconds, peak_memory_gib(accelerator.device))

    def _answer(self, row: Encoded, max_new_tokens: int) -> list[int]:
        model, device = self.generator.model, self.generator.accelerator.device
        prompt = row.input_ids[: row.prompt_length]
        assert row.images
        inputs = row.images.origin.inputs.tensors([prompt], [row.images], (1, len(prompt)))
        more = {name: torch.as_tensor(array, device=device) for name, array in inputs.items()}
        tokenizer = self.generator.tokenizer
        ends = end_of_turn_ids(tokenizer, model.generation_config)
        how: dict[str, Any] = {"sampling": self.generator.sampling, "more": more, "synced": self.generator.synced}
        return generate(model, [prompt], max_new_tokens, ends, tokenizer.pad_token_id, device, **how)[0]
