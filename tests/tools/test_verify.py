"""`accel-sft verify` finds what was changed in a run, and finds nothing in a run that is as it was trained."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import forked_launches
import pytest
from click.testing import CliRunner
from conftest import finished, stopped
from reference_job import JOB, LAYOUTS
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

@dataclass(kw_only=True)
class Sums(Task):
    """Add two numbers."""
    main_metric = "accuracy"
    train_file: str = option(help="Rows.", rows=True)

    def dataset(self, split):
        rows = read_rows(self.train_file, dict)
        return rows[:30] if split == "train" else rows[30:]

    def messages(self, example):
        return [{"role": "user", "content": f"{example['a']}+{example['b']}="}]

    def target(self, example):
        return str(example["a"] + example["b"])

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


@pytest.fixture
def honest(launched, place, tmp_path):
    """A copy of a finished run, of its task and of its rows; its records name the copies."""
    run = launched("verified-run", str(place / "sums.py"), "--train-file", str(place / "rows.jsonl"), *STEPS)
    for name in ("sums.py", "rows.jsonl"):
        shutil.copy(place / name, tmp_path / name)
    shutil.copytree(run.run_dir, tmp_path / "run")
    copy = RunDir(tmp_path / "run")
    for file in (copy.record, copy.settings):
        file.write_text(file.read_text().replace(str(place), str(tmp_path)))
    make_agree(copy)
    return copy


def differences(run: RunDir, level: str = "differs") -> list[str]:
    findings = [finding for finding in examine(Recorded.read(run)) if finding.level == level]
    return [f"{finding.subject}: {finding.what}" for finding in findings]


@pytest.fixture
def forks(monkeypatch):
    """Runs what `verify` starts in forked processes; a test that is `long` starts real ones."""
    forked_launches.use(monkeypatch, segments)


def verified(run: RunDir, *options: str) -> tuple[int, dict]:
    done = CliRunner().invoke(verify, [str(run), "--json", *options])
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


def test_a_secret_that_run_yaml_hides_is_no_difference(tmp_path):
    (tmp_path / "run.yaml").write_text("task: t\nhf_token: '***'\nrows: '***'\nseed: '***'\n")
    record = {"config": {"seed": 3}, "task_options": {"hf_token": "***", "rows": "https://***@host/rows.jsonl"}}
    run = SimpleNamespace(run_dir=RunDir(tmp_path), record=record, trained=[])
    (finding,) = records._settings(run)
    assert (finding.level, finding.what) == ("differs", "seed is ***, but 3 in run.json")


def on(change, *arguments, **values):
    return lambda run: change(run, *arguments, **values)


def edit_text(run, name, old, new):
    (run.path / name).write_text((run.path / name).read_text().replace(old, new))


def edit_record(run, **values):
    edit_json(run.record, **values)


def edit_weights(run, name):
    edit_tensor(run.path / f"{name}.safetensors")


def both(run, name, value):
    edit_record(run, **{f"config__{name}": value})
    edit_yaml(run, name, value)


def slower(lines):
    lines[2] = lines[2].replace('"seconds": ', '"seconds": 1')


def rename_checkpoint(run):
    drop_checkpoint(run, 4)
    run.checkpoint(2).rename(run.checkpoint(4))


def agreeing(change):
    def changed(run):
        change(run)
        make_agree(run)

    return changed


row = on(edit_text, "../rows.jsonl", '"a": 3,', '"a": 4,')
LINES = "metrics.jsonl: lines"
TAMPERINGS = [
    (row, "rows.jsonl: its content is not what the run was trained on"),
    (on(edit_text, "../sums.py", "['a']}+", "['b']}+"), "sums.py differs from the file that the run used"),
    (on(edit_record, config__learning_rate=None), "run.json: its records cannot be understood (AssertionError"),
    (agreeing(on(both, "learning_rate", 0.5)), "step 1 had learning rate"),
    (on(both, "seed", 6), "step-000006: written with other settings than run.json"),
    (on(edit_record, data_sha256="0" * 64), "written with other data than"),
    (on(edit_lines, slower), f"{LINES} up to step 2 have changed"),
    (agreeing(on(edit_lines, lambda lines: lines.pop(3))), "the line of step 4 is where that of step 3 is expected"),
    (lambda run: flip_bit(next(run.checkpoint(4).glob("*.safetensors"))), "rank-0000-000.safetensors has changed"),
    (on(edit_checkpoint, 4, "weights"), "step-000004: it is not the checkpoint that was there when step-000006 was"),
    (on(drop_checkpoint, 2), "step-000002: is missing; it was there when step 6"),
    (rename_checkpoint, "step-000004: it was written as the checkpoint of step 2"),
    (on(edit_weights, "final/adapter_model"), "final/adapter_model.safetensors: has"),
    (lambda run: (run.final / "config.json").write_text("{}"), "final/config.json: was added"),
    (on(edit_text, "samples/step-000006.jsonl", '"generated"', '"Generated"'), "step-000006.jsonl: has changed"),
    (lambda run: (run.path / manifest.MANIFEST).unlink(), "manifest.json: is missing"),
]


@pytest.mark.parametrize(("change", "expected"), TAMPERINGS, ids=[expected for _, expected in TAMPERINGS])
def test_changes_in_a_run_are_found_by_its_records(honest, change, expected):
    change(honest)
    lines = differences(honest)
    assert any(expected in line for line in lines), lines


def test_training_run_may_remove_its_checkpoints(honest):
    drop_checkpoint(honest, 2)
    assert any("step-000002: is missing" in line for line in differences(honest))
    descriptor = os.open(honest.path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as training does
    assert not any("step-000002: is missing" in line for line in differences(honest))
    os.close(descriptor)


def test_other_software_than_the_runs_is_found(honest, monkeypatch):
    monkeypatch.setattr(records, "code_fingerprint", lambda *_: "another")
    assert any(line.startswith("code: accel_sft's files differ from the run's") for line in differences(honest))
    monkeypatch.setattr(records, "versions", lambda: {**json.loads(honest.record.read_text()), "torch": "9.9"})
    assert any("torch" in line and "here 9.9" in line for line in differences(honest, "open"))


def test_installed_task_is_held_to_its_files_and_their_imports(honest, monkeypatch):
    mine = task_record(Chat)
    assert mine["task_libraries"].keys() == {"regex", "sacrebleu"}

    def findings(level, **changes):
        edit_json(honest.record, task="chat", task_file=None, **{**mine, **changes})
        return [line for line in differences(honest, level) if line.startswith(("task:", "code:"))]

    assert findings("holds") == ["code: accel_sft, the task and the libraries' versions are those of the run"]
    (line,) = findings("differs", task_code="another")
    assert line.startswith("task: the files of its package differ from the run's: /")
    assert line.endswith("/accel_sft_chat")
    older = {"task_libraries": {"sacrebleu": "1.0"}}
    assert findings("differs", **older) == []
    (line,) = findings("open", **older)
    assert line.startswith("task: the task's libraries differ (sacrebleu 1.0, here ")
    monkeypatch.setattr(fingerprint, "_distributions", dict)
    assert findings("differs") == []
    assert "task: not compared, because a library that the task imports" in "".join(findings("open"))


def lower_loss(lines):
    """Of step 5."""
    at, line = next((at, x) for at, x in enumerate(map(json.loads, lines)) if x.get("loss") and x["step"] == 5)
    lines[at] = json.dumps({**line, "loss": line["loss"] - 0.01}) + "\n"


def row_and_digest(run):
    row(run)
    record = run.read_record()
    for split in record["data_files"].values():
        split[0][1] = records.digest_of(Path(split[0][0]))
    run.record.write_text(json.dumps(record, indent=2))


changed_loss = agreeing(on(edit_lines, lower_loss))
AGREEING = {
    "a loss": (changed_loss, [4, 6], "steps 5 to 6: step 5: loss was"),
    "a moment": (
        agreeing(on(edit_checkpoint, 4, "exp_avg:")),
        [2, 4],
        "steps 3 to 4: the checkpoint of step 4 has other weights or optimizer states (rank-0000-000.safetensors)",
    ),
    "a row": (
        agreeing(row_and_digest),
        [2, 4],
        "cannot be run again: the data is not what the run was started with",
    ),
    "final/": (agreeing(on(edit_weights, "final/adapter_model")), [4, 6], "final/ has other weights"),
}


def seed_that_draws(run: RunDir, segment: list[int]) -> str:
    possible = segments.candidates(Recorded.read(run), from_start=False)
    drawn = {seed: segments.chosen(possible, 1, seed)[0] for seed in range(30)}
    return next(str(seed) for seed, draw in drawn.items() if [draw.begin, draw.end] == segment)


@pytest.mark.parametrize(
    "what", [what if what == "a moment" else pytest.param(what, marks=pytest.mark.long) for what in AGREEING]
)
def test_rerun_segment_finds_what_agreeing_records_hide(honest, what, forks):
    change, segment, expected = AGREEING[what]
    change(honest)
    assert differences(honest) == []
    status, report = verified(honest, "--segments", "1", "--seed", seed_that_draws(honest, segment))
    assert status == 1
    assert report["segments"] == [segment]
    assert report["notes"][0] == "1 of 3 segments were run again (2 of 6 steps)"
    lines = [
        f"{finding['subject']}: {finding['what']}" for finding in report["findings"] if finding["level"] == "differs"
    ]
    assert any(expected in line for line in lines), lines


def test_unchanged_run_has_no_findings_and_the_same_bits(honest, forks):
    run = Recorded.read(honest)
    assert [finding.level for finding in examine(run)] == ["holds"] * 6
    (first, *_, last) = segments.candidates(run, from_start=False)
    assert (first.begin, last.end) == (0, 6)
    finding = segments.run_again(run, last, 0.0)
    assert (finding.level, finding.subject) == ("holds", "steps 5 to 6"), finding
    assert finding.what == "weights, optimizer states and log lines are the same to the bit"


def test_segment_of_three_ranks_has_the_same_bits(tmp_path, forks):
    job = (*JOB, *KEPT, "--eval-every", "off")
    finished(*job, run_dir=tmp_path / "run", **LAYOUTS["ddp on three ranks"])
    run = Recorded.read(RunDir(tmp_path / "run"))
    finding = segments.run_again(run, segments.candidates(run, from_start=False)[-1], 0.0)
    assert (finding.level, finding.subject) == ("holds", "steps 5 to 6"), finding


def test_segment_that_cannot_rerun_is_neither_difference_nor_success(honest, forks):
    (honest.path.parent / "rows.jsonl").unlink()
    done = CliRunner().invoke(verify, [str(honest.path), "--segments", "1"])
    assert done.exit_code == 1, done.output
    assert f"{honest.path}: nothing differs from its records; 1 of 1 segments could not be run again" in done.output
    assert "rows.jsonl" in done.output
    assert "0 of 3 segments were run again" in done.output


HONEST = {
    "resumed": (),
    "z3": (),
    "torchrun": (),
    "averages": ("--adapter", "lora", "--lora-dropout", "0.1", "--ema-decay", "0.9"),
}


@pytest.mark.long
@pytest.mark.parametrize("how", HONEST)
def test_nothing_is_found_in_honest_runs(how, tmp_path):
    run_dir, job = tmp_path / "run", (*JOB, *KEPT, *HONEST[how])
    trained = finished(*job, run_dir=run_dir, **LAYOUTS.get(how, {}))
    if how == "resumed":
        run_dir = stopped(trained, tmp_path / "resumed", 4)
        (run_dir / manifest.MANIFEST).unlink()
        assert "at step 4 of 6" in finished(*job, "--resume", "auto", run_dir=run_dir).output
    status, report = verified(RunDir(run_dir), "--segments", "9")
    assert status == 0, report
    assert {finding["level"] for finding in report["findings"]} == {"holds"}, report
    again = [finding["what"] for finding in report["findings"] if finding["subject"].startswith("steps")]
    assert len(again) == len(report["segments"]) >= 3
    assert all("are the same to the bit" in what for what in again)


def test_another_machines_run_is_held_to_its_curve(honest, forks):
    edit_json(honest.record, launch__host__processor="another")
    changed_loss(honest)
    run = Recorded.read(honest)
    finding = segments.run_again(run, segments.Segment(4, 6), 1.0)
    assert finding.level == "holds"
    assert "bits may differ: processor (another in the run, " in finding.what
    finding = segments.run_again(run, segments.Segment(4, 6), 0.0)
    assert finding.level == "differs"
    assert "more than --tolerance 0" in finding.what


def test_what_is_no_run_is_refused_in_a_line(honest, tmp_path, called):
    done = called("verify", str(tmp_path))
    assert done.status == 1
    assert "no run.json in it; name the folder of a run" in done.output
    honest.metrics.unlink()
    honest.metrics.mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be read"):
        Recorded.read(honest)
