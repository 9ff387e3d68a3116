"""Makes small real models and tokenizers, which tests save and load by path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel_sft import Task
from accel_sft.chat.encode import encode_parts
from accel_sft.chat.encoded import Encoding, Rules
from accel_sft.chat.rendering import Rendering
from accel_sft.models.tiny import build_tiny

TEXTS = ["You answer sums.", *(f"{n}=" for n in range(60)), *(f"the answer is {n} + {n}" for n in range(60))]


@dataclass(kw_only=True)
class Sums(Task):
    """A task of a few lines."""

    main_metric = "right"

    def dataset(self, split):
        return list(range(20, 40) if split == "train" else range(40, 47))

    def messages(self, example):
        return [{"role": "system", "content": "You answer sums."}, {"role": "user", "content": f"{example}="}]

    def target(self, example):
        return f"the answer is {example // 2} + {example - example // 2}"

    def score(self, example, text):
        return {"right": float(text == self.target(example))}


def make_tiny(folder: Path, seed: int = 0) -> Path:
    build_tiny(folder, TEXTS, seed)
    return folder


def encode(tokenizer, task, examples, split, *, eos_ids, max_length, truncation, **more):
    """A split encoded directly and held in memory, as the reference for the token store."""
    rules, whole = Rules(frozenset(eos_ids), max_length, truncation, **more), Encoding(split)
    rendering = Rendering(tokenizer, rules.thinking, rules.day, rules.control_tokens)
    for part in encode_parts(rendering, task, examples, range(len(examples)), split, rules):
        whole.kept.extend(part.kept)
        whole.note(part)
    whole.notes += rendering.notes
    whole.check(len(examples), rules)
    return whole
