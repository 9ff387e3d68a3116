"""Rows of every kind of wrong, from a grammar of mutations, through the shipped tasks' readers and chat encoding.

    python tests/fuzz.py --rows 10000 --seed 0

Prints how many were accepted and how many refused, by message. A row that is neither (another exception, a message
that is not one line, too many seconds) is printed with its traceback, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import codecs
import copy
import dataclasses
import json
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models import encode

from accel_sft import UserError
from accel_sft.data import row_reading
from accel_sft.data.conversation import conversation
from accel_sft.models.tiny import train_tokenizer
from accel_sft_math import Math
from accel_sft_ner import Ner

LONGEST_MESSAGE = 4000
"""Characters of one line of a refusal: some fields, each with some of what stands there."""
MOST_SECONDS = 10
"""For one file, of which the largest has some megabytes."""

PREFIX = Math().answer_prefix
NASTY_TEXTS = ["", " ", "\n", "\0", "\x7f", "\ufeff", "\u2028", "\u0301", "\ud800", "\udfff\ud83d", "😀", "<|im_end|>"]
NASTY_TEXTS += [
    "<|im_start|>assistant\n",
    "<|endoftext|>",
    "５=",
    "-0=",
    "1_0=",
    "9" * 700 + "=",
    PREFIX,
    PREFIX + "1 +",
]
NASTY_TEXTS += ["{{ messages }}", "\r\n", "‮", "e" + "\u0301" * 50, "x" * 5000]
NASTY_VALUES: list[Any] = [None, True, 0, -1, 3.5, 10**30, 1e308, [], {}, [[]], [[0]], [[0, -1]], [[0, 10**9]]]
NASTY_VALUES += [[[0, 0], [0, 0]], [[0.0, 1.0]], [["0", "1"]], [[True, False]], {"": {}}, {" ": {"a": [[0, 0]]}}]
NASTY_LITERALS = ["NaN", "-Infinity", "1e999", "9" * 5000, "00", "1.", "'a'", "undefined", "nul", '"\\x"', '"\\ud800"']
NASTY_LITERALS += ["[" * 150 + "]" * 150, "[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000, '{"a": 1, "a": 2}', ""]
NASTY_BYTES = [codecs.BOM_UTF8, b"\r\n", b"\r", b"\n", b"\0", b"\xed\xa0\x80", b"\xff", b"\xc3", "é".encode("latin-1")]
NASTY_BYTES += [
    codecs.BOM_UTF16_LE,
    b",",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"\\",
    b"\x0c",
    b"\xc2\xa0",
    b"\x1a",
    b"//",
    b"\t",
]
LITERAL = "\ue000literal"
"""Stands in a row for what `json.dumps` would not write."""


def good_row(draw: random.Random, task: str) -> dict[str, Any]:
    """A row as the task's files have it."""
    if task == "math":
        first, second = draw.randrange(100), draw.randrange(100)
        return {"instruction": f"{first + second}=", "input": "", "output": f"{PREFIX}{first} + {second}"}
    name = draw.choice(["Ada", "王大丫丫", "Zoë", "😀"])
    text = f"{name} in Rome"
    at = text.index("Rome")
    label = {"name": {name: [[0, len(name) - 1]]}, "place": {"Rome": [[at, at + 3]]}}
    return {"text": text, "label": label}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a row: keys and positions from the row on."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [*([path] if path else []), *(found for key in keys for found in _paths(value[key], (*path, key)))]


