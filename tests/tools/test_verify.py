"""`accel-sft verify` finds what was changed in a run, and finds nothing in a run that is as it was trained."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from click.testing import CliRunner
from conftest import accel_sft, stopped
from limits import wait_for
from reference_job import JOB, LAYOUTS
from stopping import JOB as STOPPED
from stopping import steps_done
from tampering import (
    drop_checkpoint,
    edit_checkpoint,
    edit_json,
    edit_lines,
    edit_tensor,
    edit_yaml,
    flip_bit,
    make_agree,
)

from accel_sft import UserError
from accel_sft.io import manifest
from accel_sft.io.run_dir import RunDir
from accel_sft.rows import fingerprint
from accel_sft.rows.fingerprint import task_record
from accel_sft.tools.verify import records, segments
from accel_sft.tools.verify.command import verify
from accel_sft.tools.verify.records import Recorded, examine
from accel_sft_chat import Chat

TASK = '''
from dataclasses import dataclass
from accel_sft import Task, option, read_rows

def parse(row):
    return row["a"], row["b"]

@dataclass(kw_only=True)
class Sums(Task):
    """Add two numbers."""
    main_metric = "accuracy"
    train_file: str = option(help="Rows.", rows=True)

    def dataset(self, split):
        rows = read_rows(self.train_file, parse)
        return rows[:30] if split == "train" else rows[30:]

    def messages(self, example):
        return [{"role": "user", "content": f"{example[0]}+{example[1]}="}]

    def target(self, example):
        return str(sum(example))

    def score(self, example, text):
        return {"accuracy": float(text == self.target(example))}
'''
KEPT = ("--keep-checkpoints", "every:2", "--eval-every", "3", "--tracker", "none")
STEPS = ("--max-steps", "6", "--global-batch-size", "8", "--seed", "5", "--max-new-tokens", "4", *KEPT)
STEPS += ("--adapter", "lora")


@pytest.fixture(scope="module")
def place(common):
    """A folder with a task and its rows."""
    folder = common / "verified"
    folder.mkdir(exist_ok=True)
    (folder / "sums.py").write_text(TASK)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"a": n, "b": n * 7 % 10}) + "\n" for n in range(36)))
    return folder


@pytest.fixture(scope="module")
def job(place):
    return (str(place / "sums.py"), "--train-file", str(place / "rows.jsonl"), *STEPS)


@pytest.fixture
def honest(launched, job, place, tmp_path):
    """A copy of a finished run, of its task and of its rows; its records name the copies."""
    run = launched("verified-run", *job)
    for name in ("sums.py", "rows.jsonl"):
        shutil.copy(place / name, tmp_path / name)
    shutil.copytree(run.run_dir, tmp_path / "run")
    copy = RunDir(tmp_path / "run")
    for file in (copy.record, copy.settings):
        file.write_text(file.read_text().replace(str(place), str(tmp_path)))
    make_agree(copy)
    return copy


def told(run: RunDir, level: str = "differs") -> list[str]:
    found = [each for each in examine(Recorded.read(run)) if each.level == level]
    return [f"{each.subject}: {each.what}" for each in found]


@pytest.fixture
def forks(monkeypatch):
    """Runs what `verify` starts in forked processes; a test that is `long` starts real ones."""

    def launch(command, variables, folder, log, limit, on_poll):
        words = tuple(command[1:])
        module = {"accelerate.commands.launch": forked.LAUNCH, "torch.distributed.run": forked.TORCHRUN}
        words = (module.get(words[1], "accel_sft"), *words[2:])
        done = forked.run(words, {**os.environ, **variables}, folder.parent)
        log.write_text(done.stdout + done.stderr)

    monkeypatch.setattr(segments, "launch", launch)


def verified(run: RunDir, *options: str) -> tuple[int, dict]:
    done = CliRunner().invoke(verify, [str(run), "--json", *options])
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


def test_a_secret_that_run_yaml_hides_is_no_difference(tmp_path):
    (tmp_path / "run.yaml").write_text("task: t\nhf_token: '***'\nrows: '***'\nseed: '***'\n")
    record = {"config": {"seed": 3}, "task_options": {"hf_token": "***", "rows": "https://***@host/rows.jsonl"}}
    run = SimpleNamespace(run_dir=RunDir(tmp_path), record=record, trained=[])
    (found,) = records._settings(run)
    assert (found.level, found.what) == ("differs", "seed is ***, and 3 in run.json")


def test_nothing_is_found_in_a_run_that_is_as_it_was_trained(honest):
    assert told(honest) == told(honest, "open") == []
    assert len(told(honest, "holds")) == 6


def row(run):
    file = run.path.parent / "rows.jsonl"
    file.write_text(file.read_text().replace('"a": 3,', '"a": 4,'))


def task(run):
    file = run.path.parent / "sums.py"
    file.write_text(file.read_text().replace("{example[0]}+", "{example[1]}+"))


def both(name, value):
    def change(run):
        edit_json(run.record, **{f"config__{name}": value})
        edit_yaml(run, name, value)

    return change


def agreeing(change):
    def changed(run):
        change(run)
        make_agree(run)

    return changed


def swap(lines):
    lines[2], lines[3] = lines[3], lines[2]


def cut(lines):
    del lines[-2:]


def slower(lines):
    lines[2] = lines[2].replace('"seconds": ', '"seconds": 1')


LINES = "metrics.jsonl: lines"
TAMPERINGS = {
    "a row of the data": (row, "rows.jsonl: its content is another"),
    "the task's code": (task, "sums.py is not what the run was made with"),
    "the rate in run.json": (
        lambda run: edit_json(run.record, config__learning_rate=0.5),
        "run.yaml: learning_rate is",
    ),
    "the rate in run.json, by none": (
        lambda run: edit_json(run.record, config__learning_rate=None),
        "run.json: its records cannot be understood (AssertionError",
    ),
    "the rate in run.yaml": (lambda run: edit_yaml(run, "learning_rate", 0.5), "run.yaml: learning_rate is 0.5"),
    "the rate in both": (both("learning_rate", 0.5), "step 1 was made at the rate"),
    "the rate, with every digest made anew": (agreeing(both("learning_rate", 0.5)), "step 1 was made at the rate"),
    "the seed in both": (both("seed", 6), "step-000002 to step-000006: written with other settings than run.json"),
    "the data's digest": (
        lambda run: edit_json(run.record, data_sha256="0" * 64),
        "written with other data than",
    ),
    "a version": (lambda run: edit_json(run.record, launch__versions__torch="2.12.0"), "run.json: has"),
    "a number of a line": (lambda run: edit_lines(run, slower), f"{LINES} up to step 2 are not those"),
    "a line of a later step": (
        lambda run: edit_lines(run, lambda lines: lines.insert(-1, lines[-2])),
        f"{LINES} after step 4 and up to step 6 are not",
    ),
    "a line taken away": (lambda run: edit_lines(run, lambda lines: lines.pop(3)), "where step 3 is expected"),
    "a line taken away, with every digest made anew": (
        agreeing(lambda run: edit_lines(run, lambda lines: lines.pop(3))),
        "where step 3 is expected, the line of step 4 stands",
    ),
    "lines swapped": (lambda run: edit_lines(run, swap), f"{LINES} up to step"),
    "the last lines": (lambda run: edit_lines(run, cut), "metrics.jsonl: has"),
    "a checkpoint's bytes": (
        lambda run: flip_bit(next(run.checkpoint(4).glob("*.safetensors"))),
        "step-000004: rank-0000-000.safetensors has other bytes",
    ),
    "a checkpoint's weights, with its manifest": (
        lambda run: edit_checkpoint(run, 4, "weights"),
        "step-000004: it is another than was there when step-000006 was written",
    ),
    "a moment, with its manifest": (lambda run: edit_checkpoint(run, 2, "exp_avg:"), "step-000002: it is another"),
    "the last checkpoint, with its manifest": (
        lambda run: edit_checkpoint(run, 6, "weights"),
        "checkpoints/step-000006/manifest.json: has",
    ),
    "a checkpoint taken away": (
        lambda run: drop_checkpoint(run, 2),
        "step-000002: is missing; it was kept when step 6",
    ),
    "a checkpoint of another step": (
        lambda run: (drop_checkpoint(run, 4), run.checkpoint(2).rename(run.checkpoint(4))),
        "step-000004: it was written as that of step 2",
    ),
    "final/": (
        lambda run: edit_tensor(run.final / "adapter_model.safetensors"),
        "final/adapter_model.safetensors: has",
    ),
    "a file in final/": (
        lambda run: (run.final / "config.json").write_text("{}"),
        "final/config.json: was added",
    ),
    "a folder best/": (
        lambda run: shutil.copytree(run.base, run.best / "base"),
        "best/base/model.safetensors: was added",
    ),
    "the largest forward": (lambda run: run.most_tokens.write_text("{}"), "most-tokens.json: was added"),
    "best/": (
        lambda run: edit_tensor(run.best / "adapter_model.safetensors"),
        "best/adapter_model.safetensors: has",
    ),
    "the base": (lambda run: edit_tensor(run.base / "model.safetensors"), "base/model.safetensors: has other bytes"),
    "the result": (lambda run: edit_json(run.result, after__accuracy=1.0), "result.json: has"),
    "an answer": (
        lambda run: run.answers(6).write_text(run.answers(6).read_text().replace('"generated"', '"Generated"')),
        "samples/step-000006.jsonl: has other bytes",
    ),
    "the manifest": (lambda run: (run.path / manifest.MANIFEST).unlink(), "manifest.json: is missing"),
}


@pytest.mark.parametrize("what", TAMPERINGS)
def test_what_was_changed_in_a_run_is_found_by_its_records(honest, what):
    change, expected = TAMPERINGS[what]
    change(honest)
    found = told(honest)
    assert any(expected in line for line in found), found


def test_a_checkpoint_that_a_run_has_removed_since_is_not_missed_while_it_trains(honest):
    drop_checkpoint(honest, 2)
    assert any("step-000002: is missing" in line for line in told(honest))
    descriptor = os.open(honest.path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as training does
    assert not any("step-000002: is missing" in line for line in told(honest))
    os.close(descriptor)


def test_other_software_than_the_runs_is_found(honest, monkeypatch):
    monkeypatch.setattr(records, "code_fingerprint", lambda *_: "another")
    assert any(line.startswith("code: accel_sft's files are others") for line in told(honest))
    monkeypatch.setattr(records, "versions", lambda: {**json.loads(honest.record.read_text()), "torch": "9.9"})
    assert any("torch" in line and "here 9.9" in line for line in told(honest, "open"))


def test_an_installed_task_is_held_to_its_own_files_and_to_the_versions_of_what_they_import(honest):
    mine = task_record(Chat)
    assert mine["task_libraries"].keys() == {"regex", "sacrebleu"}

    def found(level, **changes):
        edit_json(honest.record, task="chat", task_file=None, **{**mine, **changes})
        return [line for line in told(honest, level) if line.startswith(("task:", "code:"))]

    assert found("holds") == ["code: accel_sft, the task and the libraries' versions are those of the run"]
    (line,) = found("differs", task_code="another")
    assert line.startswith("task: the files of its package are others than the run's: /")
    assert line.endswith("/accel_sft_chat")
    older = {"task_libraries": {"sacrebleu": "1.0"}}
    assert found("differs", **older) == []
    (line,) = found("open", **older)
    assert line.startswith("task: what it imports: sacrebleu 1.0, here ")


def test_a_task_whose_library_is_missing_is_not_called_changed(honest, monkeypatch):
    edit_json(honest.record, task="chat", task_file=None, **task_record(Chat))
    monkeypatch.setattr(fingerprint, "_distributions", dict)
    assert not [line for line in told(honest) if line.startswith("task:")]
    assert "task: a library that it imports is not installed here" in "".join(told(honest, "open"))


def changed_loss(run):
    """Lower the loss of step 5 and make all records agree."""

    def lower(lines):
        at, line = next(
            (at, line) for at, line in enumerate(map(json.loads, lines)) if line.get("loss") and line["step"] == 5
        )
        lines[at] = json.dumps({**line, "loss": line["loss"] - 0.01}) + "\n"

    edit_lines(run, lower)
    make_agree(run)


def changed_moments(run):
    edit_checkpoint(run, 4, "exp_avg:")
    make_agree(run)


def changed_row(run):
    """Another row, and another digest of it."""
    row(run)
    record = json.loads(run.record.read_text())
    name = next(iter(record["data_files"]))
    ((file, _),) = record["data_files"][name]
    for split in record["data_files"].values():
        split[0][1] = records.digest_of(Path(file))
    run.record.write_text(json.dumps(record, indent=2))
    make_agree(run)


AGREEING = {
    "a loss": (changed_loss, [4, 6], "steps 5 to 6: step 5: loss is"),
    "a moment": (changed_moments, [2, 4], "steps 3 to 4: tensors differ (1 of exp_avg; by up to 1.0e-03)"),
    "a row": (changed_row, [2, 4], "cannot be run again: the data is not what the run was started with"),
    "final/": (
        lambda run: (edit_tensor(run.final / "adapter_model.safetensors"), make_agree(run)),
        [4, 6],
        "final/ has other weights",
    ),
    "the seed": (agreeing(both("seed", 6)), [2, 4], "steps 3 to 4: step 3: "),
}


def seed_that_draws(run: RunDir, segment: list[int]) -> str:
    possible = segments.candidates(Recorded.read(run), from_start=False)
    drawn = {seed: segments.chosen(possible, 1, seed)[0] for seed in range(30)}
    return next(str(seed) for seed, found in drawn.items() if [found.begin, found.end] == segment)


@pytest.mark.parametrize(
    "what", [what if what == "a moment" else pytest.param(what, marks=pytest.mark.long) for what in AGREEING]
)
def test_what_all_records_were_made_to_agree_with_is_found_where_its_segment_is_run_again(honest, what, forks):
    change, segment, expected = AGREEING[what]
    change(honest)
    assert told(honest) == []
    status, report = verified(honest, "--segments", "1", "--seed", seed_that_draws(honest, segment))
    assert status == 1
    assert report["segments"] == [segment]
    assert report["chance"] == pytest.approx(1 / 3)
    assert "a changed segment would have been found with a probability of 33%" in report["notes"][0]
    found = [f"{each['subject']}: {each['what']}" for each in report["findings"] if each["level"] == "differs"]
    assert any(expected in line for line in found), found


def test_a_segment_that_is_run_again_has_the_same_bits(honest, forks):
    run = Recorded.read(honest)
    (first, *_, last) = segments.candidates(run, from_start=False)
    assert (first.begin, last.end) == (0, 6)
    finding = segments.run_again(run, last, 0.0)
    assert (finding.level, finding.subject) == ("holds", "steps 5 to 6"), finding
    assert finding.what == "weights, optimizer states and log lines are the same to the bit"


def test_segment_of_three_ranks_has_the_same_bits(tmp_path, forks):
    job = (*JOB, *KEPT, "--eval-every", "off")
    trained = accel_sft(*job, run_dir=tmp_path / "run", **LAYOUTS["ddp on three ranks"])
    assert trained.status == 0, trained.output
    run = Recorded.read(RunDir(tmp_path / "run"))
    finding = segments.run_again(run, segments.candidates(run, from_start=False)[-1], 0.0)
    assert (finding.level, finding.subject) == ("holds", "steps 5 to 6"), finding


def test_a_segment_that_cannot_be_run_again_here_is_no_difference_and_no_success(honest, forks):
    (honest.path.parent / "rows.jsonl").unlink()
    done = CliRunner().invoke(verify, [str(honest.path), "--segments", "1"])
    assert done.exit_code == 1, done.output
    assert f"{honest.path}: nothing differs from what it records; 2 of 2 segments could not be run again" in done.output
    assert "rows.jsonl" in done.output
    assert "with a probability of" not in done.output


HONEST = {
    "resumed": (*JOB, *KEPT),
    "killed and resumed": (*STOPPED, "--keep-checkpoints", "every:10", "--save-every", "10", "--tracker", "none"),
    "ddp": (*JOB, *KEPT),
    "ddp on three ranks": (*JOB, *KEPT),
    "z2": (*JOB, *KEPT),
    "z3": (*JOB, *KEPT),
    "torchrun": (*JOB, *KEPT),
    "lora": (*JOB, *KEPT, "--adapter", "lora", "--lora-dropout", "0.1"),
    "averages": (*JOB, *KEPT, "--ema-decay", "0.9"),
    "mix": (),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.long) for how in HONEST])
def test_nothing_is_found_in_honest_runs(how, tmp_path):
    run_dir, options = tmp_path / "run", LAYOUTS.get(how, {})
    job = HONEST[how]
    if how == "mix":
        job = mixed_job(tmp_path)
    if how == "killed and resumed":
        process = subprocess.Popen([sys.executable, "-m", "accel_sft", *job, "--output-dir", str(run_dir)])
        wait_for(lambda: steps_done(run_dir) >= 15)
        process.send_signal(signal.SIGKILL)
        process.wait()
        job = (*job, "--resume", "auto")
    trained = accel_sft(*job, run_dir=run_dir, **options)
    assert trained.status == 0, trained.output
    if how == "resumed":
        run_dir = stopped(trained, tmp_path / "resumed", 4)
        (run_dir / manifest.MANIFEST).unlink()
        resumed = accel_sft(*job, "--resume", "auto", run_dir=run_dir)
        assert "at step 4 of 6" in resumed.output
    command = [sys.executable, "-m", "accel_sft", "verify", str(run_dir), "--segments", "9", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert {finding["level"] for finding in report["findings"]} == {"holds"}, report
    again = [finding["what"] for finding in report["findings"] if finding["subject"].startswith("steps")]
    assert len(again) == len(report["segments"]) >= 3
    assert report["findings"][-1]["what"] == "exported weights are the same to the bit"
    assert all("are the same to the bit" in what for what in again)
    assert report["chance"] == 1.0


def mixed_job(folder):
    for name in ("a", "b"):
        turns = [{"role": "user", "content": f"{name}?"}, {"role": "assistant", "content": "It is so."}]
        rows = [{"messages": [{**turn, "content": f"{turn['content']} {n}"} for turn in turns]} for n in range(20)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [word for name in ("a", "b") for word in ("--train-file", str(folder / f"{name}.jsonl"))]
    mixed = ("chat", *files, "--mix", "2,1", "--held-out", "6", "--max-steps", "6", "--global-batch-size", "8")
    return (*mixed, "--max-new-tokens", "4", *KEPT)


@pytest.mark.parametrize("tolerance", [1.0, pytest.param(0.0, marks=pytest.mark.long)])
def test_another_machines_run_is_held_to_its_curve(honest, forks, tolerance):
    edit_json(honest.record, launch__host__processor="another")
    changed_loss(honest)
    if tolerance:
        asked = ("--segments", "1", "--seed", seed_that_draws(honest, [4, 6]), "--tolerance", str(tolerance))
        report = verified(honest, *asked)[1]
        finding = next(each for each in report["findings"] if each["subject"] == "steps 5 to 6")
        assert finding["level"] == "holds"
        assert "bits may differ: processor then: another, here: " in finding["what"]
        assert report["notes"][1].startswith("where bits may differ, that is a change by which a loss differs by more")
    else:
        finding = segments.run_again(Recorded.read(honest), segments.Segment(4, 6), tolerance)
        assert finding.level == "differs"
        assert "more than --tolerance 0" in finding.what


def test_what_is_no_run_is_refused_in_a_line(honest, tmp_path):
    done = accel_sft("verify", str(tmp_path))
    assert done.status == 1
    assert "no run.json in it; name the folder of a run" in done.output
    honest.metrics.unlink()
    honest.metrics.mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be read"):
        Recorded.read(honest)
