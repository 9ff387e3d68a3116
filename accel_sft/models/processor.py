"""Loads a model's own processor, which turns images into its input."""

from __future__ import annotations

from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.models.source import Source, errors_explained


def load_processor(source: Source, *, model: str, trust_remote_code: bool) -> Any:
    """The processor of a model that reads images.

    Transformers needs torchvision to read videos. Where it is not installed, the processor is made without its part for
    videos, and Pillow reads the images.

    Raises:
        UserError: Pillow is missing, or the model has no processor for images, or one that cannot be used here.
    """
    from transformers import AutoConfig, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available, is_vision_available

    name = source.weights
    shown = model if model == "tiny" else name
    if not is_vision_available():
        raise UserError("the data has images, which need Pillow: pip install 'accel-sft[images]'")
    if has_torchvision := is_torchvision_available():
        try:
            import torchvision  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:  # PyPI's build is for CUDA, and fails without it
            cause = one_line(str(error), LONGEST_ERROR)
            raise UserError(
                f"torchvision is installed and cannot be loaded ({cause}); install the build for this torch, or "
                "uninstall it: images are read without it too"
            ) from error
    with errors_explained(name):
        settings = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        kind: Any = PROCESSOR_MAPPING.get(type(settings), None)
        if kind is None or "image_processor" not in kind.get_attributes():
            raise UserError(f"--model {shown}: it reads no images, and the data has some; name a vision-language model")
        if "video_processor" in kind.get_attributes() and not has_torchvision:
            processor = _without_videos(kind, name, trust_remote_code)
        else:
            processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    if getattr(processor, "image_token", None) is None or not hasattr(processor, "image_token_ids"):
        raise UserError(f"--model {name}: {type(processor).__name__} names no token of an image")
    return processor


def _without_videos(kind: Any, name: str, trust: bool) -> Any:
    """A processor of this kind whose part for videos is None."""
    from transformers import AutoImageProcessor, AutoTokenizer

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else kind.check_argument_for_proper_class(self, name, part)

    images_only: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
    loaders: dict[str, Any] = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
    found = {part: loader.from_pretrained(name, trust_remote_code=trust) for part, loader in loaders.items()}
    parts = [found.get(part) for part in kind.get_attributes()]
    settings, _ = kind.get_processor_dict(name)
    return images_only.from_args_and_dict(parts, settings)
