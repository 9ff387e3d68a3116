"""Hypothesis strategies for wrong inputs of every kind: odd values, changed JSON, damaged bytes."""

from __future__ import annotations

import codecs
import copy
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from limits import limit

from accel_sft import UserError
from accel_sft.chat.conversation import conversation
from accel_sft.rows import reading as row_reading
from accel_sft_chat import Chat
from accel_sft_math import Math
from accel_sft_ner import Ner

LONGEST_LINE = 4000
"""Most characters of one line of a refusal, which names some fields and quotes a part of each."""
PREFIX = Math().answer_prefix
# fmt: off
TEXTS = [
    "", " ", "\n", "\0", "\x7f", "\x85", "\ufeff", "\u2028", "\u0301", "\ud800", "\udfff\ud83d", "😀", "\u202e", "a\nb",
    "\r\n", "<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "５=", "２", "²", "-0=", "-1", "1_0=", "1e400",
    "nan", "auto", "off", "9" * 700 + "=", "9" * 5000, PREFIX, PREFIX + "1 +", "{{ messages }}", "e" + "\u0301" * 50,
    "x" * 5000, "[", '[{"role": 1}]', "2001-13-45", "../x",
]
VALUES: list[Any] = [
    None, True, 0, -1, 3.5, 10**30, 1e308, float("nan"), float("-inf"), [], {}, [[]], [[0]], [[0, -1]], [[0, 10**9]],
    [[0, 0], [0, 0]], [[0.0, 1.0]], [["0", "1"]], [[True, False]], {"": {}}, {" ": {"a": [[0, 0]]}},
]
LITERALS = [
    "NaN", "-Infinity", "1e999", "9" * 400, "9" * 5000, "00", "1.", "'a'", "undefined", "nul", '"\\x"', "", '"\\ud800"',
    "[" * 150 + "]" * 150, "[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000, '{"a": 1, "a": 2}',
]
BYTES = [
    codecs.BOM_UTF8, codecs.BOM_UTF16_LE, b"\r\n", b"\r", b"\n", b"\0", b"\xed\xa0\x80", b"\xff", b"\xc3", b"\xe9",
    b"\xc2\xa0", b"\x0c", b"\x1a", b"\t", b",", b"[", b"]", b"{", b"}", b'"', b"\\", b"//",
]
YAML = [
    "", "~", "2001-13-45", "0x" + "f" * 9000, "9" * 400, "9" * 5000, "!!int ''", "!!int x", "!!bool x", "!!float x",
    "0b_", "!!timestamp x", "!!binary '%'", "!!python/name:os.system", "!!set {a}", "&a [*a]", "*a", ".", "[a, b]",
    "[1]", "[[a]]", "[2001-13-45]", "{a: b}", '"\\0"', '"\\ud800"', '"a\\nb"', ".nan", "-.inf", "190:20", "[" * 5000,
    "[" * 500 + "]" * 500, "{a: " * 500 + "}" * 500, "|\n  a\n  b", "'x", "\t", "%", "- a", "=", "<<", "&p\nfp16: *p",
    "NO",
]
YAML_KEYS = [
    "<<", "?", "[a]", "{a: b}", "=", "2001-01-01", "~", "''", '"\\0"', "&a seed", "!!int x", "x" * 3000, "seed ", "- a",
    "\t",
]
# fmt: on
LITERAL = "@literal@"
"""Placeholder in a value for a literal of LITERALS, which `json.dumps` would not write."""

texts = st.sampled_from(TEXTS) | st.text(max_size=9)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=9), part, max_size=3),
    max_leaves=9,
)
values = st.sampled_from(VALUES) | json_values
yaml_values = st.sampled_from(YAML) | st.text(max_size=9) | json_values.map(json.dumps)


def yaml_lines(keys: list[str]) -> st.SearchStrategy[str]:
    """Up to four lines of YAML, whose keys are these or odd."""
    key = st.sampled_from(keys) | st.sampled_from(YAML_KEYS) | st.text(max_size=5)
    pairs = st.lists(st.tuples(key, yaml_values), max_size=4)
    return pairs.map(lambda pairs: "\n".join(f"{key}: {value}" for key, value in pairs))


def holds(count: int, inputs: st.SearchStrategy, check: Any) -> None:
    """Assert that `check` holds for `count` inputs: the same inputs each time if `count` is below 1000."""
    deadline = timedelta(seconds=limit(20))
    chosen = settings(max_examples=count, deadline=deadline, derandomize=count < 1000, database=None)
    chosen = settings(
        chosen, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink], print_blob=True
    )
    chosen(given(inputs)(check))()


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path, as keys and indices, of every part of a value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [*([path] if path else []), *(found for key in keys for found in paths(value[key], (*path, key)))]


