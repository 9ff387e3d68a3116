"""Puts a mark for each image into the text of a turn, and turns marked texts into the parts that templates take."""

from collections.abc import Sequence
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.chat.pictures import Picture, picture_of

MARK = "\ue006\ue007"
"""Stands for an image in the text of a turn; `Conversation.images` has the images in the order of their marks."""
_SHOWN = "<image>"
_EXPECTED = (
    'expected {"type": "text", "text": ...} or {"type": "image", "image": ...}, the image a path, bytes or a PIL image'
)


def read_parts(content: Sequence[Any], what: str) -> tuple[str, list[Picture]]:
    """Return the text of a content that is a list of parts, with MARK for each image, and return the images.

    Raises:
        UserError: a part is neither text nor image, or its image does not exist; the message begins with `what`.
    """
    text, pictures = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            text.append(unmarked(part["text"], what))
        elif kind in ("image", "image_url"):
            text.append(MARK)
            pictures.append(picture_of(part, what))
        else:
            raise UserError(f"{what} gave the part {str(part)[:80]!r}, {_EXPECTED}")
    return "".join(text), pictures


def unmarked(text: str, what: str) -> str:
    """Check a text, which is returned unchanged.

    Raises:
        UserError: it contains MARK, which would be taken for an image.
    """
    if MARK in text:
        raise UserError(f"{what} gave a text with the characters U+E006 U+E007, which mean an image here; remove them")
    return text


def marks(turns: Sequence[dict[str, Any]]) -> int:
    """Number of images in turns."""
    return sum(turn["content"].count(MARK) for turn in turns)


def parted(turns: list[dict[str, Any]], pictures: Sequence[Picture]) -> list[dict[str, Any]]:
    """Turns as a chat template takes them: contents with images are lists of parts; unchanged without pictures."""
    return [{**turn, "content": _as_parts(turn["content"])} for turn in turns] if pictures else turns


def _as_parts(content: Any) -> Any:
    """A content (a text, or a list of one text part) as a list of parts if it has images, else unchanged."""
    text = content[0]["text"] if isinstance(content, list) else content
    if MARK not in text:
        return content
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] * (number > 0)
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return parts


def shown(text: str) -> str:
    """A turn's text for people, with `<image>` for each image."""
    return text.replace(MARK, _SHOWN)
