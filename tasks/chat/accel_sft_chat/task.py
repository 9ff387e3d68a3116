"""The task `chat`: reads chats, decides which turns are learnt, and compares answers with those in the rows."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from accel_sft import MISSING_VALUES, ParsedRow, RowLeftOut, RowProblem, Task, UserError, option, read_rows
from accel_sft_chat.columns import RAW_TEXT, RENDERED, named_columns
from accel_sft_chat.images import as_parts
from accel_sft_chat.keys import RowRefused, without_numbers
from accel_sft_chat.metrics import METRICS, UNANSWERED, comparable, comparable_text, matching, without_thinking
from accel_sft_chat.preferences import read_pair
from accel_sft_chat.turns import LEARN, Dialogue, dialogue

_SHARE, _MOST = 0.05, 500
"""Share of --train-file's rows that is held out by default, and the maximum number of these rows."""
_FEWEST, _LOOKED_AT = 12, 200
"""Minimum number of evaluated rows for a note on their answers, and maximum number of rows examined for it."""
_LONGEST_LABEL = 60
"""Maximum number of characters of a label, which is an answer that several rows have."""
_ENOUGH = 100
"""If at least this many rows are held out, no note says how uncertain their score is."""
_ONE_WORD = (
    "answers are single words or labels; --metric f1 scores a right word among others as partly right, --metric exact "
    "as wrong"
)
_REMEMBERED = (
    "{:,} rows are both trained on and evaluated (--held-out 0): their scores show what is remembered, not what is "
    "learnt"
)
_FILES = (
    "JSON, JSONL, CSV, Parquet or text, also .gz .bz2 .xz .zst, a folder of them, or a data set of the hub (ORG/NAME); "
    "the last two may end with :SPLIT. May be repeated."
)
_UNSHOWN = re.compile(r", got (['\"]|-?\d+\.\d).*|[:,]? \(.*", re.DOTALL)
"""The part of a problem that differs from row to row; without it, equal problems are counted together."""
_RENDERED_TEXT = (
    "with the marks of a chat template in their text: give their messages or, if the marks are the model's own tokens, "
    "--control-tokens tokens"
)


