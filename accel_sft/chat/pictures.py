"""Images in messages: the forms in which tasks give them, their hashes, and their places in a conversation's texts."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import os
import stat
import urllib.parse
import urllib.request
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.text import LONGEST_ERROR, one_line

MARK = "\ue006\ue007"
"""Stands for an image in the text of a turn; `Conversation.images` has the images in the order of their marks."""
_SHOWN = "<image>"
_NUMBERS = ("F", "I")
"""Pillow's modes whose values it clips to 0 and 255 when it converts them to RGB: floats from 0 to 1 become black."""
_GREY_OF_16_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_BITS_PER_SAMPLE = 258
"""Number of TIFF's tag BitsPerSample: Pillow opens grey values of 12 bits as `I;16` too."""
_PROGRAMS = ("EPS",)
"""Formats that are programs, which Pillow lets Ghostscript run."""
MAX_FILE_BYTES = 512 << 20
"""Most bytes of an image file: with the most pixels that are accepted it is smaller, even uncompressed."""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_NO_FILE = "a folder, a pipe or a device, not a file"
_KEYS = ("image", "path", "url", "base64", "image_url")
"""Keys of a part that may hold its image: those that transformers reads in a part of type "image", and OpenAI's, in a
part of type "image_url"."""
_EXPECTED = (
    'expected {"type": "text", "text": ...} or {"type": "image", "image": ...}, the image a path, bytes or a PIL image'
)


