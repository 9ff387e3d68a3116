"""Decides, at each level of a row, which keys are refused by name, and which are reported as not read.

The code that reads a level says which keys it reads. Any other key with a value is refused if it would change what is
learnt in a way that the trainer does not support. Otherwise it is reported: "not read: source (200 rows)".
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from accel_sft import RowProblem

_MARK = "a mark of each turn: weight, train or loss"
_MASK = f"{_MARK}; masks of tokens are not read"
_MEDIA = "only text and images: video and sound are not trained on"
VIDEOS = dict.fromkeys(("video", "videos", "audio", "audios"), _MEDIA)
_MASKS = dict.fromkeys(
    ("loss_mask", "loss_masks", "completion_mask", "assistant_mask", "assistant_masks", "prompt_mask"), _MASK
)
_WEIGHTS = dict.fromkeys(("loss_scale", "loss_weight"), _MARK)
_JUDGED = (
    "no judgment of the answer: preferences are learnt from pairs (--loss dpo, columns chosen and rejected); to learn "
    "the good answers alone, keep rows with true and drop this column"
)
SWITCHES = dict.fromkeys(
    ("enable_thinking", "thinking_budget", "reasoning_effort"), "this key within the object chat_template_kwargs"
)
_ROW_MARKS = ("weight", "train", "loss", "mask", *_WEIGHTS)
REFUSED_IN_TURNS = {
    **VIDEOS,
    **_MASKS,
    **_WEIGHTS,
    "train_detail": f"{_MARK}; a turn is learnt as a whole or not at all",
    **dict.fromkeys(("mask", "masked"), _MASK),
    **dict.fromkeys(("training", "trainable"), _MARK),
    "channel": "an answer's thinking as its reasoning_content: channels are not read",
    **dict.fromkeys(("image", "images"), "images as parts of the content, or in the row's column images"),
    "parts": "a content; Gemini's parts are not read",
}
REFUSED_IN_PARTS = {**_MASKS, **_WEIGHTS}
AS_JSON = "with numbers, lists or objects in place of texts, which are read as JSON"


def refused_in(row: Mapping[str, Any]) -> dict[str, str]:
    """Maps each refused column to what is expected in its place; some columns are refused only for certain values."""
    refused = {**VIDEOS, **_MASKS, **SWITCHES}
    refused |= {name: _JUDGED for name in ("label", "kto_tag") if isinstance(_in_cell(row.get(name)), bool)}
    for name in _ROW_MARKS:
        value = _in_cell(row.get(name))  # 1 or true changes nothing, unless the column is a mask
        if isinstance(value, (int, float, list)) and (value != 1 or (name == "mask" and value is True)):
            refused[name] = f"{_MARK}; marks of whole rows are not read"
    if row.get("input_ids") is not None:
        refused["labels"] = _MASK
    return refused


def _in_cell(value: Any) -> Any:
    """The number, list or JSON word in a text, as in the cells of a CSV file; otherwise the value itself."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value.strip().lower())
    return value


class RowRefused(RowProblem):
    """For a key that says what to learn in a way that this task does not support: the file is refused, with or without
    --strict-rows."""


@dataclasses.dataclass
class Remarks:
    """Remarks on a row, for the user.

    Attributes:
        notes: what was done to the row.
        unread: the names of the row's keys that are not read, each with the levels above it, as in `messages[].id`.
    """

    notes: dict[str, None] = dataclasses.field(default_factory=dict)
    unread: dict[str, None] = dataclasses.field(default_factory=dict)

    def look(self, held: Mapping[str, Any], read: Collection[str], refused: Mapping[str, str], above: str = "") -> None:
        """Add each key that has a value and is not read to `unread`.

        Args:
            refused: what is expected in place of keys that are refused.
            above: the levels above the keys, as in `messages[3].`.
        Raises:
            RowRefused: a key is refused.
        """
        for key, value in held.items():
            if key in read or is_empty(value):
                continue
            if key in refused:
                raise RowRefused(above + key, refused[key])
            self.unread[without_numbers(above) + (key[:80] or '""')] = None


def is_empty(value: Any) -> bool:
    """Whether a key's value is empty."""
    return value is None or value in ("", [], {}) or (isinstance(value, str) and not value.strip())


def without_numbers(field: str) -> str:
    """A field's name without the numbers of turns and parts: `messages[].id`."""
    return re.sub(r"\[\d+\]", "[]", field)
