"""Any row, template, setting, launch file, file of a run or checkpoint is taken for what it says, or refused in lines.

Hundreds of inputs, the same ones each time; `pytest -m long tests/faults/test_fuzzing.py` makes 20,000 others.
"""

from __future__ import annotations

import codecs
import copy
import csv
import functools
import gzip
import io
import itertools
import json
import random
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import chats
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from limits import limit
from models import Sums, encode
from places import CONFIGS, STORED_RUNS

from accel_sft import UserError, read_rows
from accel_sft.api.config import TrainConfig
from accel_sft.api.config_file import load_yaml
from accel_sft.api.options import settings as settings_of
from accel_sft.chat.conversation import conversation
from accel_sft.cli.task_command import TaskCommand
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.audit import audit
from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.precision import precision_in_record
from accel_sft.launch.recordable import recordable, without_secrets
from accel_sft.models.source import began_with, find_source
from accel_sft.models.tiny import train_tokenizer
from accel_sft.rows import reading as row_reading
from accel_sft.tools.report import page
from accel_sft.tools.report.runs import read_run
from accel_sft.tracking.metrics_file import MetricsFile
from accel_sft.training.record import _check_unchanged
from accel_sft_chat import Chat
from accel_sft_math import Math
from accel_sft_ner import Ner

EARLIER = STORED_RUNS / "0.1.0"
LONG = pytest.param(3340, marks=[pytest.mark.long, pytest.mark.timeout(1800)])
counts = pytest.mark.parametrize("count", [80, LONG])


# --- odd values, changed JSON, damaged bytes ---

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
    chosen = settings(
        max_examples=count,
        deadline=deadline,
        derandomize=count < 1000,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
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


def rows_in(task: Math | Ner | Chat, path: Path, large: bool = False) -> Sequence[Any] | UserError:
    """The rows of a file (as of a `large` one, which is not held in memory), or the error that refuses it; asserts what
    is promised of either."""
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


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for n in range(60) for text in (f"{n}=", f"{PREFIX}{n} + {n}", '{"name": {}}')])


# --- rows ---

FILES = {".json": None, ".jsonl": None, ".csv": None, ".jsonl.gz": gzip.compress}


@st.composite
def files(draw):
    """A task, a file's suffix, its bytes, and how many rows it has if nothing is wrong with it."""
    task, seeded = draw(st.sampled_from(["math", "ner", "chat", "chat"])), random.Random(draw(st.integers(0, 99)))
    form, rows = draw(st.sampled_from([*chats.FORMS])), []
    for number in range(draw(st.integers(1, 3))):
        good = chats.FORMS[form](chats.chat(number, seeded)) if task == "chat" else good_row(seeded, task)
        rows.append((good, draw(changed(good))))
    suffix = draw(st.sampled_from([".json", ".jsonl", *FILES]))
    if suffix == ".csv":
        text = io.StringIO()
        table = csv.writer(text)
        table.writerow(rows[0][1])
        table.writerows([[*map(str, row.values())] for _, row in rows])
        content = text.getvalue().encode("utf-8", "surrogatepass")
    else:
        lines = [draw(written(row)) for _, row in rows]
        content = b"[" + b",\n".join(lines) + b"]" if draw(st.booleans()) else b"\n".join(lines)
    if draw(st.integers(0, 9)) == 0:
        content, suffix = draw(st.binary()), ".json"
    content = draw(damaged(FILES[suffix](content) if FILES[suffix] else content))
    lines = [json.dumps(row).encode() for row, _ in rows]
    good = content in (b"[" + b",\n".join(lines) + b"]", b"\n".join(lines))
    return task, suffix, content, len(rows) if good else None


