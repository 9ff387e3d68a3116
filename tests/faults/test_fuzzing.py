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
from pathlib import Path

import chats
import click
import odd_input
import pytest
import yaml
from hypothesis import strategies as st
from limits import limit
from models import Sums, encode
from odd_input import PREFIX, changed, damaged, holds, json_values, one_line_each, texts, written, yaml_lines
from places import CONFIGS, STORED_RUNS

from accel_sft import UserError, read_rows
from accel_sft.api.config import TrainConfig
from accel_sft.api.config_file import load_yaml
from accel_sft.api.options import settings as settings_of
from accel_sft.cli.task_command import TaskCommand
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.audit import audit
from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.precision import precision_in_record
from accel_sft.launch.recordable import recordable, without_secrets
from accel_sft.models.source import began_with, find_source
from accel_sft.models.tiny import train_tokenizer
from accel_sft.tools.report import page
from accel_sft.tools.report.runs import read_run
from accel_sft.tracking.metrics_file import MetricsFile
from accel_sft.training.record import _check_unchanged
from accel_sft_math import Math

EARLIER = STORED_RUNS / "0.1.0"
LONG = pytest.param(3340, marks=[pytest.mark.long, pytest.mark.timeout(1800)])
counts = pytest.mark.parametrize("count", [80, LONG])


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
        good = chats.FORMS[form](chats.chat(number, seeded)) if task == "chat" else odd_input.good_row(seeded, task)
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
        task = odd_input.reader(kind, path)
        examples = odd_input.read(task, path, large)
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
    holds(2 * count, st.tuples(files(), *how), lambda drawn: check(*drawn))


def read(task, folder, content):
    """What `odd_input.read` gives of a file with this content."""
    path = folder / "rows.json"
    path.write_bytes(content)
    return odd_input.read(odd_input.reader(task, path), path)


@pytest.mark.parametrize(("before", "between", "after"), [("\ufeff", "\r\n", "\r\n"), ("\n\n", "\n\n", "\n")])
def test_named_line_is_the_wrong_one(before, between, after, tmp_path):
    lines = [json.dumps(odd_input.good_row(random.Random(0), "ner")) for _ in range(3)]
    for line, end in itertools.product(range(3), range(1, len(lines[0]), 9)):
        cut = [text[:end] if at == line else text for at, text in enumerate(lines)]
        (problem,) = read("ner", tmp_path, (before + between.join(cut) + after).encode()).problems
        at = before.count("\n") + line * between.count("\n") + 1
        assert problem.startswith(f"{tmp_path}/rows.json:{at}: not JSON at column ")


MEGABYTE = 1 << 20
LARGE = {
    "brackets": b"[" * MEGABYTE,
    "digits": b'{"text": ' + b"9" * MEGABYTE + b"}",
    "an answer of blanks": json.dumps({"instruction": "2=", "output": PREFIX + "1" + " " * MEGABYTE}).encode(),
    "blank lines": b"\n" * MEGABYTE,
    "backslashes": b'{"text": "' + b"\\" * MEGABYTE,
    "one key again and again": b"{" + b'"a":1,' * (MEGABYTE // 6) + b'"a":1}',
    "bad rows": b"{}\n" * 50_000,
    "spans": json.dumps({"text": "x", "label": {"a": {"x": [[0, n] for n in range(MEGABYTE // 11)]}}}).encode(),
    "spans of a long surface": json.dumps(
        {"text": "x" * 400_000, "label": {"a": {"x" * 200_000: [[n, 399_999] for n in range(25_000)]}}}
    ).encode(),
}


@pytest.mark.parametrize("name", LARGE)
def test_megabyte_of_nonsense_is_refused_at_once(tmp_path, name):
    started = time.perf_counter()
    assert isinstance(read("math" if "answer" in name else "ner", tmp_path, LARGE[name]), UserError)
    assert time.perf_counter() - started < limit(60)  # a hundredth of that, unless something is not linear


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_impossible_file_names_are_refused(name):
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


def built(*arguments):
    """The settings that a command line gives, by way of the program's own command, or the UserError."""
    command = TaskCommand("math", Math, summary="")
    try:
        return command.read(command.make_context("math", list(arguments)))[0]
    except (UserError, click.UsageError) as error:
        return error


@counts
def test_config_files_are_settings_or_refused_by_option(count, tmp_path):
    path = tmp_path / "config.yaml"

    def check(drawn):
        content, bom = drawn
        path.write_bytes(bom + content)
        config = built("--config", str(path))
        if isinstance(config, TrainConfig):
            assert config.problems() == []
            return
        one_line_each(config, longest=1000)
        options = [line.removeprefix(f"--config {path}: ") for line in config.problems]
        assert all(map(OPTION.match, options)), options

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
