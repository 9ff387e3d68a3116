"""Finds the images of a row: in parts of its messages, or in a column, for the <image> marks in its texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from accel_sft import RowProblem
from accel_sft_chat.messages import IMAGE, Turn, image_address
from accel_sft_chat.values import kind

PUT_FIRST = f"with images and no {IMAGE} in their texts; the images are put before the first question"

WITHOUT = f"with {IMAGE} in a text and no image in the row; the mark is read as a word"


def with_images(turns: list[Turn], value: Any, column: str, folder: str) -> tuple[list[Turn], tuple[str, ...]]:
    """The turns, each with the paths of its images, and notes on what was done to the row.

    Args:
        value: the row's column of images: one image or a list, each a path or bytes; None if there is no column.
        folder: the folder that paths are relative to.
    Raises:
        RowProblem: the numbers of images and of marks differ.
    """
    waiting = sum((turn.get("images") or [None] * turn["content"].count(IMAGE)).count(None) for turn in turns)
    paths = _paths(value, column, waiting > 0)
    marked = sum(turn["content"].count(IMAGE) for turn in turns)
    notes: tuple[str, ...] = ()
    if paths and not marked:
        turns, notes = _put_first(turns, len(paths), column), (PUT_FIRST,)
    if column and marked and not (paths or any(turn.get("images") for turn in turns)):
        notes = (WITHOUT,)
    placed, rest = [], iter(paths)
    wanted = 0
    for turn in turns:
        # without images in the row, <image> in a text is an ordinary word
        marks = turn.get("images") or [None] * turn["content"].count(IMAGE) * bool(paths)
        wanted += marks.count(None)
        images = [path if path is not None else next(rest, None) for path in marks]
        placed.append({**turn, "images": [_placed(path, folder) for path in images if path]} if images else turn)
    if wanted != len(paths):
        raise RowProblem(column or "images", f"an image for each of {wanted} {IMAGE} in the texts, got {len(paths)}")
    return placed, notes


def as_parts(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The turns in the trainer's form: a content with images is a list of parts."""
    return [_as_parts(turn) if "images" in turn else turn for turn in turns]


def _as_parts(turn: Turn) -> dict[str, Any]:
    first, *others = turn["content"].split(IMAGE)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for path, text in zip(turn["images"], others, strict=True):
        parts += [{"type": "image", "image": path}, {"type": "text", "text": text}]
    rest = {name: value for name, value in turn.items() if name != "images"}
    return {**rest, "content": [part for part in parts if part.get("text") != ""]}


def _paths(value: Any, column: str, wanted: bool) -> list[str]:
    images = value if isinstance(value, list) else [] if value is None else [value]
    images = images if wanted else [image for image in images if not _is_empty(image)]
    paths = [image_address(image) for image in images]
    for number, path in enumerate(paths):
        if not isinstance(path, str) or not path:
            raise RowProblem(f"{column}[{number}]", f"an image's path or bytes, got {kind(path)}")
    return paths


def _is_empty(image: Any) -> bool:
    """Whether this value means that the row has no image: an empty text, null, or an object without values."""
    return image in ("", None) or (isinstance(image, dict) and not any(image.values()))


def _put_first(turns: list[Turn], count: int, column: str) -> list[Turn]:
    at = next((at for at, turn in enumerate(turns) if turn["role"] == "user"), None)
    if at is None:
        raise RowProblem(column, f"no images, because there is no question to put them in, got {count}")
    return [*turns[:at], {**turns[at], "content": IMAGE * count + turns[at]["content"]}, *turns[at + 1 :]]


def _placed(path: str, folder: str) -> str:
    return path if "://" in path[:10] or path.startswith("data:") else os.path.join(folder, path)