@counts
def test_rows(count, tokenizer, tmp_path):
    def check(drawn, large, most, truncation):
        kind, suffix, content, expected = drawn
        path = tmp_path / f"rows{suffix}"
        path.write_bytes(content)
        task = reader(kind, path)
        examples = rows_in(task, path, large)
        if isinstance(examples, UserError):
            assert expected is None, examples
            return
        assert expected in (None, len(examples))
        rules = {"eos_ids": {tokenizer.eos_token_id}, "max_length": most, "truncation": truncation}
        try:
            encoding = encode(tokenizer, task, examples, "validation", **rules)
        except UserError as error:
            one_line_each(error)
            return
        for example in encoding.kept:
            assert 0 < example.supervised_tokens < len(example.input_ids) <= most

    how = st.booleans(), st.sampled_from([8, 30, 200, 4096]), st.sampled_from(["drop", "right", "error"])
    holds(count, st.tuples(files(), *how), lambda drawn: check(*drawn))


def read(task, folder, content):
    path = folder / "rows.json"
    path.write_bytes(content)
    return rows_in(reader(task, path), path)


@pytest.mark.parametrize(("before", "between", "after"), [("\ufeff", "\r\n", "\r\n"), ("\n\n", "\n\n", "\n")])
def test_named_line_is_the_wrong_one(before, between, after, tmp_path):
    lines = [json.dumps(good_row(random.Random(0), "ner")) for _ in range(3)]
    for line, end in itertools.product(range(3), range(1, len(lines[0]), 9)):
        cut = [text[:end] if at == line else text for at, text in enumerate(lines)]
        (problem,) = read("ner", tmp_path, (before + between.join(cut) + after).encode()).problems
        at = before.count("\n") + line * between.count("\n") + 1
        assert problem.startswith(f"{tmp_path}/rows.json:{at}: not JSON at column ")


@pytest.mark.parametrize("task", ["math", "ner"])
def test_megabyte_of_nonsense_and_impossible_names_are_refused(tmp_path, task):
    started, spans = time.perf_counter(), {"x" * 200_000: [[n, 399_999] for n in range(25_000)]}
    large = [b"[" * (1 << 20), b'{"text": ' + b"9" * (1 << 20) + b"}", b"{}\n" * 50_000]
    for content in (*large, json.dumps({"text": "x" * 400_000, "label": {"a": spans}}).encode()):
        assert isinstance(read(task, tmp_path, content), UserError)
    assert time.perf_counter() - started < limit(60)  # a hundredth of that, unless something is not linear
    for name in ("a\0b", "\ud800", "x" * 300):
        with pytest.raises(UserError, match=r"not a file's name|cannot be read"):
            read_rows(name, dict)


# --- chat templates ---

CHATML = ["{% for m in messages %}", "<|im_start|>", "{{ m.role }}", "\n", "{{ m.content }}", "<|im_end|>\n"]
CHATML += ["{% endfor %}", "{% if add_generation_prompt %}", "<|im_start|>assistant\n", "{% endif %}"]
PIECES = [*CHATML, "{% if m.role == 'user' %}", "{% else %}", "{{ m['content'] | trim }}", "{{ eos_token }}", "{{"]
PIECES += ["}}", "{{ messages }}", "{{ messages[0].content }}", "{{ raise_exception('no\nsuch role') }}"]
PIECES += ["{{ 1 / 0 }}", "{{ raise_exception(m) }}", "{{ missing.deeper }}", "{{ m.content[99] }}"]
PIECES += ["{% include 'x' %}", "{% if", "{#", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"]
PIECES += ["{% extends 'x' %}", "{% import 'os' as o %}", "#}", "{%", "{% set x = namespace(n=0) %}"]
PIECES += ["{% set x.n = x.n + 1 %}", "{{ loop.index }}", "{{ lipsum() }}", "{% break %}"]
PIECES += ["{% for i in range(99999) %}{% endfor %}", "{{ 9 ** 9 }}", "{% raw %}", "\0", "\ud800", "{{ '\\ud800' }}"]
PIECES += ["{{ ''.__class__.__mro__ }}", "{{ m.update({'content': 'x'}) }}", "{% generation %}"]
PIECES += ["{% endgeneration %}", "{{ strftime_now('%Y') }}", "{{ m.content.encode() }}"]
PIECES += ["{{ '%s' | format(m.content) }}"]


@st.composite
def templates(draw):
    """ChatML, some of it replaced; or pieces in any order."""
    pieces = [*CHATML] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(pieces)))
        pieces[at : at + draw(st.integers(0, 1))] = [draw(st.sampled_from(PIECES) | texts)]
    return "".join(pieces)


