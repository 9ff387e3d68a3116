"""Runs the model's processor on rows with images: makes placeholder tokens for images, and the model's inputs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import Conversation, conversation
from accel_sft.chat.pictures import Picture
from accel_sft.chat.rendering import Rendered
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.rows.rows import example_name

_OF_TOKENS = ("input_ids", "attention_mask")
_THREAD, _ONE_AT_A_TIME = ThreadPoolExecutor(1, "images"), threading.Lock()
_TYPES = "token_type_ids"
"""Suffix of the inputs that mark each token as text or image: `mm_token_type_ids`, `token_type_ids`."""


@dataclasses.dataclass(frozen=True)
class RowImages:
    """A row's images: the first `count` images of the split's example number `index`.

    Attributes:
        digest: 128 bits of the SHA-256 of the images and of the processor's settings.
        source: reads the images again; None until the row is read from a token store.
    """

    index: int
    count: int
    digest: bytes
    source: ImageSource | GivenImages | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def origin(self) -> ImageSource | GivenImages:
        """`source`; after a row is read from a token store, it is never None."""
        assert self.source
        return self.source


def no_processor() -> Any:
    """Raise UserError; used instead of a function that loads a processor, where only texts are read."""
    raise UserError("the data has images, but only texts are read here")


class ImageInputs:
    """Makes placeholders and inputs from images with the model's processor, which `load` returns at the first use."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._written: dict[tuple[int, int], str] = {}
        self._ahead: tuple[list[RowImages], Future[Any] | None] = [], None

    @functools.cached_property
    def processor(self) -> Any:
        """The processor."""
        return self._load()

    @functools.cached_property
    def _settings(self) -> bytes:
        images = self.processor.image_processor
        return f"{type(self.processor).__name__} {type(images).__name__} {images.to_json_string()}".encode()

    def row(self, index: int, chat: Conversation) -> RowImages | None:
        """Return what a row keeps of its conversation's images; None if the conversation has none."""
        if not chat.images:
            return None
        digest = hashlib.sha256(self._settings + b"".join(picture.digest.encode() for picture in chat.images))
        return RowImages(index, len(chat.images), digest.digest()[:16])

    def expanded(self, chat: Conversation, text: Rendered, where: str) -> Rendered:
        """Return the texts of a conversation, with as many placeholders for each image as the image has tokens."""
        return text._replace(prompt=self.prompt(chat.images, text.prompt, where, text.rest)) if chat.images else text

    def prompt(self, pictures: Sequence[Picture], text: str, where: str, rest: str = "") -> str:
        """Return a prompt with as many placeholders for each image as the image has tokens; `rest` comes after it."""
        place = self.processor.image_token
        if (places := text.count(place)) != len(pictures) or place in rest:
            raise UserError(
                f"{where}: the chat template writes {places} placeholders ({place}) for {len(pictures)} images; it "
                "must write one for each image, and no text may contain one"
            )
        written = [self._placeholders(picture, where) for picture in pictures]
        before, *behind = text.split(place)
        return before + "".join(tokens + then for tokens, then in zip(written, behind, strict=True))

    def _placeholders(self, picture: Picture, where: str) -> str:
        """Return an image's placeholders. They must depend only on the image's size; `tensors` checks their number."""
        try:
            size = (image := picture.opened()).size
            if size not in self._written:
                with _ONE_AT_A_TIME:
                    made = self.processor(
                        text=[self.processor.image_token],
                        images=[[image]],
                        add_special_tokens=False,
                        return_text_replacement_offsets=True,
                    )
                ((replaced,),) = made["text_replacement_offsets"]
                self._written[size] = replaced["replacement"]
        except UserError as error:
            raise UserError(*(f"{where}: {line}" for line in error.problems)) from error
        except Exception as error:  # a processor is the model's own code, and may raise anything
            raise UserError(f"{where}: {picture}: {_refusal(error)}") from error
        return self._written[size]

    def tensors(
        self, ids: Sequence[list[int]], images: Sequence[RowImages | None], shape: tuple[int, int]
    ) -> dict[str, np.ndarray]:
        """Return the model's inputs other than tokens and mask, for rows of these ids, right-padded to `shape` (B, T).

        The pixels of all images follow each other in the order of their placeholders, as the model expects.
        """
        pictured = [of_row for of_row in images if of_row]
        made = self._made(pictured)
        types = self._types(ids)
        of_rows = [sum(kinds) for of_row, kinds in zip(images, types, strict=True) if of_row]
        of_images = [sum(kinds) for kinds in self._types(made["input_ids"].tolist())]
        for of_row, tokens, made_tokens in zip(pictured, of_rows, of_images, strict=True):
            if tokens != made_tokens:
                raise UserError(
                    f"{of_row.origin.of(of_row)}: its images make {made_tokens} tokens, but the row has {tokens}"
                )
        inputs = {}
        for name, value in made.items():
            if name.endswith(_TYPES):
                inputs[name] = np.zeros(shape, dtype=np.int64)
                for number, kinds in enumerate(types):
                    inputs[name][number, : len(kinds)] = kinds
            elif name not in _OF_TOKENS:
                inputs[name] = value.numpy()
        return inputs

    def begin(self, pictured: list[RowImages]) -> None:
        """Start the processor in a thread for the rows whose `tensors` are made next: otherwise a GPU would idle for
        the 5 to 90 ms that an image takes. The calling thread reads the images, as a task need not be thread-safe."""
        self._ahead = pictured, _THREAD.submit(self._processed, pictured, self._opened(pictured))

    def ids(self, images: RowImages) -> list[int]:
        """Return the tokens that the processor makes of a row's images alone."""
        ids: list[int] = self._made([images])["input_ids"][0].tolist()
        return ids

    def pixels(self, images: RowImages) -> int:
        """Return the number of pixel values that the processor makes of a row's images."""
        return pixels_in(self._made([images]))

    def _made(self, pictured: list[RowImages]) -> Any:
        (begun, made), self._ahead = self._ahead, ([], None)
        return made.result() if made and begun == pictured else self._processed(pictured, self._opened(pictured))

    def _opened(self, pictured: Sequence[RowImages]) -> list[list[Any]]:
        return [[picture.opened() for picture in of_row.origin.pictures(of_row)] for of_row in pictured]

    def _processed(self, pictured: Sequence[RowImages], opened: list[list[Any]]) -> Any:
        import torch

        texts = [self.processor.image_token * len(images) for images in opened]
        try:
            with _ONE_AT_A_TIME, torch.device("cpu"):  # the values become arrays, even if a GPU is the default
                return self.processor(
                    text=texts, images=opened, add_special_tokens=False, padding=True, return_tensors="pt"
                )
        except Exception as error:
            named = ", ".join(of_row.origin.of(of_row) for of_row in pictured)
            raise UserError(f"{named}: {_refusal(error)}") from error

    def _types(self, ids: Sequence[list[int]]) -> list[list[int]]:
        """Return 1 for each image token, and 0 for each other token."""
        of_images = {*self.processor.image_token_ids}
        return [[int(token in of_images) for token in row] for row in ids]


