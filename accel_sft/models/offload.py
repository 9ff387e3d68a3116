"""Places a model that is larger than the memory, for answers and scores: parts on the GPU, the host and the disk.

Accelerate's hooks bring each layer's weights to the device for the layer's forward, and drop them after it.
"""

import contextlib
import errno
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from accel_sft.api.errors import UserError, first_line
from accel_sft.io import cache
from accel_sft.io.files import trouble_of_writing
from accel_sft.launch import host_memory
from accel_sft.launch.accelerator import own_folder
from accel_sft.launch.environment import device_count

SHARE = 0.75
"""Share of a GPU's free memory that weights get; the rest is for activations and the KV cache."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PLACES = {"cpu": "in host memory", "disk": "on the disk"}


def refuse(where: str | None, *, ranks: int, quantized: bool) -> None:
    """Raise UserError if a model cannot be offloaded `where` the user asks for; None: nowhere.

    Args:
        ranks: processes of the launch.
        quantized: whether its weights are to be in 4 bits.
    """
    if where is None:
        return
    if ranks > 1:
        raise UserError("--offload: one process places the whole model; start it without accelerate launch")
    if quantized:
        raise UserError("--offload: weights in 4 bits cannot be offloaded; leave it out, or name a model that is not")
    if where == "host" and not device_count():
        raise UserError("--offload host: there is no GPU here, so that all weights are in host memory anyhow; try disk")


def placing(where: str) -> dict[str, Any]:
    """The arguments of `from_pretrained` that place weights on the GPU as far as there is room, then `where` is said.

    Files of safetensors stay where they are. Weights that must be converted as they are read, such as merged experts,
    are written to a folder of the cache that is removed when the process ends.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        folder = {"offload_folder": str(own_folder(_root()))}
    except OSError as error:
        raise UserError(
            f"--offload: the folder {_root()} cannot be used ({error.strerror}); set ACCEL_SFT_CACHE to one that can"
        ) from None
    if not device_count():
        return {"device_map": {"": "disk"}, **folder}
    free = int(SHARE * torch.cuda.mem_get_info()[0])
    host = int(SHARE * host_memory.free_bytes()) if where == "host" else 0
    return {"device_map": "auto", "max_memory": {torch.cuda.current_device(): free, "cpu": host}, **folder}


@contextlib.contextmanager
def room_explained() -> Iterator[None]:
    """Turn a failure to write weights to the folder of `placing` into a UserError that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        written = "serializ" in str(error) if isinstance(error, SafetensorError) else error.errno in _NO_ROOM
        if not written:
            raise
        cause = trouble_of_writing(error, _root()) or first_line(error)
        raise UserError(
            f"--offload: weights that are converted as they are read cannot be written to {_root()}: {cause}, or set "
            "ACCEL_SFT_CACHE to a folder of another disk"
        ) from error


def _root() -> Path:
    return cache.folder() / "offload"


def is_offloaded(model: Any) -> bool:
    """Whether weights come to the device for their forwards only, so that they cannot be read at other times."""
    return hasattr(model, "hf_device_map") and any(parameter.is_meta for parameter in model.parameters())


def placement(model: Any) -> str:
    """A line that says how many of the model's blocks are where."""
    places: dict[str, Any] = model.hf_device_map
    counted: Counter[str] = Counter()
    for name, module in model.named_modules():
        if type(module).__name__ in (model._no_split_modules or ()) and re.search(r"\.\d+$", name):
            above = max((key for key in places if not key or f"{name}.".startswith(f"{key}.")), key=len)
            counted[_PLACES.get(str(places[above]), "on the GPU")] += 1
    return f"offloaded: of {counted.total()} blocks {', '.join(f'{n} {place}' for place, n in counted.items())}"
