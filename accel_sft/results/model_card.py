"""Writes the model card, README.md, that is exported beside weights. No torch."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from accel_sft.api.config import LAYOUT
from accel_sft.io.text import markdown_cell, markdown_table
from accel_sft.results.run_report import comparison_table


def model_card(
    *,
    base_model: str,
    adapter: str = "none",
    model_class: str = "AutoModelForCausalLM",
    messages: Sequence[Mapping[str, Any]],
    prompt_end: str,
    eos_ids: Sequence[int],
    max_new_tokens: int,
    left_out: Mapping[str, Any],
    settings: Mapping[str, Any],
    result: Mapping[str, Any],
    asked: Mapping[str, Any],
    **shown: Any,
) -> str:
    """README.md of an exported model: its base, its task, its scores, its data, settings and versions.

    Args:
        base_model: hub id, folder or `tiny`; the metadata names it only if it is a hub id.
        messages: one prompt as it is given to the chat template; empty if the model was trained on raw text.
        prompt_end: text that follows the chat template's text in prompts.
        left_out: arguments of `generate` that switch off the base model's penalties, as in the run's evaluations.
        settings: the run's options; the card omits those that only say how the run was executed.
        asked: the part of the run's record that says how to prompt the model; in the card, it stays with the weights.
        shown: values that the template shows unchanged.
    """
    from huggingface_hub import ModelCard, ModelCardData

    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base_model) and not Path(base_model).exists()
    text_model = model_class == "AutoModelForCausalLM"  # peft has an Auto class only for these models
    metadata = ModelCardData(
        base_model=base_model if on_hub else None,
        library_name="transformers" if adapter == "none" else "peft",
        pipeline_tag="text-generation" if text_model else "image-text-to-text",
        tags=["accel_sft", settings.get("loss", "sft")],
        accel_sft=dict(asked),
    )
    base = f"`{Path(base_model).name}`"
    parts = [part["type"] for turn in messages if isinstance(turn["content"], list) for part in turn["content"]]
    generation: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, **left_out}
    if adapter != "none":
        generation["eos_token_id"] = list(eos_ids)
    template = (Path(__file__).parent / "model_card.md.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    card = environment.from_string(template).render(
        metadata=metadata.to_yaml(),
        what=f"{base}, fine-tuned" if adapter == "none" else f"A {adapter} adapter of {base}, trained",
        adapter=adapter != "none",
        text_model=text_model,
        model="AutoPeftModelForCausalLM" if adapter != "none" and text_model else model_class,
        messages=messages,
        images=parts.count("image"),
        reader="processor" if "image" in parts else "tokenizer",
        ending=f" + {prompt_end!r}" if prompt_end else "",
        generation=generation,
        comparison=comparison_table(result),
        settings=[[key, value] for key, value in settings.items() if key not in LAYOUT and value is not None],
        cell=markdown_cell,
        table=markdown_table,
        fenced=_fenced,
        repr=repr,
        json=lambda value: json.dumps(value, ensure_ascii=False, indent=4),
        arguments=lambda named: "".join(f", {name}={value!r}" for name, value in named.items()),
        **shown,
    )
    return str(ModelCard(card))


_MERGED = (
    (r"library_name: peft", "library_name: transformers"),
    (r"^    load_in_4bit: true\n", ""),
    (r"^A (\w+) adapter of (`.*?`), trained for", r"\2, fine-tuned with a \1 adapter that is merged, for"),
    (r"^from peft import AutoPeftModelForCausalLM$", "from transformers import AutoModelForCausalLM"),
    (r"^from peft import PeftConfig, PeftModel\n", ""),
    (r"^base = PeftConfig.*\n", ""),
    (r"AutoPeftModelForCausalLM\.from_pretrained\(folder\)", "AutoModelForCausalLM.from_pretrained(folder)"),
    (r"PeftModel\.from_pretrained\((\w+)\.from_pretrained\(base\), folder\)", r"\1.from_pretrained(folder)"),
)
"""Patterns of text about peft in an adapter's card, each with its replacement in the card of the merged weights."""


def of_merged(card: str) -> str | None:
    """The card of merged weights, made from the adapter's `card`; None if `model_card` did not write that card."""
    if not re.search(_MERGED[2][0], card, re.M):
        return None
    for before, now in _MERGED:
        card = re.sub(before, now, card, count=1, flags=re.M)
    return card


def _fenced(language: str, code: str) -> str:
    """A block of code, in a fence longer than any run of backticks in the code."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"
