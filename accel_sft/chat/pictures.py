"""Reads the images that a task gives in parts of turns: their marks in the turn's text, their hashes, their pixels."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.text import LONGEST_ERROR, one_line

IMAGE_MARK = "\ue006\ue007"
"""Stands for an image in the text of a turn; `Conversation.images` has the images in the order of their marks."""
_SHOWN = "<image>"
_EXPECTED = (
    'expected {"type": "text", "text": ...} or {"type": "image", "image": ...}, the image a path, bytes or a PIL image'
)
_KEYS = ("image", "path", "url", "base64", "image_url")
"""Keys under which a part may hold its image: those that transformers reads in parts of type "image", and OpenAI's key
in parts of type "image_url"."""


class Picture:
    """An image that a task gave: a file's path, a file's bytes, or a PIL image.

    Args:
        number: the image's place among the example's images, from 1; in messages it names an image without a path.
    """

    def __init__(self, given: Any, number: int = 1) -> None:
        self.given, self.number = given, number

    def __repr__(self) -> str:  # part of a conversation's hash
        return f"Picture({self.digest})"

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the file, or of the pixels of a PIL image."""
        if isinstance(self.given, (str, bytes)):
            return hashlib.sha256(self._file()).hexdigest()
        image = self.given
        shape = f"{image.mode} {image.size} "
        if palette := image.getpalette():  # the pixels are indices into it
            shape += f"{palette} {image.info.get('transparency')} "
        return hashlib.sha256(shape.encode() + image.tobytes()).hexdigest()

    def opened(self) -> Any:
        """Return the image as transformers opens it: a file upright and in RGB, a PIL image as it is. Transparent areas
        become white, as in vLLM and Qwen's own code."""
        if not isinstance(self.given, (str, bytes)):
            return self._on_white(self.given)
        content = self._file()
        try:
            import PIL.Image
            from transformers.image_utils import load_image
        except ImportError as error:
            raise UserError(f"images need Pillow ({error}): pip install 'accel-sft[images]'") from error
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
                image = PIL.Image.open(io.BytesIO(content))
            if image.format == "EPS":  # Pillow would run it with Ghostscript
                raise UserError(f"{self}: EPS is a program, not pixels; convert it to PNG")
            return load_image(self._on_white(image))
        except UserError:
            raise
        except Exception as error:  # a decoder may raise anything on a file's content
            raise UserError(f"{self} cannot be read: {one_line(str(error), LONGEST_ERROR)}") from error

    def _on_white(self, image: Any) -> Any:
        """Return the image, on white if it is transparent; raise UserError for more than 8 bits a channel."""
        import PIL.Image
        import PIL.ImageOps

        if image.mode.startswith(("I", "F")):  # Pillow would clip their values, so that they become black or white
            raise UserError(
                f"{self} has more than 8 bits a channel (Pillow's mode {image.mode}); write it with 8 bits a channel"
            )
        if image.mode.endswith(("A", "a")) or "transparency" in image.info:
            image = PIL.ImageOps.exif_transpose(image).convert("RGBA")
            white = PIL.Image.new("RGBA", image.size, "white")
            return PIL.Image.alpha_composite(white, image).convert("RGB")
        return image

    def __str__(self) -> str:
        return f"the image {self.given}" if isinstance(self.given, str) else f"image {self.number} of the row"

    def _file(self) -> bytes:
        if isinstance(self.given, bytes):
            return self.given
        try:
            return Path(self.given).read_bytes()
        except OSError as error:
            raise UserError(f"{self}: {error.strerror or error}") from error


def picture_of(part: dict[str, Any], source: str) -> Picture:
    """Return the image that a part of a turn's content holds."""
    given = [part[key] for key in _KEYS if part.get(key) is not None]
    if len(given) != 1:
        raise UserError(f"{source} gave the part {str(part)[:80]!r}, expected one image in it")
    (value,), encoded = given, "base64" in part
    while isinstance(value, dict):  # OpenAI's {"url": ...}, {"bytes": ..., "path": ...} of the library datasets
        key = next((key for key in ("url", "bytes", "base64", "path") if value.get(key) is not None), "")
        encoded |= key in ("bytes", "base64")  # `read_rows` gives bytes as {"base64": ...}
        value = value.get(key)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, (bytes, bytearray)):
        return Picture(bytes(value))
    if isinstance(value, str):
        return Picture(_file_or_bytes(value, source, encoded=encoded))
    if all(hasattr(value, name) for name in ("mode", "size", "tobytes", "convert")):
        return Picture(value)
    raise UserError(f"{source} gave the image {str(value)[:80]!r}, expected a path, bytes or a PIL image")


def _file_or_bytes(value: str, source: str, *, encoded: bool) -> str | bytes:
    if encoded or value.startswith("data:image/"):
        try:
            return base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value)
        except (binascii.Error, ValueError) as error:
            raise UserError(f"{source} gave an image in base64 that cannot be decoded ({error})") from None
    if "://" in value[:10]:
        raise UserError(
            f"{source} gave the image {value[:80]!r}, which would be fetched again in every epoch; download it, and "
            "give its path"
        )
    if not os.path.isfile(value):
        raise UserError(f"{source} gave the image {value!r}; there is no such file")
    return value


def read_parts(content: Sequence[Any], source: str) -> tuple[str, list[Picture]]:
    """Return the text of a content that is a list of parts, with IMAGE_MARK for each image, and the images."""
    text, pictures = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            text.append(unmarked(part["text"], source))
        elif kind in ("image", "image_url"):
            text.append(IMAGE_MARK)
            pictures.append(picture_of(part, source))
        else:
            raise UserError(f"{source} gave the part {str(part)[:80]!r}, {_EXPECTED}")
    return "".join(text), pictures


def unmarked(text: str, source: str) -> str:
    """Return the text; UserError if it contains IMAGE_MARK, which would be taken for an image."""
    if IMAGE_MARK in text:
        raise UserError(f"{source} gave a text with the characters U+E006 U+E007, which mark an image; remove them")
    return text


def marks(turns: Sequence[dict[str, Any]]) -> int:
    """Number of images in turns."""
    return sum(turn["content"].count(IMAGE_MARK) for turn in turns)


def parted(turns: list[dict[str, Any]], pictures: Sequence[Picture]) -> list[dict[str, Any]]:
    """Return turns as a chat template takes them, with lists of parts for contents that have images."""
    return [{**turn, "content": _as_parts(turn["content"])} for turn in turns] if pictures else turns


def _as_parts(content: Any) -> Any:
    """Return a content (a text, or a list of one text part) as a list of parts if it has images, else unchanged."""
    text = content[0]["text"] if isinstance(content, list) else content
    if IMAGE_MARK not in text:
        return content
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(IMAGE_MARK)):
        parts += [{"type": "image"}] * (number > 0)
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return parts


def shown(text: str) -> str:
    """Return a turn's text as shown to people, with `<image>` for each image."""
    return text.replace(IMAGE_MARK, _SHOWN)