@counts
def test_chat_templates(count, tokenizer):
    own, task, refused = copy.deepcopy(tokenizer), Sums(), set()

    def check(text):
        own.chat_template = text
        rules = {"eos_ids": {own.eos_token_id}, "max_length": 4096, "truncation": "error"}
        try:
            encoding = encode(own, task, [20, 21], "validation", **rules)
        except UserError as error:
            one_line_each(error)
            refused.add(text)
            return
        for example, number in zip(encoding.kept, (20, 21), strict=True):
            assert 0 < example.supervised_tokens < len(example.input_ids)
            assert task.target(number) in own.decode(example.input_ids[-example.supervised_tokens :])

    check("".join(CHATML))
    holds(count, templates(), check)
    assert "".join(CHATML) not in refused


# --- launch files ---

SHIPPED = [yaml.safe_load(path.read_text()) for path in sorted(CONFIGS.glob("*.yaml"))]
REPEATED = ["&x0 [y]", *(f"&x{n + 1} [{', '.join([f'*x{n}'] * 9)}]" for n in range(9))]
"""Lists of which the last one holds the first nine to the ninth times."""
LAUNCH_KEYS = ["num_processes", "mixed_precision", "machine_rank", "deepspeed_config", "tpu_env", "commands", "use_cpu"]
LAUNCH_KEYS += ["debug", f"commands: [{', '.join(REPEATED)}]\nnum_processes: *x9\ntpu_env"]
JSON = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}},
    "bf16": {"enabled": "auto"},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "tensor_parallel": {"autotp_size": 1},
}


@st.composite
def launches(draw):
    """The text of a launch file, and of the DeepSpeed JSON that it names."""
    content = draw(st.sampled_from(SHIPPED).flatmap(changed))
    if named := draw(st.booleans()) and isinstance(content.get("deepspeed_config"), dict):
        content["deepspeed_config"] = {"deepspeed_config_file": "deepspeed.json"}
    text = yaml.safe_dump(content, allow_unicode=draw(st.booleans())).encode("utf-8", "surrogatepass")
    text += draw(yaml_lines(LAUNCH_KEYS)).encode("utf-8", "surrogatepass")
    return draw(damaged(text)), draw(changed(JSON).flatmap(written).flatmap(damaged)) if named else b"{}"


