"""A run can be watched while it lasts, and what it recorded survives its death and its resume."""

import html
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from fake_nvml import Nvml
from limits import limit, wait_for
from rich.cells import cell_len
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.io.run_dir import RunDir
from accel_sft.tracking.metrics_file import MetricsFile
from accel_sft.tracking.progress_bar import ProgressBar
from accel_sft.tracking.services import Trackers
from accel_sft.tracking.system import Reading, SystemSampler, Usage, host_memory_gib
from accel_sft.tracking.time_spent import BATCHES, FORWARD, span
from accel_sft.tracking.tracker import Tracker

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
ANSWER = {"expected": "1 + 2", "generated": "<|im_start|>a|b\n**王大**", "scores": {"accuracy": 1.0}}
SAMPLES = [{"index": index, "prompt": f"{index}=", **ANSWER} for index in range(30)]


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def tracked(accelerator, tmp_path, monkeypatch):
    """Build a Tracker in `runs/one`; all are closed at the end."""
    opened = []
    # TensorBoard orders a folder's files by the second and the number in their names
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))

    def build(total_steps=10, **settings):
        run_dir, numbers = RunDir(tmp_path / "runs" / "one"), {"total_steps": total_steps, "main_metric": "accuracy"}
        opened.append(Tracker(accelerator, run_dir, TrainConfig(**settings), **numbers))
        return opened[-1]

    yield build
    for tracker in opened:
        tracker.close()


def record(step, **more):
    usual = {"epoch": step / 10, "loss": 1 / 3 + step, "grad_norm": 0.5, "learning_rate": 1e-3}
    return {"step": step, **usual, "supervised_tokens": 50, "tokens": 200, "seconds": 0.1, **more}


def lines(tracker):
    return [json.loads(line) for line in (tracker.run_dir.path / "metrics.jsonl").read_text().splitlines()]


