"""Makes the row of a blank image, with which a forward without images calls the layers that read images."""

from accel_sft.chat.encoded import Encoded
from accel_sft.chat.image_inputs import GivenImages, ImageInputs, RowImages
from accel_sft.chat.pictures import Picture

_EDGE = 32
"""Pixels of the image's edges. Processors enlarge it if it is too small for them."""


def blank_row(inputs: ImageInputs) -> Encoded:
    """A white image's placeholders, of which nothing is learnt.

    Raises:
        UserError: the model has no processor for images, or it cannot make the image its input.
    """
    import PIL.Image

    picture = Picture(PIL.Image.new("RGB", (_EDGE, _EDGE), "white"))
    images = RowImages(-1, 1, b"", GivenImages(inputs, (picture,), "a blank image"))
    ids = inputs.ids(images)
    return Encoded(-1, ids, len(ids), images=images)