class Picture:
    """An image that a task gave: a file's path, a file's bytes, or a PIL image.

    Args:
        number: its place among the example's images, from 1, which names it in messages if it has no path.
    """

    def __init__(self, given: Any, number: int = 1) -> None:
        self.given, self.number = given, number

    def __repr__(self) -> str:  # what a conversation's hash is made of
        return f"Picture({self.digest})"

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the file, or of the pixels of a PIL image.

        Raises:
            UserError: the file cannot be read.
        """
        if isinstance(self.given, (str, bytes)):
            return hashlib.sha256(self._file()).hexdigest()
        image = self.given
        shape = f"{image.mode} {image.size} "
        if palette := image.getpalette():  # the pixels are indices into it
            shape += f"{palette} {image.info.get('transparency')} "
        return hashlib.sha256(shape.encode() + image.tobytes()).hexdigest()

    def opened(self) -> Any:
        """The image as transformers opens it: a file upright and in RGB, a PIL image as it is (16-bit grey as 8-bit).

        Raises:
            UserError: it cannot be read, or Pillow is missing.
        """
        if not isinstance(self.given, (str, bytes)):
            return self._of_eight_bits(self.given)
        return self._decoded(self._file())

    def _decoded(self, content: bytes) -> Any:
        try:
            import PIL.Image
            from transformers.image_utils import load_image
        except ImportError as error:
            raise UserError(f"images need Pillow ({error}): pip install 'accel-sft[images]'") from error
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # `_of_eight_bits` refuses these
                image = PIL.Image.open(io.BytesIO(content))
            if image.format in _PROGRAMS:
                raise UserError(f"{self}: {image.format} is a program, not pixels; convert it to PNG")
            return load_image(self._of_eight_bits(image))
        except UserError:
            raise
        except PIL.UnidentifiedImageError as error:
            raise UserError(f"{self} cannot be read: it is in no format of images that Pillow knows") from error
        except Exception as error:  # a decoder may raise anything on a file's content
            raise UserError(f"{self} cannot be read: {one_line(str(error), LONGEST_ERROR)}") from error

    def _of_eight_bits(self, image: Any) -> Any:
        """The image, 16-bit grey scaled to 8 bits; called before Pillow decodes the pixels, which may be too many.

        Raises:
            UserError: it has pixels of 32 bits, or too many pixels.
        """
        import PIL.Image

        most = PIL.Image.MAX_IMAGE_PIXELS
        width, height = image.size
        if most and width * height > most:
            raise UserError(
                f"{self} has {width:,} x {height:,} pixels; {most:,} are the most (Pillow's "
                "MAX_IMAGE_PIXELS): scale it down"
            )
        if image.mode in _GREY_OF_16_BITS:
            return _scaled(image)
        if image.mode in _NUMBERS:
            raise UserError(
                f"{self} has pixels of 32 bits (Pillow's mode {image.mode}), and nothing says which of them are black "
                "and white; write it with 8 bits a channel"
            )
        return image

    def file(self) -> tuple[bytes, str]:
        """The bytes of an image file, and the suffix of its name; a PIL image is written as PNG.

        Raises:
            UserError: it cannot be read, or is not an image that training accepts.
        """
        if isinstance(self.given, (str, bytes)):
            self._decoded(content := self._file())  # raises if it is no image: a row may name any file
            return content, Path(self.given).suffix.lower() if isinstance(self.given, str) else ""
        image, file = self.opened(), io.BytesIO()
        (image if image.mode in _PNG_MODES else image.convert("RGB")).save(file, "png")
        return file.getvalue(), ".png"

    def __str__(self) -> str:
        return f"the image {self.given}" if isinstance(self.given, str) else f"image {self.number} of the row"

    def _file(self) -> bytes:
        if isinstance(self.given, bytes):
            return self.given
        try:
            # it may have become a pipe since the row was read: with O_NONBLOCK, opening it does not wait for a writer
            with open(os.open(self.given, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise UserError(f"{self}: {_NO_FILE}")
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise UserError(f"{self}: {error.strerror or error}") from error
        if len(content) > MAX_FILE_BYTES:
            raise UserError(f"{self}: larger than {MAX_FILE_BYTES >> 20} MiB; scale it down")
        return content


def _scaled(grey: Any) -> Any:
    """A 16-bit grey image scaled to 8 bits, with black and white kept: Pillow's `convert` clips values above 255."""
    import numpy as np
    import PIL.Image
    import PIL.ImageOps

    (bits, *_) = getattr(grey, "tag_v2", {}).get(_BITS_PER_SAMPLE) or (16,)
    most = 2**bits - 1
    values = np.asarray(PIL.ImageOps.exif_transpose(grey)).astype(np.uint32)
    return PIL.Image.fromarray(((values * 255 + most // 2) // most).astype(np.uint8))


def read_parts(content: Sequence[Any], what: str) -> tuple[str, list[Picture]]:
    """The text of a content that is a list of parts, with MARK for each image, and the images.

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
            pictures.append(_picture(part, what))
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


def _picture(part: dict[str, Any], what: str) -> Picture:
    given = [part[key] for key in _KEYS if part.get(key) is not None]
    if len(given) != 1:
        raise UserError(f"{what} gave the part {str(part)[:80]!r}, expected one image in it")
    (value,) = given
    if isinstance(value, dict):  # OpenAI's {"url": ...}, and {"bytes": ..., "path": ...} of the library datasets
        value = next((value[key] for key in ("url", "bytes", "path") if value.get(key) is not None), None)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, (bytes, bytearray)):
        return Picture(bytes(value))
    if isinstance(value, str):
        return Picture(_file_or_bytes(value, what, encoded="base64" in part))
    if all(hasattr(value, name) for name in ("mode", "size", "tobytes", "convert")):
        return Picture(value)
    raise UserError(f"{what} gave the image {str(value)[:80]!r}, expected a path, bytes or a PIL image")


def _file_or_bytes(value: str, what: str, *, encoded: bool) -> str | bytes:
    if encoded or value.startswith("data:image/"):
        try:
            return base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value)
        except (binascii.Error, ValueError) as error:
            raise UserError(f"{what} gave an image in base64 that cannot be decoded ({error})") from None
    if value.lower().startswith("file://"):
        address = urllib.parse.urlsplit(value)
        if address.netloc not in ("", "localhost"):
            raise UserError(f"{what} gave the image {value[:80]!r}, on another machine; a path has three: file:///")
        value = urllib.request.url2pathname(address.path)
    if "://" in value[:10]:
        raise UserError(
            f"{what} gave the image {value[:80]!r}, which would be fetched again in every epoch; download it, and give "
            "its path"
        )
    if not os.path.isfile(value):
        problem = _NO_FILE if os.path.exists(value) else "there is no such file"
        raise UserError(f"{what} gave the image {value!r}; {problem}")
    return value


def marks(turns: Sequence[dict[str, Any]]) -> int:
    """Number of images in turns."""
    return sum(turn["content"].count(MARK) for turn in turns)


def parted(turns: list[dict[str, Any]], pictures: Sequence[Picture]) -> list[dict[str, Any]]:
    """Turns as a chat template takes them: contents with images are lists of parts; unchanged without pictures."""
    return [{**turn, "content": _as_parts(turn["content"])} for turn in turns] if pictures else turns


def _as_parts(content: Any) -> Any:
    """A content (a text, or a list of one text part) as a list of parts, if it has images."""
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
