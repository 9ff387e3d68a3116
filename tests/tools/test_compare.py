"""A comparison measures real launches; however one ends is a result, and an interrupted comparison goes on."""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import forked_launches
import pytest
from click.testing import CliRunner
from limits import wait_for

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.options import settings
from accel_sft.cli.group import cli
from accel_sft.io.files import write_json_lines
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.child import Ended, outcome
from accel_sft.tools.compare import command, rounds
from accel_sft.tools.compare.findings import findings as summary
from accel_sft.tools.compare.findings import paired_settings
from accel_sft.tools.compare.measured import measure, summarise
from accel_sft.tools.compare.rounds import open_record, write_record
from accel_sft.tools.compare.settings import ComparedSetting, product, split_values
from accel_sft.tools.compare.tables import as_csv, terminal_table
from accel_sft.tools.report.runs import SCHEMA

SETTINGS = {setting.name: setting for setting in settings(TrainConfig)}
FAULTY = '''
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
from accel_sft import option
from accel_sft_math import Math

@dataclass(kw_only=True)
class Faulty(Math):
    """Sums, unless a fault comes first."""
    api_key: str = option("", help="A secret.")
    fault: str = option("none", choices=("none", "killed", "memory", "raised", "held"), help="What happens.")

    def dataset(self, split):
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raised":
            raise ValueError("no rows today")
        if self.fault == "held":
            Path("begun").touch()
            while Path("hold").exists():
                time.sleep(0.1)
        if self.fault == "memory":
            import fake_memory
            fake_memory.Device(budget=1 << 20).__enter__()
        return super().dataset(split)[: 40 if split == "train" else 4]
'''
FAULTS = {"none": "complete", "killed": "killed", "memory": "out of memory", "raised": "failed"}
RUN = ("--global-batch-size", "4", "--max-steps", "3", "--discard-steps", "1", "--output-dir", "compared")


def here(monkeypatch, folder, *arguments):
    """What `accel-sft compare ./faulty.py` prints in this process, with launches that fork, in `folder`."""
    (folder / "faulty.py").write_text(FAULTY)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["accel-sft", "compare", "./faulty.py", *arguments])
    forked_launches.use(monkeypatch, rounds)
    done = CliRunner().invoke(cli, sys.argv[1:])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def read(folder):
    return json.loads((folder / "compared" / "comparison.json").read_text())


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Four settings, three of which do not come to their end; the one that does is run twice."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        printed = here(patch, folder, "--api-key", "hunter2", "--fault", ",".join(FAULTS), "--repeat", "2", *RUN)
    return folder, printed, read(folder)


def test_however_a_run_ends_is_a_result(compared):
    folder, printed, record = compared
    settings = {setting["values"]["fault"]: setting for setting in record["settings"]}
    assert {fault: setting["status"] for fault, setting in settings.items()} == FAULTS
    reasons = {"killed": "signal 9", "memory": "CUDA out of memory", "raised": "no rows today"}
    for fault, reason in reasons.items():
        assert reason in settings[fault]["reason"]
        assert f"fault {fault}, round 1: {FAULTS[fault]}" in " ".join(printed.split())
    written = [path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".html", ".csv")]
    assert len(written) > 5
    assert [path for path in written if "hunter2" in path.read_text()] == []
    runs = [(run["started"], run["round"], entry["name"]) for entry in record["settings"] for run in entry["runs"]]
    rounds_and_names = [(number, name) for _, number, name in sorted(runs)]
    assert rounds_and_names == [*((1, f"fault {fault}") for fault in FAULTS), (2, "fault none")]  # none that failed
    rows = list(csv.DictReader((folder / "compared" / "comparison.csv").open()))
    assert [(row["fault"], row["status"]) for row in rows] == [("none", "complete"), *FAULTS.items()]
    table = printed[: printed.index("\n- ")].rpartition("in all)")[2].splitlines()[1:]
    assert sum(line.split()[:1] in ([fault] for fault in FAULTS) for line in table) == len(FAULTS)
    assert max(map(len, table)) <= 80
    assert "fault killed" in (folder / "compared" / "comparison.html").read_text()


def test_silent_run_is_called_hung(tmp_path):
    (tmp_path / "log").write_text("Error: nothing has moved for 12 seconds: stuck in dataset\n")
    assert outcome(Ended(1, 2.0, False), RunDir(tmp_path), tmp_path / "log", 90.0)[0] == "hung"