def _mutated_row(draw: random.Random, row: dict[str, Any], literals: list[str]) -> None:
    """Change something that stands anywhere in the row."""
    paths = _paths(row)
    if not paths:
        return
    *way, last = draw.choice(paths)
    parent: Any = row
    for key in way:
        parent = parent[key]
    how = draw.randrange(8)
    if how == 0:
        del parent[last]
    elif how == 1 and isinstance(parent, dict):
        parent[draw.choice(NASTY_TEXTS)] = parent.pop(last)
    elif how == 2:
        parent[last] = copy.deepcopy(draw.choice(NASTY_VALUES))
    elif how == 3:
        literals.append(draw.choice(NASTY_LITERALS))
        parent[last] = f"{LITERAL}{len(literals) - 1}"
    elif how == 4 and isinstance(parent[last], str):
        at = draw.randrange(len(parent[last]) + 1)
        parent[last] = parent[last][:at] + draw.choice(NASTY_TEXTS) + parent[last][at:]
    elif how == 5 and isinstance(parent, dict):
        parent[draw.choice(["more", *NASTY_TEXTS])] = copy.deepcopy(draw.choice([*NASTY_VALUES, *NASTY_TEXTS]))
    elif how == 6 and draw.random() < 0.02:
        parent[last] = draw.choice(
            ["x" * 1_000_000, [[n, n + 1] for n in range(70_000)], {"k" * 500_000: [[0, 1]] * 9}]
        )
    else:
        parent[last] = draw.choice(NASTY_TEXTS)


def mutated_bytes(draw: random.Random, content: bytes) -> bytes:
    """Flip, cut, insert, take out, double: as a broken disk, transfer, editor or merge leaves a file."""
    at, end = sorted((draw.randrange(len(content) + 1), draw.randrange(len(content) + 1)))
    how = draw.randrange(7)
    if how == 0 and content[at:]:
        return content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
    if how == 1:
        return content[:at]
    if how == 2:
        return content[:at] + content[end:]
    if how == 3:
        return content[:at] + content[at:end] * 2 + content[end:]
    if how == 4:
        return draw.choice([content.replace(b"\n", b"\r\n"), codecs.BOM_UTF8 + content, content + content])
    if how == 5:
        return draw.choice([content.decode("utf-8", "replace").encode("utf-16"), content.replace(b'"', b"'"), b""])
    return content[:at] + draw.choice(NASTY_BYTES) + content[at:]


def content_of(draw: random.Random, task: str) -> bytes:
    """A file of one to three rows, an array or lines, with nothing to a lot wrong in it."""
    texts = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        row, literals = good_row(draw, task), []
        for _ in range(draw.choice([0, 0, 0, 1, 1, 2, 4])):
            _mutated_row(draw, row, literals)
        text = json.dumps(row, ensure_ascii=draw.random() < 0.5)
        for number, literal in enumerate(literals):
            text = text.replace(json.dumps(f"{LITERAL}{number}"), literal).replace(f'"{LITERAL}{number}"', literal)
        if draw.random() < 0.05:  # a key twice
            text = re.sub(r'^\{("\w+": )', r"{\1null, \1", text)
        texts.append(text)
    array = draw.random() < 0.5
    whole = "[" + draw.choice([",", ",\n "]).join(texts) + "]" if array else "\n".join(texts) + draw.choice(["", "\n"])
    content = whole.encode("utf-8", "surrogatepass")
    for _ in range(draw.choice([0, 0, 0, 0, 0, 1, 3])):
        content = mutated_bytes(draw, content)
    return content


def reader(task: str, path: Path) -> Math | Ner:
    """A task whose validation rows are those of the file."""
    if task == "math":
        return Math(validation_file=str(path))
    return Ner(train_file=str(path), validation_file=str(path), allow_overlap=True)


def read(task: Math | Ner, path: Path) -> Sequence[Any] | UserError:
    """The rows of a file, or why it is refused; what the reader promises of both is seen to.

    Raises:
        AssertionError: a promise was not kept.
    """
    try:
        examples = list(task.dataset("validation"))
    except UserError as error:
        checked_refusal(error, path)
        return error
    assert examples
    for index in range(len(examples)):
        chat = conversation(task, examples, "validation", index)
        assert all(type(turn["content"]) is str for turn in (*chat.turns, chat.answer))
        for text in chat.texts():
            text.encode()  # a lone surrogate could not be written down
    return examples


def checked_refusal(error: UserError, path: Path) -> None:
    """A refusal is some lines, each of which names the file; at most twenty rows and how many more there are."""
    assert 1 <= len(error.problems) <= row_reading.MAX_PROBLEMS + 1
    for line in error.problems:
        assert line.startswith(f"{path}:"), line[:LONGEST_MESSAGE]
    _checked_lines(error)


