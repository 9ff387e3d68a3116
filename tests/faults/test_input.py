"""Whatever the bytes of a data file and the values of a configuration are: what they say, or one clear line each."""

from __future__ import annotations

import codecs
import json
import os
import random
import re
import time
from pathlib import Path

import click
import odd_input
import pytest
import yaml
from conftest import accel_sft
from fake_plugins import install
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limits import limit
from odd_input import PREFIX, good_row, json_values

from accel_sft import UserError, read_rows
from accel_sft.api.config import TrainConfig
from accel_sft.api.config_file import load_yaml
from accel_sft.api.options import settings as settings_of
from accel_sft.cli.task_command import TaskCommand
from accel_sft_math import Math

LAW = settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
FLAGS = [setting.flag for setting in settings_of(TrainConfig)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("input") / "rows.json"


def read(task, path, content):
    """What `odd_input.read` gives of a file with this content."""
    path.write_bytes(content)
    return odd_input.read(odd_input.reader(task, path), path)


draws = st.integers(0, 2**32).map(random.Random)


# --- rows ---


@pytest.mark.parametrize("task", ["math", "ner"])
@LAW
@given(
    draw=draws,
    line=st.integers(1, 3),
    form=st.sampled_from([("", "\n", ""), ("\ufeff", "\r\n", "\r\n"), ("\n\n", "\n\n", "\n")]),
)
def test_the_line_that_is_named_is_the_one_that_is_wrong(path, task, draw, line, form):
    before, between, after = form
    lines = [json.dumps(good_row(draw, task)) for _ in range(3)]
    lines[line - 1] = lines[line - 1][: draw.randrange(1, len(lines[line - 1]))]
    error = read(task, path, (before + between.join(lines) + after).encode())
    at = before.count("\n") + (line - 1) * between.count("\n") + 1
    assert error.problems[0].startswith(f"{path}:{at}: not JSON at column ")
    assert len(error.problems) == 1


MEGABYTE = 1 << 20
LARGE = {
    "brackets": b"[" * MEGABYTE,
    "braces": b'{"a":' * (MEGABYTE // 5),
    "an unclosed text": b'{"text": "' + b"x" * MEGABYTE,
    "an unclosed array": b'[{"text": "' + b"x" * MEGABYTE,
    "digits": b'{"text": ' + b"9" * MEGABYTE + b"}",
    "a number before the equals sign": b'{"instruction": "' + b"9" * MEGABYTE + b'=", "output": "1 + 1"}',
    "blanks before the equals sign": b'{"instruction": "1' + b" " * MEGABYTE + b'", "output": ""}',
    "an answer of blanks": json.dumps({"instruction": "2=", "output": PREFIX + "1" + " " * MEGABYTE}).encode(),
    "blank lines": b"\n" * MEGABYTE,
    "backslashes": b'{"text": "' + b"\\" * MEGABYTE,
    "an escape for each character": b'{"text": "' + rb"\u0041" * (MEGABYTE // 6) + b'"}',
    "lone surrogates": b'{"text": "' + rb"\ud800" * (MEGABYTE // 6) + b'"}',
    "one key again and again": b"{" + b'"a":1,' * (MEGABYTE // 6) + b'"a":1}',
    "as many keys": b"{" + b",".join(b'"%d":1' % n for n in range(MEGABYTE // 10)) + b"}",
    "a long key": json.dumps({"text": "x", "label": {"k" * MEGABYTE: {"x": [1]}}}).encode(),
    "bad rows": b"{}\n" * 50_000,
    "bad elements": b"[" + b"{},\n" * 50_000 + b"{}]",
    "a byte that is not UTF-8, at the end": b" " * MEGABYTE + b"\xff",
    "spans": json.dumps({"text": "x", "label": {"a": {"x": [[0, n] for n in range(MEGABYTE // 11)]}}}).encode(),
    "spans of a long surface": json.dumps(
        {"text": "x" * 400_000, "label": {"a": {"x" * 200_000: [[n, 399_999] for n in range(25_000)]}}}
    ).encode(),
}


@pytest.mark.parametrize("task", ["math", "ner"])
@pytest.mark.parametrize("content", LARGE.values(), ids=LARGE)
def test_a_megabyte_of_one_kind_of_wrong_is_refused_at_once(path, task, content):
    started = time.perf_counter()
    error = read(task, path, content)
    assert isinstance(error, UserError)
    assert time.perf_counter() - started < limit(60)  # a hundredth of that, unless something is not linear


def test_a_megabyte_in_one_line_is_a_row_like_any_other(path):
    row = {"text": "x" * MEGABYTE, "label": {"a": {"x": [[n, n] for n in range(100_000)]}}}
    started = time.perf_counter()
    (example,) = read("ner", path, json.dumps(row).encode())
    assert example.text == row["text"]
    assert time.perf_counter() - started < limit(60)  # a hundredth of that, unless something is not linear


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(UserError, match=r"not a file's name|cannot be read"):
        read_rows(name, dict)


# --- settings ---

ODD_TEXTS = ["", "\0", "a\nb", "\ud800", "\x85", "9" * 5000, "-1", "1e400", "nan", "２", "²", "1_0", "off", "auto"]
ODD_YAML = ["", "~", "2001-13-45", "0x" + "f" * 9000, "9" * 400, "9" * 5000, "!!int ''", "!!int x", "!!bool x", "0b_"]
ODD_YAML += ["!!timestamp x", "!!float x", "!!binary '%'", "!!python/name:os.system", "!!set {a}", "&a [*a]", "*a", "."]
ODD_YAML += [
    "[a, b]",
    "[1]",
    "[[a]]",
    "[2001-13-45]",
    "{a: b}",
    '"\\0"',
    '"\\ud800"',
    '"a\\nb"',
    ".nan",
    "-.inf",
    "190:20",
]
ODD_YAML += [
    "[" * 5000,
    "[" * 500 + "]" * 500,
    "{a: " * 500 + "}" * 500,
    "|\n  a\n  b",
    "'x",
    "\t",
    "%",
    "- a",
    "=",
    "<<",
]
ODD_KEYS = [
    "<<",
    "?",
    "[a]",
    "{a: b}",
    "=",
    "2001-01-01",
    "~",
    "''",
    '"\\0"',
    "&a seed",
    "!!int x",
    "x" * 3000,
    "seed ",
]
yaml_lines = st.lists(
    st.tuples(
        st.sampled_from([setting.name for setting in settings_of(TrainConfig)])
        | st.sampled_from([*ODD_KEYS, "output-dir"])
        | st.text(max_size=5),
        st.sampled_from(ODD_YAML) | st.text(max_size=9) | json_values.map(json.dumps),
    ),
    max_size=4,
).map(lambda pairs: "\n".join(f"{key}: {value}" for key, value in pairs))
yaml_mappings = st.dictionaries(st.sampled_from([flag[2:] for flag in FLAGS]) | json_values.map(str), json_values).map(
    lambda values: yaml.safe_dump(values, allow_unicode=True)
)
OPTION = re.compile(r"--[a-z0-9-]+\b|(unknown option|\S+ is given) ")


def one_line_each(error, prefix=""):
    odd_input.one_line_each(error, prefix, 1000)


def built(*arguments):
    """The settings that a command line gives, by way of the program's own command, or the UserError."""
    command = TaskCommand("math", Math, summary="")
    try:
        return command.read(command.make_context("math", list(arguments)))[0]
    except (UserError, click.UsageError) as error:
        return error


@LAW
@given(content=yaml_mappings | yaml_lines | st.text(), bom=st.sampled_from([b"", codecs.BOM_UTF8]))
def test_any_text_is_settings_or_is_refused_by_option(path, content, bom):
    path.write_bytes(bom + content.encode("utf-8", "surrogatepass"))
    found = built("--config", str(path))
    if isinstance(found, TrainConfig):
        assert found.problems() == []
    else:
        one_line_each(found)
        options = [line.removeprefix(f"--config {path}: ") for line in found.problems]
        whole = all(line.startswith(("not YAML: ", "expected option names")) for line in options)
        assert whole or all(OPTION.match(line) or re.match(r"line \d+: ", line) for line in options), options


@LAW
@given(content=st.binary())
def test_any_bytes_of_a_config_file_are_settings_or_refused(path, content):
    path.write_bytes(content)
    try:
        _, problems = load_yaml(str(path), TrainConfig)
    except UserError as error:
        problems = error.problems
    one_line_each(UserError(*problems), f"--config {path}: ")


@LAW
@given(
    values=st.dictionaries(
        st.sampled_from([flag for flag in FLAGS if not flag.startswith("--config")]),
        st.sampled_from(ODD_TEXTS) | st.text(max_size=9) | st.integers().map(str) | st.floats().map(str),
        max_size=4,
    )
)
def test_any_command_line_is_settings_or_is_refused_by_option(values):
    found = built(*(f"{flag}={value}" for flag, value in values.items()))
    if isinstance(found, TrainConfig):
        assert found.problems() == []
    elif isinstance(found, UserError):  # else click's own, of a switch that takes no value
        one_line_each(found, "--")
        assert all(line.split()[0].rstrip(":") in values for line in found.problems), found.problems


@LAW
@given(values=st.fixed_dictionaries({}, optional={s.name: json_values for s in settings_of(TrainConfig)}))
def test_settings_of_any_type_have_problems_in_a_line_each(values):
    one_line_each(UserError(*TrainConfig(**values).problems()), "--")


def test_a_value_that_holds_itself_a_million_times_is_refused_at_once(path):
    lines = ["a0: &a0 [x]", *(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(9)), "seed: *a9"]
    lines += ["b0: &b0 {a: b}", *(f"b{n + 1}: &b{n + 1} {{<<: [{', '.join([f'*b{n}'] * 9)}]}}" for n in range(9))]
    path.write_text("\n".join([*lines, "model: *b9", "? *a9\n: 1"]))
    started = time.perf_counter()
    _, problems = load_yaml(str(path), TrainConfig)
    one_line_each(UserError(*problems))
    told = {line.split()[4].rstrip(":") for line in problems}
    assert told == {"unknown", "--seed", "--model", "expected"}
    assert time.perf_counter() - started < limit(60)


# --- tasks that go wrong on one rank only ---

OUR_FRAME = re.compile(rf'File "{re.escape(str(Path(load_yaml.__code__.co_filename).parents[1]))}/\S+\.py", line')

ONE_RANK = """
import os
from dataclasses import dataclass
from accel_sft import option
from accel_sft_math import Math as Shipped

@dataclass(kw_only=True)
class Lame(Shipped):
    \"\"\"Math of which one method gives nonsense on rank 1.\"\"\"
    how: str = option("", help="Which method.")

    def dataset(self, split):
        rows = super().dataset(split)
        if self.how == "dataset" and os.environ.get("RANK") == "1":
            raise LookupError("no such\\nsplit")
        return rows

    def score(self, example, text):
        scores = super().score(example, text)
        if self.how == "score" and os.environ.get("RANK") == "1":
            scores["accuracy"] = {1, 2}
        return scores
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("dataset", r"the task's dataset\('train'\) failed: LookupError: no such\\nsplit \(\S+lame\.py:15\)"),
        ("score", r"validation example \d: score\(\) gave .*, which JSON cannot hold \(Object of type set is not .*"),
    ],
)
def test_nonsense_on_one_rank_is_one_line_and_ends_both(tmp_path, how, told):
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "accel-sft-lame", "lame = accel_sft_lame:Lame", ONE_RANK)
    site = {"PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")))}
    small = ("--max-steps", "2", "--train-examples", "40", "--validation-examples", "7", "--global-batch-size", "10")
    started = time.monotonic()
    run = accel_sft("lame", "--how", how, *small, yaml="ddp", run_dir=tmp_path / "run", environment=site)
    assert time.monotonic() - started < limit(400)
    assert run.status == 1
    lines = [
        line for line in run.output.splitlines() if line.startswith("Error: ") and "after another rank" not in line
    ]
    assert len(lines) == 1
    assert re.fullmatch(f"Error: {told}", lines[0])
    assert OUR_FRAME.search(f'File "{load_yaml.__code__.co_filename}", line 1')
    assert not OUR_FRAME.search(run.output)  # no traceback but the launcher's own
    assert not (tmp_path / "run").exists()  # refused before the first evaluation