@st.composite
def changed(draw, value: Any, most: int = 4) -> Any:
    """The value with up to `most` changes anywhere inside it."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(0, most))):
        if not (there := paths(value)):
            return value
        *way, last = draw(st.sampled_from(there))
        parent: Any = value
        for key in way:
            parent = parent[key]
        how = draw(st.sampled_from(["drop", "rename", "add", "insert", "literal", "text", "value", "value"]))
        if how == "drop":
            del parent[last]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(texts)] = parent.pop(last)
        elif how == "add" and isinstance(parent, dict):
            parent[draw(texts)] = copy.deepcopy(draw(values))  # a copy, since the next change may go into it
        elif how == "insert" and isinstance(parent[last], str):
            at = draw(st.integers(0, len(parent[last])))
            parent[last] = parent[last][:at] + draw(texts) + parent[last][at:]
        else:
            parent[last] = LITERAL if how == "literal" else copy.deepcopy(draw(texts if how == "text" else values))
    return value


@st.composite
def written(draw, value: Any) -> bytes:
    """A value as JSON, or as a text that only looks like JSON."""
    parts = json.dumps(value, ensure_ascii=draw(st.booleans())).split(f'"{LITERAL}"')
    text = parts[0] + "".join(draw(st.sampled_from(LITERALS)) + part for part in parts[1:])
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw, content: bytes, most: int = 2) -> bytes:
    """The content cut, doubled or with a flipped bit, as a broken disk, transfer, editor or merge leaves a file."""
    for _ in range(draw(st.sampled_from([0, 0, 0, *range(most + 1)]))):
        at, end = sorted((draw(st.integers(0, len(content))), draw(st.integers(0, len(content)))))
        bit = bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) if content[at:] else b""
        content = draw(
            st.sampled_from(
                [
                    content[:at] + bit + content[at + 1 :],
                    content[:at],
                    content[:at] + content[end:],
                    content[:at] + content[at:end] * 2 + content[end:],
                    content[:at] + draw(st.sampled_from(BYTES)) + content[at:],
                    content.replace(b"\n", b"\r\n"),
                    codecs.BOM_UTF8 + content,
                    content.decode("utf-8", "replace").encode("utf-16"),
                    content.replace(b'"', b"'"),
                ]
            )
        )
    return content


def one_line_each(error: UserError, begins: str = "", longest: int = LONGEST_LINE) -> None:
    """Assert that each problem of a refusal is one line that begins with `begins` and is not too long."""
    for line in error.problems:
        assert line.startswith(begins), line[:LONGEST_LINE]
        assert len(line.splitlines()) == 1, line[:LONGEST_LINE]
        assert len(line) <= longest, f"{len(line)} characters: {line[:LONGEST_LINE]}"


def good_row(draw: Any, task: str) -> dict[str, Any]:
    """A valid row of the task's files; `draw` is a `random.Random`."""
    if task == "math":
        first, second = draw.randrange(100), draw.randrange(100)
        return {"instruction": f"{first + second}=", "input": "", "output": f"{PREFIX}{first} + {second}"}
    name = draw.choice(["Ada", "王大丫丫", "Zoë", "😀"])
    text = f"{name} in Rome"
    at = text.index("Rome")
    label = {"name": {name: [[0, len(name) - 1]]}, "place": {"Rome": [[at, at + 3]]}}
    return {"text": text, "label": label}


def reader(task: str, path: Path) -> Math | Ner | Chat:
    """A task whose validation rows are the file's."""
    if task == "ner":
        return Ner(train_file=str(path), validation_file=str(path), allow_overlap=True)
    return {"math": Math, "chat": Chat}[task](validation_file=str(path))


def read(task: Math | Ner | Chat, path: Path, large: bool = False) -> Sequence[Any] | UserError:
    """The rows of a file, or the error that refuses it; asserts what is promised of either.

    Args:
        large: read the file as a large one, which is not held in memory.
    """
    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr(row_reading, "IN_MEMORY_BYTES", 0)
        try:
            examples = list(task.dataset("validation"))
        except UserError as error:
            examples = error
    if isinstance(examples, UserError):
        one_line_each(examples)
        named = [line for line in examples.problems if "left out: " not in line]  # that last line names their file
        assert all(line.removeprefix(str(path)).startswith((":", " row")) for line in named), named[:9]
        assert 1 <= len(examples.problems) <= row_reading.MAX_PROBLEMS + 1
        return examples
    assert examples
    for index in range(len(examples)):
        chat = conversation(task, examples, "validation", index)
        assert all(type(turn["content"]) is str for turn in (*chat.turns, chat.answer))
        for text in chat.texts():
            text.encode()  # a lone surrogate could not be encoded
    return examples
