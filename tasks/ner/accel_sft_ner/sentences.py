"""Generates the built-in data: Chinese and English sentences with entities. Sizes, language and seed determine it."""

from __future__ import annotations

import dataclasses
import random
import re
import zlib

from accel_sft_ner.lexicon import FILLERS, JOINERS, SURFACES, TEMPLATES

Label = dict[str, dict[str, list[list[int]]]]
"""Type -> surface -> spans; a span is [first, last], both inclusive, in characters of the text (CLUENER's form)."""

_SLOT = re.compile(r"\{([a-z]+)(\d?)\}")


@dataclasses.dataclass(frozen=True)
class Sentence:
    """One example: a text and the entities in it."""

    text: str
    label: Label


def held_out(surface: str) -> bool:
    """Whether a surface is kept for validation: always the same quarter of all surfaces, whatever seed and sizes."""
    return zlib.crc32(surface.encode()) % 4 == 0


def generate(train: int, validation: int, language: str, seed: int) -> tuple[list[Sentence], list[Sentence]]:
    """The built-in training and validation sentences.

    Training uses only surfaces that are not `held_out`; in validation, each surface is held out with a chance of one
    half. Validation sentences differ from each other and from all of training, and do not depend on `train`.

    Args:
        train, validation: number of sentences in each split.
        language: "zh", "en" or "both", which draws either with equal chances.
    """
    languages = ("zh", "en") if language == "both" else (language,)
    rng = random.Random(f"validation {seed}")
    kept: dict[str, Sentence] = {}
    while len(kept) < validation:
        sentence = _sentence(rng, rng.choice(languages), held_out_share=0.5)
        kept.setdefault(sentence.text, sentence)
    rng = random.Random(f"train {seed}")
    trained: list[Sentence] = []
    while len(trained) < train:
        sentence = _sentence(rng, rng.choice(languages), held_out_share=0.0)
        if sentence.text not in kept:
            trained.append(sentence)
    return trained, list(kept.values())


def _sentence(rng: random.Random, language: str, held_out_share: float) -> Sentence:
    while True:
        sentence = _fill(rng.choice(TEMPLATES[language]), rng, language, held_out_share)
        # A surface that also occurs outside its slots (inside a longer one) would leave a span without a label.
        if all(
            sentence.text.count(surface) == len(spans)
            for surfaces in sentence.label.values()
            for surface, spans in surfaces.items()
        ):
            return sentence


def _fill(template: str, rng: random.Random, language: str, held_out_share: float) -> Sentence:
    """Fill a template and label its entities from left to right: types in order of first mention, then surfaces."""
    text, label = "", Label()
    chosen: dict[str, str] = {}
    end_of_slot = 0
    for slot in _SLOT.finditer(template):
        text += template[end_of_slot : slot.start()]
        end_of_slot = slot.end()
        kind, key = slot[1], slot[0]
        if kind in FILLERS[language]:
            text += rng.choice(FILLERS[language][kind])
            continue
        if key not in chosen:
            chosen[key] = _surface(rng, language, kind, rng.random() < held_out_share)
        surface = chosen[key]
        label.setdefault(kind, {}).setdefault(surface, []).append([len(text), len(text) + len(surface) - 1])
        text += surface
    return Sentence(text + template[end_of_slot:], label)


def _surface(rng: random.Random, language: str, kind: str, from_held_out: bool) -> str:
    while True:
        parts = [rng.choice(choices) for choices in rng.choice(SURFACES[language][kind])]
        surface = JOINERS[language].join(filter(None, parts))
        if held_out(surface) == from_held_out:
            return surface
