"""What a run, an evaluation and a task may not do to each other: each guard in the case where it fires."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest
import scripts
from accelerate import Accelerator
from conftest import accel_sft, finished, stopped
from fake_plugins import GOOD
from models import Sums, encode, make_tiny
from reference_job import JOB, layout
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft import UserError, option
from accel_sft.api.config import TrainConfig
from accel_sft.api.options import settings
from accel_sft.batching.layouts import Batching
from accel_sft.chat.conversation import read_split
from accel_sft.checkpoint import checkpoint
from accel_sft.commands.train import _explained
from accel_sft.evaluation.evaluator import Evaluator
from accel_sft.evaluation.generate import Generator
from accel_sft.evaluation.scoring import check_scoring, scored
from accel_sft.io import lock
from accel_sft.io.run_dir import RunDir
from accel_sft.io.run_record import recorded_options
from accel_sft.launch import deepspeed_ops
from accel_sft.launch.info import read_launch
from accel_sft.resilience.exit import report
from accel_sft.resilience.signals import StopSignals
from accel_sft.training import folder as run_folder
from accel_sft.training import prepare
from accel_sft.training.record import _check_unchanged

ALONE = read_launch({}, [])
"""One process without a launcher."""


@pytest.fixture
def copy(launched, tmp_path):
    """A finished run of one process, to be damaged: its launch and its folder."""
    whole = layout(launched, "plain")
    return whole, shutil.copytree(whole.run_dir, tmp_path / "run")


# --- what a task returns ---


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("tiny") / "base")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def evaluate(tiny, **methods):
    model, tokenizer = tiny
    task = type("Broken", (Sums,), methods)()
    examples = [40, 41]
    eos = {tokenizer.eos_token_id}
    rows = encode(tokenizer, task, examples, "validation", eos_ids=eos, max_length=99, truncation="drop").kept
    config = TrainConfig(max_new_tokens=2).resolved({})
    accelerator = Accelerator(cpu=True)
    backend = Generator(accelerator, tokenizer, model, None)
    return Evaluator(accelerator, tokenizer, task, examples, rows, config, backend)(model, Batching("padded", 256))


def fail(*_):
    raise RuntimeError("ill\nand\ttired" + "!" * 1000)


@pytest.mark.parametrize(
    ("method", "function", "message"),
    [
        ("aggregate", lambda self, scores: {"right": "much"}, r"aggregate\(\) failed, .* 'much'"),
        ("aggregate", fail, r"aggregate\(\) failed, .*RuntimeError: ill"),
        ("aggregate", lambda self, scores: {"other": 1.0}, r"aggregate\(\) gave \['other'\], without its main_metric"),
        (
            "aggregate",
            lambda self, scores: {"right": 1.0, "loss": 0.0, "generate_seconds": 0.0},
            r"gave generate_seconds, loss, which are names of the trainer's metrics; rename them",
        ),
        ("score", lambda self, example, text: 1.0, r"validation example [01]: score\(\) gave 1\.0"),
        ("score", fail, r"example [01]: the task's score\(\) failed on .*RuntimeError: ill\\nand\\ttired!+\.\.\.$"),
    ],
)
def test_a_judgement_that_is_none_is_refused_by_name(tiny, method, function, message):
    with pytest.raises(UserError, match=message):
        evaluate(tiny, **{method: function})


def test_a_metric_that_some_scores_lack_is_refused_by_name():
    for scores in ([{"right": 1.0}, {"right": 1.0, "extra": 1.0}], [{"right": 1.0, "extra": 1.0}, {"right": 1.0}]):
        with pytest.raises(UserError, match=r"score\(\) gave None for 'extra', which has no mean"):
            Sums().aggregate(scores)
    means = Sums().aggregate([{"right": 1.0, "extra": True}, {"extra": 0.0, "right": 0.0}])
    assert means == {"right": 0.5, "extra": 0.5}


def test_task_that_turns_gradients_off_still_trains(tmp_path):
    off = "torch.set_grad_enabled(False)"
    text = GOOD.replace("def score(self, example, text):", f"def score(self, example, text):\n        {off}")
    (tmp_path / "judged.py").write_text(f"import torch\n{off}\n{text}")
    quick = ("--max-steps", "2", "--eval-every", "1", "--save-every", "off", "--global-batch-size", "4")
    done = finished(f"{tmp_path}/judged.py", *quick, run_dir=tmp_path / "run")
    assert all(line["grad_norm"] > 0 for line in done.lines())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"accuracy"\n', '"f1"\n', "the task's score() gave ['accuracy'], without its main_metric 'f1'"),
        ('{"accuracy":', '1 / 0 or {"accuracy":', "validation example 0: the task's score() failed on '0': Zero"),
    ],
)
def test_task_that_cannot_be_scored_is_refused_before_any_work(called, tmp_path, old, new, message):
    (tmp_path / "scored.py").write_text(GOOD.replace(old, new))
    job = (str(tmp_path / "scored.py"), "--max-steps", "1", "--global-batch-size", "4")
    run = called(*job, run_dir=tmp_path / "run")
    assert run.status == 1
    assert f"Error: {message}" in run.output
    assert not (tmp_path / "run" / "base").exists()


def test_unreadable_row_is_not_blamed_on_the_score():
    class Gone(list):
        def __getitem__(self, index):
            raise OSError("stale file handle")

    with pytest.raises(UserError, match="validation example 0: the task's dataset failed: OSError: stale file handle"):
        scored(Sums(), Gone([40]), 0, "")


def test_metric_that_no_own_answer_scores_is_named():
    never = type("Never", (Sums,), {"score": lambda self, example, text: {"right": 0.0}})
    (line,) = check_scoring(never(), [40, 41])
    assert line.startswith("warning: right is 0 for the expected answers of the first 2 validation examples; ")
    assert check_scoring(Sums(), [40, 41]) == []


def test_limits_that_no_right_answer_can_pass_are_named(tmp_path):
    rows = [{"prompt": f"is {n} small", "completion": "yes" if n < 50 else "no"} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = ("--train-file", str(tmp_path / "rows.jsonl"), "--held-out", "40", "--metric", "exact", "--max-steps", "1")
    job += ("--save-every", "off", "--tracker", "none")
    run = accel_sft("chat", *job, "--max-new-tokens", "1", run_dir=tmp_path / "run")
    assert re.search(r"warning: \d+ of 40 validation answers have more tokens than --max-new-tokens 1, and", run.output)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda self, split: None, r"dataset\('train'\) gave NoneType, expected a sequence"),
        (lambda self, split: [], r"dataset\('train'\) is empty"),
        (lambda self, split: 1 / 0, r"dataset\('train'\) failed: ZeroDivisionError: .* \(\S+test_guards\.py:\d+\)$"),
    ],
)
def test_examples_are_a_sequence_with_something_in_it(dataset, message):
    with pytest.raises(UserError, match=message):
        read_split(type("Broken", (Sums,), {"dataset": dataset})(), "train")


@pytest.mark.parametrize(
    ("flags", "cache", "message"),
    [
        (("--epochs", "0.0001"), "", "--epochs 0.0001 is less than one of 60 examples"),
        (("--max-steps", "3", "--warmup-steps", "4"), "", "--warmup-steps 4: the run has only 3 steps"),
        ((), "~nobody.here", "Error: ACCEL_SFT_CACHE ~nobody.here: no user has this home folder"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(called, monkeypatch, tmp_path, flags, cache, message):
    monkeypatch.setenv("ACCEL_SFT_CACHE", cache or str(tmp_path / "cache"))
    run = called("math", *flags, "--train-examples", "60", run_dir=tmp_path / "run")
    assert (run.status, message in run.output, "Traceback" in run.output) == (1, True, False), run.output


# --- a run's folder ---


def claim(folder, launch=ALONE, **given):
    """Claim a folder, or without one a new one, as a run of one process does; then let it go."""
    config = TrainConfig(output_dir=folder and str(folder), **given).resolved({})
    try:
        return run_folder.claim_run_dir(Accelerator(cpu=True), launch, "sums", Sums(), config).run_dir
    finally:
        lock.release()


def test_claim_broken_off_by_another_rank_leaves_no_running_run(tmp_path, monkeypatch):
    def broken(accelerator, decide):
        decide()
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(run_folder, "decided_by_main", broken)
    with pytest.raises(RuntimeError, match="closed by peer"):
        claim(tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result == {"status": "failed", "error": "Connection closed by peer"}


def test_finished_run_without_checkpoints_refuses_other_settings(copy, called):
    whole, folder = copy
    shutil.rmtree(folder / "checkpoints")
    before = (folder / "base" / "tokenizer.json").stat().st_mtime_ns
    refused = called(*whole.arguments, "--seed", "99", "--resume", "auto", run_dir=folder)
    assert refused.status == 1
    assert "--seed: the run was started with 7, not 99" in refused.output
    assert "then start a new run with --init-from" in " ".join(refused.output.split())
    assert (folder / "base" / "tokenizer.json").stat().st_mtime_ns == before


def test_resume_from_a_named_checkpoint_sets_later_files_aside(launched, tmp_path):
    run_dir = stopped(layout(launched, "plain"), tmp_path / "run", 6)
    assert [path.name for path in checkpoint.undo_after(RunDir(run_dir), 3)] == ["undone-step-000006"]
    assert checkpoint.newest(RunDir(run_dir), "auto")[0] == run_dir / "checkpoints" / "step-000003"
    for path in (run_dir / "checkpoints").glob("step-*/manifest.json"):
        path.unlink()
    with pytest.raises(UserError, match="all checkpoints are damaged; to start again, name another --output-dir"):
        checkpoint.newest(RunDir(run_dir), "auto")


FORKS_AND_WAITS = """
from accel_sft.io import lock
lock.lock(Path(sys.argv[1]))
if child := os.fork():
    print(child, flush=True)