@dataclasses.dataclass(kw_only=True)
class Chat(Task):
    """Train on chat files; to talk to a model: accel-sft generate --interactive"""

    main_metric: ClassVar[str] = "token_f1"

    train_file: str | None = option(None, rows=True, help=f"Rows to train on: {_FILES}")
    validation_file: str | None = option(
        None, rows=True, help="Rows to evaluate, in the same forms; default: some of --train-file's."
    )
    held_out: float | None = option(
        None,
        help="Rows of --train-file to evaluate: a share below 1, or a number; default: 5 %, at most 500. 0: train "
        "on all rows, and evaluate on as many of them as by default.",
    )
    data_seed: int = option(0, min=0, help="Seed of the choice of held-out rows.")
    columns: str | None = option(
        None, help="Names of columns that are not recognized: prompt=question,completion=answer"
    )
    strict_rows: bool = option(
        False, help="Refuse a file with a malformed row; off: leave out such rows, and count them."
    )
    system_prompt: str | None = option(None, help="System prompt of rows without one.")
    learn: str = option("every", choices=LEARN, help="Turns of the assistant that carry loss; weight 0 never does.")
    metric: str = option(
        "f1",
        choices=tuple(METRICS),
        help="How answers are scored; loss, perplexity: no answer is generated. By default, raw text is scored by "
        "perplexity.",
    )
    regex: str | None = option(None, help="For --metric regex: the pattern whose match must be equal in both answers.")

    def __post_init__(self) -> None:
        if self.metric in METRICS and not self._own_metric:  # `problems` reports an unknown metric
            self.main_metric = METRICS[self.metric].key
            self.higher_is_better = self.metric not in UNANSWERED

    @property
    def _own_metric(self) -> bool:
        """Whether a subclass has its own main metric, which its score() returns."""
        return next(cls for cls in type(self).__mro__ if "main_metric" in vars(cls)) is not Chat

    def problems(self) -> list[str]:
        found = super().problems()
        if found:
            return found
        if not self.train_file and not self.validation_file:
            found.append("--train-file: a file, a folder or a data set of the hub is needed")
        if self.held_out is not None:
            if self.validation_file:
                found.append("--held-out: --validation-file replaces it; leave one of the two out")
            elif self.held_out < 0 or (self.held_out >= 1 and self.held_out % 1):
                found.append(f"--held-out {self.held_out:g}: expected a share from 0 to 1, or a number of rows")
        try:
            named_columns(self.columns)
        except ValueError as error:
            found.append(f"--columns {self.columns}: {error}")
        if self._own_metric and self.metric != "f1":
            found.append(f"--metric {self.metric}: this task scores answers by {self.main_metric}; leave it out")
        if (self.metric == "regex") != (self.regex is not None):
            found.append("--regex and --metric regex need each other: give both or none")
        elif self.regex is not None:
            try:
                re.compile(self.regex)
            except re.error as error:
                found.append(f"--regex {self.regex}: not a regular expression ({error})")
        return found

    def dataset(self, split: str) -> Sequence[Dialogue]:
        """The rows of the files. Without a validation file, some of the training rows are held out for validation."""
        if split not in ("train", "validation"):
            raise ValueError(f"split {split!r}: train or validation")
        if found := self.problems():
            raise UserError(*found)
        if split == "validation" and self.validation_file:
            rows = self._read(self.validation_file, split)
            return self._with_advice(rows, rows.notes)
        if not self.train_file:
            raise UserError("--train-file: needed to train")
        if self.validation_file:
            return self._read(self.train_file)
        train, validation = self._divided
        return self._with_advice(validation, train.notes) if split == "validation" else train

    def messages(self, example: Dialogue) -> list[dict[str, Any]]:
        return as_parts(example.prompt)

    def target(self, example: Dialogue) -> str | list[dict[str, Any]]:
        """The answer's text, or the turns from the first to the last learnt turn."""
        answers = [*example.answered, *(example.rejected or ())]
        plain = len(example.answered) == 1 and all(turn.keys() == {"role", "content"} for turn in answers)
        if not example.prompt or (plain and example.prompt[-1]["role"] != "assistant"):
            return example.answer["content"]
        return as_parts(example.answered)

    def rejected(self, example: Dialogue) -> str | list[dict[str, Any]] | None:
        is_text = example.rejected and isinstance(self.target(example), str)
        return example.rejected[0]["content"] if is_text else example.rejected

    def tools(self, example: Dialogue) -> list[dict[str, Any]] | None:
        return example.tools

    def chat_template_kwargs(self, example: Dialogue) -> dict[str, Any] | None:
        return example.variables

    def score(self, example: Dialogue, text: str) -> dict[str, Any]:
        """Score a generated answer by --metric, without its thinking.

        Tool calls are compared by name and arguments, however the template writes them.
        """
        score = matching(re.compile(self.regex)) if self.regex else METRICS[self.metric].score
        text = without_thinking(text)
        calls = "tool_calls" in example.answer or example.tools
        return score(comparable(example.answer), comparable_text(text) if calls else text)

    def _with_advice(self, rows: Any, notes: Sequence[str]) -> Any:
        """The rows to evaluate. If answers are single words or labels, a note explains --metric f1 and --metric exact.
        If there is raw text among the rows, they are scored by perplexity.

        Args:
            notes: the notes from reading the rows.
        """
        if self.metric not in UNANSWERED and self._by_loss(notes) and any(not row.prompt for row in rows):
            return self._by_perplexity(rows)
        some = rows[:_LOOKED_AT]
        told = self.metric == "f1" and not self._own_metric and len(rows) >= _FEWEST
        answers = [comparable(row.answer) for row in some] if told else []
        labels = 1 < len({*answers}) <= len(answers) // 4 and max(map(len, answers)) <= _LONGEST_LABEL
        short = told and (labels or all(len(answer.split()) == 1 for answer in answers))
        if short and _ONE_WORD not in rows.notes:
            rows.notes.append(_ONE_WORD)
        return rows

    def _by_loss(self, notes: Sequence[str]) -> bool:
        """Whether no answer is scored: there is raw text among the rows, or the metric is a loss."""
        return self.metric in UNANSWERED or any(f"read as {RAW_TEXT}" in note for note in notes)

    def _by_perplexity(self, rows: Any) -> Any:
        if self._own_metric:
            raise UserError(f"{self.main_metric}: raw text has no answer to score; train on it with the task chat")
        if self.metric != "f1":  # the user chose this metric
            raise UserError(
                f"--metric {self.metric}: raw text has no answer to compare; leave it out, or use --metric perplexity"
            )
        self.main_metric, self.higher_is_better = METRICS["perplexity"].key, False
        line = "raw text is scored by its perplexity (lower is better); no answers are generated"
        if line not in rows.notes:
            rows.notes.append(line)
        return rows

    def _read(self, path: str, split: str = "train") -> Any:
        how = named_columns(self.columns), self.learn, self.system_prompt
        parse = functools.partial(parse_row, *how, strict=self.strict_rows)
        return read_rows(path, parse, with_folder=True, split=split)

    @functools.cached_property
    def _divided(self) -> tuple[Sequence[Dialogue], Sequence[Dialogue]]:
        """The rows to train on, and the rows held out."""
        rows = self._read(self.train_file)
        if not self.held_out:
            wanted = min(round(_SHARE * len(rows)), _MOST)
        else:
            wanted = round(self.held_out * (len(rows) if self.held_out < 1 else 1))
        if wanted >= len(rows) > 1:
            raise UserError(
                f"--held-out {self.held_out:g}: {self.train_file} has {len(rows)} rows; leave some to train on"
            )
        try:
            train, validation = rows.held_out(max(wanted, 1), self.data_seed)
        except UserError:  # all rows are of one group
            if self.held_out != 0:
                raise UserError(
                    f"{self.train_file}: {'there is one row' if len(rows) == 1 else 'all rows have one prompt'}, so "
                    "none can be held out; give --validation-file, or --held-out 0 to score rows that are trained on",
                    *(note for note in rows.notes if " left out: " in note),
                ) from None
            validation = dataclasses.replace(rows[: max(wanted, 1)], notes=[])
        if self.held_out == 0:
            validation.notes.append(_REMEMBERED.format(len(validation)))
            return rows, validation
        why = "for evaluation (see --held-out, --validation-file); rows with the same prompt stay together"
        if len(validation) < _ENOUGH and not self._by_loss(rows.notes):
            why = _few(len(validation), len(rows))
        validation.notes.append(f"{len(validation):,} of {len(rows):,} rows are held out of {self.train_file}: {why}")
        return train, validation


