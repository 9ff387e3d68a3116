"""`run.yaml` starts its run again: the same bits in a new folder, what it records, and what it leaves out."""

import dataclasses
import json
import os
import shlex
from pathlib import Path

import forked
import pytest
import yaml
from places import CONFIGS
from reference_job import layout

from accel_sft.api.config import TrainConfig
from accel_sft.api.config_file import load_yaml, task_in
from accel_sft.api.options import option
from accel_sft.api.task import Task
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.info import launch_of_this_process, launch_of_yaml, read_launch
from accel_sft.launch.launcher import own_words
from accel_sft.training import record


def command_in(run_dir):
    """The words of the command that a run.yaml names."""
    lines = run_dir.settings.read_text(encoding="utf-8").splitlines()
    return shlex.split(lines[1].removeprefix("# "))


def test_command_in_run_yaml_reproduces_the_run_bit_for_bit(launched, tmp_path):
    first, again = RunDir(layout(launched, "z2").run_dir), RunDir(tmp_path / "again")
    program, launch, *words = command_in(first)
    assert (program, launch, words[0]) == ("accelerate", "launch", "--config_file")
    assert "--mixed_precision" not in words  # it is in the file
    command = (forked.LAUNCH, *words, "--output-dir", str(again))
    done = forked.run(command, {**os.environ, "COLUMNS": "100"}, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in ("base", "final"):
        file = f"{folder}/model.safetensors"
        assert (again.path / file).read_bytes() == (first.path / file).read_bytes()
    then, now = first.read_record(), again.read_record()
    for saved in (then, now):
        saved["config"].pop("output_dir")
        saved["launch"].pop("yaml_path")
        saved["launch"]["yaml"] = yaml.safe_load(saved["launch"]["yaml"]) | {"mixed_precision": "no"}
    assert then == now
    _, _, settings = first.settings.read_text(encoding="utf-8").partition("\n\n")
    assert again.settings.read_text(encoding="utf-8").partition("\n\n")[2] == settings
    assert task_in(str(again.settings)) == "math"


@dataclasses.dataclass(kw_only=True)
class Odd:
    """Stands for a task whose options have every type, and texts that mean something else in YAML."""

    tiny_steps = Task.tiny_steps
    needed: str = option(help="")
    word: str = option("plain", help="")
    empty: str | None = option(None, help="")
    lines: str = option("", help="")
    share: float | None = option(None, help="")
    loud: bool = option(True, help="")
    api_key: str | None = option(None, help="")


ODD = {"needed": "null", "word": "# no: 'yes' \"ё\" 王", "empty": "", "lines": "a\n\n b: c\\\t", "share": 1e-05}


def written(folder, config=None, task=None, launch=None):
    """The run.yaml of a run of these settings, as it would be written in this process."""
    folder.mkdir(exist_ok=True)
    config = config or TrainConfig(output_dir=str(folder), resume="auto")
    run = "odd", task or Odd(needed="x"), config.resolved({}), launch or launch_of_this_process()
    record.write_run_yaml(RunDir(folder), *run)
    return RunDir(folder)


def test_run_yaml_gives_every_setting_back_but_asks_for_secrets(tmp_path):
    given = {"model": "org/m", "adapter": "lora", "micro_batch_size": "8", "eval_every": "off", "epochs": 2.0}
    given["control_tokens"] = "tokens"
    config = TrainConfig(**given, learning_rate=1e-05, output_dir="a", resume="auto", dry_run=True)
    task = Odd(**ODD, loud=False, api_key="sk-1")
    run_dir = written(tmp_path / "run", config, task)
    text = run_dir.settings.read_text(encoding="utf-8")
    values, problems = load_yaml(str(run_dir.settings), TrainConfig, Odd, given=["api_key"])
    assert problems == []
    _, (problem,) = load_yaml(str(run_dir.settings), TrainConfig, Odd)
    assert problem.endswith("--api-key: a run's file holds no secrets; give this one on the command line")
    options = {field.name: values.pop(field.name) for field in dataclasses.fields(Odd) if field.name in values}
    assert Odd(**options) == dataclasses.replace(task, api_key=None)
    usual = {"output_dir": None, "resume": "off", "dry_run": False}
    assert TrainConfig(**values).resolved({}) == dataclasses.replace(config.resolved({}), **usual)
    assert "sk-1" not in text
    secret_word = dataclasses.replace(task, word="https://me:sk-1@host/x", lines="***x")
    partly = written(tmp_path / "partly", config, secret_word)
    values, problems = load_yaml(str(partly.settings), TrainConfig, Odd, given=["api_key"])
    assert problems[0].endswith("--word: a run's file holds no secrets; give this one on the command line")
    assert values["lines"] == "***x"


def test_without_a_launcher_the_command_has_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_in(written(tmp_path / "a run")) == ["accel-sft", "--config", "a run/run.yaml"]
    assert not (tmp_path / "a run" / "launch.yaml").exists()


def test_under_torchrun_alone_the_command_has_torchrun(tmp_path, monkeypatch):
    typed = ["/x/python", "/x/bin/torchrun", "--nproc_per_node", "2", "-m", "accel_sft", "math", "--seed", "1"]
    monkeypatch.setattr(record, "torchrun_command", lambda: typed)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.chdir(tmp_path)
    program = ["ACCELERATE_MIXED_PRECISION=bf16", "torchrun", "--nproc_per_node", "2", "-m", "accel_sft"]
    assert command_in(written(tmp_path / "run")) == [*program, "--config", "run/run.yaml"]


def test_a_folder_s_name_is_no_setting(tmp_path, monkeypatch):
    (tmp_path / "a\nseed: 3").mkdir()
    monkeypatch.chdir(tmp_path / "a\nseed: 3")
    values, problems = load_yaml(str(written(Path.cwd() / "run\nseed: 4").settings), TrainConfig, Odd)
    assert (values["seed"], problems) == (42, [])


LAUNCHER = ["/x/python", "/x/bin/accelerate", "launch", "--config_file=z.yaml", "--num-processes", "1"]
LAUNCHER += ["--main_process_ip", "::1", "--mixed_precision", "fp16", "--num_cpu_threads_per_process=3"]
LAUNCHER += ["-m", "accel_sft", "math", "--seed", "1"]


def test_launch_yaml_has_flags_that_decide_numbers(tmp_path, monkeypatch):
    deepspeed = {"zero_optimization": {"stage": 1}, "wandb": {"api_key": "sk-1"}}
    (tmp_path / "ds.json").write_text(json.dumps(deepspeed))
    content = yaml.safe_load((CONFIGS / "z2.yaml").read_text())
    content |= {"deepspeed_config": {"deepspeed_config_file": str(tmp_path / "ds.json")}, "main_process_port": 1}
    (tmp_path / "z.yaml").write_text(yaml.safe_dump(content))
    flags = ("--num_processes", "1", "--mixed_precision", "fp16")
    launch = launch_of_yaml(tmp_path / "z.yaml", *flags)
    monkeypatch.setattr(record, "launcher_command", lambda: (LAUNCHER, tmp_path))
    monkeypatch.chdir(tmp_path)
    run_dir = written(tmp_path / "run", launch=launch)
    (tmp_path / "ds.json").unlink()
    again = launch_of_yaml(run_dir.launch)
    assert (again.world_size, again.precision[0], again.stage) == (1, "fp16", 1)
    assert again.yaml["main_process_port"] == 1
    assert "sk-1" not in run_dir.deepspeed.read_text()
    own = ["--main_process_ip", "::1", "--num_cpu_threads_per_process=3"]
    start = ["accelerate", "launch", "--config_file", "run/launch.yaml", *own]
    assert command_in(run_dir) == [*start, "-m", "accel_sft", "--config", "run/run.yaml"]


def test_command_without_launch_file_names_the_chosen_precision(tmp_path, monkeypatch):
    flags = ["accelerate", "launch", "--num_processes", "1"]
    monkeypatch.setattr(record, "launcher_command", lambda: ([*flags, "-m", "accel_sft", "math"], tmp_path))
    monkeypatch.chdir(tmp_path)
    launch = dataclasses.replace(read_launch({}, []), resolved=("bf16", "this CPU has amx_bf16"))
    start = [*flags, "--mixed_precision", "bf16", "-m", "accel_sft"]
    assert command_in(written(tmp_path / "run", launch=launch)) == [*start, "--config", "run/run.yaml"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (LAUNCHER[1:], LAUNCHER[4:11]),
        (["python", "-m", "accelerate.commands.launch", "--multi_gpu", "-m", "accel_sft"], ["--multi_gpu"]),
        (["accelerate", "launch", "--num_processes", "2", "train.py", "--seed", "1"], []),
        (["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "accel_sft"], ["--nproc-per-node=2"]),
    ],
)
def test_the_launcher_s_own_words_end_where_its_module_begins(command, words):
    assert own_words(command, without=("config_file",)) == words
