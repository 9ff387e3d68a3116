"""Makes values fit for a record (valid in JSON, without secrets), and reads the versions of libraries. No torch."""

import contextlib
import functools
import importlib.metadata
import math
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from accel_sft.api.options import HIDDEN

_SECRET = re.compile(
    r"(?:^|_)(?:[a-z]*(?:secret|password|passwd|passphrase|credential)s?"
    r"|(?:access|account|admin|[a-z]*api|auth|bearer|client|deploy|encryption|hf|hub|license|master|private|service"
    r"|session|signing|ssh|storage)_?(?:key|token)s?\d*"
    r"|^(?!(?:.*_)?(?:audio|begin|bos|cls|control|end|eos|image|mask|pad|sep|special|start|stop|unk|video)_token)"
    r"(?:.*_)?token(?:_?\d+)?$)(?:_|$)"
)
"""Matches names of secrets, in small letters with _ between words: `hf_token`, not `eos_token` or `max_tokens`."""
_PERHAPS = re.compile(r"(?:^|_)(?:key|token)s?\d*(?:_|$)")
"""Matches names whose value counts as a secret only if it looks random: an `answer_key` is more often a column."""
_RANDOM = re.compile(r"(?=[A-Za-z]*\d)[A-Za-z\d]{16}|[\da-fA-F]{8}-[\da-fA-F]{4}-")
_CONTROL = re.compile(r"<.*>|\[\w+\]")
"""Matches tokens of models: `<|end|>`, `</s>`, `[SEP]`."""
_VARIABLE = re.compile(r"([?&][\w.-]+|\b[A-Z][A-Z0-9_]*)=([^\s&'\"]+)")
"""Matches a variable of a URL's query or of an environment, with its value."""
_IN_TEXT = tuple(
    (re.compile(pattern), shown)
    for pattern, shown in (
        (r"://[^/\s'\"]+@", f"://{HIDDEN}@"),  # user and password, or token, of a URL
        (r"(?i)([?&](?:sig|[\w-]*signature)=)[^\s&'\"]+", rf"\1{HIDDEN}"),  # of a signed URL
        # access tokens, by prefix; file names that begin with hf_ or sk- have no such run of characters
        (r"\b(?:github_pat_|glpat-)[\w-]{16,}", HIDDEN),
        (r"\b(?:hf_|gh[opsru]_|pypi-|sk-)(?=[\w-]*[A-Z\d])[\w-]*?[A-Za-z\d]{16}[\w-]*", HIDDEN),
    )
)
"""Patterns that recognise secrets in any text by their form, each with its replacement."""


def recordable(value: Any, name: str = "") -> Any:
    """Return `value` in a form that JSON can hold. At any depth, HIDDEN replaces a value whose name marks a
    secret, and texts are `masked`."""
    if _is_secret(name, value):
        return HIDDEN
    if isinstance(value, dict):
        return {key: recordable(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [recordable(item, name) for item in value]
    if isinstance(value, str):
        return masked(value)
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _is_secret(name: str, value: Any) -> bool:
    """Whether an option, key or variable of this name has a secret as its value. In a variable of the environment
    or of a URL, KEY always means a secret; elsewhere it may name a column (`answer_key`)."""
    words = re.sub(r"(?<=[a-z\d])(?=[A-Z])|\W", "_", name.lstrip("-?&")).lower()
    if value in (None, "") or not (_SECRET.search(words) or _PERHAPS.search(words)):
        return False
    if isinstance(value, float) or (isinstance(value, str) and _CONTROL.fullmatch(value)):
        return False  # a number per token, or a token of the model
    random = isinstance(value, str) and _RANDOM.search(value)
    return bool(random or _SECRET.search(words) or re.search(r"^[?&]|(?:\b|_)KEYS?\d*(?:\b|_)", name))


def masked(text: str) -> str:
    """`text` with HIDDEN in place of secrets: credentials of a URL, values of variables, access tokens."""
    for secret, shown in _IN_TEXT:
        text = secret.sub(shown, text)
    return _VARIABLE.sub(lambda one: f"{one[1]}={HIDDEN}" if _is_secret(one[1], one[2]) else one[0], text)


def masked_words(words: Sequence[str]) -> list[str]:
    """The words of a command line, `masked`. HIDDEN replaces values of options and variables that name secrets."""
    shown, name = [], ""  # the name of the option whose value comes next
    for word in words:
        flag, equals, value = word.partition("=")
        if _is_secret(name, word):
            shown.append(HIDDEN)
        elif equals and re.fullmatch(r"[\w-]+", flag) and _is_secret(flag, value):
            shown.append(f"{flag}={HIDDEN}")
        else:
            shown.append(masked(word))
        name = flag if flag.startswith("--") and not equals else ""
    return shown


def without_secrets(content: Mapping[str, Any]) -> str | None:
    """A launch file's content as YAML, with HIDDEN for secrets; None if it is empty. Keys about TPUs, whose
    values are command lines and variables, are left out."""
    read = {key: value for key, value in content.items() if not str(key).startswith(("tpu_", "command"))}
    return yaml.safe_dump(recordable(read), sort_keys=False, allow_unicode=True) if read else None


def command_line(words: Sequence[str]) -> str:
    """Return a command line for a shell, with the program's name but not its folder, and without secrets."""
    program, *rest = masked_words(words)
    return shlex.join([Path(program).name, *rest])


@functools.cache
def versions() -> dict[str, str]:
    """Installed versions of what decides a run's numbers: Python, this package and the libraries that it uses."""
    installed = {"python": platform.python_version()}
    for name in ("accel-sft", "torch", "transformers", "tokenizers", "accelerate", "deepspeed", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed
