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

from accel_sft import Task, option


@dataclass(kw_only=True)
class {cls}(Task):
    """Say whether a number is even or odd."""

    main_metric = "accuracy"

    max_number: int = option(9999, min=99, help="Largest number asked about.")

    def dataset(self, split):
        """Numbers; every tenth of the shuffled ones is held out for validation."""
        numbers = random.Random(0).sample(range(self.max_number + 1), min(2000, self.max_number + 1))
        return numbers[::10] if split == "validation" else [n for i, n in enumerate(numbers) if i % 10]

    def messages(self, example):
        """The prompt, as chat messages."""
        return [{{"role": "user", "content": f"Is {{example}} even or odd?"}}]

    def target(self, example):
        """The only text that carries loss."""
        return "odd" if example % 2 else "even"

    def score(self, example, text):
        """The scores of one generated answer; the mean over all examples is reported."""
        return {{"accuracy": float(text.strip() == self.target(example))}}
'''

_TEST = """\
from {module} import {cls}

from accel_sft.api.registry import load


def test_the_task_is_found_by_its_name_and_keeps_the_contract():
    assert load("{name}") is {cls}


def test_nothing_of_validation_is_in_training():
    task = {cls}(max_number=200)
    assert not set(task.dataset("train")) & set(task.dataset("validation"))


def test_the_right_answer_scores_and_a_wrong_one_does_not():
    task = {cls}()
    example = task.dataset("validation")[0]
    assert task.score(example, task.target(example)) == {{"accuracy": 1.0}}
    assert task.score(example, "neither") == {{"accuracy": 0.0}}
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
    click.echo(f"  pip install -e {target}\n  accel-sft {name}\n  pytest {target}")
