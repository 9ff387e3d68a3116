"""Builds the model `tiny`: a Qwen2 of about a million parameters, with a tokenizer made from the training text."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import conversation
from accel_sft.io.text import common_length

TINY_DEFAULTS: dict[str, Any] = {
    "learning_rate": 2e-3,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "global_batch_size": 64,
    "max_length": 512,
}
"""Defaults of training settings for `tiny`, which starts from random weights: the learning rate for a pretrained model
would be a hundred times too small."""

TINY_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "rope_theta": 100.0,
}
"""Arguments of Qwen2Config for the tiny model; the size of its vocabulary comes from the data.

With the usual `rope_theta` of 10,000, most of the 16 rotary angles would hardly change over such short rows, and the
model would take longer to learn copying."""
TINY_VOCABULARY = 1024
"""Approximate number of tokens in the tiny model's vocabulary."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CHARACTER_SCRIPTS = r"\p{Han}\p{Hiragana}\p{Katakana}"
_PIECES = rf"\p{{N}}|[{_CHARACTER_SCRIPTS}]|[\p{{L}}&&[^{_CHARACTER_SCRIPTS}]]{{1,64}}| ?[^\s\p{{L}}\p{{N}}]{{1,64}}|\s"
"""Matches a piece of text, of at most 64 letters: BPE training time grows with the square of a piece's length."""
_MAX_LENGTH = 4096
_MAX_TEXT = 1 << 14
"""The tokenizer is made from at most this many characters of each text; much longer rows are left out anyway."""
_MAX_EXAMPLES = 1 << 13
"""The tokenizer is made from at most this many examples; more would hardly change it, and would slow every start."""
_MAX_CHARACTERS = 4096
_MAX_MERGES = 768
_MERGE_SHARE = 0.01
_MIN_COUNT = 4
_OPENING_SHARE = 0.1
_OPENING_CHARACTERS = 6


def texts_of(task: Task, examples: Sequence[Any]) -> list[str]:
    """Return all texts of the examples or, if there are too many examples, of a sample spread over them."""
    some = range(0, len(examples), -(-len(examples) // _MAX_EXAMPLES))
    return [text for index in some for text in conversation(task, examples, "train", index).texts()]


def build_tiny(directory: Path, texts: Sequence[str], seed: int) -> None:
    """Write model and tokenizer to `directory`, from which transformers' `from_pretrained` loads them.

    The result depends only on `seed` and `texts` (of the training examples); torch's global random state is kept.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if not any(texts):
        raise UserError("--model tiny: its tokenizer is made from the training text, and there is none; check the task")
    tokenizer = train_tokenizer(texts)
    config = Qwen2Config(
        **TINY_SHAPE,
        max_position_embeddings=_MAX_LENGTH,
        initializer_range=0.06,  # near 1 / sqrt(hidden_size); the usual 0.02 suits wide models and slows learning
        vocab_size=-len(tokenizer) // 64 * -64,
        use_sliding_window=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype=torch.float32,
    )
    # torch.manual_seed would also reseed every GPU, and fork_rng(devices=[]) does not restore GPU states.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def train_tokenizer(texts: Sequence[str]) -> Any:
    """Return a small byte-level BPE that makes copying easy: varying text is spelt out, constant text is one token.

    Each digit and each Chinese or Japanese character is one token, so that positions can be counted. Words and runs of
    punctuation become one token only if many texts have them, so that new names are spelt with well-trained tokens. An
    opening that many texts share (the system prompt, an answer's fixed prefix) is one token. Characters that are not in
    `texts` become their UTF-8 bytes, so any text in Unicode's NFC round-trips.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    openings = common_openings(texts)
    opening = re.compile("|".join([*map(re.escape, openings), ""]))  # matches a text's longest opening
    corpus = [opening.sub("", text, count=1)[:_MAX_TEXT] for text in sorted(set(texts))]
    characters, merges = _characters_and_merges(corpus)
    pairs: dict[tuple[str, str], None] = {}  # an ordered set
    for char in characters:
        spelt = _bytes_as_text(char)
        pairs.update({(spelt[:end], spelt[end]): None for end in range(1, len(spelt))})
    pairs.update({(_bytes_as_text(left), _bytes_as_text(right)): None for left, right in merges})
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in pairs:
        vocabulary.setdefault(left + right, len(vocabulary))
    kind: Any = Qwen2Tokenizer  # it takes more arguments than are annotated
    tokenizer = kind(
        vocab=vocabulary,
        merges=list(pairs),
        unk_token=None,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_LENGTH,
    )
    tokenizer.add_tokens([AddedToken(opening, normalized=False) for opening in openings])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _characters_and_merges(corpus: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the frequent characters, which get tokens of their own, and the merges that occur often enough."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    frequency = max(_MIN_COUNT, int(_MERGE_SHARE * len(corpus)))
    corpus = [*corpus, *["system user assistant"] * frequency]
    counts = Counter(char for text in corpus for char in text)
    # The trainer breaks ties between equally frequent characters by hash order, which differs between processes.
    characters = sorted(counts, key=lambda char: (-counts[char], char))[:_MAX_CHARACTERS]
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=len(characters) + _MAX_MERGES,
        min_frequency=frequency,
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    draft.train_from_iterator(corpus, trainer)
    return characters, json.loads(draft.to_str())["model"]["merges"]


def _bytes_as_text(text: str) -> str:
    """Return a text's UTF-8 bytes as the printable characters with which byte-level BPE writes them (a space is Ġ)."""
    from tokenizers import pre_tokenizers

    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in spell.pre_tokenize_str(text))


def common_openings(texts: Sequence[str]) -> list[str]:
    """Return openings that at least 4 texts and a tenth of all share, longest first, without digits at their end."""
    from tokenizers import decoders

    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:_OPENING_CHARACTERS], []).append(text)
    enough = max(_MIN_COUNT, _OPENING_SHARE * len(texts))
    shared = (group[0][: common_length(group)] for group in groups.values() if len(group) >= enough)
    trimmed = {re.sub(r"\d+$", "", opening) for opening in shared}
    # Added tokens go through the byte-level decoder too, which reads a token of only Latin-1 letters as bytes.
    decode = decoders.ByteLevel().decode
    usable = [text for text in trimmed if len(text) >= _OPENING_CHARACTERS and decode([text]) == text]
    return sorted(usable, key=lambda opening: (-len(opening), opening))
