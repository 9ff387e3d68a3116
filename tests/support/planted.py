"""A task that reads rows from files, a tokenizer and template that expose every fault, and rows with one fault each."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import GPTNeoXConfig, PreTrainedTokenizerFast

TASK = '''
from dataclasses import dataclass
from accel_sft import RowProblem, Task, option, read_rows

@dataclass(kw_only=True)
class Planted(Task):
    """Answer what is asked."""
    main_metric = "right"
    train_file: str = option(help="Training rows.")
    validation_file: str = option(help="Validation rows.")

    def dataset(self, split):
        return read_rows(getattr(self, f"{split}_file"), parse)

    def messages(self, example):
        ask = example["ask"]
        return ask if isinstance(ask, list) else [{"role": "user", "content": ask}]

    def target(self, example):
        return example["answer"]

    def score(self, example, text):
        if text == "boom":
            raise ValueError("no score for this")
        return {"right": float(text == example["answer"] != "wrong")}

def parse(row):
    if "answer" not in row:
        raise RowProblem("answer", "an answer")
    return row
'''
ENTRY = "planted = accel_sft_planted:Planted"
TEMPLATE = (
    "{{ bos_token * 2 if 'TWICE' in messages[0].content else bos_token }}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ m.content.replace('?', '!') if 'REWRITE' in messages[-1].content else m.content.replace('DROPPED', '') }}\n"
    "{% elif m.role == 'assistant' %}A: {{ m.content.split('</think>')[-1] }}{{ eos_token }}\n"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
MAX_LENGTH = 60


def make_model(folder: Path, *, positions: int = 128, vocabulary: int = 0, template: str = TEMPLATE) -> Path:
    """Write a tokenizer of single characters and a configuration, without weights."""
    pieces = ["<unk>", "<s>", "</s>", "<pad>", *string.printable[:95], "\n", "Ã", "©"]
    spelling = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    spelling.normalizer = normalizers.Replace("\u200b", "")
    spelling.decoder = decoders.Fuse()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelling, **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    GPTNeoXConfig(vocab_size=vocabulary or len(pieces), max_position_embeddings=positions).save_pretrained(folder)
    return folder


def row(ask: str | list, answer: str) -> str:
    return json.dumps({"ask": ask, "answer": answer})


CLEAN = {
    "train": [row(f"What is {n} and {n}?", f"{n + n}") for n in range(8)],
    "validation": [row(f"What is {n} and {n}?", f"{n + n}") for n in range(20, 24)],
}
FAULTS = {
    "train": [
        ("D101", '{"ask": "What is 100?", "answer": '),
        ("D102", '{"ask": "What is 101?"}'),
        ("D201", row([{"role": "user", "content": "102?"}, {"role": "assistant", "content": "102"}], "102")),
        ("D202", row([{"role": "tool", "content": "103"}, {"role": "user", "content": "103?"}], "103")),
        ("D203", row("What is 104?", "REWRITE")),
        ("D204", row("What is 105?", "<think>one hundred</think>105")),
        ("D206", row("What is 106?", " ")),
        ("D207", row(" ", "107")),
        ("D208", row("What is 108?</s>", "108")),
        ("D209", row("What is 109?", "109</s>")),
        ("D210", row("What is 110 of CafÃ©?", "110")),
        ("D211", row("What is 111?", "111 ")),
        ("D213", row("What is DROPPED 111?", "111")),
        ("D217", row("What is 118?\nnan", "118")),
        ("D301", row("What is " + "1" * 60, "112")),
        ("D303", row("What is 113?", "\u200b")),
        ("D305", row("TWICE 114?", "114")),
        ("D306", row("What is 115 \u0436?", "115")),
        ("D401", row("What is 1 and 1?", "2")),
        ("D403", row("What is 3 and 3?", "7")),
        ("D501", row("What is 116?", "wrong")),
    ],
    "validation": [
        ("D404", row("What is 4 and 4?", "8")),
        ("D406", row("What is 6 and 6?", "13")),
        ("D502", row("What is 117?", "boom")),
    ],
}
"""The code of each fault, and a row that has it, by split; `write` appends these rows to the clean ones."""


def write(folder: Path, faults: dict[str, list[tuple[str, str]]]) -> tuple[tuple[str, ...], dict[str, set[str]]]:
    """Write files with these faults; returns the options that name them, and the places of each code."""
    expected: dict[str, set[str]] = {}
    options: list[str] = []
    for split, clean in CLEAN.items():
        file, lines = folder / f"{split}.jsonl", list(clean)
        for number, (code, text) in enumerate(faults.get(split, ())):
            lines += ["", text] if number % 3 == 0 else [text]
            expected.setdefault(code, set()).add(f"{file}:{len(lines)}")
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        options += [f"--{split}-file", str(file)]
    return tuple(options), expected
