"""The command line: names from metadata, options from fields, all problems at once, and how a failure ends."""

import contextlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import click
import click.testing
import pytest
from fake_plugins import GOOD, accel_sft, install, only_plugins_of
from places import CONFIGS

from accel_sft.__main__ import main
from accel_sft.api import registry
from accel_sft.api.config import TrainConfig
from accel_sft.api.config_file import OTHER_COMMANDS, OTHER_NAMES
from accel_sft.api.errors import UserError
from accel_sft.api.options import settings
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.cli.group import cli
from accel_sft.cli.task_command import TaskCommand
from accel_sft.cli.task_tools import TOOLS
from accel_sft_chat import Chat
from accel_sft_math import Math

# A run that never reaches training: it ends as the task's dataset() does.
RECORD = """
import sys, types
import accel_sft.launch.environment
sys.modules["accel_sft.commands.train"] = types.SimpleNamespace(run=lambda name, task, config: task.dataset("train"))
accel_sft.launch.environment.prepare_environment = lambda debug=False: None
"""


@pytest.fixture
def site(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    return site


@pytest.fixture
def run(site, monkeypatch, capsys):
    """Call the command line in this process, with one good task; training prints what it was given."""

    def trainer(name, task, config):
        print(json.dumps({"task": name, "options": vars(task), "config": config.as_dict()}))
        task.dataset("train")

    for module in ("accel_sft.commands.train", "accel_sft.commands.evaluate"):
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(run=trainer))
    environment = types.SimpleNamespace(prepare_environment=lambda debug: None, importing=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "accel_sft.launch.environment", environment)
    install(site, "accel-sft-good", "good = accel_sft_good:Good")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["accel-sft", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        stdout, stderr = capsys.readouterr()
        return types.SimpleNamespace(returncode=exit.value.code, stdout=stdout, stderr=stderr)

    with only_plugins_of(site, monkeypatch):
        yield call


def handed_over(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_help_lists_tasks_and_tools_and_imports_no_plugin(run, site):
    install(site, "accel-sft-loud", "loud = accel_sft_loud:Good", "raise SystemExit('was imported')")
    tasks, tools = run("--help").stdout.split("Tasks:")[1].split("Tools:")
    assert re.search(r"loud +accel-sft-loud sums up", tasks)
    assert all(name in tools for name in ("tasks", "evaluate", "new-task", "launch-file"))


def test_broken_task_is_listed_and_fails_alone(run, site):
    install(site, "p-bad", "bad = p_bad:Good", "import nowhere\n", version="0.7")
    result = run("tasks")
    assert result.returncode == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert lines["good"].split(maxsplit=4)[1:] == ["accel-sft-good", "1.2", "ok", "Repeat the number."]
    assert lines["bad"].split()[1:4] == ["p-bad", "0.7", "broken"]
    why = "task 'bad' (p_bad:Good, p-bad 0.7): cannot be imported: ModuleNotFoundError"
    assert why in result.stdout
    broken = run("bad")
    assert (broken.returncode, "Traceback" in broken.stderr) == (1, False)
    assert broken.stderr.startswith(f"Error: {why}")
    handed_over(run("good"))


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("god", 2, "no task or tool 'god'; did you mean good?"),
        ("dpo --model m", 2, "Error: no task or tool 'dpo'; `accel-sft chat --loss dpo --train-file PAIRS` learns"),
        ("good --learning-rat 1", 2, "--learning-rate"),
        ("--hlep", 2, "Did you mean '--help'"),
        ("plan --model x", 1, "--model: name a task before its options, as in `accel-sft plan TASK --model ...`"),
        ("--model x good", 1, "--model: name a task before its options, as in `accel-sft TASK --model ...`"),
        ("good --gradient_checkpointing True", 2, "unexpected extra argument (True); each value needs its option"),
        ("evaluate good --learning-rate 1", 2, "No such option"),
        ("--config none.yaml", 1, "Error: --config none.yaml: cannot be r"),
        ("launch-file z2_ofload", 1, "did you mean z2_offload"),
        ("new-task random --file", 1, "a library has this name"),
    ],
)
def test_wrong_words_get_one_hint(run, words, status, message):
    result = run(*words.split())
    assert (result.returncode, result.stdout) == (status, "")
    assert message in result.stderr