time.sleep(120)
"""


def test_orphan_of_a_killed_run_does_not_hold_its_folder(tmp_path, monkeypatch):
    with scripts.started(FORKS_AND_WAITS, tmp_path) as run:
        child = psutil.Process(int(run.stdout.readline()))
        try:
            monkeypatch.setattr(lock, "LOCK_SECONDS", 0.5)
            with pytest.raises(UserError, match="another process is working"):
                lock.lock(tmp_path)  # the child gave up its copy of the lock, not the lock
            run.kill()
            run.wait()
            assert child.is_running()
            lock.lock(tmp_path)
            lock.release()
            assert not list(tmp_path.iterdir())
        finally:
            child.kill()


def test_refused_run_leaves_nothing_for_tensorboard_or_report(called, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ("math", "--train-examples", "60", "--adapter", "lora", "--lora-target-modules", "none_such")
    for folder in (None, tmp_path / "named"):  # refused once the model is there
        refused = called(*few, run_dir=folder)
        assert (refused.status, "none_such" in refused.output) == (1, True), refused.output
    assert [*tmp_path.rglob("*")] == [tmp_path / "runs"]


def test_runs_of_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder.time, "strftime", lambda form: "20261126-101500")
    folders = [claim(None).path.name for _ in range(3)]
    assert folders == [f"sums-20261126-101500{more}" for more in ("", "-2", "-3")]
    (tmp_path / "runs").rename(tmp_path / "other")
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match="cannot be used"):
        claim(None)


RUNNING, FAILED = '{"status": "running"}', '{"status": "failed"}'
OCCUPIED = {
    "a run": ("off", {"result.json": '{"status": "complete"}'}, "continue the run in it with --resume auto"),
    "a start that was killed, resumed": ("auto", {"result.json": RUNNING}, None),
    "a failed start, resumed": ("auto", {"result.json": FAILED, "base/notes": "mine"}, None),
    "another's metrics": ("auto", {"result.json": RUNNING, "metrics.jsonl": "[1]"}, "not a run of accel_sft"),
    "another's result": ("auto", {"result.json": '{"accuracy": 1.0}', ".a.1.tmp": "mine"}, "not a run of accel_sft"),
    "half a record": ("auto", {"result.json": RUNNING, "run.json": '{"task": "math"}'}, "not the record of a run"),
}


@pytest.mark.parametrize("case", OCCUPIED)
def test_a_folder_is_a_runs_by_its_record_alone(tmp_path, case):
    resume, files, refusal = OCCUPIED[case]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    if refusal is None:
        assert claim(tmp_path, resume=resume).path == tmp_path
        return
    with pytest.raises(UserError, match=refusal):
        claim(tmp_path, resume=resume)
    left = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == files


@pytest.mark.parametrize("resume", ["off", "auto"])
def test_a_folder_of_something_else_is_never_written_to(tmp_path, monkeypatch, resume):
    (tmp_path / "letter.txt").write_text("dear reader")
    for restarts in ("0", "1"):  # a launch that was refused a folder is refused it again
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        with pytest.raises(UserError, match="not empty"):
            claim(tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_machines_without_a_common_folder_are_refused(tmp_path, monkeypatch):
    two = types.SimpleNamespace(machines=2)
    monkeypatch.setattr(run_folder, "_SHARED_SECONDS", 0.3)
    with pytest.raises(UserError, match="--output-dir is missing: the launch has several machines"):
        claim(None, two)
    run_dir = claim(tmp_path / "run", two)
    assert sorted(path.name for path in run_dir.path.iterdir()) == ["logs", "result.json"]

    def on_another_machine(accelerator, decide):
        decision = decide()
        return tmp_path / "elsewhere" / decision.name if isinstance(decision, Path) else decision

    monkeypatch.setattr(run_folder, "decided_by_main", on_another_machine)
    with pytest.raises(UserError, match="does not see a file that rank 0 wrote there; name a folder on a file system"):
        claim(tmp_path / "run", two, resume="auto")
    assert run_dir.read_status() == "failed"


@pytest.mark.parametrize("file", ["/error.json", "log/termination"])
def test_an_error_file_that_is_not_torchruns_is_only_written(tmp_path, monkeypatch, file):
    (tmp_path / "run" / "log").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
    assert claim(tmp_path / "out").path == tmp_path / "out"
    if file[0] != "/":
        report("no data", "no data")
        assert json.loads(Path(file).read_text())["message"]["message"] == "no data"
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {Path(file).name, "result.json", ".lock"}


def test_a_value_that_a_record_hides_is_asked_for(tmp_path, capsys):
    config = TrainConfig().resolved({}).as_dict()
    record = {"task": "t", "config": config, "data_sha256": "a", "task_code": "a", "task_options": {"tokenizer": "***"}}
    (own,) = settings(Hiding)
    with pytest.raises(UserError, match=r"--model run: secrets are not in its record; give --tokenizer again"):
        recorded_options(record, [own], [], "--model run", same_data=False)
    assert recorded_options(record, [own], ["tokenizer"], "--model run", same_data=False) == {}
    assert recorded_options(record, [own], None, "RUN run", same_data=False) == {}  # a command that cannot be given it
    assert "so the default of --tokenizer is used" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--tokenizer 5: expected text; the run.json of --model run says so"):
        recorded_options({**record, "task_options": {"tokenizer": 5}}, [own], [], "--model run", same_data=False)
    _check_unchanged(record, {**record, "task_options": {"tokenizer": "gpt2"}}, RunDir(tmp_path))
    with pytest.raises(UserError, match="--tokenizer: the run was started with"):
        _check_unchanged(record, {**record, "task_options": {"tokenizer": ""}}, RunDir(tmp_path))


@dataclasses.dataclass(kw_only=True)
class Hiding:
    tokenizer: str = option("", help="")


def test_a_resume_with_another_score_says_so(tmp_path, capsys):
    config = TrainConfig().resolved({}).as_dict()
    before = {"task": "math", "config": config, "task_options": {}, "data_sha256": "a"}
    before |= {"task_code": "a", "task_libraries": {"library": "1.0"}}
    before |= {"task_file": {"class": "A", "path": "a.py", "sha256": "a"}, "task": "a.py"}
    _check_unchanged(before, {**before, "task_code": None}, RunDir(tmp_path))
    _check_unchanged(
        before, {**before, "task_file": {**before["task_file"], "path": "elsewhere/a.py"}}, RunDir(tmp_path)
    )
    _check_unchanged({**before, "task_code": None}, before, RunDir(tmp_path))
    assert capsys.readouterr().out == ""
    other = {"task_file": {**before["task_file"], "sha256": "b"}}
    for change in ({"task_code": "b"}, {"task_libraries": {"library": "1.1"}}, other):
        _check_unchanged(before, {**before, **change}, RunDir(tmp_path))
        assert "the task's code or libraries have changed since the last start" in capsys.readouterr().out


def test_another_runs_checkpoint_is_refused(tmp_path):
    theirs = tmp_path / "other" / "checkpoints" / "step-000003"
    with pytest.raises(UserError, match=f"--resume {theirs}: not a checkpoint of the run .* use --init-from"):
        claim(tmp_path / "run", resume=str(theirs))
    assert [*tmp_path.iterdir()] == []


def test_broken_record_is_named_and_broken_result_is_rewritten(copy, called):
    whole, folder = copy
    (folder / "result.json").write_text('{"status": "comp')
    assert RunDir(folder).read_status() is None
    record = (folder / "run.json").read_text()
    (folder / "run.json").write_text(record[:100])
    refused = called(*whole.arguments, "--resume", "auto", run_dir=folder)
    assert refused.status == 1
    assert f"{folder / 'run.json'}: cannot be read" in refused.output
    (folder / "run.json").write_text(record)
    resumed = finished(*whole.arguments, "--resume", "auto", run_dir=folder)
    assert resumed.result()["after"]["accuracy"] == whole.result()["after"]["accuracy"]


def test_a_damaged_later_checkpoint_pushes_no_good_one_out(copy):
    whole, folder = copy
    shutil.rmtree(folder / "final")
    (folder / "result.json").unlink()
    later = folder / "checkpoints" / "step-000009"
    (folder / "checkpoints" / "step-000006").rename(later)
    os.truncate(later / "rank-0000-000.safetensors", 10)
    resumed = finished(*whole.arguments, "--resume", "auto", "--keep-checkpoints", "1", run_dir=folder)
    assert "step-000009: skipped as damaged" in resumed.output
    path, _ = checkpoint.newest(RunDir(folder), "auto")
    assert path == folder / "checkpoints" / "step-000006"
    assert not (folder / "checkpoints" / "step-000003").exists()


UNSHARED = ("unshare", "--user", "--map-root-user", "--mount")
IN_A_SMALL_DISK = """
mount -t tmpfs -o size="$1" tmpfs "$0"; shift
"$@"; status=$?; cat "$0"/run/result.json; exit $status
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*UNSHARED, "true"], capture_output=True).returncode,
    reason="a small file system of one's own needs user namespaces",
)
@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("2m", "the disk is full; free space, then go on with --resume auto"),  # the base model
        ("14m", "checkpoints need 1 x 10.2 MiB, and other files 3.4 MiB, but "),
    ],
)
def test_a_full_disk_is_named_with_the_way_out(tmp_path, size, message):
    job = (*JOB, "--save-every", "1", "--eval-every", "1", "--output-dir", str(tmp_path / "run"))
    command = [*UNSHARED, "sh", "-c", IN_A_SMALL_DISK, str(tmp_path), size, sys.executable, "-m", "accel_sft", *job]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert ("{\n" in run.stdout) == (size == "2m")  # what is refused before it trains leaves no result


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_refused_write_is_reported_with_a_fix(tmp_path, number):
    error = _explained(RunDir(tmp_path), StopSignals(), OSError(number, os.strerror(number), "model.safetensors"))
    assert isinstance(error, UserError)
    assert "then go on with --resume auto" in str(error)


