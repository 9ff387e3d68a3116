"""What a multimodal model's vision tower takes: its sizes from config.json, and the bytes of its activations."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """A vision transformer.

    Attributes:
        width, inner: elements of a patch's hidden state, and in the feed-forward.
        depth: number of blocks.
        values: number of pixel values of a patch, colours and frames included; 0 if not known.
    """

    width: int
    inner: int
    depth: int
    values: int

    @property
    def parameters(self) -> int:
        """About how many parameters the blocks have: attention and a feed-forward of two matrices in each."""
        return self.depth * (4 * self.width**2 + 2 * self.width * self.inner)


def tower(vision: Mapping[str, Any]) -> Tower | None:
    """The tower of config.json's vision part, as Qwen, CLIP and SigLIP name its sizes; None where they are absent."""

    def first(*names: str, otherwise: int = 0) -> int:
        found = next((vision[name] for name in names if vision.get(name)), otherwise)
        return int(found[0] if isinstance(found, (list, tuple)) else found)

    width, depth = first("embed_dim", "hidden_size"), first("depth", "num_hidden_layers")
    if not width or not depth:
        return None
    share = vision.get("mlp_ratio") or (0 if vision.get("intermediate_size") else 4)
    inner = int(width * share) or first("intermediate_size")
    frames = first("temporal_patch_size", otherwise=2 if "spatial_merge_size" in vision else 1)
    colours = first("in_channels", "in_chans", "num_channels", otherwise=3)
    return Tower(width=width, inner=inner, depth=depth, values=colours * frames * first("patch_size") ** 2)


_KEPT = {"qwen2_vl": (22, 6, 14), "qwen2_5_vl": (30, 8, 18), "qwen3_vl": (22, 4, 15), "": (16, 4, 7)}
"""Bytes that a trained block keeps for each element of `width` and of `inner`, and what surrounds the blocks keeps for
each of `width`, by family, in half precision. The last line is SigLIP's and CLIP's. Counted with torch's profiler at
widths of 256 and 512."""
_FLOAT32_STREAM = 8
"""Bytes for each element of `width` that a block of SigLIP or CLIP keeps besides where autocast computes from float32
weights: positions, which are added in float32, make its residual stream float32. Qwen's stays in half precision."""
_PASSING = {"qwen2_vl": 34, "qwen2_5_vl": 36, "qwen3_vl": 42}
"""Bytes for each element of `width` that a frozen tower holds at once, rotations in float32 mostly."""
_ANGLES = 512
"""Bytes of a patch's rotation in float32."""
PIXEL = 4
"""Bytes of a pixel value, as the processor gives it."""


def tower_bytes(
    family: str, eyes: Tower | None, pixels: int, blocks: int, *, itemsize: int, autocast: bool, recomputed: bool
) -> tuple[float, float]:
    """Bytes that a tower keeps for the backward, and those that it holds at once in its forward, pixels included.

    Args:
        family: the model's `model_type`.
        pixels: pixel values of all images of a forward.
        blocks: how many of the tower's last blocks a gradient goes through; 0: it is frozen, and keeps nothing.
        itemsize: bytes of one element in the computing type.
        autocast: whether autocast computes in it from weights in float32.
        recomputed: whether blocks' activations are computed again in the backward.
    """
    held = float(PIXEL * pixels)
    if eyes is None or not eyes.values:
        return held, held
    patches, double = pixels / eyes.values, 2 if itemsize == 4 else 1
    of_width, of_inner, around = (double * each for each in _KEPT.get(family, _KEPT[""]))
    if autocast and family not in _KEPT:
        of_width += _FLOAT32_STREAM
    block = of_width * eyes.width + of_inner * eyes.inner
    kept = 0.0
    if blocks:
        whole = block + blocks * eyes.width * (4 if autocast else itemsize) if recomputed else blocks * block
        kept = patches * (whole + around * eyes.width) + (itemsize * eyes.parameters if autocast else 0)  # cast weights
    most = _PASSING[family] * eyes.width + _ANGLES if family in _PASSING else 8 * eyes.width + 4 * eyes.inner
    cast = 0 if autocast or itemsize == 4 else itemsize * eyes.values
    return held + kept, held + max(kept, patches * (double * most + cast))
