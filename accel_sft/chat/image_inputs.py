"""Uses the model's processor for rows with images: for the tokens that stand for them, and for the model's inputs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import Conversation, conversation
from accel_sft.chat.pictures import Picture
from accel_sft.chat.rendering import Rendered
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.rows.rows import example_name

_OF_TOKENS = ("input_ids", "attention_mask")
_TYPES = "token_type_ids"
"""End of the names of inputs with each token's kind, text or image: `mm_token_type_ids`, `token_type_ids`."""


@dataclasses.dataclass(frozen=True)
class RowImages:
    """The images of a row.

    Attributes:
        count: number of the example's images that the row has; they are the first ones.
        digest: 128 bits of the SHA-256 of the images and of the processor's settings.
        source: gives the images again; None while the row is made.
    """

    count: int
    digest: bytes
    source: ImageSource | None = dataclasses.field(default=None, compare=False, repr=False)


class ImageRow(Protocol):
    """The fields of an Encoded that this module reads."""

    index: int
    input_ids: list[int]
    images: RowImages | None


def no_processor() -> Any:
    """Stands in for a processor where only texts are read: it raises UserError."""
    raise UserError("the data has images, which are not read here")


class ImageInputs:
    """Makes placeholders and inputs from images with the model's own processor, loaded at the first image.

    Args:
        load: gives the processor, or raises UserError.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._written: dict[tuple[int, int], str] = {}

    @functools.cached_property
    def processor(self) -> Any:
        """The processor.

        Raises:
            UserError: the model has none for images, or it cannot be loaded.
        """
        return self._load()

    @functools.cached_property
    def _settings(self) -> bytes:
        images = self.processor.image_processor
        return f"{type(self.processor).__name__} {type(images).__name__} {images.to_json_string()}".encode()

    def row(self, chat: Conversation) -> RowImages | None:
        """What a row keeps of a conversation's images; None if it has none."""
        if not chat.images:
            return None
        digest = hashlib.sha256(self._settings + b"".join(picture.digest.encode() for picture in chat.images))
        return RowImages(len(chat.images), digest.digest()[:16])

    def expanded(self, chat: Conversation, text: Rendered, where: str) -> Rendered:
        """The texts with as many placeholders for each image as it has tokens.

        Raises:
            UserError: the template does not write one placeholder for each image, or an image cannot be used.
        """
        place, pictures = self.processor.image_token, chat.images
        if (places := text.prompt.count(place)) != len(pictures) or place in (text.rest or ""):
            raise UserError(
                f"{where}: the chat template makes {places} placeholders ({place}) of {len(pictures)} images; no text "
                "may have one, and the template must write one for each image"
            )
        written = [self._placeholders(picture, where) for picture in pictures]
        before, *behind = text.prompt.split(place)
        prompt = before + "".join(tokens + then for tokens, then in zip(written, behind, strict=True))
        return text._replace(prompt=prompt)

    def _placeholders(self, picture: Picture, where: str) -> str:
        """What the processor writes for an image. It may depend only on the image's size, which `tensors` checks."""
        try:
            size = (image := picture.opened()).size
            if size not in self._written:
                how = {"add_special_tokens": False, "return_text_replacement_offsets": True}
                made = self.processor(text=[self.processor.image_token], images=[[image]], **how)
                ((replaced,),) = made["text_replacement_offsets"]
                self._written[size] = replaced["replacement"]
        except UserError as error:
            raise UserError(*(f"{where}: {line}" for line in error.problems)) from error
        except Exception as error:  # a processor is the model's own code, and may raise anything
            raise UserError(f"{where}: {picture}: {_refusal(error)}") from error
        return self._written[size]

    def tensors(self, rows: Sequence[ImageRow], shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """The model's inputs besides tokens and mask, for rows padded at the right to this shape (B, T).

        The pixels of all images follow each other in the order of their placeholders, by which the model finds them.

        Raises:
            UserError: an image is gone or was changed, or a row's images make other numbers of tokens than it has.
        """
        pictured = [row for row in rows if row.images]
        pictures = [row.images.source.pictures(row) for row in pictured]
        texts = [self.processor.image_token * len(each) for each in pictures]
        opened = [[picture.opened() for picture in each] for each in pictures]
        how = {"add_special_tokens": False, "padding": True, "return_tensors": "pt"}
        try:
            made = self.processor(text=texts, images=opened, **how)
        except Exception as error:
            named = ", ".join(row.images.source.of(row) for row in pictured)
            raise UserError(f"{named}: {_refusal(error)}") from error
        types = self._types([row.input_ids for row in rows])
        of_rows = [sum(kinds) for row, kinds in zip(rows, types, strict=True) if row.images]
        of_images = [sum(kinds) for kinds in self._types(made["input_ids"].tolist())]
        for row, here, there in zip(pictured, of_rows, of_images, strict=True):
            if here != there:
                raise UserError(f"{row.images.source.of(row)}: its images make {there} tokens, and it has {here}")
        inputs = {}
        for name, value in made.items():
            if name.endswith(_TYPES):
                inputs[name] = np.zeros(shape, dtype=np.int64)
                for number, kinds in enumerate(types):
                    inputs[name][number, : len(kinds)] = kinds
            elif name not in _OF_TOKENS:
                inputs[name] = value.numpy()
        return inputs

    def _types(self, ids: list[list[int]]) -> list[list[int]]:
        """For each token, 1 if it is an image's, else 0."""
        of_images = {*self.processor.image_token_ids}
        return [[int(token in of_images) for token in row] for row in ids]


def _refusal(error: Exception) -> str:
    cause = one_line(f"{type(error).__name__}: {error}", LONGEST_ERROR)
    return f"the model's processor cannot make it input ({cause}); mend it, or take the row out"


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """Gives the images of a split's rows, from the task's own examples."""

    inputs: ImageInputs
    task: Task
    examples: Sequence[Any]
    split: str

    def of(self, row: ImageRow) -> str:
        """The row's name in messages."""
        return example_name(self.examples, self.split, row.index)

    def is_as_before(self, row: ImageRow) -> bool:
        """Whether the row's images, and the processor's settings, are those that it was tokenized with."""
        return self._found(row)[1] == row.images

    def pictures(self, row: ImageRow) -> tuple[Picture, ...]:
        """The row's images.

        Raises:
            UserError: they are not the images that it was tokenized with.
        """
        pictures, found = self._found(row)
        if found != row.images:
            raise UserError(f"{self.of(row)}: its images are others than at the start; leave files alone that train")
        return pictures

    def _found(self, row: ImageRow) -> tuple[tuple[Picture, ...], RowImages | None]:
        chat = conversation(self.task, self.examples, self.split, row.index)
        chat = chat._replace(images=chat.images[: row.images.count])
        return chat.images, self.inputs.row(chat)