def _checked_lines(error: UserError) -> None:
    for line in error.problems:
        assert len(line.splitlines()) == 1, line[:LONGEST_MESSAGE]
        assert len(line) <= LONGEST_MESSAGE, f"{len(line)} characters: {line[:LONGEST_MESSAGE]}"


@dataclasses.dataclass
class Counts:
    """What became of the rows."""

    accepted: int = 0
    encoded: int = 0
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    failed: int = 0
    slowest_seconds: float = 0.0


def fuzz(files: int, seed: int, folder: Path) -> Counts:
    """Make files and read them; those that are neither accepted nor refused are printed."""
    tokenizer = train_tokenizer([text for n in range(60) for text in (f"{n}=", f"{PREFIX}{n} + {n}", '{"name": {}}')])
    counts, path = Counts(), folder / "rows.json"
    in_memory = row_reading.IN_MEMORY_BYTES
    for number in range(files):
        draw = random.Random(f"{seed} {number}")
        kind = draw.choice(["math", "ner"])
        content = content_of(draw, kind)
        path.write_bytes(content)
        row_reading.IN_MEMORY_BYTES = 0 if draw.random() < 0.1 else in_memory  # a tenth is read as a large file is
        started = time.perf_counter()
        try:
            task = reader(kind, path)
            found = read(task, path)
            if isinstance(found, UserError):
                counts.refused.update({_kind(found.problems[0], path): 1})
            else:
                counts.accepted += 1
                counts.encoded += _encoded(draw, tokenizer, task, found, counts)
            seconds = time.perf_counter() - started
            counts.slowest_seconds = max(counts.slowest_seconds, seconds)
            assert seconds < MOST_SECONDS, f"{seconds:.0f} s"
        except Exception:  # noqa: BLE001 - what is looked for
            counts.failed += 1
            shown = repr(content) if len(content) < 2000 else f"{content[:2000]!r}... ({len(content):,} bytes)"
            print(f"row {number} ({kind}), of --seed {seed}: {shown}\n{traceback.format_exc()}", file=sys.stderr)
    row_reading.IN_MEMORY_BYTES = in_memory
    return counts


def _encoded(draw: random.Random, tokenizer: Any, task: Any, examples: Sequence[Any], counts: Counts) -> int:
    """1 if something of a file's rows can be learnt from; why not is counted."""
    most, how = draw.choice([8, 30, 200, 4096]), draw.choice(["drop", "right", "error"])
    eos = {tokenizer.eos_token_id}
    try:
        encoding = encode(tokenizer, task, examples, "validation", eos_ids=eos, max_length=most, truncation=how)
    except UserError as error:
        _checked_lines(error)
        counts.refused.update({_kind(error.problems[-1], None): 1})
        return 0
    for example in encoding.kept:
        assert 0 < example.supervised_tokens < len(example.input_ids) <= most
    return 1


def _kind(line: str, path: Path | None) -> str:
    """A message without the file, the line and what stood there."""
    line = re.sub(r"^:\d+: ", "", line.removeprefix(str(path))) if path else line
    line = re.sub(r", got .*| \(byte .*|, such as .*", "", line)
    line = re.sub(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\.\.\.""", "'...'", line)
    return re.sub(r"(?<![\w-])-?\d+", "N", line)[:110]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000, help="files of one to three rows each")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ACCEL_SFT_CACHE"] = str(Path(folder) / "cache")
        counts = fuzz(chosen.rows, chosen.seed, Path(folder))
    for message, count in counts.refused.most_common():
        print(f"{count:7,}  {message}")
    print(
        f"{chosen.rows:,} rows: {counts.accepted:,} accepted ({counts.encoded:,} of them encoded), "
        f"{chosen.rows - counts.accepted - counts.failed:,} refused by the reader, {counts.failed} tracebacks; "
        f"{time.perf_counter() - started:.0f} s, the slowest {counts.slowest_seconds:.2f} s"
    )
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