def test_record_of_a_run_is_what_its_folder_says(compared, tmp_path):
    folder, _, record = compared
    run = record["settings"][0]["runs"][0]
    run_dir = RunDir(folder / "compared" / run["folder"])
    steps = [line for line in map(json.loads, run_dir.metrics.read_text().splitlines()) if "loss" in line]
    result = json.loads(run_dir.result.read_text())
    assert (run["steps"], run["step_seconds"]) == (3, [line["seconds"] for line in steps[1:]])
    expected = sum(line["tokens"] for line in steps[1:]) / sum(line["seconds"] for line in steps[1:])
    assert run["tokens_per_second"] == run["tokens_per_second_per_device"] == pytest.approx(expected)
    assert run["mfu"] is None  # a CPU has no known peak
    write_json_lines(tmp_path / "metrics.jsonl", [{**line, "mfu": 0.25} for line in steps])
    assert measure(RunDir(tmp_path), 1)["mfu"] == pytest.approx(0.25)
    assert run["peak_host_memory_gib"] == result["peak_host_memory_gib"] > 0
    assert run["host_memory_all_ranks_gib"] == result["system"][0]["peak"]["process_memory_gib"] > 0
    assert run["metric_after"] == result["after"]["accuracy"]
    assert run["environment"]["versions"]["torch"] == record["environment"]["versions"]["torch"]
    assert not run_dir.final.exists()  # weights are deleted once they are measured
    assert (folder / "compared" / run["log"]).is_file()


