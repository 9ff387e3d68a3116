"""Looks at a model before it is trained: the files beside its weights, and which of its weights learn."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from accel_sft.api.adapters import names_of
from accel_sft.api.config import TrainConfig
from accel_sft.data.token_store import StoredEncoding
from accel_sft.models.architecture import alike
from accel_sft.models.source import Source
from accel_sft.models.targets import USED_ALONE, in_block, unfit
from accel_sft.models.tokenizer import template_of
from accel_sft.tools.rehearse.stages import FAILS, WARNS, Flaw
from accel_sft.training.prepare import Assembly

_MARKS = re.compile(r"<\|[^<>|\s'\"{}]+\|>|<(?:start|end)_of_[a-z]+>")
"""Marks that are surely control tokens; others, such as `<think>` and `[INST]`, are plain text in some models."""
_TURNS = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def flaws(source: Source, config: TrainConfig) -> Iterator[Flaw]:
    """What is wrong with the files."""
    from transformers import AutoTokenizer

    if config.chat_template is None:
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer, trust_remote_code=config.trust_remote_code)
        tokenizer.chat_template = template_of(tokenizer, source.tokenizer)
        yield from _unknown_marks(tokenizer)


def trained(assembly: Assembly, encodings: Sequence[StoredEncoding], steps: int) -> tuple[str, list[Flaw]]:
    """Load the shrunk model as the run will; return which weights learn and which do not, and what is wrong with it.

    Raises:
        UserError: the settings do not fit the model.
    """
    lines: list[str] = []
    config = assembly.config
    model = assembly.load_model(*encodings, total_steps=steps, log=lines.append)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = sum(not parameter.requires_grad for parameter in model.parameters())
    told = [line for line in lines if line.startswith(("the adapter leaves out", "not trained,", "generation_config"))]
    found = []
    if config.adapter != "none" and assembly.source.adapter is None:
        whole = dataclasses.replace(config, adapter="none")
        plain = Assembly(assembly.accelerator, assembly.task, whole, assembly.source).load_model(*encodings)
        passed_by = set(unfit(plain).get(USED_ALONE, ()))
        adapted = [name.split(".lora_A")[0].removeprefix("base_model.model.") for name in names if "lora_A" in name]
        if idle := [name for name in adapted if name in passed_by]:
            what = f"the adapter of {', '.join(alike(idle))} is passed by: the model reads these weights itself"
            fix = "leave them out of --lora-target-modules: on GPUs they would be trained in vain"
            found.append(Flaw(FAILS, what, fix))
        experts = [name for name, weights in plain.named_parameters() if weights.ndim == 3 and "expert" in name]
        asked, given = (names_of(each) for each in (config.lora_target_modules, config.lora_target_parameters))
        if missed := [n for n in experts if n.rsplit(".", 1)[-1] in asked and not any(map(n.endswith, given))]:
            what = f"--lora-target-modules does not reach {', '.join(alike(missed))}, which are no layers"
            inside = ",".join(dict.fromkeys(name.split(".", 3)[-1] for name in missed))
            found.append(Flaw(WARNS, what, f"--lora-target-parameters {inside} adapts the experts"))
    within = (part if "." in (part := in_block(name)) else name for name in names)
    short = (re.sub(r"\.lora_\w+\.default(\.weight)?$|^base_model\.model\.", "", name) for name in within)
    return "; ".join([f"{', '.join(dict.fromkeys(short))}; {frozen} others are frozen", *told]), found


def _unknown_marks(tokenizer: Any) -> Iterator[Flaw]:
    if not isinstance(tokenizer.chat_template, str):
        return
    written = tokenizer.apply_chat_template(_TURNS, tokenize=False)
    known = {*tokenizer.get_vocab(), *tokenizer.all_special_tokens}
    if lacking := [mark for mark in dict.fromkeys(_MARKS.findall(written)) if mark not in known]:
        pieces = len(tokenizer(lacking[0], add_special_tokens=False)["input_ids"])
        what = f"the chat template writes {', '.join(lacking)}, for which the tokenizer has no token: {lacking[0]}"
        fix = "use the tokenizer that came with the weights, or make them tokens with --chat-template"
        yield Flaw(WARNS, f"{what} is read as {pieces} pieces of text", fix)