def test_task_help_groups_the_options_by_section(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    text = run("good", "--help-all").stdout
    for heading, flag in (("Task good", "--size INTEGER"), ("Looks", "--style plain|fancy"), ("Run", "--config FILE")):
        assert flag in text.split(f"\n{heading}:\n")[1].split("\n\n")[0]
    assert re.search(r"--learning-rate .*default: 2e-05, 0.0002 for an adapter, 0.002 for tiny", text)
    assert "--shout / --no-shout" in text
    assert "[default: 10; 2 to 100]" in text
    assert "None" not in text


@pytest.mark.parametrize(
    ("command", "own", "left_out", "does"),
    [
        ("", "--size", "--weight-decay", "Train, evaluate"),
        ("plan", "--gpu-memory", "--lora-dropout", "Predict memory"),
        ("check", "--strict", "--truncation", "Audit a task"),
        ("compare", "--launch", "--learning-rate", "Compare launch"),
        ("evaluate", "--key-from", "--dtype", "Score a model"),
    ],
)
def test_help_is_short_and_its_last_line_names_the_whole(run, monkeypatch, command, own, left_out, does):
    monkeypatch.setenv("COLUMNS", "80")
    words = (*command.split(), "good")
    help, all_of_it = run(*words, "--help").stdout, run(*words, "--help-all").stdout
    assert len(help.splitlines()) <= 60
    assert help.splitlines()[-1] == f"Every option: {' '.join(('accel-sft', *words))} --help-all"
    assert f"  {does}" in help
    assert f"  {own} " in help
    assert (f"  {left_out} " in help, f"  {left_out} " in all_of_it) == (False, True)
    if not command:
        settings_of_all = settings(TrainConfig)
        assert [s.flag for s in settings_of_all if (f"  {s.flag} " in help) != s.basic] == []
        assert [s.flag for s in settings_of_all if f"  {s.flag} " not in all_of_it] == []
        assert "--shout / --no-shout" not in help


def test_command_line_beats_file_and_file_beats_defaults(run, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("size: 20\nlearning-rate: 1e-3\nseed: 7\nshout: true\nlimit: null\n", encoding="utf-8")
    words = ("--seed", "42", "--no-shout", "--micro-batch-size", "8", "--max_steps=3", "--no-gradient_checkpointing")
    got = handed_over(run("good", "--config", str(file), *words))
    assert got["task"] == "good"
    assert got["options"] == {"size": 20, "style": "plain", "shout": False, "limit": None}
    expected = {"learning_rate": 1e-3, "seed": 42, "adapter": "none", "micro_batch_size": "8", "max_steps": 3}
    assert expected.items() <= got["config"].items()


READS = GOOD.replace("shout: bool", 'train_file: str | None = option(None, rows=True, help="Rows.")\n    shout: bool')


def test_several_row_files_are_one_value_in_every_form(run, site, tmp_path):
    install(site, "accel-sft-reads", "reads = accel_sft_reads:Good", READS)
    one, two, file = (str(tmp_path / name) for name in ("one.jsonl", "two.jsonl", "run.yaml"))
    for path in (one, two):
        Path(path).touch()
    both = f"{one},{two}"
    Path(file).write_text(f"train_file: [{one}, {two}]")
    for words in (("--train-file", one, "--train-file", two), ("--train-file", both), ("--config", file)):
        assert handed_over(run("reads", *words))["options"]["train_file"] == both
    assert handed_over(run("evaluate", "reads", "--model", "m", "--config", file))["options"]["train_file"] == both
    assert handed_over(run("reads", "--train-file", one))["options"]["train_file"] == one
    assert handed_over(run("reads"))["options"]["train_file"] is None


def test_every_foreign_option_of_a_command_is_named_at_once(run, site):
    """A command of another trainer, as it is, with an option of the task's own that is called as one elsewhere."""
    words = "--stage sft --template qwen --shout --quantization_bit=4 --val_size 0.1 --lora_rank 8 --save_steps 100"
    result = run("good", *words.split(), *(f"--{name}=1" for name in NOT_OURS[6:]))
    hints = dict(line.split(" is not an option of accel-sft good: ") for line in result.stderr.splitlines())
    assert [*hints] == [f"Error: --{name}" for name in NOT_OURS]
    assert hints["Error: --quantization-bit"] == "it is --load-in-4bit here"
    assert hints["Error: --val-size"] == "the task chat takes --held-out"
    assert max(map(len, result.stderr.splitlines())) <= 160


NOT_OURS = "stage", "template", "quantization-bit", "val-size", "lora-rank", "save-steps"
NOT_OURS += "metric-for-best-model", "chat-template-path", "enable-thinking"


def test_names_of_other_trainers_lead_to_options_that_exist():
    ours = {setting.flag for cls in (EvaluateConfig, Chat) for setting in settings(cls)}
    hints = " ".join(hint for hint in OTHER_NAMES.values() if "accelerate" not in hint)
    assert {*re.findall(r"--[a-z0-9-]+", hints)} <= ours
    assert not ours & OTHER_NAMES.keys()
    commands = {word for hint in OTHER_COMMANDS.values() for word in re.findall(r"`accel-sft ([a-z-]+)", hint)}
    assert commands <= {*cli.commands, "chat"}
    assert not OTHER_COMMANDS.keys() & {*cli.commands, *registry.SHIPPED}
    assert set(cli.commands) <= registry.RESERVED


def test_all_problems_are_told_at_once_each_naming_its_flag(run, site, tmp_path):
    (tmp_path / "run.yaml").write_text("sise: 20\n", encoding="utf-8")
    args = ("--seed", "-1", "--lora-r", "x", "--adapter", "lara", "--resume", "auto", "--size", "1", "--style", "fancy")
    result = run("good", *args, "--config", str(tmp_path / "run.yaml"))
    assert result.returncode == 1
    assert set(result.stderr.splitlines()) == {
        f"Error: --config {tmp_path / 'run.yaml'}: line 1: unknown option 'sise'; did you mean size?",
        "Error: --seed -1: must be at least 0",
        "Error: --lora-r 'x': expected a whole number",
        "Error: --adapter lara: not one of none, lora, adalora",
        "Error: --resume auto: name the run's folder with --output-dir",
        "Error: --size 1: must be at least 2",
        "Error: --style fancy needs --shout",
    }


def test_lora_options_without_an_adapter_are_refused(run):
    refused = "Error: --lora-r has no effect without an adapter; add --adapter lora, or leave this option out\n"
    assert run("good", "--lora-r", "8").stderr == refused  # also if it is the default
    assert handed_over(run("good", "--lora-r", "8", "--adapter", "lora"))["config"]["lora_r"] == 8


def test_a_file_that_names_its_task_needs_no_other_word(run, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("task: good\nsize: 20\nseed: 7\n", encoding="utf-8")
    got = handed_over(run("--config", str(file), "--seed", "8"))
    assert (got["task"], got["options"]["size"], got["config"]["seed"]) == ("good", 20, 8)
    assert handed_over(run("--seed", "8", f"--config={file}"))["config"]["seed"] == 8
    for words in (("--config", str(file), "good"), (f"--config={file}", "good", "--seed", "42")):
        assert handed_over(run(*words))["options"]["size"] == 20
    for words in (("--config", str(file), "evaluate"), ("evaluate", "--config", str(file))):
        got = handed_over(run(*words, "--model", "m"))
        assert (got["task"], got["config"]["model"]) == ("good", "m")
    assert run("--config", str(file), "--help").stdout.startswith("Usage: accel-sft good ")


def test_a_file_of_another_task_or_of_none_is_refused(run, site, tmp_path):
    install(site, "p-other", "other = p_other:Good")
    file = tmp_path / "run.yaml"
    file.write_text("task: good\n", encoding="utf-8")
    message = f"Error: --config {file}: the file names the task good, not other; leave one out\n"
    assert run("other", "--config", str(file)).stderr == message
    file.write_text("task: god\n", encoding="utf-8")
    assert "no task or tool 'god'; did you mean good?" in run("--config", str(file)).stderr
    file.write_text("seed: 1\n", encoding="utf-8")
    message = f"Error: --config {file}: no task in it; add `task: NAME`, or name a task before the options\n"
    assert run("--config", str(file)).stderr == message


SOURCE_WITH_NEED = GOOD.replace("option(10, min=2", "option(min=2")


def test_an_option_without_default_must_be_given(site, run):
    install(site, "p-required", "needy = p_required:Good", SOURCE_WITH_NEED)
    result = run("needy")
    assert (result.returncode, result.stderr) == (1, "Error: --size: a value is needed\n")
    assert "required" in run("needy", "--help").stdout
    assert handed_over(run("needy", "--size", "4"))["options"]["size"] == 4


@pytest.mark.parametrize("name", TOOLS)
def test_what_the_table_of_tools_names_exists(name):
    tool = TOOLS[name]
    known = {setting.name for setting in settings(tool.config_class)}
    assert (tool.takes or known) <= known
    assert (tool.lists or set()) | tool.repeated <= {setting.name for setting in tool.settings()}


# How a failure ends


def failing(site, statement, before=RECORD, name="fail"):
    source = GOOD.replace("return list(range(self.size))", statement)
    install(site, f"p-{name}", f"{name} = p_{name}:Good", before + source)


def with_tasks(site):
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), os.environ["PYTHONPATH"]))}


