"""Makes tiny random vision-language models with their processors, and a task whose messages hold images."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from architectures import HYBRID, SECTIONS, SMALL
from models import Sums
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3ImageProcessorPil, Qwen2VLImageProcessorPil

from accel_sft import option
from accel_sft.models.tiny import train_tokenizer

COLOURS = {"red": (220, 30, 30), "green": (20, 200, 40), "blue": (30, 40, 210), "white": (250, 250, 250)}
SIZES = ((16, 16), (24, 16), (16, 32), (32, 32))
_CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n" + _CONTENT + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
_GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_TEXT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3},
}
_EYES: dict[str, Any] = {"depth": 1, "num_heads": 4, "intermediate_size": 48, "patch_size": 4, "initializer_range": 0.3}
_EYES |= {"hidden_size": 32}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({}, {"embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": ({}, {"out_hidden_size": 32, "fullatt_block_indexes": [0]}),
    "qwen3_vl": ({}, {"out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}),
    "qwen3_5": (
        {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}, "layer_types": HYBRID[:2]}
        | {name: size for name, size in SMALL.items() if name.startswith("linear_")},
        {"out_hidden_size": 32, "num_position_embeddings": 64},
    ),
    "gemma3": (
        {"query_pre_attn_scalar": 8, "sliding_window": 512, "tie_word_embeddings": True},
        {"num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16, "vision_use_head": False},  # as published
    ),
}


def make(folder: Path, family: str, text: dict[str, Any] | None = None, eyes: dict[str, Any] | None = None) -> Path:
    """Write a model of this family with its processor: an image has 4 to 16 tokens, or 4 with Gemma.

    Args:
        text, eyes: other sizes of the language model and of the vision tower; the processor then leaves images as large
            as they are.
    """
    gemma = family == "gemma3"
    named = _GEMMA if gemma else _QWEN
    tokenizer = train_tokenizer([*COLOURS, "You see.", "Which colours are", "What is this?", "It is and"] * 4)
    tokenizer.add_special_tokens({"extra_special_tokens": list(named.values())}, replace_extra_special_tokens=False)
    tokenizer.chat_template = _TEMPLATE.replace(
        "IMAGE", named["boi_token"] if gemma else "<|vision_start|><|image_pad|><|vision_end|>"
    )
    small, large = FAMILIES[family], bool(eyes)
    rotary = {} if gemma else {"rope_parameters": SECTIONS}
    text, eyes = {**_TEXT, **rotary, **small[0], **(text or {})}, {**_EYES, **small[1], **(eyes or {})}
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    if gemma:
        ids = {"boi_token_index": ids["boi_token_id"], "eoi_token_index": ids["eoi_token_id"], **ids}
        ids["mm_tokens_per_image"] = 64 if large else 4
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        text_config={**text, **special, "vocab_size": -len(tokenizer) // 64 * -64},
        vision_config=eyes,
        tie_word_embeddings=gemma,
        **ids,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if gemma:  # the files from which AutoProcessor makes the family's processor
        edge, tokens = (eyes["image_size"], 64) if large else (16, 4)
        Gemma3ImageProcessorPil(size={"height": edge, "width": edge}, image_seq_length=tokens).save_pretrained(folder)
        settings = {"processor_class": "Gemma3Processor", "image_seq_length": tokens}
        (folder / "processor_config.json").write_text(json.dumps(settings))
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | named))
    else:
        edges = {"shortest_edge": 256, "longest_edge": 2**20 if large else 4096}
        Qwen2VLImageProcessorPil(patch_size=eyes["patch_size"], merge_size=2, size=edges).save_pretrained(folder)
    return folder


@dataclass(kw_only=True)
class Colours(Sums):
    """What an image shows, or two; some examples have none."""

    folder: str | None = option(None, help="Images are written there and given by path; without: PIL images.")
    text_too: bool = option(True, help="Whether every fifth example has no image.")
    one_in: int = option(1, help="Of so many examples, one may have images.")

    def dataset(self, split):
        return list(range(0, 20) if split == "train" else range(20, 27))

    def messages(self, example):
        names = self.names(example)
        asked = [{"type": "text", "text": "Which colours are " if len(names) > 1 else "What is "}]
        parts = [part for name in names for part in (self.part(example, name), {"type": "text", "text": " this?"})]
        system = {"role": "system", "content": "You see."}
        if (self.text_too and example % 5 == 3) or example % self.one_in:
            return [system, {"role": "user", "content": f"What is this {names[0]} {example}?"}]
        return [system, {"role": "user", "content": [*asked, *parts]}]

    def names(self, example):
        colours = list(COLOURS)
        return [colours[example % 4], colours[example // 4 % 4]][: 1 + example % 3 // 2]

    def part(self, example, name):
        image = picture(example, name)
        if not self.folder:
            return {"type": "image", "image": image}
        path = Path(self.folder, f"{example}-{name}.png")
        if not path.exists():
            write_picture(image, path)
        return {"type": "image", "path": str(path)}

    def target(self, example):
        return "It is " + " and ".join(self.names(example))


def picture(example: int, name: str) -> Image.Image:
    """An image of one of four sizes in this colour, with a mark that differs for each example."""
    image = Image.new("RGB", SIZES[example % len(SIZES)], COLOURS[name])
    image.putpixel((example % 16, 3), (example, 0, 0))
    return image


def write_picture(image: Image.Image, path: Path) -> None:
    """Write the image atomically, since several ranks may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{os.getpid()}.png")
    image.save(own)
    own.replace(path)


class Kept(list):
    """Examples with a fingerprint: the cache does not read them again while it stays the same."""

    def __init__(self, examples, fingerprint):
        super().__init__(examples)
        self.fingerprint = fingerprint
