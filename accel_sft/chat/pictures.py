"""An image that a task gives: the forms in which it may be given, its hash, and its pixels."""

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
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.text import LONGEST_ERROR, one_line

_NUMBERS = ("F", "I")
"""Pillow's modes whose values it clips to 0 and 255 in converting to RGB, so that floats from 0 to 1 become black."""
_GREY_OF_16_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_BITS_PER_SAMPLE = 258
"""Number of TIFF's tag BitsPerSample, to be read because Pillow opens grey values of 12 bits as `I;16` too."""
_PROGRAMS = ("EPS",)
"""Formats that are programs, which Pillow lets Ghostscript run."""
MAX_FILE_BYTES = 512 << 20
"""Maximum size of an image file: one with the maximum number of pixels is smaller, even uncompressed."""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_NO_FILE = "a folder, a pipe or a device, not a file"
_KEYS = ("image", "path", "url", "base64", "image_url")
"""Keys of a part that may hold its image: those that transformers reads in a part of type "image", and OpenAI's, in a
part of type "image_url"."""


class Picture:
    """An image that a task gave: a file's path, a file's bytes, or a PIL image.

    Args:
        number: its place among the example's images, from 1, which names it in messages if it has no path.
    """

    def __init__(self, given: Any, number: int = 1) -> None:
        self.given, self.number = given, number

    def __repr__(self) -> str:  # the hash of a conversation covers it
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
        """The image as transformers opens it: a file upright and in RGB, a PIL image as it is. Grey of 16 bits becomes
        grey of 8, and what is transparent white, as vLLM and Qwen's own code have it.

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
        """Return the image, 16-bit grey scaled to 8 bits, and on white if it is transparent. Call this before Pillow
        decodes the pixels, maybe too many.

        Raises:
            UserError: it has pixels of 32 bits, or too many pixels.
        """
        import PIL.Image
        import PIL.ImageOps

        most = PIL.Image.MAX_IMAGE_PIXELS
        width, height = image.size
        if most and width * height > most:
            raise UserError(
                f"{self} has {width:,} x {height:,} pixels; {most:,} are the most (Pillow's "
                "MAX_IMAGE_PIXELS): scale it down"
            )
        if image.mode in _GREY_OF_16_BITS:
            return _scaled(image)
        if image.mode.endswith(("A", "a")) or "transparency" in image.info:
            image = PIL.ImageOps.exif_transpose(image).convert("RGBA")
            white = PIL.Image.new("RGBA", image.size, "white")
            return PIL.Image.alpha_composite(white, image).convert("RGB")
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
            # the file may have become a pipe since the row was read; with O_NONBLOCK, open does not wait for a writer
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
    """Scale a 16-bit grey image to 8 bits, keeping black and white; Pillow's `convert` would clip values above 255."""
    import numpy as np
    import PIL.Image
    import PIL.ImageOps

    (bits, *_) = getattr(grey, "tag_v2", {}).get(_BITS_PER_SAMPLE) or (16,)
    most = 2**bits - 1
    values = np.asarray(PIL.ImageOps.exif_transpose(grey)).astype(np.uint32)
    values[values == grey.info.get("transparency", most)] = most
    return PIL.Image.fromarray(((values * 255 + most // 2) // most).astype(np.uint8))


def picture_of(part: dict[str, Any], what: str) -> Picture:
    """The image of a part of a content.

    Raises:
        UserError: the part has no image, or one that does not exist; the message begins with `what`.
    """
    given = [part[key] for key in _KEYS if part.get(key) is not None]
    if len(given) != 1:
        raise UserError(f"{what} gave the part {str(part)[:80]!r}, expected one image in it")
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
        return Picture(_file_or_bytes(value, what, encoded=encoded))
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
