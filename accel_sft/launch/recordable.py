"""Makes values fit for a record (valid in JSON, without secrets), and reads the libraries' versions. No torch."""

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

_SECRET = re.compile(r"key|(?<!control.)token|secret|passw|passphrase|credential", re.IGNORECASE)
"""Matches names of secrets, but not --control-tokens, whose value is no secret."""
_COUNT = re.compile(r"tokens", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?i)([\w-]*(?:{_SECRET.pattern})[\w-]*\s*[=: ]\s*)\S.*")
"""A secret within a text of a launch file: `export HF_TOKEN=...`, `--api-key ...`."""
_IN_TEXT = tuple(
    (re.compile(pattern), shown)
    for pattern, shown in (
        (r"://[^/\s'\"]+@", f"://{HIDDEN}@"),  # user and password, or token, of a URL
        (rf"([?&][\w-]*(?i:{_SECRET.pattern})[\w-]*=)[^\s&'\"]+", rf"\1{HIDDEN}"),  # in a URL's query
        (rf"\b([A-Z0-9_]*(?:{_SECRET.pattern.upper()})[A-Z0-9_]*=)[^\s'\"]+", rf"\1{HIDDEN}"),  # HF_TOKEN=...
        # access tokens by their beginning; hf_ and sk- begin names of files too, which have no such run of characters
        (r"\b(?:github_pat_|glpat-)[\w-]{16,}", HIDDEN),
        (r"\b(?:hf_|gh[opsru]_|pypi-|sk-)(?=[\w-]*[A-Z\d])[\w-]*?[A-Za-z\d]{16}[\w-]*", HIDDEN),
    )
)
"""Patterns that recognise secrets in any text by their form, each with what is shown instead."""


def recordable(value: Any, name: str = "") -> Any:
    """Return `value` in a form that JSON can hold. At any depth, HIDDEN replaces a value that is named as a secret,
    except a number of tokens, and texts are `masked`."""
    counts = isinstance(value, (int, float)) and _COUNT.search(name)
    if value is not None and _SECRET.search(name) and not counts:
        return HIDDEN
    if isinstance(value, dict):
        return {key: recordable(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [recordable(item) for item in value]
    if isinstance(value, str):
        return masked(value)
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def masked(text: str) -> str:
    """`text` with HIDDEN for what looks like a secret: credentials of a URL, values of variables, access tokens."""
    for secret, shown in _IN_TEXT:
        text = secret.sub(shown, text)
    return text


def masked_words(words: Sequence[str]) -> list[str]:
    """The words of a command line, `masked`, with HIDDEN for the values of options and variables named as secrets."""
    shown, name = [], ""  # the name of the option whose value comes next
    for word in words:
        flag, equals, value = word.partition("=")
        if name:
            shown.append(HIDDEN if _is_secret(name, word) else masked(word))
            name = ""
        elif equals and _is_secret(flag, value) and re.fullmatch(r"[\w-]+", flag):
            shown.append(f"{flag}={HIDDEN}")
        else:
            shown.append(masked(word))
            name = flag if word.startswith("--") and not equals and _SECRET.search(flag) else ""
    return shown


def _is_secret(name: str, text: str) -> bool:
    return bool(_SECRET.search(name)) and not (_COUNT.search(name) and text.isdecimal())


def without_secrets(content: Mapping[str, Any]) -> str | None:
    """Return a launch file's content as YAML, with HIDDEN for secrets, also within texts; None if it is empty."""

    def within(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: within(item) for key, item in value.items()}
        if isinstance(value, list):
            return [within(item) for item in value]
        return _ASSIGNED.sub(rf"\1{HIDDEN}", value) if isinstance(value, str) else value

    return yaml.safe_dump(within(recordable(dict(content))), sort_keys=False, allow_unicode=True) if content else None


def command_line(words: Sequence[str]) -> str:
    """Return a command line for a shell, with the name of its program but no folder, and without secrets."""
    program, *rest = masked_words(words)
    return shlex.join([Path(program).name, *rest])


@functools.cache
def versions() -> dict[str, str]:
    """Installed versions of what decides a run's numbers: Python, this package and the libraries below it."""
    found = {"python": platform.python_version()}
    for name in ("accel-sft", "torch", "transformers", "tokenizers", "accelerate", "deepspeed", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