def begin_images(pictured: list[RowImages]) -> None:
    """Start the processor in a thread for the next forward's images, if there are any; see `ImageInputs.begin`."""
    if pictured:
        pictured[0].origin.inputs.begin(pictured)


def pixels_in(inputs: Mapping[str, Any]) -> int:
    """Return the number of pixel values in a model's inputs."""
    return math.prod(inputs["pixel_values"].shape) if "pixel_values" in inputs else 0


def _refusal(error: Exception) -> str:
    cause = one_line(f"{type(error).__name__}: {error}", LONGEST_ERROR)
    return f"the model's processor rejects the image ({cause}); fix it, or remove the row"


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """Gives the images of a split's rows, from the task's own examples."""

    inputs: ImageInputs
    task: Task
    examples: Sequence[Any]
    split: str

    def of(self, images: RowImages) -> str:
        """The row's name in messages."""
        return example_name(self.examples, self.split, images.index)

    def is_as_before(self, images: RowImages) -> bool:
        """Whether a row's images and the processor's settings are the same as when the row was tokenized."""
        return self._current(images)[1] == images

    def pictures(self, images: RowImages) -> tuple[Picture, ...]:
        """Return a row's images; UserError if images or processor settings have changed since the row was tokenized."""
        pictures, row_images = self._current(images)
        if row_images != images:
            raise UserError(f"{self.of(images)}: its images have changed since the start; do not edit files in use")
        return pictures

    def _current(self, images: RowImages) -> tuple[tuple[Picture, ...], RowImages | None]:
        chat = conversation(self.task, self.examples, self.split, images.index)
        chat = chat._replace(images=chat.images[: images.count])
        return chat.images, self.inputs.row(images.index, chat)


@dataclasses.dataclass(frozen=True)
class GivenImages:
    """Gives images that are in no split: those of a prompt, or a blank one."""

    inputs: ImageInputs
    given: tuple[Picture, ...]
    name: str

    def of(self, images: RowImages) -> str:
        """The images' name in messages."""
        return self.name

    def pictures(self, images: RowImages) -> tuple[Picture, ...]:
        """The images."""
        return self.given
