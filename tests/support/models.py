"""Makes small real models and tokenizers, which tests save and load by path."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from accel_sft import Task
from accel_sft.api.config import TrainConfig
from accel_sft.chat.encode import encode_parts
from accel_sft.chat.encoded import Encoding, Rules
from accel_sft.chat.rendering import Rendering
from accel_sft.models.load import load_model
from accel_sft.models.source import find_source
from accel_sft.models.tiny import build_tiny

TEXTS = ["You answer sums.", *(f"{n}=" for n in range(60)), *(f"the answer is {n} + {n}" for n in range(60))]


@dataclass(kw_only=True)
class Sums(Task):
    """A task of a few lines."""

    main_metric = "right"

    def dataset(self, split):
        return list(range(20, 40) if split == "train" else range(40, 47))

    def messages(self, example):
        return [{"role": "system", "content": "You answer sums."}, {"role": "user", "content": f"{example}="}]

    def target(self, example):
        return f"the answer is {example // 2} + {example - example // 2}"

    def score(self, example, text):
        return {"right": float(text == self.target(example))}


@dataclass(kw_only=True)
class Given(Sums):
    """An example is its messages and its target, and what a subclass reads beside them."""

    def messages(self, example):
        return example[0]

    def target(self, example):
        return example[1]


@dataclass(kw_only=True)
class Says(Sums):
    """Examples are their own answers to one question, and right only to the letter."""

    def messages(self, example):
        return [{"role": "system", "content": "Say it."}, {"role": "user", "content": "What?"}]

    def target(self, example):
        return example

    def score(self, example, text):
        return {"right": float(text == example)}


def make_tiny(folder: Path, seed: int = 0) -> Path:
    build_tiny(folder, TEXTS, seed)
    return folder


def with_template(tokenizer, template):
    """A copy of the tokenizer with another chat template."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    return own


def loaded(folder, steps=0, lines=None, *, precision="no", deepspeed=False, **options):
    """The model in a folder as a training of so many steps loads it, or an evaluation; `options` are its settings."""
    config, log = TrainConfig(**options).resolved({}), [].append if lines is None else lines.append
    how = {"precision": precision, "deepspeed": deepspeed, "total_steps": steps, "log": log}
    return load_model(find_source(str(folder)), config, **how)


def encode(tokenizer, task, examples, split, *, eos_ids, max_length, truncation, **more):
    """A split encoded directly and held in memory, as the reference for the token store."""
    rules, whole = Rules(frozenset(eos_ids), max_length, truncation, **more), Encoding(split)
    rendering = Rendering(tokenizer, rules.thinking, rules.day, rules.control_tokens)
    for part in encode_parts(rendering, task, examples, range(len(examples)), split, rules):
        whole.kept.extend(part.kept)
        whole.add(part)
    whole.notes += rendering.notes
    whole.check(len(examples), rules)
    return whole


def make_base(folder: Path, *, tied: bool = True, bos: bool = False, spare: int = 0) -> Path:
    """A pretrained model as they come: no chat template, one control token, `spare` rows above its vocabulary."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", *(["<s>"] if bos else [])]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    if bos:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=special[0], bos_token="<s>" if bos else None)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    ends = {"vocab_size": len(tokenizer) + spare, "tie_word_embeddings": tied, "bos_token_id": None, "eos_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**shape, **heads, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
