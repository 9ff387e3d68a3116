"""The key of a split's tokens in the cache: a hash of everything that decides them."""

import datetime
import hashlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import conversation
from accel_sft.chat.encode import encode_parts
from accel_sft.chat.encoded import Rules
from accel_sft.rows.fingerprint import code_fingerprint


def token_key(decided: list[Any], task: Task, examples: Sequence[Any], split: str, *, read: bool) -> str:
    """A split's key: the first 32 hex digits of a SHA-256, which are enough to be unique.

    For the examples it hashes the fingerprints of the sequence and of the task's code if both are known, else every
    message and target.

    Args:
        decided: what `decided_without_examples` gave.
        read: hash every message and target even if the fingerprints are known.
    """
    of_datasets = type(examples).__module__.partition(".")[0] == "datasets"
    fingerprint = getattr(examples, "_fingerprint" if of_datasets else "fingerprint", None)
    code = code_fingerprint(task) if fingerprint and isinstance(fingerprint, str) and not read else None
    content = hashlib.sha256(f"{fingerprint} {code}".encode() if code else b"")
    if not code:
        for index in range(len(examples)):
            content.update(json.dumps(conversation(task, examples, split, index), default=repr).encode())
    parts = [decided, len(examples), content.hexdigest()]
    return _sha256(json.dumps(parts, sort_keys=True).encode())[:32]


def decided_without_examples(tokenizer: Any, rules: Rules) -> list[Any]:
    """Return everything besides the examples that decides tokens, as JSON can hold it."""
    own = code_fingerprint(encode_parts)
    if own is None:  # without it, tokens that an earlier version made would be used
        raise UserError("accel_sft's own files cannot all be read, or are not plain files; install it again")
    cls, template = type(tokenizer), json.dumps(tokenizer.chat_template)
    model_code = None
    if not cls.__module__.startswith("transformers."):  # the tokenizer's code came with the model
        model_code = _files(Path(sys.modules[cls.__module__].__file__ or "").parent.glob("*.py"))
    return [
        {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")},
        own,
        [cls.__qualname__, model_code, _vocabulary(tokenizer), tokenizer.eos_token_id],
        [template, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}],
        getattr(tokenizer, "split_special_tokens", None),
        (rules.day or datetime.date.today().isoformat()) if "strftime_now" in template else None,  # as in Llama's
        [sorted(rules.eos_ids), rules.max_length, rules.truncation, rules.thinking, rules.control_tokens],
    ]


def _vocabulary(tokenizer: Any) -> str:
    if getattr(tokenizer, "is_fast", False):
        return _sha256(tokenizer.backend_tokenizer.to_str().encode())
    with tempfile.TemporaryDirectory() as folder:  # a tokenizer in Python: its saved files decide the tokens
        tokenizer.save_pretrained(folder)
        return _files(Path(folder).rglob("*"))


def _files(paths: Iterable[Path]) -> str:
    return _sha256(b"".join(path.name.encode() + path.read_bytes() for path in sorted(paths) if path.is_file()))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
