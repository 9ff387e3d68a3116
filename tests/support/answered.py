"""A tokenizer that decodes as SentencePiece does, and an evaluation of answers that are given."""

from __future__ import annotations

from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from accel_sft.api.config import TrainConfig
from accel_sft.evaluation.evaluator import Evaluator, Generated


def by_characters() -> PreTrainedTokenizerFast:
    """A tokenizer that decodes as SentencePiece does: an answer's first blank is lost, unknown characters are bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    made = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    blank = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")


class Answered:
    """An answer backend that returns given answers."""

    def __init__(self, generated):
        self.generated = generated

    def __call__(self, examples, max_new_tokens):
        return self.generated


def scored_answers(tokenizer, task, examples, encoded, answers, **settings):
    """What the evaluator makes of token ids that were generated as answers to these examples."""
    config, rows = TrainConfig(**settings).resolved({}), list({row.index: row for row in encoded}.values())
    backend = Answered(Generated(list(zip(rows, answers, strict=True)), 1.0, {}))
    evaluator = Evaluator(Accelerator(cpu=True), tokenizer, task, examples, encoded, config, backend)
    assert evaluator.answered == rows
    return evaluator.score_answers({"eval_loss": 0.0})
