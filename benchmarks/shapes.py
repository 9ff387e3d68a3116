"""Makes the rows to measure (instruction, question and answer, with known token counts), and a model for them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

WORDS = 4000
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The token counts of a job's rows; question and answer lengths are drawn from a range, its end excluded.

    Attributes:
        batch: rows of an optimizer step.
        steps: optimizer steps of one round.
        spread: how lengths are drawn. `even`: uniformly over the range; `log`: uniformly in the logarithm; `skewed`:
            many short ones and a long tail, like sentences and label objects (a gamma distribution whose mean is the
            middle of the range).
    """

    instruction: int
    question: tuple[int, int]
    answer: tuple[int, int]
    batch: int
    steps: int
    spread: str = "even"

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a row, if the spread is even."""
        return self.instruction + self.question[1] + self.answer[1]


SHAPES = {
    "series-a": Shape(20, (5, 12), (14, 23), 64, 3),  # 20 + 8 + 18
    "series-b": Shape(30, (6, 51), (4, 51), 64, 2, "skewed"),  # 30 + 28 + 27, the longest about twice the mean
    "long-instruction": Shape(300, (10, 51), (10, 31), 32, 1),  # 300 + 30 + 20
    "long-chat": Shape(0, (600, 1401), (180, 421), 8, 1),  # 0 + 1,000 + 300
    "mixed": Shape(0, (5, 1401), (5, 601), 32, 1, "log"),  # 10 to 2,000, no instruction
}


def make_rows(shape: Shape, seed: int = 0) -> list[dict[str, str]]:
    """The rows of one step; every step trains on the same rows, in each contestant's own order."""
    draw = np.random.default_rng(seed)

    def words(count: int) -> str:
        return "".join(f"w{n:04}" for n in draw.integers(0, WORDS, count))

    def length(low: int, high: int) -> int:
        if shape.spread == "log":
            return int(np.exp(draw.uniform(np.log(low), np.log(high))))
        if shape.spread == "skewed":
            mean = (low + high - 1) / 2
            return max(low, round(draw.gamma(3.0, mean / 3.0)))
        return int(draw.integers(low, high))

    instruction = words(shape.instruction)
    return [
        {
            "instruction": instruction,
            "question": words(length(*shape.question)),
            "answer": words(length(*shape.answer) - 1),  # the end-of-turn token is one more
        }
        for _ in range(shape.batch)
    ]


def make_tokenizer() -> Any:
    """A tokenizer with one token per word, or per byte of other text; its chat template only joins messages."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    letters = {char: at for at, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[], unk_token=None, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.add_tokens([f"w{n:04}" for n in range(WORDS)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_qwen2(folder: Path, vocabulary: int = 0, device: str = "cpu", tokenizer: Any = None, **config: Any) -> Any:
    """Write a Qwen2 with random weights and a tokenizer (`make_tokenizer`'s if none is given); return the model.

    Args:
        vocabulary: least number of rows of the head; it may exceed the tokenizer's tokens, as in large models.
        device: where the weights are drawn.
        config: arguments of `Qwen2Config`.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tokenizer or make_tokenizer()
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=max(len(tokenizer), vocabulary), **tokens, **config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def make_model(folder: Path, hidden: int = 384, layers: int = 6, vocabulary: int = 0, tokenizer: Any = None) -> int:
    """Write a Qwen2, by default of about 12 million parameters, with one token per word; return its parameter count."""
    model = make_qwen2(
        folder,
        vocabulary,
        tokenizer=tokenizer,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return model.num_parameters()


def write(file: Path, shape: Shape) -> tuple[int, int]:
    """Write a step's rows of a shape; return the (tokens, supervised tokens) of all rows."""
    rows = make_rows(shape)
    file.write_text(json.dumps(rows))
    prompt = sum(len(row["instruction"] + row["question"]) // 5 for row in rows)  # a word has five characters
    supervised = sum(len(row["answer"]) // 5 + 1 for row in rows)
    return prompt + supervised, supervised
