"""Writes the model card, README.md, that is exported beside weights. No torch."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.config import LAYOUT
from accel_sft.io.text import markdown_cell, markdown_table
from accel_sft.results.run_report import comparison_table


def model_card(
    *,
    base_model: str,
    task: str,
    adapter: str = "none",
    model_class: str = "AutoModelForCausalLM",
    messages: Sequence[Mapping[str, Any]],
    template_arguments: Mapping[str, Any],
    prompt_end: str,
    answer_end: str,
    eos_ids: Sequence[int],
    max_new_tokens: int,
    left_out: Mapping[str, Any],
    data: Mapping[str, Any],
    command: str,
    settings: Mapping[str, Any],
    result: Mapping[str, Any],
    versions: Mapping[str, str],
) -> str:
    """README.md of an exported model: its base, its task, its scores, its data, settings and versions.

    Args:
        base_model: hub id, folder or `tiny`; only a hub id is named in the metadata, which takes nothing else.
        model_class: the class of transformers that loads the whole model.
        messages: one prompt as it is given to the chat template, system message included; images are parts. None: the
            model was trained on raw text.
        template_arguments: the template's own variables.
        prompt_end: text that follows the template's text in prompts.
        answer_end: text that follows answers, such as a mark that is no token.
        eos_ids: tokens that end an answer; an adapter's base may know others.
        max_new_tokens: maximum number of tokens of an answer, as in the run's evaluations.
        left_out: arguments of `generate` that leave out the base's penalties, as in the run's evaluations.
        data: counts by name, such as {"training examples": 1798}, files and fingerprint.
        command: the command line that trained.
        settings: the run's options; those that only say how the run was executed are left out.
    """
    from huggingface_hub import ModelCard, ModelCardData

    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base_model) and not Path(base_model).exists()
    metadata = ModelCardData(
        base_model=base_model if on_hub else None,
        library_name="transformers" if adapter == "none" else "peft",
        pipeline_tag="text-generation" if model_class == "AutoModelForCausalLM" else "image-text-to-text",
        tags=["accel_sft", "sft"],
    )
    base = f"`{Path(base_model).name}`"
    what = f"{base}, fine-tuned" if adapter == "none" else f"A {adapter} adapter of {base}, trained"
    trained_with = [[key, value] for key, value in settings.items() if key not in LAYOUT and value is not None]
    generation: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, **left_out}
    if adapter != "none":
        generation["eos_token_id"] = list(eos_ids)
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {markdown_cell(task)}\n\n{what} for the task `{task}` with accel_sft.",
        f"## Usage\n\n{_ASKED if messages else 'It goes on with a text:'}\n\n"
        + _usage(messages, template_arguments, prompt_end, answer_end, generation, adapter, model_class),
        "## Before and after\n\n" + comparison_table(result),
        "## Data\n\n" + markdown_table(["", ""], list(data.items())),
        f"## Command\n\n{_fenced('bash', [command])}",
        "## Settings\n\n" + markdown_table(["setting", "value"], trained_with),
        "## Versions\n\n" + markdown_table(["package", "version"], list(versions.items())),
    ]
    return str(ModelCard("\n\n".join(parts) + "\n"))


_ASKED = "With the messages it was trained on, system message included if there is one:"
_MERGED = (
    (r"library_name: peft", "library_name: transformers"),
    (r"^A (\w+) adapter of (`.*?`), trained for", r"\2, fine-tuned with a \1 adapter that is merged, for"),
    (r"^from peft import AutoPeftModelForCausalLM$", "from transformers import AutoModelForCausalLM"),
    (r"^from peft import PeftConfig, PeftModel\n", ""),
    (r"^base = PeftConfig.*\n", ""),
    (r"AutoPeftModelForCausalLM\.from_pretrained\(folder\)", "AutoModelForCausalLM.from_pretrained(folder)"),
    (r"PeftModel\.from_pretrained\((\w+)\.from_pretrained\(base\), folder\)", r"\1.from_pretrained(folder)"),
)
"""Patterns of what an adapter's card says about peft, each with what the card of the merged weights says instead."""


def of_merged(card: str) -> str | None:
    """The card of merged weights, made from the card of their adapter; None if `model_card` did not write that."""
    if not re.search(_MERGED[1][0], card, re.M):
        return None
    for before, now in _MERGED:
        card = re.sub(before, now, card, count=1, flags=re.M)
    return card


def _usage(
    messages: Sequence[Mapping[str, Any]],
    template_arguments: Mapping[str, Any],
    prompt_end: str,
    answer_end: str,
    generation: Mapping[str, Any],
    adapter: str,
    model_class: str,
) -> str:
    """A Python block that asks one question in plain transformers, or peft."""
    library, model = "transformers", model_class
    imports, base = [], []
    if adapter != "none" and model_class == "AutoModelForCausalLM":
        library, model = "peft", "AutoPeftModelForCausalLM"
    load = f"{model}.from_pretrained(folder)"
    if adapter != "none" and library != "peft":  # peft has no such class for other models
        imports = ["from peft import PeftConfig, PeftModel"]
        base = ["base = PeftConfig.from_pretrained(folder).base_model_name_or_path"]
        load = f"PeftModel.from_pretrained({model}.from_pretrained(base), folder)"
    given = "".join(f", {name}={value!r}" for name, value in template_arguments.items())
    images = [part["type"] for turn in messages if isinstance(turn["content"], list) for part in turn["content"]]
    reader = "processor" if "image" in images else "tokenizer"
    asked = [
        "inputs = tokenizer.apply_chat_template(",
        f'    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"{given}',
        ")",
    ]
    if prompt_end:
        asked = [
            f"prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False{given})",
            f'inputs = tokenizer(prompt + {prompt_end!r}, add_special_tokens=False, return_tensors="pt")',
        ]
    if reader == "processor":
        files = ", ".join(["'image.png'"] * images.count("image"))
        asked = [
            f"prompt = processor.apply_chat_template(messages, add_generation_prompt=True{given})",
            f"asked = {{'text': [prompt{f' + {prompt_end!r}' * bool(prompt_end)}], 'images': [[{files}]]}}",
            'inputs = processor(**asked, add_special_tokens=False, return_tensors="pt")',
        ]
    else:
        asked.append('inputs.pop("token_type_ids", None)')
    chosen = "".join(f", {name}={value!r}" for name, value in generation.items())
    if not messages:
        asked = ['inputs = tokenizer("Once", return_tensors="pt")', 'inputs.pop("token_type_ids", None)']
    lines = [
        *imports,
        f"from transformers import Auto{reader.title()}",
        f"from {library} import {model}",
        "",
        'folder = "."  # this one',
        *base,
        f"model, {reader} = {load}, Auto{reader.title()}.from_pretrained(folder)",
        *([f"messages = {json.dumps(list(messages), ensure_ascii=False, indent=4)}"] if messages else []),
        *asked,
        f"output = model.generate(**inputs{chosen})",
        f'answer = {reader}.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)',
        f"print(answer{f'.removesuffix({answer_end!r})' * bool(answer_end.strip())})",
    ]
    return _fenced("python", lines)


def _fenced(language: str, lines: Sequence[str]) -> str:
    """A block of code, in a fence longer than any run of backticks in the code."""
    fence = "`" * max(3, 1 + max((len(run) for line in lines for run in re.findall("`+", line)), default=0))
    return "\n".join([f"{fence}{language}", *lines, fence])
