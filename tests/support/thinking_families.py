"""Tokenizers with the chat templates of families that think, and the modes of `--thinking`."""

from __future__ import annotations

import copy

import pytest
from families import FAMILIES

DAY = "2024-02-29"
MODES = ("off", "template", "keep")
_ALIKE = {"Gemma 3", "Llama 3.2", "Phi-3", "SmolLM3", "EXAONE 4", "Nemotron 3", "MiniMax-M2", "QwQ"}
"""Families whose templates do what those of others do, too."""
NAMES = [pytest.param(name, marks=pytest.mark.long) if name in _ALIKE else name for name in FAMILIES]


def of_family(tokenizer, name):
    """A tokenizer with the family's template and tokens, and the ids that end its answers."""
    family, own = FAMILIES[name], copy.deepcopy(tokenizer)
    own.add_tokens(list(family.special), special_tokens=True)
    own.add_tokens(["<think>", "</think>", "\n\n"])  # two line breaks are one token, as in most vocabularies
    own.eos_token = family.ends[0]
    own.chat_template = family.template
    return own, set(own.convert_tokens_to_ids(list(family.ends)))