def _few(count: int, of: int) -> str:
    """How uncertain a score of `count` rows is, and how many rows would make it less uncertain."""
    more = min(_ENOUGH, of // 4)
    few = f"with so few, a score of 0.5 is uncertain by ±{_reach(count):.2f} (95%)"
    return f"{few}; --held-out {more} makes it ±{_reach(more):.2f}" if more > count else f"{few}; see --validation-file"


def _reach(count: int) -> float:
    """Half of the 95% interval (Wilson's) of a rate of one half."""
    return 0.98 / math.sqrt(count + 1.96**2)


def parse_row(
    columns: tuple[tuple[str, str], ...],
    learn: str,
    system_prompt: str | None,
    row: dict[str, Any],
    folder: str = "",
    *,
    strict: bool = True,
) -> ParsedRow:
    """A row of a file as a Dialogue, with its question and notes on what was done to it.

    Args:
        columns: the pairs that `named_columns` returns.
        learn, system_prompt: the task's options.
        folder: the folder that the paths of images are relative to.
        strict: refuse a malformed row; otherwise it is left out.
    Raises:
        RowProblem: the row is malformed.
        RowLeftOut: nothing in the row can be learnt.
    """
    try:
        read = read_pair(row, columns, folder)
    except RowProblem as problem:
        if strict or isinstance(problem, RowRefused):
            raise
        raise RowLeftOut(f"malformed ({_UNSHOWN.sub('', without_numbers(str(problem)))})") from problem
    last_lines = [turn["content"].rpartition("\n")[2] for turn in read.turns if turn["role"] == "user"]
    texts = map(str.strip, [*last_lines, *(turn["content"] for turn in (*read.turns, *(read.rejected or ())))])
    missing = [f"with a text that is {text!r}, which is learnt as a word" for text in texts if text in MISSING_VALUES]
    if read.form.startswith(RAW_TEXT):
        text = read.turns[0]["content"]
        if not text.strip():
            raise RowLeftOut("the text is empty")
        rendered = [_RENDERED_TEXT] if RENDERED.search(text) else []
        notes = (f"read as {read.form}", *read.notes, *missing[:1], *rendered)
        return ParsedRow(Dialogue([], read.turns, None), "", notes, read.unread)
    learn = "last" if read.rejected else learn
    made, notes = dialogue(read.turns, read.system_text, read.tools, learn, system_prompt)
    made = made._replace(variables=read.variables, rejected=read.rejected)
    return ParsedRow(made, made.question, (f"read as {read.form}", *read.notes, *missing[:1], *notes), read.unread)
