"""The task `ner`: finds named entities in sentences and answers with JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from accel_sft import Task, UserError, option
from accel_sft_ner import cluener, scorer
from accel_sft_ner.sentences import Sentence, generate

SYSTEM_PROMPT = "Do named entity recognition: extract all entities of the text and answer in JSON."

_OF_BUILT_IN = ("train_sentences", "validation_sentences", "language", "data_seed")


@dataclasses.dataclass(kw_only=True)
class Ner(Task):
    """Extract named entities as JSON.

    The answer is the label object, {type: {surface: [[first, last], ...]}}, spans in characters, both ends inclusive;
    {} if there is no entity. Metrics: see `accel_sft_ner.scorer`.
    """

    main_metric = "f1"

    train_file: str | None = option(
        None, rows=True, help="Training rows in CLUENER 2020's form, JSONL or a JSON array."
    )
    validation_file: str | None = option(None, rows=True, help="Validation rows, same form.")
    allow_overlap: bool = option(False, help="Accept sentences of --validation-file that are trained on too.")
    train_sentences: int = option(20_000, min=1, help="Built-in training sentences.")
    validation_sentences: int = option(200, min=1, max=5_000, help="Built-in validation sentences.")
    language: str = option("both", choices=("both", "zh", "en"), help="Language of the built-in sentences.")
    data_seed: int = option(0, min=0, help="Seed of the built-in sentences.")
    system_prompt: str = option(SYSTEM_PROMPT, help="What the model is told to do.")

    def problems(self) -> list[str]:
        found = super().problems()
        for given, missing in (("train", "validation"), ("validation", "train")):
            if getattr(self, f"{given}_file") and not getattr(self, f"{missing}_file"):
                found.append(f"--{missing}-file: needed with --{given}-file; files and built-in sentences do not mix")
        from_files = bool(self.train_file or self.validation_file)
        for field in dataclasses.fields(self):
            if from_files and field.name in _OF_BUILT_IN and getattr(self, field.name) != field.default:
                flag = "--" + field.name.replace("_", "-")
                found.append(f"{flag}: this is only for the built-in sentences; leave it out with --train-file")
        if self.allow_overlap and not from_files:
            found.append("--allow-overlap: this is only for files; built-in sentences never overlap. Leave it out")
        return found

    def dataset(self, split: str) -> Sequence[Sentence]:
        return self._splits[split]

    def messages(self, example: Sentence) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": example.text}]

    def target(self, example: Sentence) -> str:
        return json.dumps(example.label, ensure_ascii=False)

    def score(self, example: Sentence, text: str) -> dict[str, Any]:
        return scorer.score(example.label, text, self._training_surfaces)

    def aggregate(self, scores: Sequence[dict[str, Any]]) -> dict[str, float]:
        return scorer.aggregate(scores)

    @functools.cached_property
    def _splits(self) -> dict[str, Sequence[Sentence]]:
        if found := self.problems():
            raise UserError(*found)
        if self.train_file and self.validation_file:
            validation = cluener.read(self.validation_file, "validation")
            if self.allow_overlap:
                train = cluener.read(self.train_file)
            else:
                train = cluener.read_unseen(self.train_file, validation)
        else:
            train, validation = generate(self.train_sentences, self.validation_sentences, self.language, self.data_seed)
        return {"train": train, "validation": validation}

    @functools.cached_property
    def _training_surfaces(self) -> frozenset[str]:
        labels = (sentence.label for sentence in self._splits["train"])
        return frozenset(surface for label in labels for surfaces in label.values() for surface in surfaces)
