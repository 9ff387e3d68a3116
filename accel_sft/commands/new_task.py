"""`accel-sft new-task`: writes a plugin, which is a small task that learns and its test, to change into one's own."""

import re
from pathlib import Path

import click

import accel_sft
from accel_sft.api import registry
from accel_sft.api.errors import UserError

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "accel-sft-{name}"
version = "0.1.0"
description = "Say whether a number is even or odd."
requires-python = ">=3.11"
dependencies = ["accel-sft>={version}"]

[project.entry-points."accel_sft.tasks"]
{name} = "{module}:{cls}"

[tool.setuptools]
py-modules = ["{module}"]
"""

_MODULE = '''\
"""The task `{name}`: a small example that learns. Change data, prompt, answer and score into your own."""

import random
from dataclasses import dataclass

from accel_sft import RowProblem, Task, option, read_rows


@dataclass(kw_only=True)
class {cls}(Task):
    """Say whether a number is even or odd."""

    main_metric = "accuracy"

    data_folder: str | None = option(None, help="Where train.jsonl and validation.jsonl are; default: made-up rows.")

    def dataset(self, split):
        """The examples of "train" or "validation"; none may be in both."""
        if self.data_folder:
            return read_rows(f"{{self.data_folder}}/{{split}}.jsonl", parse)
        rows = [{{"question": f"Is {{n}} even or odd?", "answer": ("even", "odd")[n % 2]}} for n in range(2000)]
        random.Random(0).shuffle(rows)
        return rows[200:] if split == "train" else rows[:200]

    def messages(self, example):
        """The prompt, as chat messages."""
        return [{{"role": "user", "content": example["question"]}}]

    def target(self, example):
        """The only text that carries loss."""
        return example["answer"]

    def score(self, example, text):
        """The scores of one generated answer; the mean over all examples is reported."""
        return {{"accuracy": float(text.strip() == example["answer"])}}


def parse(row):
    """A row of a file as an example; what is wrong with it is told by file and line."""
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str):
            raise RowProblem(field, "text")
    return row
'''

_TEST = """\
from {module} import {cls}

from accel_sft.api.registry import load

TASK = {cls}()  # give options that have no default here


def test_the_task_is_found_by_its_name_and_keeps_the_contract():
    assert load("{name}") is {cls}


def test_nothing_of_validation_is_in_training():
    trained, held_out = ([str(TASK.messages(x)) for x in TASK.dataset(split)] for split in ("train", "validation"))
    assert not set(trained) & set(held_out)


def test_the_right_answer_scores_better_than_none():
    example = TASK.dataset("validation")[0]
    scores = [TASK.score(example, text) for text in (TASK.target(example), "")]
    right, none = (TASK.aggregate([score])[TASK.main_metric] for score in scores)
    assert right > none if TASK.higher_is_better else right < none
"""


@click.command("new-task")
@click.argument("name")
@click.argument("directory", required=False)
def new_task(name: str, directory: str | None) -> None:
    """Start a task of your own: a plugin named NAME in DIRECTORY (default: accel-sft-NAME)."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name):
        raise UserError(
            f"NAME {name!r}: begin with a lower-case letter, go on with lower-case letters, digits and hyphens"
        )
    if name in registry.RESERVED or name in registry.SHIPPED:
        raise UserError(f"NAME {name!r}: belongs to accel-sft itself; choose another")
    for plugin in registry.plugins():
        if plugin.name == name:
            raise UserError(f"NAME {name!r}: {plugin.distribution} {plugin.version} already has it; choose another")
    target = Path(directory or f"accel-sft-{name}")
    identifier, cls = re.sub("-+", "_", name), f"{name.title().replace('-', '')}Task"
    module = f"accel_sft_{identifier}"
    values = {"name": name, "module": module, "cls": cls, "version": accel_sft.__version__}
    files = {"pyproject.toml": _PYPROJECT, f"{module}.py": _MODULE, f"tests/test_{identifier}.py": _TEST}
    try:
        if target.exists() and any(target.iterdir()):
            raise UserError(f"DIRECTORY {target}: not empty; name a new one")
        (target / "tests").mkdir(parents=True, exist_ok=True)
        for path, template in files.items():
            (target / path).write_text(template.format(**values), encoding="utf-8")
    except OSError as error:
        raise UserError(f"DIRECTORY {target}: cannot be written ({error.strerror}); name another") from None
    click.echo(f"Wrote {target}: pyproject.toml, the task, and its test. Next:")
    click.echo(f"  pip install -e {target}\n  accel-sft {name} --max-steps 100\n  pytest {target}")