def test_what_kernels_on_gpus_are_compiled_with_is_asked_for(monkeypatch, tmp_path):
    (compiler := tmp_path / "cc").write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(prepare, "device_count", lambda: 1)
    monkeypatch.setattr(prepare, "liger", lambda: None)
    monkeypatch.setattr(deepspeed_ops.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    compiling, liger = TrainConfig(compile=True).resolved({}), TrainConfig(use_liger_kernel=True).resolved({})
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UserError, match=r"--compile: there is no compiler \(no-such-compiler\)"):
        prepare._refuse_missing_packages(compiling)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(UserError, match="--use-liger-kernel: Python's headers are missing"):
        prepare._refuse_missing_packages(liger)
    (tmp_path / "Python.h").write_text("")
    prepare._refuse_missing_packages(compiling)
    prepare._refuse_missing_packages(liger)


# --- evaluate ---


def test_an_evaluation_overwrites_nothing(launched, called, tmp_path):
    (tmp_path / "report.md").write_text("by hand")
    refused = called("evaluate", "math", "--model", str(layout(launched, "plain").run_dir), run_dir=tmp_path)
    assert (refused.status, f"--output-dir {tmp_path}: not empty" in refused.output) == (1, True)
    assert (tmp_path / "report.md").read_text() == "by hand"


