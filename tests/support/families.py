"""Chat templates, written for the tests, that behave like those of model families; tokenizers with them."""

from __future__ import annotations

import copy
import dataclasses

import pytest

DAY = "2024-02-29"
MODES = ("off", "template", "keep")
"""The modes of `--thinking`."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's chat template.

    Attributes:
        special: the special tokens that it uses.
        ends: the tokens that end an answer.
        stop: the token that should be learnt as the end; "" for the first of `ends`.
    """

    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    stop: str = ""

    @property
    def learnt_end(self) -> str:
        return self.stop or self.ends[0]


CHATML = ("<|im_start|>", "<|im_end|>")


def _chatml(assistant: str, prompt: str = "") -> Family:
    return Family(
        "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% else %}<|im_start|>assistant\n" + assistant + "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + prompt + "{% endif %}",
        CHATML,
        ("<|im_end|>",),
    )


_THOUGHT = (  # takes thinking from its own field, or from a block at the beginning of the content
    "{% set content, thought = m.content, '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
_CLOSED_IF_OFF = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
_OPENED_UNLESS_OFF = (
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"
)

FAMILIES = {
    "Qwen2.5": _chatml("{{ m.content }}"),
    "Qwen3": _chatml(_THOUGHT + "<think>\n{{ thought.strip() }}\n</think>\n\n{{ content }}", _CLOSED_IF_OFF),
    "Qwen3.5": _chatml(_THOUGHT + "<think>\n{{ thought.strip() }}\n</think>\n\n{{ content }}", _OPENED_UNLESS_OFF),
    "GLM-4.5": Family(
        "[gMASK]<sop>{% for m in messages %}{% if m.role != 'assistant' %}<|{{ m.role }}|>\n{{ m.content }}"
        "{% if m.role == 'user' and enable_thinking is defined and not enable_thinking %}/nothink{% endif %}"
        "{% else %}<|assistant|>" + _THOUGHT + "{% if thought %}\n<think>{{ thought.strip() }}</think>"
        "{% else %}\n<think></think>{% endif %}\n{{ content.strip() }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>"
        "{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}{% endif %}",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
        ("<|endoftext|>",),
    ),
    "gpt-oss": Family(
        "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>"
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if 'thinking' in m %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
        "{% else %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        ("<|return|>",),
    ),
    "DeepSeek-R1": Family(
        "<|bos|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "<|User|>{{ m.content }}{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        ("<|bos|>", "<|User|>", "<|Assistant|>", "<|eos|>"),
        ("<|eos|>",),
    ),
    "DeepSeek-V3.1": Family(
        "<|bos|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "<|User|>{{ m.content }}{% else %}<|Assistant|></think>{{ m.content.split('</think>', 1)[-1] }}<|eos|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>"
        "{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
        ("<|bos|>", "<|User|>", "<|Assistant|>", "<|eos|>"),
        ("<|eos|>",),
    ),
    "Gemma 2": Family(
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
        ("<eos>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "Gemma 3": Family(
        "<bos>{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first, rest = '', messages %}{% endif %}"
        "{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
        ("<eos>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "Gemma 4": Family(
        "<bos>{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n"
        "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}{% endif %}",
        ("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        ("<turn|>",),
    ),
    "Mistral v0.3": Family(
        "<s>{% if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'user' %}"
        "{% if loop.last and system is defined %}[INST] {{ system + '\n\n' + m.content }}[/INST]"
        "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        ("</s>",),
    ),
    "Llama 3.2": Family(
        "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% else %}"
        "{% set day = '26 Jul 2024' %}{% endif %}<|begin|><|head|>system<|/head|>\n\nToday Date: {{ day }}\n\n"
        "{% if messages[0].role == 'system' %}"
        "{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}<|eot|>{% for m in messages %}"
        "<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}",
        ("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"),
        ("<|eot|>",),
    ),
    "SmolVLM": Family(
        "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}:"
        "{% for line in m.content %}{% if line.type == 'text' %} {{ line.text }}{% elif line.type == 'image' %}<image>"
        "{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
        ("<|im_start|>", "<image>", "<end_of_utterance>"),
        ("<end_of_utterance>",),
    ),
    "Granite 3.3": Family(
        "{% if messages[0].role != 'system' %}<|start_of_role|>system<|end_of_role|>You are Granite.<|end_of_text|>\n"
        "{% endif %}{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
        "{% if loop.last and add_generation_prompt %}<|start_of_role|>assistant"
        '{% if thinking %} {"thinking": true}{% endif %}<|end_of_role|>{% endif %}{% endfor %}',
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        ("<|end_of_text|>",),
    ),
}
_ALIKE = {"Gemma 3", "Llama 3.2"}
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