def test_an_interrupted_comparison_leaves_no_process_and_goes_on(tmp_path, monkeypatch):
    given = ("--fault", "held", "--repeat", "1", *RUN)
    (tmp_path / "hold").touch()
    (tmp_path / "faulty.py").write_text(FAULTY)

    def started(condition):
        """The process of a comparison, once its first launch has come to a condition."""
        words = [sys.executable, "-m", "accel_sft", "compare", "./faulty.py", *given]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(words, env={**os.environ, "COLUMNS": "80"}, cwd=tmp_path, **pipes)
        wait_for(lambda: condition() or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        return process

    process = started(lambda: forked_launches.marked(tmp_path))
    process.kill()
    process.communicate()
    left = forked_launches.marked(tmp_path)
    assert left != []
    process = started((tmp_path / "begun").exists)
    assert forked_launches.marked(tmp_path) != []
    assert [one for one in left if one.is_running()] == []
    process.send_signal(signal.SIGINT)
    printed = process.communicate()[0]
    assert process.returncode == 130, printed
    assert "interrupted by SIGINT; to resume, repeat the command with --output-dir" in printed
    assert forked_launches.marked(tmp_path) == []
    assert (read(tmp_path)["status"], read(tmp_path)["settings"][0]["runs"]) == ("interrupted", [])
    (tmp_path / "hold").unlink()
    here(monkeypatch, tmp_path, *given)
    assert read(tmp_path)["settings"][0]["status"] == "complete"


def test_settings_are_the_product_and_single_has_one_process():
    z2 = Path("accelerate_configs/z2.yaml").absolute()
    options = {SETTINGS["micro_batch_size"]: ["1", "32"], SETTINGS["seed"]: ["1"]}
    made, varied = product("math", {"single": None, "z2": z2}, ["1", "2"], [], options, [])
    assert varied == ["launch", "num_processes", "micro_batch_size"]
    assert [setting.name for setting in made] == [
        *(f"single, micro-batch-size {m}" for m in (1, 32)),
        *(f"z2, num-processes {n}, micro-batch-size {m}" for n in (1, 2) for m in (1, 32)),
    ]
    made, _ = product("math", {"z2": z2}, ["2"], ["no"], {}, ["--seed", "1"])
    assert made[0].launch == {"processes": 2, "precision": "no"}
    assert made[0].shown_command(Path("run")).endswith("-m accel_sft math --seed 1 --output-dir run")


@dataclass
class Keyed:
    api_key: str = ""


def test_secrets_cannot_be_compared():
    (key,) = (one for one in settings(Keyed) if one.name == "api_key")
    made, _ = product("math", {"single": None}, [], [], {key: ["a"]}, [])
    assert (made[0].name, made[0].values["api_key"]) == ("single", "***")
    with pytest.raises(UserError, match="--api-key: secrets are not recorded, so they cannot be compared"):
        product("math", {"single": None}, [], [], {key: ["a", "b"]}, [])


def test_values_are_split_at_commas_but_where_they_hold_commas():
    assert split_values(SETTINGS["micro_batch_size"], ("1,32", "1", "auto")) == ["1", "32", "auto"]
    assert split_values(SETTINGS["learning_rate"], ("1e-4,0.0001,3e-4",)) == ["1e-4", "3e-4"]
    assert split_values(SETTINGS["lora_target_modules"], ("q,v", "k"), unsplit=True) == ["q,v", "k"]
    assert split_values(SETTINGS["gradient_checkpointing"], ("on,off",)) == ["on", "off"]
    with pytest.raises(UserError, match="--seed 1,,2: a value between two commas is empty"):
        split_values(SETTINGS["seed"], ("1,,2",))


@pytest.mark.parametrize(
    ("task", "given", "words"),
    [
        ("math", ("--train-only", r"layers\.\d{1,2}\.", "--no-profile"), ("--tracker", "none")),
        ("chat", ("--train-file", "it's a -- b,c.jsonl"), ("--eval-every", "5")),
    ],
)
def test_command_line_decides_settings_and_words_of_runs(monkeypatch, task, given, words):
    made = []
    monkeypatch.setattr(command, "_check", lambda settings, *_: made.extend(settings))
    done = CliRunner().invoke(cli, ["compare", task, "--seed", "1,2", *given, "--dry-run", "--", *words])
    assert done.exit_code == 0, done.exception
    assert [setting.name for setting in made] == ["seed 1", "seed 2"]
    own = made[0].words[: -len(words)]
    assert made[0].words[len(own) :] == words
    assert {*given, "--seed", "1", "--save-every", "off"} <= {*own}
    assert ("epoch" in own) == ("5" not in words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--launch z9", "--launch 'z9': expected a file, a name that `accel-sft launch-file` lists"),
        ("--launch multinode_z3", "it is for 2 machines"),
        ("--max-steps 3", "--max-steps 3: the first 3 are not counted"),
        ("--seed 1 -- --seed 2", "--seed: given both before and after --"),
        ("-- --output-dir x", "--output-dir after --"),
        ("--lr-scheduler linear,bad", "--lr-scheduler bad: not one of"),
        ("--mixed-precision bf17", "--mixed-precision 'bf17': expected one of no, fp16, bf16"),
        ("--profile", "--profile slows the first 5 steps: --discard-steps 5 or more"),
        ("--num-processes two", "--num-processes 'two': expected whole numbers"),
        ("--output-dir taken", "not empty, and without a comparison"),
        ("--lora-r 8,32", "--lora-r: all settings would train the same, because --adapter none has no adapter"),
    ],
)
def test_unmeasurable_settings_are_refused_before_the_first_launch(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    refused = CliRunner().invoke(cli, ["compare", "math", *arguments.split()]).exception
    assert isinstance(refused, UserError)
    (line,) = refused.problems
    assert message in line
    assert [path.name for path in tmp_path.rglob("*") if path.name != "runs"] == ["taken", "mine"]


def test_resume_makes_runs_whose_folder_is_gone_again(tmp_path):
    nothing: dict = {}
    about = {"values": nothing, "launch": nothing, "environment": nothing, "words": (), "fingerprint": ""}
    made = [ComparedSetting(name=name, folder=name, launcher=(), **about) for name in ("z0", "z1")]
    wanted = {"task": "math", "fingerprints": {}, "discard_steps": 0, "command": "accel-sft compare math"}
    record = open_record(tmp_path, wanted, made)
    for setting, entry in zip(made, record["settings"], strict=True):
        folder = f"runs/{setting.folder}/round-1"
        (tmp_path / folder).mkdir(parents=True)
        entry["runs"].append({"round": 1, "status": "failed", "reason": "", "folder": folder, "environment": {}})
    write_record(tmp_path, record)
    (tmp_path / "runs" / "z1" / "round-1").rmdir()
    again = open_record(tmp_path, wanted, made)
    assert [entry["runs"] for entry in again["settings"]] == [record["settings"][0]["runs"], []]
    for other in ({"discard_steps": 1}, {"fingerprints": {"--config a.yaml": "1"}}):
        with pytest.raises(UserError, match="a comparison of other settings or files"):
            open_record(tmp_path, {**wanted, **other}, made)
    with pytest.raises(UserError, match="a comparison of other settings or files"):
        open_record(tmp_path, wanted, [dataclasses.replace(made[0], fingerprint="changed"), made[1]])
    write_record(tmp_path, {**record, "schema": SCHEMA + 1})
    with pytest.raises(UserError, match="not the record of a comparison"):
        open_record(tmp_path, wanted, made)
    write_record(tmp_path, {"schema": SCHEMA})
    with pytest.raises(UserError, match="damaged; name another --output-dir"):
        open_record(tmp_path, wanted, made)


@pytest.mark.parametrize("metric", [float("nan"), "\ud800", [1]], ids=repr)
def test_metric_that_is_no_number_ends_no_comparison(tmp_path, metric):
    run_dir = RunDir(tmp_path)
    result = {"after": {"accuracy": metric}, "main_metric": "accuracy", "intervals": {"after": {}}}
    run_dir.result.write_text(json.dumps(result))
    run_dir.metrics.write_text('{"step": 1, "loss": 1.0, "seconds": 0.1, "tokens": 64}\n{"step": 2, "lo')
    measured = measure(run_dir, 0)
    assert (measured["steps"], measured["tokens_per_second"]) == (1, 640)
    assert measured["metric_after"] is None or measured["metric_after"] != measured["metric_after"]


def made(tmp_path, varied, rows, **more):
    """A record as if measured: of each row the values of the varied options, and speed, losses and result of rounds."""
    record = {"task": "math", "varied": varied, "main_metric": "accuracy", "command": "compare", **more, "settings": []}
    for number, (values, of_rounds) in enumerate(rows):
        runs = []
        for turn, (speed, losses, result) in enumerate(of_rounds, 1):
            run_dir = RunDir(tmp_path / f"{number}-{turn}")
            run_dir.path.mkdir(parents=True)
            lines = [{"step": n, "loss": loss, "seconds": 64 / speed, "tokens": 64} for n, loss in enumerate(losses, 1)]
            write_json_lines(run_dir.metrics, lines)
            run_dir.write_result({**result, "main_metric": "accuracy"})
            run = {"round": turn, "status": "complete", "reason": "", "folder": run_dir.path.name, "seconds": 9}
            runs.append(run | measure(run_dir, 1))
        values = dict(zip(varied, values, strict=True))
        about = {"name": " ".join(map(str, values.values())), "values": values, "launch": {"precision": "bf16"}}
        record["settings"].append({**about, "runs": runs})
    return summarised(record, tmp_path)


def summarised(record, folder):
    summarise(record, folder)
    record["findings"] = summary(record)
    return record


LOSSES = [4.0, 2.0, 1.0]
SWEPT = ("learning_rate", "seed")


def of_launch(name, speeds, memory=10.0, losses=LOSSES):
    result = {"peak_device_memory_gib": memory, "after": {"accuracy": 0.5}}
    return (name,), [(speed, losses, result) for speed in speeds]


def of_sweep(rate, seed, metric, loss):
    return (rate, seed), [(640, LOSSES, {"after": {} if metric is None else {"accuracy": metric, "eval_loss": loss}})]


def test_findings_name_the_fastest_and_what_others_cost(tmp_path):
    rows = [of_launch("z0", (1000, 1010)), of_launch("z2", (800, 810), 10.5, [4.0, 2.0, 1.01])]
    record = made(tmp_path, ["launch"], [*rows, of_launch("z2_offload", (400, 404), 6.0)])
    findings = "\n".join(record["findings"])
    assert "z0 is the fastest: 1,005 tokens/s" in findings
    assert "z2_offload takes 2.50 times the time of z0, -4.00 GiB on a GPU." in findings
    assert "differ by 1% at most (z2 from z0, step 3)" in findings
    assert not re.search("undecided|Conditions differ|precision", findings)
    assert record["settings"][1]["ratio_to_best"] == pytest.approx(805 / 1005)
    assert record["settings"][1]["spread"]["tokens_per_second"] == pytest.approx(10 / 805)
    record["settings"][1]["launch"]["precision"] = "no"
    for run, version in zip(record["settings"][1]["runs"], ("2.13", "2.14"), strict=True):
        run["environment"]["versions"] = {"torch": version}
    findings = "\n".join(summary(record))
    assert "Settings compute in different precisions (bf16, no)" in findings
    assert "Conditions differ between runs: versions (" in findings
    record["settings"].append(copy.deepcopy(record["settings"][0]) | {"runs": [], "name": "z3"})
    summarised(record, tmp_path)
    assert record["settings"][3]["status"] == "not run"
    assert (terminal_table(record).row_count, len(as_csv(record).splitlines())) == (4, 7)


def test_difference_below_spread_is_undecided_and_one_round_unknown(tmp_path):
    rows = [of_launch("z0", (1000, 1100)), of_launch("z2", (990, 1090))]
    text = "\n".join(made(tmp_path / "twice", ["launch"], rows)["findings"])
    assert "fastest: z0 and z2. They differ by 1.0% at most, and rounds of one setting by 10%. z0: " in text
    record = made(tmp_path / "once", ["launch"], [(values, of_rounds[:1]) for values, of_rounds in rows])
    assert record["findings"][0].startswith("The fastest setting is not known: a setting has only one round")
    assert not any("is the fastest" in line for line in record["findings"][1:])
    assert record["settings"][0]["spread"]["tokens_per_second"] is None


def test_disturbed_round_is_marked_and_its_times_dropped(tmp_path):
    rows = [of_launch("z0", (1000, 1010, 500)), of_launch("z2", (400, 410, 420))]
    record = made(tmp_path, ["launch"], rows)
    assert not any("disturbed" in line for line in record["findings"])
    first, second = record["settings"]
    first["runs"][2]["disturbed"] = ["steps 2 to 9: other processes took 1.4 of 2 cores"]
    for run, low in zip(first["runs"], (0.40, 0.42, 0.44), strict=True):
        run["metric_low"] = low
    for run in second["runs"]:
        run["disturbed"] = ["steps 3 to 9: rank 0's GPU ran at 1,200 of 1,980 MHz (power cap)"]
    text = "\n".join(summarised(record, tmp_path)["findings"])
    assert first["median"]["tokens_per_second"] == pytest.approx(1005)
    assert second["median"]["tokens_per_second"] == pytest.approx(410)
    assert first["median"]["metric_low"] == 0.42  # of all rounds, as the metric
    assert "Round 3 of z0 (*) was disturbed (steps 2 to 9: other processes took 1.4 of 2 cores): its times" in text
    assert [str(text) for text in terminal_table(record).columns[0].cells] == ["z0 *", "z2 *"]
    assert list(csv.DictReader(io.StringIO(as_csv(record))))[2]["disturbed"].startswith("steps 2 to 9")
    first["runs"][1]["disturbed"] = ["steps 2 to 9: other processes took 1.0 of 2 cores"]
    findings = summarised(record, tmp_path)["findings"]
    assert any("not known: a setting has only one round that counts; --repeat 3" in line for line in findings)


def test_sweep_is_ranked_by_metric_and_not_by_speed(tmp_path):
    good = [of_sweep(3e-4, seed, metric, 0.1) for seed, metric in ((1, 0.96), (2, 0.94), (3, 0.90))]
    close = [of_sweep(1e-3, seed, metric, 0.1) for seed, metric in ((1, 0.92), (2, 0.90))]
    record = made(tmp_path, SWEPT, [of_sweep(1e-4, 1, 0.5, 0.9), of_sweep(1e-4, 2, 0.5, 0.9), *close, *good])
    assert record["findings"][:2] == [
        "It is undecided which setting is best by accuracy after training: learning-rate 0.0003 and learning-rate "
        "0.001. They differ by 0.03 at most; other seeds or other examples may reverse their order.",
        "By accuracy, the best first: learning-rate 0.0003: 0.94 (median of 3, 0.9 to 0.96), validation loss 0.1; "
        "learning-rate 0.001: 0.91 (median of 2, 0.9 to 0.92), validation loss 0.1; "
        "learning-rate 0.0001: 0.5 (median of 2, 0.5 to 0.5), validation loss 0.9.",
    ]
    assert not any(re.search("fastest|One seed", line) for line in record["findings"])
    table = terminal_table(record)
    titles = ["learning rate", "seed", "accuracy", "loss", "tokens/s", "spread", "of best"]
    assert [str(column.header) for column in table.columns] == titles
    assert [str(text) for text in table.columns[2].cells] == ["0.96", "0.94", "0.92", "0.9", "0.9", "0.5", "0.5"]


def test_equal_and_missing_metrics_and_one_seed_are_named(tmp_path):
    rows = [of_sweep(1e-4, 1, 1.0, 0.3), of_sweep(3e-4, 1, 1.0, 0.1), of_sweep(1, 1, None, None)]
    findings = made(tmp_path / "equal", SWEPT, rows)["findings"]
    both = "learning-rate 0.0003 and learning-rate 0.0001"  # the lower validation loss first
    assert f"undecided which setting is best by accuracy after training: {both}. They differ by 0 " in findings[0]
    assert findings[2] == "One seed does not show whether such differences repeat; compare several with --seed 1,2,3."
    record = made(tmp_path / "none", SWEPT, [of_sweep(1e-4, 1, None, None), of_sweep(3e-4, 1, None, None)])
    line = "Settings cannot be ranked: no run has accuracy after training; leave out --eval-every off."
    assert record["findings"][0] == line


def test_direction_of_the_metric_decides_and_launches_add_speed(tmp_path):
    rows = [(("z0", rate), of_rounds) for (rate, _), of_rounds in (of_sweep(1, 1, 0.5, 1), of_sweep(2, 1, 0.7, 1))]
    for place, (higher, best) in {"more": (True, 2), "less": (False, 1)}.items():
        findings = made(tmp_path / place, ("launch", "learning_rate"), rows, higher_is_better=higher)["findings"]
        assert findings[0] == f"learning-rate {best} is the best by accuracy after training."
        assert any("The fastest setting is not known" in line for line in findings)


def answered(tmp_path, rows, right):
    """A record of a sweep whose runs left 100 answers each, of which so many are right."""
    record = made(tmp_path, SWEPT, rows)
    for number, (entry, count) in enumerate(zip(record["settings"], right, strict=True)):
        run_dir = RunDir(tmp_path / f"{number}-1")
        run_dir.samples.mkdir()
        scores = [float((place * 7 + number) % 100 < count) for place in range(100)]
        scored = [{"index": n, "prompt": str(n), "scores": {"accuracy": score}} for n, score in enumerate(scores)]
        write_json_lines(run_dir.answers(2), scored)
        after = {"accuracy": sum(scores) / 100, "eval_loss": 0.1}
        intervals = {"after": {"accuracy": [after["accuracy"] - 0.1, after["accuracy"] + 0.1]}}
        run_dir.write_result({"after": after, "main_metric": "accuracy", "intervals": intervals})
        entry["runs"][0] |= measure(run_dir, 0)
    summarise(record, tmp_path)
    record["paired"] = paired_settings(record, tmp_path)
    return summarised(record, tmp_path)


def test_a_difference_that_other_examples_may_turn_round_is_undecided(tmp_path):
    record = answered(tmp_path, [of_sweep(rate, 1, 0.5, 0.1) for rate in (1e-4, 3e-4, 1e-3)], (62, 60, 20))
    findings = record["findings"]
    both = "learning-rate 0.0001 and learning-rate 0.0003. They differ by 0.02 at most"
    assert findings[0].startswith(f"It is undecided which setting is best by accuracy after training: {both}")
    assert "learning-rate 0.0001: 0.62 (95%: 0.52 to 0.72), validation loss 0.1;" in findings[1]
    assert re.search(r"0.0003: [^;]*, no difference that 100 examples can show; [\d,]+ would; ", findings[1])
    assert re.search(r"0.001: [^;]*, worse \(-0.42, -0.\d\d to -0.\d\d\)\.", findings[1])


def test_seeds_are_tested_together_and_other_examples_never(tmp_path):
    rows = [of_sweep(rate, seed, 0.5, 0.1) for rate in (1e-4, 3e-4) for seed in (1, 2)]
    record = answered(tmp_path, rows, (90, 88, 50, 54))
    assert record["paired"]["learning-rate 0.0003"]["difference"] == pytest.approx(-0.37)
    assert record["findings"][0] == "learning-rate 0.0001 is the best by accuracy after training."
    samples = [{"index": place, "prompt": "another", "scores": {"accuracy": 1.0}} for place in range(100)]
    for number in (2, 3):
        run_dir = RunDir(tmp_path / f"{number}-1")
        write_json_lines(run_dir.answers(2), samples)
        run_dir.write_result({"after": {"accuracy": 1.0, "eval_loss": 0.1}, "main_metric": "accuracy"})
    assert paired_settings(record, tmp_path) == {"learning-rate 0.0003": None}