@counts
def test_launch_files(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check(drawn):
        for name, content in zip(("launch.yaml", "deepspeed.json"), drawn, strict=True):
            Path(name).write_bytes(content)
        try:
            launch = launch_of_yaml("launch.yaml")
            findings = audit(TrainConfig(), launch, devices=2)
        except UserError as error:
            one_line_each(error)
            return
        one_line_each(UserError("those are all", *map(str, findings)))
        if not any(finding.level == "error" for finding in findings):
            assert launch.stage in range(4)
            assert launch.precision[0] in ("no", "fp16", "bf16", "fp8")
            assert {launch.offload(what) for what in ("optimizer", "param")} <= {"none", "cpu", "nvme"}
            assert launch.world_size == launch.machines * launch.local_world_size >= launch.shard_ranks > 0
            yaml.safe_load(without_secrets(launch.yaml) or "")
            json.dumps(recordable(launch.json))

    for content in SHIPPED:
        check((yaml.safe_dump(content).encode(), b"{}"))
    holds(count, launches(), check)


# --- settings ---

FLAGS = [setting.flag for setting in settings_of(TrainConfig)]
NAMES = [setting.name for setting in settings_of(TrainConfig)]
OPTION = re.compile(r"--[a-z0-9-]+\b|(unknown option|\S+ is given|not YAML:|expected option names|line \d+:)")
yaml_mappings = st.dictionaries(st.sampled_from([flag[2:] for flag in FLAGS]) | json_values.map(str), json_values)
yaml_texts = yaml_mappings.map(yaml.safe_dump) | yaml_lines([*NAMES, "output-dir"]) | st.text()
yaml_files = yaml_texts.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary()


@counts
def test_config_files_are_settings_or_refused_by_option(count, tmp_path):
    path, command = tmp_path / "config.yaml", TaskCommand("math", Math, summary="")

    def check(drawn):
        content, bom = drawn
        path.write_bytes(bom + content)
        try:
            config = command.read(command.make_context("math", ["--config", str(path)]))[0]
        except UserError as error:
            one_line_each(error, longest=1000)
            options = [line.removeprefix(f"--config {path}: ") for line in error.problems]
            assert all(map(OPTION.match, options)), options
        else:
            assert config.problems() == []

    holds(count, st.tuples(yaml_files, st.sampled_from([b"", codecs.BOM_UTF8])), check)


def test_values_that_hold_themselves_are_refused_at_once(tmp_path):
    path = tmp_path / "config.yaml"
    lines = ["a0: &a0 [x]", *(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(9)), "seed: *a9"]
    lines += ["b0: &b0 {a: b}", *(f"b{n + 1}: &b{n + 1} {{<<: [{', '.join([f'*b{n}'] * 9)}]}}" for n in range(9))]
    path.write_text("\n".join([*lines, "model: *b9", "? *a9\n: 1"]))
    started = time.perf_counter()
    _, problems = load_yaml(str(path), TrainConfig)
    one_line_each(UserError(*problems), longest=1000)
    names = {line.split()[4].rstrip(":") for line in problems}
    assert names == {"unknown", "--seed", "--model"}
    assert time.perf_counter() - started < limit(60)


# --- files of a run ---

RUN = {path.relative_to(EARLIER / "run"): path.read_bytes() for path in (EARLIER / "run").rglob("*.json*")}
RUN = {str(name): content for name, content in RUN.items() if "checkpoints" not in name.parts}
RESULT = {"status": "complete", "task": "math", "steps": 3, "train_seconds": 0.5, "tokens_per_second": 924.0}
RESULT |= {"before": {"accuracy": 0.0, "eval_loss": 5.7}, "after": {"accuracy": 0.5, "eval_loss": 5.0}}
RESULT |= {"main_metric": "accuracy", "memory": {"step": {"predicted": 1.0, "measured": 1.1}}}
RUN["result.json"] = json.dumps(RESULT).encode()


@st.composite
def runs(draw):
    """The files of a run's folder, one or two of which are wrong or missing."""
    files = dict(RUN)
    for name in draw(st.lists(st.sampled_from([*RUN]), min_size=1, max_size=2, unique=True)):
        if name.endswith(".jsonl"):
            lines = draw(changed([*map(json.loads, RUN[name].splitlines())]))
            content = b"\n".join(draw(written(line)) for line in lines)
        else:
            content = draw(changed(json.loads(RUN[name])).flatmap(written))
        files[name] = draw(st.none() | damaged(content) | st.binary(max_size=20))
    return files


@counts
def test_files_of_a_run(count, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    now = {"task_code": None, **json.loads(RUN["run.json"])}
    monkeypatch.chdir(EARLIER)
    monkeypatch.setattr(page, "_template", functools.cache(page._template))

    def resumed():
        run_dir = RunDir(folder)
        run_dir.read_status()
        MetricsFile(run_dir.metrics).rewind(3)
        for line in run_dir.metrics.read_text().splitlines() if run_dir.metrics.exists() else []:
            assert json.loads(line)["step"] <= 3
        for step in (0, 3):
            run_dir.read_samples(step)
        if run_dir.is_run():
            _check_unchanged(run_dir.read_record(), now, run_dir)

    def evaluated():
        if record := RunDir.record_around(str(folder)):
            assert precision_in_record(record) in (None, "no", "bf16", "fp16")
            assert isinstance(began_with(find_source("model"), record), str)

    def check(files):
        for name, content in files.items():
            (folder / name).unlink(missing_ok=True) if content is None else (folder / name).write_bytes(content)
        for read in (lambda: page.render([read_run(folder, "run")], []), evaluated, resumed):
            try:
                read()
            except UserError as error:
                one_line_each(error)

    check(RUN)
    assert (read_run(folder, "run").status, read_run(folder, "run").notes) == ("complete", [])
    holds(count, runs(), check)