def ranks(site, tmp_path, *arguments):
    """The environment torchrun gives two ranks, one after the other, and what each printed."""
    results = []
    for rank in (1, 0):
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(file)}
        result = accel_sft(*arguments, site=site, env=own)
        results.append((result, json.loads(file.read_text(encoding="utf-8"))["message"] if file.exists() else None))
    return results


def test_failure_has_a_traceback_unless_known_or_interrupted(site, run):
    failing(site, "raise UserError('data.json:3: no answer', 'data.json:4: no answer')", before="")
    result = run("fail")
    assert result.returncode == 1
    assert result.stderr.splitlines() == ["Error: data.json:3: no answer", "Error: data.json:4: no answer"]
    assert "Traceback" in run("fail", "--debug").stderr
    failing(site, "raise KeyboardInterrupt", before="", name="stop")
    interrupted = run("stop")
    assert (interrupted.returncode, interrupted.stderr.strip()) == (130, "interrupted")
    failing(site, "return 1 / 0", before="", name="other")
    unexpected = run("other")
    assert unexpected.returncode == 1
    assert "Traceback" in unexpected.stderr
    last = unexpected.stderr.splitlines()[-1]
    assert last.startswith(f"Error: unexpected in {site / 'p_other.py'}:")
    assert last.endswith("ZeroDivisionError: division by zero")