def events(tracker):
    return EventAccumulator(str(tracker.run_dir.path), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(tracker, tag):
    return [(event.step, round(event.value, 4)) for event in events(tracker).Scalars(tag)]  # they are float32


def text(tracker, tag):
    return events(tracker).Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()


def test_a_killed_run_leaves_only_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    child = os.fork()
    if child == 0:
        metrics = MetricsFile(path)
        for step in range(10**9):
            metrics.append(record(step))
    wait_for(lambda: path.exists() and path.stat().st_size > 10_000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    written = path.read_bytes()
    assert written.endswith(b"\n")
    assert [json.loads(line)["step"] for line in written.splitlines()] == list(range(written.count(b"\n")))


FULL = """
import resource, signal, sys
from pathlib import Path
from accel_sft.tracking.metrics_file import MetricsFile

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (110, 110))
metrics = MetricsFile(Path(sys.argv[1]))
for step in range(1, 100):
    metrics.append({"step": step, "loss": 0.5})
"""


def test_partly_written_line_is_an_error_and_later_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("OSError: ")
    assert path.stat().st_size == 110  # the system took what it could of the last line
    assert not path.read_bytes().endswith(b"\n")
    assert MetricsFile(path).rewind(99)[0] == 1
    remaining = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in remaining] == list(range(1, len(remaining) + 1))


def test_every_step_is_an_unrounded_line_and_a_point_of_its_curves(tracked):
    tracker = tracked()
    for numbers in (record(1), record(2), record(3, grad_norm=math.inf), record(4, loss=math.nan, grad_norm=None)):
        tracker.step(numbers)
    tracker.close()
    assert "NaN" not in (tracker.run_dir.path / "metrics.jsonl").read_text()
    assert [line["loss"] for line in lines(tracker)] == [1 / 3 + 1, 1 / 3 + 2, 1 / 3 + 3, None]
    assert [line["grad_norm"] for line in lines(tracker)] == [0.5, 0.5, None, None]
    assert lines(tracker)[0]["tokens_per_second"] == 200 / 0.1
    assert [path.name[:6] for path in tracker.run_dir.path.glob("**/events*")] == ["events"]
    assert next(tracker.run_dir.path.glob("**/events*")).parent == tracker.run_dir.path
    assert points(tracker, "train/loss")[:3] == [(1, 1.3333), (2, 2.3333), (3, 3.3333)]
    drawn = set(events(tracker).Tags()["scalars"])
    assert {"train/grad_norm", "train/learning_rate", "throughput/tokens_per_second"} < drawn
    assert {"throughput/step_seconds", "train/epoch", "throughput/tokens_per_second_per_device"} < drawn
    assert "| learning_rate |" in text(tracker, "settings")


def reading(number, percent=90.0):
    return Reading(number, 50.0, 0.5, 4.0, percent, 1.0, 0.0)


def test_slowdown_stands_in_the_line_of_its_step(tracked):
    tracker = tracked()
    quiet = reading(1)._replace(cpu_percent=60.0, busy_cores=0.6, idle_cores=1.4, stolen_cores=0.0, held_cores=0.0)
    taken = quiet._replace(busy_cores=2.0, idle_cores=0.0)
    for step, (read, number) in enumerate([(taken, 1), (taken, 2), (taken, 2), (quiet, 3)], start=1):
        tracker.step(record(step), [read._replace(sample=number), Reading(step, 0.0)])
    tracker.close()
    assert [line.get("machine") for line in lines(tracker)] == [
        None,  # the first reading is of the start
        {"other processes took # of 2 cores": 1.4},
        None,  # less than a second later
        {},
    ]
    assert points(tracker, "system/rank0/busy_cores") == [(1, 2.0), (2, 2.0), (4, 0.6)]
    assert points(tracker, "system/rank1/cpu_percent") == [(step, 0.0) for step in (1, 2, 3, 4)]
    assert "system/rank1/busy_cores" not in events(tracker).Tags()["scalars"]


def test_an_evaluation_is_recorded_with_every_answer(tracked, capsys):
    tracker = tracked()
    tracker.evaluation(7, {"eval_loss": 0.25, "accuracy": 0.5, "generate_seconds": 3.0}, SAMPLES)
    tracker.close()
    assert lines(tracker) == [{"step": 7, "eval_loss": 0.25, "accuracy": 0.5, "generate_seconds": 3.0}]
    assert points(tracker, "eval/accuracy") == [(7, 0.5)]
    assert points(tracker, "eval/loss") == [(7, 0.25)]
    written = (tracker.run_dir.path / "samples" / "step-000007.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == SAMPLES
    assert capsys.readouterr().out == "step 7:  accuracy 0.5  eval_loss 0.25\n"
    from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(text(tracker, "eval/samples"))
    assert page.count("<tr>") == 21  # the header and the first twenty
    assert "<|" not in page
    assert "<td><|im_start|>a|b<br>**王大**</td>" in html.unescape(page)


def test_a_resumed_run_has_no_doubled_points(tracked, capsys):
    tracker = tracked()
    for step in range(1, 11):
        tracker.step(record(step))
        if step % 4 == 0:
            tracker.evaluation(step, {"eval_loss": 1.0, "accuracy": 0.1}, SAMPLES)
    tracker.close()
    with open(tracker.run_dir.path / "metrics.jsonl", "a") as file:
        file.write("[" * 100_000 + "\n")
        file.write('{"step": 11, "lo')  # as a machine that lost power leaves it
    resumed = tracked()
    resumed.rewind(6)
    assert "2 unreadable line" in capsys.readouterr().out
    assert [path.name for path in resumed.run_dir.path.glob("samples/*")] == ["step-000004.jsonl"]
    for step in range(7, 11):
        resumed.step(record(step, loss=-1.0))
    resumed.evaluation(8, {"eval_loss": 2.0, "accuracy": 0.9}, SAMPLES)
    resumed.close()
    assert [line["step"] for line in lines(resumed) if "loss" in line] == list(range(1, 11))
    assert [line["accuracy"] for line in lines(resumed) if "accuracy" in line] == [0.1, 0.9]
    assert [step for step, _ in points(resumed, "train/loss")] == list(range(1, 11))
    assert [value for step, value in points(resumed, "train/loss") if step > 6] == [-1.0] * 4
    assert points(resumed, "eval/accuracy") == [(4, 0.1), (8, 0.9)]
    again = tracked()
    again.rewind(0)  # starting over forgets everything
    again.evaluation(0, {"eval_loss": 2.0}, SAMPLES[:1])
    again.close()
    assert lines(again) == [{"step": 0, "eval_loss": 2.0}]
    assert points(again, "eval/loss") == [(0, 2.0)]
    assert "train/loss" not in events(again).Tags()["scalars"]
    assert len(events(again).Tensors("settings/text_summary")) == 1


@pytest.mark.parametrize("evaluated", [False, True])
def test_evaluation_after_the_last_checkpoint_is_logged_once(tracked, evaluated):
    tracker = tracked()
    tracker.step(record(3))
    tracker.evaluation(3, {"eval_loss": 1.0}, SAMPLES)
    tracker.close()
    resumed = tracked()
    resumed.rewind(3, evaluated=evaluated)
    assert len([*resumed.run_dir.path.glob("samples/*")]) == evaluated
    if not evaluated:
        resumed.evaluation(3, {"eval_loss": 2.0}, SAMPLES)
    resumed.step(record(4))
    resumed.close()
    (loss,) = [line["eval_loss"] for line in lines(resumed) if "eval_loss" in line]
    assert points(resumed, "eval/loss") == [(3, loss)]
    assert loss == (1.0 if evaluated else 2.0)
    assert [step for step, _ in points(resumed, "train/loss")] == [3, 4]


def test_chain_of_lines_resumes_from_checkpoints_and_shows_changes(tracked):
    whole, chains = tracked(), []
    for step in (1, 2, 3):
        whole.step(record(step))
        chains.append(whole.chain)
    whole.close()
    assert len({*chains}) == 3
    again = tracked()
    again.rewind(2, chain=chains[1])
    assert again.chain == chains[1]
    again.step(record(3))
    again.close()
    of_file = tracked()
    of_file.rewind(3)  # of a checkpoint without a chain
    assert of_file.chain == again.chain
    text = of_file.run_dir.metrics.read_text()
    of_file.run_dir.metrics.write_text(text.replace('"step": 1', '"step": 0'))
    of_file.rewind(3)
    assert of_file.chain != again.chain


def test_unknown_or_missing_tracker_is_named_with_a_fix(tracked):
    with pytest.raises(UserError, match=r"--tracker tensorbored: unknown; give one or several of .*tensorboard.* none"):
        tracked(tracker="tensorbored")
    from accelerate.tracking import get_available_trackers

    missing = sorted(set(LOGGER_TYPE_TO_CLASS) - {str(name) for name in get_available_trackers()})
    if missing:
        with pytest.raises(UserError, match=rf"--tracker {missing[0]}: not installed; `pip install"):
            tracked(tracker=f"tensorboard,{missing[0]}")


def test_no_tracker_leaves_metrics_alone(tracked):
    tracker = tracked(tracker="none")
    with tracker.profiler() as profiler:  # without --profile nothing is traced
        profiler.step()
    tracker.step(record(1))
    tracker.evaluation(1, {"eval_loss": 1.0}, SAMPLES)
    assert sorted(path.name for path in tracker.run_dir.path.iterdir()) == ["metrics.jsonl", "samples"]


class Service(GeneralTracker):
    """A dashboard of someone else's, registered by name as Accelerate allows."""

    name = "service"
    requires_logging_directory = False
    starts, seen = True, []

    def __init__(self, run_name):
        super().__init__()

    @property
    def tracker(self):
        return None

    def start(self):
        if not self.starts:
            raise ConnectionError("not logged in")

    def log(self, values, step=None, **_):
        if step == 2:
            raise ConnectionError("service down")
        self.seen.append(step)


def test_failing_service_is_named_and_the_run_continues(tracked, capsys, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "service", Service)
    monkeypatch.setattr(Service, "seen", [])
    tracker = tracked(tracker="service,tensorboard")
    for step in (1, 2, 3):
        tracker.step(record(step))
    tracker.close()
    assert Service.seen == [1]
    assert capsys.readouterr().out.count("--tracker service: ConnectionError: service down; nothing more is sent") == 1
    assert len(lines(tracker)) == len(points(tracker, "train/loss")) == 3
    monkeypatch.setattr(Service, "starts", False)
    with pytest.raises(UserError, match="--tracker service: does not start: ConnectionError: not logged in"):
        tracked(tracker="service")


def test_the_profiler_traces_steps_three_to_five(tracked, capsys):
    tracker = tracked(profile=True)
    with tracker.profiler() as profiler:
        for _ in range(6):
            with span(BATCHES):
                rows = torch.ones(4)
            with span(FORWARD):
                rows @ rows
            profiler.step()
    (trace,) = (tracker.run_dir.path / "profile").iterdir()
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"} < names
    assert "aten::dot" in names
    assert str(trace.parent) in capsys.readouterr().out


def test_the_machine_is_sampled_at_most_once_in_an_interval():
    sampler = SystemSampler(torch.device("cpu"), print, seconds_between=limit(0.2))
    first = sampler.sample()
    assert sampler.sample() is first
    time.sleep(limit(0.25))
    second = sampler.sample()
    assert (first.sample, second.sample) == (1, 2)
    assert all(math.isnan(value) for field, value in second._asdict().items() if field.startswith("gpu_"))
    cores = second.busy_cores + second.idle_cores + second.stolen_cores
    assert cores == pytest.approx(len(os.sched_getaffinity(0)), abs=0.01)
    assert second.process_memory_gib == pytest.approx(host_memory_gib()["now"], abs=0.1)


@pytest.mark.parametrize("known", ["memory", "percent", "nothing"])
def test_gpu_reading_that_is_missing_costs_no_other(known):
    """A MIG slice has no utilisation, and a GPU with the host's memory no memory of its own."""
    answers = {"MemoryInfo": types.SimpleNamespace(used=2**30), "UtilizationRates": types.SimpleNamespace(gpu=77)}
    given = {"memory": "MemoryInfo", "percent": "UtilizationRates"}.get(known)
    driver = Nvml(Samples=None, **{name: answer if name == given else None for name, answer in answers.items()})
    sampler = SystemSampler(torch.device("cpu"), print)
    sampler._nvml = driver, None
    read = sampler.sample()
    assert math.isnan(read.gpu_memory_gib) == (known != "memory")
    assert math.isnan(read.gpu_percent) == (known != "percent")


def test_gpu_use_is_the_mean_since_the_last_reading():
    def samples(*uses):
        readings = [types.SimpleNamespace(uiVal=use) for use in uses]
        return 1, [types.SimpleNamespace(timeStamp=at, sampleValue=value) for at, value in enumerate(readings, 1)]

    driver = Nvml(MemoryInfo=None, Samples=samples(0, 100, 20), UtilizationRates=types.SimpleNamespace(gpu=77))
    sampler = SystemSampler(torch.device("cpu"), print, seconds_between=0.0)
    sampler._nvml = driver, None
    assert sampler.sample().gpu_percent == 40.0
    assert sampler.sample().gpu_percent == 77.0  # no new sample: what the driver says of this moment
    driver.answers["Samples"] = samples(0, 100, 20, 10, 20)
    assert sampler.sample().gpu_percent == 15.0


def test_means_and_peaks_leave_out_the_first_sample():
    usage = Usage()
    assert usage.by_rank() == []
    usage.add(0, Reading(1, 900.0, 5.0, 7.0))
    assert usage.by_rank()[0]["mean"]["cpu_percent"] == 900
    for sample in (Reading(2, 100.0, 1.0, 7.0), Reading(3, 200.0, 2.0, 7.0)):
        usage.add(0, sample)
    usage.add(1, Reading(1, 10.0, 1.0, 7.0, 50.0, 3.0))
    first, second = usage.by_rank()
    assert (first["rank"], first["samples"], second["rank"]) == (0, 2, 1)
    assert first["mean"] == {"cpu_percent": 150.0, "process_memory_gib": 1.5, "host_memory_gib": 7.0}
    assert first["peak"]["process_memory_gib"] == 2.0
    assert second["peak"]["gpu_memory_gib"] == 3.0


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(tracked, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI services set it
    tracker = tracked(total_steps=25, log_every=10)
    for step in range(1, 26):
        tracker.step(record(step))
    tracker.close()
    out = capsys.readouterr().out
    assert [line.split("  ")[0] for line in out.splitlines()] == ["step 10/25", "step 20/25", "step 25/25"]
    assert "2,000 tokens/s  lr 1.00e-03" in out
    assert not CONTROL.search(out)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def rows(terminal):
    """Every line ever drawn, without colours and cursor movements; the last is the one that stays."""
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", terminal.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]", text) if line.strip()]


def test_the_bar_fits_eighty_columns(terminal):
    line = ProgressBar(10**12, file=terminal)
    line.step(record(1, loss=1234.5678, tokens_per_second=123456.7))
    line.evaluated({"中文的指标名称" * 5: 1e-9})
    line.step(record(10**12 // 2, tokens_per_second=123456.7))
    line.close()
    drawn = rows(terminal)
    assert max(map(cell_len, drawn)) <= 80
    assert "ETA" in drawn[-1]


def test_the_bar_shows_loss_metric_and_time_to_go(terminal, capsys):
    line = ProgressBar(200, file=terminal)
    line.step(record(1, tokens_per_second=2000.0))
    line.evaluated({"accuracy": 0.95})
    assert re.match(r"1/200 ━+ ETA -:--:--  loss 1\.333  eval accuracy 0\.95  2,000 tokens/s", rows(terminal)[-1])
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")  # no cursor is hidden
    line.log("a line above")
    print("chatter of libraries")
    line.step(record(200, loss=2.0, tokens_per_second=2000.0, mfu=0.4213))
    line.close()
    drawn = rows(terminal)
    assert re.match(r"200/200 ━+ loss 2  eval accuracy 0\.95  2,000 tokens/s  MFU 42\.1%", drawn[-1])
    assert "a line above" in drawn
    assert "chatter" in capsys.readouterr().out
    assert "chatter" not in terminal.getvalue()


def test_a_service_gets_no_name_that_it_refuses(tmp_path, monkeypatch):
    logged = []

    class Strict(LOGGER_TYPE_TO_CLASS["mlflow"]):
        start = store_init_configuration = lambda self, *given: None

        def log(self, values, step, **more):
            logged.append(values)

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Strict)
    Trackers(["mlflow"], tmp_path, {}, print).curves({"eval/f1/数 a(1).jsonl": 0.5, "eval/f1/x:train[:5]": 1.0}, 3)
    assert logged == [{"eval/f1/数 a_1_.jsonl": 0.5, "eval/f1/x:train_:5_": 1.0}]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_service_gets_project_and_run_name(tmp_path, monkeypatch, name):
    kind, starts = LOGGER_TYPE_TO_CLASS[name], []

    class Started(kind):  # with its own signature; what it would start is not installed
        def start(self):
            starts.append({**vars(self), **getattr(self, "init_kwargs", {})})

        def store_init_configuration(self, values):
            pass

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Started)
    for settings in ({"tracker_project": "sums", "run_name": "first"}, {}):
        Trackers([name], tmp_path / "one", settings, print)
    assert {"sums", "first"} <= {str(value) for value in starts[0].values()}
    assert {"accel_sft", "one"} <= {str(value) for value in starts[1].values()}
    if name != "mlflow":  # which takes no id of ours
        Trackers([name], tmp_path / "other", {}, print)
        assert starts[0]["id"] == starts[1]["id"] != starts[2]["id"]
        assert re.fullmatch("[a-z0-9]{21}", starts[0]["id"])
        assert {settings["resume"] for settings in starts} == {"allow"}
