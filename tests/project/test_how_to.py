"""The commands of docs/how-to.md are all there, and so are the variables of docs/reference.md in the source."""

from __future__ import annotations

import json
import re
import shlex
import sys

import click
import pytest
from places import ROOT
from test_docs import _flags_of

from accel_sft.api import registry
from accel_sft.cli.group import cli
from accel_sft.evaluation.scoring import aggregated, check_scoring, scored

HOW_TO = (ROOT / "docs/how-to.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


def _commands(page: str) -> list[list[str]]:
    """The words of every command of the program or its launcher, in blocks of code and in code spans."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.S | re.M)
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", page, flags=re.S | re.M))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for line in (*lines, *spans):
        words = shlex.split(line, comments=True)
        while words and ASSIGNMENT.fullmatch(words[0]):
            del words[0]
        if words[:1] == ["accel-sft"] or words[:2] == ["accelerate", "launch"]:
            found.append(words)
    return found


def _launchers_flags() -> set[str]:
    from accelerate.commands.launch import launch_command_parser

    return {*launch_command_parser()._option_string_actions}


def _unknown(words: list[str]) -> list[str]:
    """What a command names that is not there: a launch file, an option, a tool or a task."""
    wrong = []
    if words[0] == "accelerate":
        at = words.index("-m")
        known = _launchers_flags()
        file = ROOT / words[words.index("--config_file") + 1]
        wrong += [word for word in words[:at] if word.startswith("--") and word not in known]
        wrong += [] if file.is_file() or file.name == "launch.yaml" else [str(file)]  # the latter: a run's own
        wrong += [] if words[at + 1] == "accel_sft" else [words[at + 1]]
        words = words[at + 1 :]
    command: click.Command = cli
    for at, word in enumerate(words[1:], 1):
        if not isinstance(command, click.Group) or word.startswith("-"):
            break
        try:
            found = command.get_command(click.Context(command), word)
        except click.UsageError:
            found = None
        if found is None:
            return [*wrong, " ".join(words[: at + 1])]
        command = found
    flags = _own_flags(command)
    if "--" in words:  # what is behind it is training's, of the same task
        flags |= _own_flags(cli.get_command(click.Context(cli), words[2]))
    return wrong + [word for word in words if re.match(r"--\w", word) and word.partition("=")[0] not in flags]


def _own_flags(command: click.Command | None) -> set[str]:
    """The options of a command, without those of its commands."""
    assert command is not None
    return _flags_of(click.Command(command.name, params=command.get_params(click.Context(command))))


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The working directory, with the page's task in it."""
    (source,) = re.findall(r"^```python\n# first_word.py\n(.*?)^```", HOW_TO, re.S | re.M)
    (tmp_path / "first_word.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("accel_sft_file_first_word", None)


@pytest.mark.parametrize("words", _commands(HOW_TO), ids=shlex.join)
def test_every_command_names_what_is_there(words, recipe):
    assert _unknown(words) == []


def test_recipe_for_own_metric_scores_chat_files(recipe, monkeypatch):
    monkeypatch.setenv("ACCEL_SFT_CACHE", str(recipe / ".cache"))
    rows = [{"prompt": f"{n}?", "completion": f"{'odd' if n % 2 else 'even'} it is"} for n in range(40)]
    (recipe / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = registry.load("./first_word.py")(train_file="data.jsonl", held_out=10)
    examples = task.dataset("validation")
    check_scoring(task, examples)
    answers = [task.target(example).split()[0] for example in examples]
    assert {*answers} == {"odd", "even"}
    scores = [scored(task, examples, index, "odd I think") for index in range(10)]
    assert aggregated(task, scores) == {"first_word": answers.count("odd") / 10}
    (problem,) = type(task)(train_file="data.jsonl", metric="exact").problems()
    assert problem == "--metric exact: answers are scored by first_word of the task; leave it out"


def test_there_is_a_command_for_every_wish():
    wishes = re.split(r"^### ", HOW_TO, flags=re.M)[1:]
    assert len(wishes) >= 30
    assert [wish.splitlines()[0] for wish in wishes if "```bash\n" not in wish or "](" not in wish] == []


@pytest.mark.parametrize(
    "line",
    [
        "accel-sft mth",
        "accel-sft plan mth",
        "accel-sft math --no-such-option 3",
        "accel-sft plan chat --interactive",
        "accelerate launch --config_file accelerate_configs/z9.yaml -m accel_sft math",
        "accelerate launch --config_file accelerate_configs/z2.yaml --no_such 1 -m accel_sft math",
    ],
)
def test_what_is_not_there_is_found_out(line):
    assert _unknown(shlex.split(line)) != []


def test_every_variable_of_the_reference_is_read_set_or_named_in_the_source():
    table = REFERENCE.partition("## Environment variables")[2].partition("\n## ")[0]
    named = re.findall(
        r"`([A-Z][A-Z0-9_]+)(?:=\w+)?`", "\n".join(line.partition(" | ")[0] for line in table.splitlines())
    )
    named = [name for name in named if name != "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]  # torchrun's own
    assert len(named) >= 40
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "accel_sft").rglob("*.py"))
    read_by_a_library = {"HTTPS_PROXY", "NO_COLOR", "TMPDIR"}
    assert read_by_a_library <= set(named)
    assert [name for name in named if not re.search(rf"\b{name}\b", source)] == []