FAILURES_OF_RANKS = {
    "alike": ("raise UserError('no data')", "Error: no data\n", ""),
    "apart": (
        "import os; raise UserError('disk of rank ' + os.environ['RANK'] + ' is full')",
        "Error: disk of rank 1 is full\n",
        "Error: disk of rank 0 is full\n",
    ),
    "because another failed": (
        "import os\n        if os.environ['RANK'] == '1': raise UserError('x')\n        raise RuntimeError('peer')",
        "Error: x\n",
        r"Error: rank 0 ended after another rank had failed \(RuntimeError: peer\)\n",
    ),
}


@pytest.mark.parametrize(("statement", "first", "second"), FAILURES_OF_RANKS.values(), ids=FAILURES_OF_RANKS)
def test_ranks_print_the_first_failure_once(site, tmp_path, statement, first, second):
    failing(site, statement)
    results, causes = zip(*ranks(site, tmp_path, "fail"), strict=True)
    assert [result.returncode for result in results] == [1, 1]
    assert all(re.fullmatch(line, result.stderr, re.S) for line, result in zip((first, second), results, strict=True))
    assert second or causes[1]["message"] == "same error as another rank on this machine"
    # torchrun takes the earliest for the cause, which it shows last
    assert 0 < int(causes[0]["extraInfo"]["timestamp"]) < int(causes[1]["extraInfo"]["timestamp"])


