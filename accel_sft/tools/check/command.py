"""The command `check`: audits a task's data through the tokenizer, template and collator that training uses."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from accelerate import Accelerator

import accel_sft
from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.api.tool_configs import CheckConfig
from accel_sft.chat.conversation import conversation
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
from accel_sft.tools.check import tokens
from accel_sft.tools.check.findings import Findings
from accel_sft.tools.check.report import Report, page_of, print_report, shown_rows, split_figures, step_figures
from accel_sft.tools.check.scores import OwnScores
from accel_sft.tools.check.splits import bad_rows_of, encode_split, read_splits
from accel_sft.tools.check.texts import Labels, read_texts
from accel_sft.training.prepare import Assembly, plan_steps, texts_of


def run(task_name: str, task: Task, config: CheckConfig) -> None:
    """Audit the data for `--model` and print the findings. Exit with status 1 on errors or, if strict, warnings."""
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
            print_report(report, shown)
    if target:
        try:
            write_atomically(target, page_of(report))
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
        self.folder = folder
        self.source: Source | None = None
        self.encodings: dict[str, StoredEncoding | None] = {}
        self.facts: dict[str, tokens.TokenFacts] = {}

    def report(self) -> Report:
        """Run all steps of the audit and return the report."""
        repeats: dict[str, dict[str, int]] = {}
        steps, shown, labels = None, [], Labels()
        readable = {
            split: read_texts(self.task, examples, split, labels, self.findings)
            for split, examples in self.splits.items()
        }
        self.notes += labels.report(self.findings)
        self.source = self._source(readable)
        if self.source:
            # --truncation error would raise at rows that are too long; here such rows are dropped and reported
            lenient = dataclasses.replace(self.config, truncation=self.config.truncation.replace("error", "drop"))
            assembly = Assembly(Accelerator(cpu=True), self.task, lenient, self.source)
            for split in self.splits:
                self._encode(assembly, split, readable[split])
            repeats = self._repeats()
            self._model(assembly)
            if train := self.encodings.get("train"):
                steps = self._steps(train)
                shown = shown_rows(train, assembly.tokenizer, self.config.show)
        figures = {}
        for split, examples in self.splits.items():
            rows = len(examples) + bad_rows_of(split, self.findings)
            figures[split] = split_figures(self.encodings.get(split), rows, repeats.get(split, {}))
        placed = self.findings.placed(self.splits)
        return Report(
            self.task_name, self.config.init_from or self.config.model, placed, figures, steps, self.notes, shown
        )

    def _source(self, readable: dict[str, np.ndarray]) -> Source | None:
        """Find the model's files. Build `tiny` from the readable training rows; without such rows, return None."""
        config, base = self.config, None
        if config.model == "tiny" and not config.init_from:
            rows, train = np.flatnonzero(readable.get("train", ())), self.splits.get("train", ())
            if not len(rows):
                return None
            base = str(self.folder / "base")
            examples = train if len(rows) == len(train) else [train[row] for row in rows.tolist()]
            build_tiny(Path(base), texts_of(self.task, examples), config.seed)
        return find_source(base or config.model, init_from=config.init_from, revision=config.revision)

    def _encode(self, assembly: Assembly, split: str, readable: np.ndarray) -> None:
        """Tokenize a split, and check its tokens."""
        examples, tokenizer, folder = self.splits[split], assembly.tokenizer, self.folder / f"tokens-{split}"
        folder.mkdir()
        encode = assembly.encode
        chats = (conversation(self.task, examples, split, index) for index in np.flatnonzero(readable).tolist())
        if self.config.loss != "sft" and (split == "train" or any(chat.rejected for chat in chats)):
            encode = encode.of_pairs()
        encoding = encode_split(encode, examples, readable, split, self.findings, self.config.truncation, folder)
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
        self.facts[split] = tokens.audit_tokens(encoding, tokenizer, assembly.encode.rules.eos_ids, self.findings)

    def _repeats(self) -> dict[str, dict[str, int]]:
        """Score the expected answers unless `--no-score` is given; report repeated rows, and return their counts."""
        scores = OwnScores(self.task, self.splits, self.config.thinking)
        counts = {}
        for split, facts in self.facts.items():
            if self.config.score:
                scores.audit(split, facts.indices.tolist(), self.findings)
            # a task that generates its rows may repeat them on purpose
            grade = "warning" if isinstance(self.splits[split], Rows) or split == "validation" else "note"
            copies = tokens.report_copies(facts, split, self.findings, grade)
            first, accepted = tokens.first_with_same(facts.prompts), 0
            stored, again = self.encodings[split], ~copies & (first < np.arange(len(first)))
            for row in np.flatnonzero(again) if stored and not stored.kept.pairs else ():  # pairs may share a prompt
                index, other = int(facts.indices[first[row]]), int(facts.indices[row])
                if scores.accepts(split, index, other):
                    accepted += 1
                else:
                    self.findings.add("D403", split, other, like=(split, index))
            counts[split] = {
                "distinct_prompts": len(np.unique(first)),
                "distinct_rows": int((~copies).sum()),
                "other_right_answers": accepted,
            }
        if scores.unjudged:
            self.notes.append(f"the expected answers were not scored one by one: {scores.unjudged}")
        if len(self.facts) == 2 and not tokens.shares_rows(self.splits["validation"], self.splits["train"]):
            tokens.report_leaks(self.facts["validation"], self.facts["train"], self.findings)
        return counts

    def _model(self, assembly: Assembly) -> None:
        """Report token ids outside the model's vocabulary, and rows with more tokens than the model has positions."""
        stores = {split: encoding.kept for split, encoding in self.encodings.items() if encoding}
        weights = assembly.source.weights
        text = text_settings(weights, trust_remote_code=self.config.trust_remote_code)
        largest = max([assembly.tokenizer.pad_token_id, *(store.largest_id() for store in stores.values())])
        grown = self.config.chat_template or assembly.source.adds_tokens  # training then enlarges the embeddings
        if not grown and (problem := vocabulary_problem(weights, text, largest)):
            self.findings.add("D601", "", detail=problem)
        if self.config.train_only is not None:
            images = any(len(store.pictured) for store in stores.values())
            new = assembly.template.new_tokens if assembly.template else ()
            would_train(weights, self.config, self.notes.append, images, new)
        positions = getattr(text, "max_position_embeddings", None) or float("inf")
        for split, store in stores.items():
            for row in np.flatnonzero(store.longest > positions).tolist():
                detail = f"{store.longest[row]:,} tokens, but the model has {positions:,} positions"
                self.findings.add("D602", split, store[row].index, detail)

    def _steps(self, train: StoredEncoding) -> dict[str, float] | None:
        try:
            return step_figures(plan_steps(train, self.config))
        except UserError as error:
            self.findings.add("D205", "train", detail=str(error))
            return None
