"""The command `check`: audits a task's data through the tokenizer, template and collator that training uses."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

import accel_sft
from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.api.tool_configs import CheckConfig
from accel_sft.chat.form import HEADER_LEARNT
from accel_sft.data.token_store import StoredEncoding
from accel_sft.evaluation.scoring import limits_on_scores
from accel_sft.io import terminal
from accel_sft.io.files import json_safe, page_file, write_atomically
from accel_sft.launch.launcher import under_launcher
from accel_sft.models.pretrained import text_settings, vocabulary_problem, would_train
from accel_sft.models.source import Source, find_source, resolved
from accel_sft.models.tiny import build_tiny
from accel_sft.rows.rows import Rows
from accel_sft.tools.check import show, splits, tokens
from accel_sft.tools.check.findings import Findings
from accel_sft.tools.check.report import Report, Shown, StepFigures, pieces_of, split_figures, step_figures
from accel_sft.tools.check.scores import OwnScores
from accel_sft.tools.check.splits import bad_rows_of, encode_split, read_splits, unreadable
from accel_sft.tools.check.texts import Labels, SpecialTokens, Texts, beginning_of, read_texts
from accel_sft.training.prepare import Assembly, plan_steps, texts_of


def run(task_name: str, task: Task, config: CheckConfig) -> None:
    """Audit the data for `--model`, and print the findings; exit with status 1 on errors or, if strict, warnings."""
    if under_launcher() or "LOCAL_RANK" in os.environ:
        raise UserError(
            f"accel-sft check {task_name} runs in one process: "
            "start it without accelerate launch, and with LOCAL_RANK unset"
        )
    target = page_file(config.html, "--html") if config.html else None
    config = resolved(config, task)
    config = dataclasses.replace(config, template_date=config.template_date or time.strftime("%Y-%m-%d"))
    with terminal.quiet(None, config.debug, shown_on=2 if config.json else 1) as shown:
        with tempfile.TemporaryDirectory(prefix="accel_sft-") as folder, terminal.waiting(f"check {task_name}"):
            report = Audit(task_name, task, config, Path(folder)).report()
        if not config.json:
            show.print_report(report, show.console_of(shown))
    if target:
        try:
            write_atomically(target, show.page_of(report))
        except OSError as error:
            raise UserError(f"--html {config.html}: cannot be written ({error.strerror}); name another file") from None
    if config.json:
        printed = {"version": accel_sft.__version__, **report.as_dict()}
        print(json.dumps(json_safe(printed), indent=2, ensure_ascii=False))
    if report.failed(config.strict):
        raise SystemExit(1)


class Audit:
    """One audit of a task's data. Each step adds to `findings`, and skips rows that an earlier step found unusable."""

    def __init__(self, task_name: str, task: Task, config: CheckConfig, folder: Path) -> None:
        self.task_name, self.task, self.config = task_name, task, config
        self.findings = Findings()
        self.notes: list[str] = []
        self.splits = read_splits(task, self.findings, config.train_limit)
        self.folder, self.source = folder, self._source(folder)
        self.encodings: dict[str, StoredEncoding | None] = {}

    def report(self) -> Report:
        """Run the steps of the audit, each after those whose results it needs."""
        counts: dict[str, dict[str, int]] = {}
        steps, shown = None, []
        if self.source:
            # --truncation error would raise at rows that are too long; here they are dropped and reported as findings
            lenient = dataclasses.replace(self.config, truncation=self.config.truncation.replace("error", "drop"))
            assembly = Assembly(Accelerator(cpu=True), self.task, lenient, self.source)
            eos_ids = assembly.encode.rules.eos_ids
            special = SpecialTokens(assembly.tokenizer, eos_ids, self.config.control_tokens == "text")
            labels = Labels()
            keeps = self.config.thinking == "keep"
            texts = {
                split: read_texts(self.task, examples, split, special, labels, self.findings, keeps_thinking=keeps)
                for split, examples in self.splits.items()
            }
            self.notes += labels.report(self.findings)
            for split in self.splits:
                self._encode(assembly, split, texts[split])
            counts = self._repeats(texts)
            self._model(assembly)
            steps = self._steps()
            shown = self._shown(assembly.tokenizer)
        else:
            for split, examples in self.splits.items():
                for index, why in unreadable(self.task, examples, split):
                    self.findings.add("D201", split, index, why)
        figures = []
        for split, examples in self.splits.items():
            rows = len(examples) + bad_rows_of(split, self.findings)
            figures.append(split_figures(self.encodings.get(split), split, rows, counts.get(split, {})))
        self.findings.describe(lambda split, index: beginning_of(self.task, self.splits[split], split, index))
        placed = self.findings.placed(self.splits)
        return Report(
            self.task_name, self.config.init_from or self.config.model, placed, figures, steps, self.notes, shown
        )

    def _source(self, folder: Path) -> Source | None:
        """Find the model's files. `--model tiny` is built in `folder` from the training rows that can be read; None if
        no row can be read."""
        config, base = self.config, None
        if config.model == "tiny" and not config.init_from:
            train = self.splits.get("train", ())
            bad = {index for index, _ in unreadable(self.task, train, "train")}
            if len(bad) == len(train):
                return None
            base = str(folder / "base")
            readable = [train[index] for index in range(len(train)) if index not in bad] if bad else train
            build_tiny(Path(base), texts_of(self.task, readable), config.seed)
        return find_source(base or config.model, init_from=config.init_from, revision=config.revision)

    def _encode(self, assembly: Assembly, split: str, texts: Texts) -> None:
        """Tokenize a split, and check its tokens and labels."""
        examples, tokenizer, folder = self.splits[split], assembly.tokenizer, self.folder / f"tokens-{split}"
        folder.mkdir()
        encoding = encode_split(
            assembly.encode, examples, texts.readable, split, self.findings, self.config.truncation, folder
        )
        self.encodings[split] = encoding
        if encoding is None:
            return
        limits = limits_on_scores(self.task, encoding, self.config) if split == "validation" else []
        for note in (*(assembly.template.lines if assembly.template else ()), *encoding.notes, *limits):
            if note.startswith(HEADER_LEARNT):
                self.findings.add("D215", "", detail=note.removeprefix("warning D215: "))
            elif note.startswith("warning: "):
                self.findings.add("D219", split, detail=note.removeprefix("warning: "))
            elif note not in self.notes:
                self.notes.append(note)
        facts = tokens.token_facts(encoding.kept, tokenizer, assembly.encode.rules.eos_ids)
        tokens.report_tokens(facts, split, [*encoding.cut, *encoding.windowed], tokenizer, self.findings)
        collated = tokens.report_labels(encoding.kept, split, tokenizer.pad_token_id, self.findings)
        rows = f"{collated:,} of {len(encoding.kept):,} rows"
        self.notes.append(f"{split}: the collator's labels were compared with the answers in {rows}")

    def _repeats(self, texts: dict[str, Texts]) -> dict[str, dict[str, int]]:
        """Score the expected answers, unless `--no-score` is given, and find repeated rows.

        Rows with the same prompt and different answers are reported as a contradiction, unless the task's score accepts
        the later row's answer for the first row.
        """
        scores = OwnScores(self.task, self.splits, self.config.thinking)
        counts = {}
        for split, of_split in texts.items():
            if self.config.score:
                scores.audit(split, of_split.usable, self.findings)
            in_file = isinstance(self.splits[split], Rows)
            counts[split] = splits.within(of_split, split, self.findings, scores.accepts, in_file)
        if scores.unjudged:
            self.notes.append(f"the expected answers were not scored one by one: {scores.unjudged}")
        train, validation = self.splits.get("train"), self.splits.get("validation")
        if len(texts) == 2 and not (isinstance(validation, Rows) and validation.shares_rows(train)):
            splits.between(texts["train"], texts["validation"], self.findings)
        return counts

    def _model(self, assembly: Assembly) -> None:
        """Report token ids outside the model's vocabulary, and rows with more tokens than the model has positions.

        The model's configuration is read, its weights are not.
        """
        stores = {split: encoding.kept for split, encoding in self.encodings.items() if encoding}
        weights = assembly.source.weights
        text = text_settings(weights, trust_remote_code=self.config.trust_remote_code)
        largest = max([assembly.tokenizer.pad_token_id, *(store.largest_id() for store in stores.values())])
        grown = self.config.chat_template or assembly.source.adds_tokens  # training enlarges the embeddings
        if not grown and (problem := vocabulary_problem(weights, text, largest)):
            self.findings.add("D601", "", detail=problem)
        if self.config.train_only is not None:
            images = any(len(store.pictured) for store in stores.values())
            new = assembly.template.new_tokens if assembly.template else ()
            would_train(weights, self.config, self.notes.append, images, new)
        positions = getattr(text, "max_position_embeddings", None) or float("inf")
        for split, store in stores.items():
            for row in np.flatnonzero(store.lengths > positions).tolist():
                detail = f"{store.lengths[row]:,} tokens, but the model has {positions:,} positions"
                self.findings.add("D602", split, store[row].index, detail)

    def _steps(self) -> StepFigures | None:
        train = self.encodings.get("train")
        if train is None:
            return None
        try:
            return step_figures(plan_steps(train, self.config))
        except UserError as error:
            self.findings.add("D205", "train", detail=str(error))
            return None

    def _shown(self, tokenizer: Any) -> list[Shown]:
        """The first `--show` training rows, token by token."""
        if (train := self.encodings.get("train")) is None:
            return []
        examples, pad = self.splits["train"], tokenizer.pad_token_id
        rows = train.kept[: self.config.show]
        indices = [row.index for row in rows]
        places: Sequence[Any] = [f"train example {index}" for index in indices]
        if isinstance(examples, Rows):
            places = examples.places(indices)
        return [
            Shown("train", index, str(place), len(row.input_ids), row.supervised_tokens, pieces_of(tokenizer, row, pad))
            for row, index, place in zip(rows, indices, places, strict=True)
        ]