def test_wrong_option_is_printed_once_by_the_ranks(site, tmp_path):
    failing(site, "raise UserError('no data')")
    (first, cause), (second, _) = ranks(site, tmp_path, "fail", "--sise", "3")
    assert ("No such option" in first.stderr, second.stderr) == (True, "")
    assert (first.returncode, second.returncode, "--sise" in cause["message"]) == (2, 2, True)
    without_torchrun = accel_sft("fail", site=site, env={"RANK": "3", "WORLD_SIZE": "4"})
    assert without_torchrun.stderr == "[rank 3] Error: no data\n"


@pytest.mark.parametrize(
    ("statement", "status"),
    [
        ("import threading as t, time; t.Thread(target=time.sleep, args=(60,)).start(); raise UserError('x')", 1),
        ("import sys; sys.exit(3)", 3),
    ],
    ids=["a thread is not waited for", "a plugin's own status"],
)
def test_one_of_several_ranks_ends_at_once(site, statement, status):
    failing(site, statement)
    assert accel_sft("fail", site=site, env={"RANK": "0", "WORLD_SIZE": "2"}).returncode == status


def test_a_reader_that_leaves_ends_the_command_quietly(site):
    failing(site, "[print(i, flush=True) for i in range(100000)]")
    code = f"{sys.executable} -m accel_sft fail | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", code], env=with_tasks(site), capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (141, "")


def test_any_language_prints_under_any_encoding(site):
    failing(site, "raise UserError('缺少答案')")
    assert accel_sft("fail", site=site, env={"LC_ALL": "C"}).stderr == "Error: 缺少答案\n"
    assert "\\u7f3a" in accel_sft("fail", site=site, env={"PYTHONIOENCODING": "latin-1"}).stderr


# Launch files


def test_launch_files_are_printed_and_listed_with_their_purpose(run):
    for name, file in (("z2", "z2.yaml"), ("z2.yaml", "z2.yaml"), ("z3_twin_flow.json", "z3_twin_flow.json")):
        assert run("launch-file", name).stdout == (CONFIGS / file).read_text(encoding="utf-8")
    listed = dict(line.split(maxsplit=1) for line in run("launch-file").stdout.splitlines())
    assert listed.keys() == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert all(30 < len(purpose) <= 105 and purpose.endswith(".") for purpose in listed.values()), listed


# Starting a task


LINT = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "120"]


def test_new_task_keeps_the_contract_and_passes_its_test(tmp_path, site, run):
    result = run("new-task", "even-odd", str(tmp_path / "new"))
    assert result.returncode == 0, result.stderr
    project = tmp_path / "new"
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    entry = next(line for line in text.splitlines() if line.startswith("even-odd = "))
    module = entry.split('"')[1].split(":")[0]
    source = (project / f"{module}.py").read_text(encoding="utf-8")
    install(site, "accel-sft-even-odd", entry.replace('"', ""), source, module=module)
    assert "ok" in run("tasks").stdout.split("even-odd")[2]
    env = with_tasks(site)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project)]
    subprocess.run(tests, env=env, check=True, capture_output=True)
    subprocess.run([*LINT, str(project)], check=True)
    (site / f"{module}.py").write_text(source.replace("range(900, 1000)", "range(800, 900)"))
    assert "T301 " in subprocess.run(tests, env=env, capture_output=True, text=True).stdout


