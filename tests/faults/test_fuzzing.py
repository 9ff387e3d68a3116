"""Any row, template, launch file, file of a run or checkpoint is taken for what it says, or refused in clear lines.

A thousand inputs, the same ones each time; `pytest -m long tests/faults/test_fuzzing.py` makes 20,000 others.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import functools
import gzip
import io
import json
import random
import shutil
from pathlib import Path

import chats
import odd_input
import pytest
import torch
import yaml
from accelerate import Accelerator
from checkpoints import saved
from hypothesis import strategies as st
from models import Sums, encode
from odd_input import changed, damaged, holds, in_pieces, one_line_each, texts, values, written
from places import CONFIGS, STORED_RUNS

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.checkpoint import checkpoint, shards
from accel_sft.io import manifest
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.audit import audit
from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.precision import precision_in_record
from accel_sft.launch.recordable import recordable, without_secrets
from accel_sft.models.source import began_with, find_source
from accel_sft.models.tiny import train_tokenizer
from accel_sft.tools.report import page
from accel_sft.tools.report.runs import read_comparison, read_run
from accel_sft.tracking.metrics_file import MetricsFile
from accel_sft.training.record import _check_unchanged
from accel_sft.training.state import TrainState

EARLIER = STORED_RUNS / "0.1.0"
LONG = pytest.param(3340, marks=[pytest.mark.long, pytest.mark.timeout(1800)])
each = pytest.mark.parametrize("count", [170, LONG])


@pytest.fixture(scope="module")
def tokenizer():
    prefix = odd_input.PREFIX
    return train_tokenizer([text for n in range(60) for text in (f"{n}=", f"{prefix}{n} + {n}", '{"name": {}}')])


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
        content, suffix = draw(st.binary() | in_pieces), ".json"
    content = draw(damaged(FILES[suffix](content) if FILES[suffix] else content))
    lines = [json.dumps(row).encode() for row, _ in rows]
    good = content in (b"[" + b",\n".join(lines) + b"]", b"\n".join(lines))
    return task, suffix, content, len(rows) if good else None


@each
def test_rows(count, tokenizer, tmp_path):
    def check(drawn, large, most, truncation):
        kind, suffix, content, expected = drawn
        path = tmp_path / f"rows{suffix}"
        path.write_bytes(content)
        task = odd_input.reader(kind, path)
        found = odd_input.read(task, path, large)
        if isinstance(found, UserError):
            assert expected is None, found
            return
        assert expected in (None, len(found))
        rules = {"eos_ids": {tokenizer.eos_token_id}, "max_length": most, "truncation": truncation}
        try:
            encoding = encode(tokenizer, task, found, "validation", **rules)
        except UserError as error:
            one_line_each(error)
            return
        for example in encoding.kept:
            assert 0 < example.supervised_tokens < len(example.input_ids) <= most

    how = st.booleans(), st.sampled_from([8, 30, 200, 4096]), st.sampled_from(["drop", "right", "error"])
    holds(2 * count, st.tuples(files(), *how), lambda drawn: check(*drawn))


# --- chat templates ---

CHATML = ["{% for m in messages %}", "<|im_start|>", "{{ m.role }}", "\n", "{{ m.content }}", "<|im_end|>\n"]
CHATML += ["{% endfor %}", "{% if add_generation_prompt %}", "<|im_start|>assistant\n", "{% endif %}"]
PIECES = [*CHATML, "{% if m.role == 'user' %}", "{% else %}", "{{ m['content'] | trim }}", "{{ eos_token }}"]
PIECES += ["{{ messages }}", "{{ messages[0].content }}", "{{ raise_exception('no\nsuch role') }}", "{{ 1 / 0 }}"]
PIECES += [
    "{{ raise_exception(m) }}",
    "{{ missing.deeper }}",
    "{{ m.content[99] }}",
    "{% include 'x' %}",
    "{% if",
    "{#",
]
PIECES += ["{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{% extends 'x' %}", "{% import 'os' as o %}", "{{"]
PIECES += ["{% set x = namespace(n=0) %}", "{% set x.n = x.n + 1 %}"]
PIECES += ["{% for i in range(99999) %}{% endfor %}", "{{ 9 ** 9 }}", "#}"]
PIECES += ["{{ ''.__class__.__mro__ }}", "{{ m.update({'content': 'x'}) }}", "{% generation %}", "{% endgeneration %}"]
PIECES += ["{{ strftime_now('%Y') }}", "{{ m.content.encode() }}", "{{ '%s' | format(m.content) }}", "{% raw %}", "{%"]
PIECES += ["{{ loop.index }}", "{{ lipsum() }}", "{% break %}", "\0", "\ud800", "{{ '\\ud800' }}", "}}"]


@st.composite
def templates(draw):
    """ChatML, some of it replaced; or pieces in any order."""
    pieces = [*CHATML] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(pieces)))
        pieces[at : at + draw(st.integers(0, 1))] = [draw(st.sampled_from(PIECES) | texts)]
    return "".join(pieces)


@each
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
REPEATED = ", ".join(["&x0 [y]", *(f"&x{n + 1} [{', '.join([f'*x{n}'] * 9)}]" for n in range(9))])
LINES = [f"commands: [{REPEATED}]\n{key}: *x9" for key in ("num_processes", "tpu_env", "deepspeed_config")]
LINES += [
    "<<: *a",
    "commands: &a [*a]",
    "*b",
    "? [a]\n: b",
    "mixed_precision: NO",
    "\t",
    "- a",
    "'': ''",
    "debug: " + "[" * 1500,
]
LINES += ["num_processes: 0x" + "f" * 9000, "num_processes: 2001-13-45", "num_processes: 190:20", "num_processes: .inf"]
LINES += ["machine_rank: !!python/name:os.system", "use_cpu: !!binary '%'", "mixed_precision: &p\nfp16: *p"]
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
    for line in draw(st.lists(st.sampled_from(LINES), max_size=1)):
        text += line.encode() + b"\n"
    return draw(damaged(text)), draw(changed(JSON).flatmap(written).flatmap(damaged)) if named else b"{}"


@each
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


# --- files of a run ---

RUN = {path.relative_to(EARLIER / "run"): path.read_bytes() for path in (EARLIER / "run").rglob("*.json*")}
RUN = {str(name): content for name, content in RUN.items() if "checkpoints" not in name.parts}
ROUND = {"round": 1, "folder": "inner", "status": "complete", "reason": "", "steps": 3, "step_seconds": [0.1, 0.2]}
SETTING = {"name": "a", "status": "complete", "runs": [ROUND], "reason": "", "disturbed": {}}
SETTING |= {"median": {"tokens_per_second": 5.0}, "spread": {"tokens_per_second": 0.1}}
COMPARISON = {"schema": 1, "status": "complete", "created": "2026-01-01", "command": "accel-sft compare math"}
COMPARISON |= {"varied": ["seed"], "findings": ["Undecided."], "main_metric": "accuracy", "settings": [SETTING]}
RESULT = {"status": "complete", "task": "math", "steps": 3, "train_seconds": 0.5, "tokens_per_second": 924.0}
RESULT |= {"before": {"accuracy": 0.0, "eval_loss": 5.7}, "after": {"accuracy": 0.5, "eval_loss": 5.0}}
RESULT |= {"main_metric": "accuracy", "memory": {"step": {"predicted": 1.0, "measured": 1.1}}}
RUN |= {"comparison.json": json.dumps(COMPARISON).encode(), "result.json": json.dumps(RESULT).encode()}


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


@each
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
        for read in (
            lambda: page.render([], [read_comparison(folder, "run")]),
            lambda: page.render([read_run(folder, "run")], []),
            evaluated,
            resumed,
        ):
            try:
                read()
            except UserError as error:
                one_line_each(error)

    check(RUN)
    assert (read_run(folder, "run").status, read_run(folder, "run").notes) == ("complete", [])
    holds(count, runs(), check)


# --- checkpoints ---


@st.composite
def checkpoints(draw, good):
    """The files of two checkpoints, and whether nothing but their bytes was harmed."""
    files, honest = dict(good), True
    for _ in range(draw(st.integers(0, 2))):
        name, other = draw(st.sampled_from([*files])), draw(st.sampled_from([*files]))
        how = draw(st.sampled_from(["damage", "lose", "swap", "stray", "seal"]))
        if how == "damage":
            files[name] = draw(damaged(files[name], 3))
        elif how == "lose" and len(files) > 1:
            del files[name]
        elif how == "swap":
            files[name], files[other] = files[other], files[name]
        elif how == "stray":
            files[f"{name}{draw(st.sampled_from(['.bak', '2.safetensors']))}"] = files[name]
        elif name.endswith(manifest.MANIFEST) and good.get(name) == files[name]:
            content = json.loads(files[name])["content"]
            content["about"] = draw(changed(content["about"], 2) | values)
            with contextlib.suppress(ValueError):
                files[name], honest = manifest._text(content).encode("utf-8", "surrogatepass"), False
    return files, honest


@each
def test_checkpoints(count, tmp_path):
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    run_dir, kept, refused = RunDir(tmp_path), {}, []
    for step in (3, 6):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        kept[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state = {"step": step, "progress": vars(TrainState(step=step)), "batching": None}
        saved(accelerator, model, optimizer, run_dir, state, keep="2")
    folder = run_dir.checkpoints
    good = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def check(drawn):
        files, honest = drawn
        shutil.rmtree(folder)
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        with torch.no_grad():
            model.weight.zero_()
        try:
            path, skipped = checkpoint.newest(run_dir, "auto")
            one_line_each(UserError("those are all", *skipped))
            if path is None:
                return
            saved = checkpoint.load(accelerator, model, optimizer, path)
            state = TrainState.of(saved, path)
            shards.read_extra(path)
        except UserError as error:
            one_line_each(error)
            refused.append(files)
            return
        if honest:
            assert all(torch.equal(tensor, kept[state.step][name]) for name, tensor in model.state_dict().items())

    check((good, True))
    holds(count, checkpoints(good), check)
    assert good not in refused
