"""What a record may hold: values as JSON has them, no secrets, and the versions of the libraries. No torch."""

import contextlib
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

_SECRET = re.compile(r"key|token|secret|passw|passphrase|credential", re.IGNORECASE)
_COUNT = re.compile(r"tokens", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?i)([\w-]*(?:{_SECRET.pattern})[\w-]*\s*[=: ]\s*)\S.*")
"""A secret within a text of a launch file: `export HF_TOKEN=...`, `--api-key ...`."""


def recordable(value: Any, name: str = "") -> Any:
    """`value` as JSON can hold it, at any depth. What has the name of a secret is left out, of whatever type; a number
    of tokens is none."""
    counts = isinstance(value, (int, float)) and _COUNT.search(name)
    if value is not None and _SECRET.search(name) and not counts:
        return HIDDEN
    if isinstance(value, dict):
        return {key: recordable(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [recordable(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def without_secrets(content: Mapping[str, Any]) -> str | None:
    """A launch file's content as YAML: comments are gone, and what has the name of a secret, within texts too."""

    def masked(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: masked(item) for key, item in value.items()}
        if isinstance(value, list):
            return [masked(item) for item in value]
        return _ASSIGNED.sub(rf"\1{HIDDEN}", value) if isinstance(value, str) else value

    return yaml.safe_dump(masked(recordable(dict(content))), sort_keys=False, allow_unicode=True) if content else None


def command_line(words: Sequence[str]) -> str:
    """A command line for a shell, its program by name alone, without the values of options that name secrets."""
    shown: list[str] = []
    hide = False
    for at, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        secret = flag.startswith("--") and bool(_SECRET.search(flag)) and not _COUNT.search(flag)
        if hide:
            word = HIDDEN
        elif secret and equals:
            word = f"{flag}={HIDDEN}"
        hide = secret and not equals and not hide
        shown.append(word if at else Path(word).name)
    return shlex.join(shown)


def versions() -> dict[str, str]:
    """Installed versions of what decides a run's numbers: Python, this package and the libraries below it."""
    found = {"python": platform.python_version()}
    for name in ("accel-sft", "torch", "transformers", "tokenizers", "accelerate", "deepspeed", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