def test_a_new_task_in_one_file_runs_as_it_stands(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run("new-task", "even-odd", "--file")
    assert made.returncode == 0, made.stderr
    assert "accel-sft ./even_odd.py --max-steps 100" in made.stdout
    subprocess.run([*LINT, "even_odd.py"], check=True)
    checked = accel_sft("check", "./even_odd.py", "--strict", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (tmp_path / "own.jsonl").write_text("".join(f'{{"question": "q {n}", "answer": "a {n}"}}\n' for n in range(30)))
    task = registry.load("./even_odd.py")
    assert [len(task(train_file="own.jsonl").dataset(split)) for split in ("train", "validation")] == [27, 3]
    with pytest.raises(UserError, match="--train-file: name the rows to train on"):
        task(validation_file="own.jsonl").dataset("train")
    (tmp_path / "bad.jsonl").write_text('{"question": "2?", "answer": "even"}\n{"question": "3?"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:2: field 'answer': expected text"):
        task(train_file="bad.jsonl").dataset("train")
    assert "even_odd.py: already exists" in run("new-task", "even-odd", "--file").stderr


@pytest.mark.parametrize("name", ["math", "good", "tasks", "../up"])
def test_a_new_task_needs_a_name_of_its_own_and_overwrites_nothing(tmp_path, run, name):
    result = run("new-task", "--", name, str(tmp_path / "new"))
    assert (result.returncode, "NAME" in result.stderr) == (1, True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine.txt").write_text("", encoding="utf-8")
    assert "already exists" in run("new-task", "fresh", str(tmp_path)).stderr
    assert "cannot be written" in run("new-task", "fresh", str(tmp_path / "mine.txt" / "x")).stderr


def test_task_option_of_a_tools_name_is_refused_there_alone(run, site):
    clashing = GOOD.replace("    limit: float", "    repeat: int = option(1, help='')\n    limit: float")
    install(site, "accel-sft-clashing", "clashing = accel_sft_clashing:Good", clashing)
    assert handed_over(run("clashing"))["task"] == "clashing"
    (line,) = run("compare", "clashing").stderr.splitlines()
    assert line.startswith("Error: task clashing: this command already has an option --repeat")


OF_RECORD = {
    "held out": (Chat, {"train_file": "a.jsonl", "held_out": 0.0}, "--held-out"),
    "built-in rows": (Math, {"max_number": 50, "held_out": "largest"}, "--max-number, --held-out"),
}


@pytest.mark.parametrize(("task", "recorded", "unfit"), OF_RECORD.values(), ids=OF_RECORD)
def test_recorded_options_give_way_to_those_given(tmp_path, capsys, task, recorded, unfit):
    record = {"task": task.__name__.lower(), "task_options": {}, "config": {}, "versions": {}}
    (tmp_path / "run.json").write_text(json.dumps(record | {"task_options": recorded}))
    (tmp_path / "v.jsonl").write_text("{}")
    rows = str(tmp_path / "v.jsonl")
    given = ["--model", str(tmp_path), "--validation-file", rows, "--train-file", rows]
    command = TaskCommand(record["task"], task, "", TOOLS["evaluate"])
    with command.make_context(record["task"], given):
        _, made = command.read(click.get_current_context())
    assert made.validation_file == rows
    note = capsys.readouterr().err
    assert note == f"note: options of the run's record that conflict with yours are left out: {unfit}\n"
    with pytest.raises(UserError), command.make_context(record["task"], [*given, "--held-out", "0"]):
        command.read(click.get_current_context())