def test_evaluation_takes_the_runs_settings_unless_given_others(copy, called):
    _, folder = copy
    for model, flags, length in ((folder, (), 6), (folder / "final", (), 6), (folder, ("--max-new-tokens", "4"), 4)):
        shown = called("evaluate", "math", "--model", str(model), "--dry-run", *flags)
        assert f"max-new-tokens {length}" in shown.output
    evaluated = ("evaluate", "math", "--model", str(folder), "--dry-run")
    assert ", fp32 (" in accel_sft(*evaluated).output
    record = json.loads((folder / "run.json").read_text())
    record["launch"]["precision"] = "bf16"
    (folder / "run.json").write_text(json.dumps(record))
    assert ", bf16 (" in accel_sft(*evaluated).output
    assert ", fp32 (" in accel_sft(*evaluated, environment={"ACCELERATE_MIXED_PRECISION": "no"}).output


HOSTILE = {
    "a number for a name": {"task": 5},
    "lengths that are none": {"config": {"max_length": "9" * 9, "max_new_tokens": []}},
    "what steers a terminal": {"task": "\x1b]0;mine\x07", "launch": {"precision": "\x1b[2J"}},
    "deep": None,
}


@pytest.mark.parametrize("record", HOSTILE.values(), ids=HOSTILE)
def test_printed_records_steer_no_terminal(called, tmp_path, record):
    model = make_tiny(tmp_path / "run" / "final")
    usual = {"task": "math", "config": {}, "task_options": {}, "max_new_tokens": 4}
    content = json.dumps({**usual, **record} if isinstance(record, dict) else record)
    (tmp_path / "run" / "run.json").write_text("[" * 10**6 if record is None else content)
    run = called("evaluate", "math", "--model", str(model), "--eval-limit", "1", "--max-new-tokens", "2")
    assert "Traceback" not in run.output
    assert "\x1b" not in run.output
    assert run.status == 0 or "run.json" in run.output


def test_files_that_a_record_names_are_not_read_unasked(called, tmp_path):
    model, rows = make_tiny(tmp_path / "run" / "final"), tmp_path / "rows.jsonl"
    rows.write_text('{"question": "private", "answer": "private"}')
    record = {"task": "math", "config": {}, "task_options": {"train_file": str(rows), "validation_file": str(rows)}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    refused = called("evaluate", "math", "--model", str(model), "--dry-run")
    named = ("--train-file", str(rows), "--validation-file", str(rows))
    fix = f"its record names files, which are read only if you ask for that; add --same-data, or {' '.join(named)}"
    assert (refused.status, fix in refused.output) == (1, True)
    for permission in (named, ("--same-data",)):
        assert called("evaluate", "math", "--model", str(model), "--dry-run", *permission).status == 0
    other = called("evaluate", "ner", "--model", str(model), "--dry-run", "--same-data")
    assert (other.status, "--same-data: --model" in other.output) == (1, True)
