"""`accel-sft new-task`: writes a small working task to start from, as a plugin with a test or as one file."""

import importlib.util
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
description = "The task {name}."
requires-python = ">=3.11"
dependencies = ["accel-sft>={version}"]

[project.entry-points."accel_sft.tasks"]
{name} = "{module}:{cls}"

[tool.setuptools]
py-modules = ["{module}"]
"""

_MODULE = '''\
"""A small task that works. Make it your own: change the rows, what `parse` accepts, prompt, answer and score."""

from dataclasses import dataclass

from accel_sft import RowProblem, Task, UserError, option, read_rows


@dataclass(kw_only=True)
class {cls}(Task):
    """Say whether a number is even or odd."""

    main_metric = "accuracy"

    train_file: str | None = option(None, rows=True, help="Rows with question and answer; default: a sample.")
    validation_file: str | None = option(None, rows=True, help="Validation rows; default: a tenth of --train-file.")

    def dataset(self, split):
        """The examples of "train" or "validation"; none may be in both."""
        if split == "validation" and self.validation_file:
            return read_rows(self.validation_file, parse, split=split)
        if self.train_file:
            rows = read_rows(self.train_file, parse)
            parts = (rows, None) if self.validation_file else rows.held_out(max(len(rows) // 10, 1), seed=0)
            return parts[split == "validation"]
        if self.validation_file:
            raise UserError("--train-file: name the rows to train on")
        numbers = range(900) if split == "train" else range(900, 1000)
        return [{{"question": f"Is {{n}} even or odd?", "answer": ("even", "odd")[n % 2]}} for n in numbers]

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
    """Turn a row of a file into an example; an error names the file and the line."""
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str):
            raise RowProblem(field, "text")
    return row
'''

_TEST = """\
from {module} import {cls}

from accel_sft.api.registry import load
from accel_sft.testing import TaskConformance


class Test{cls}(TaskConformance):
    task = {cls}()  # add values for options without a default


def test_the_task_is_found_by_its_name():
    assert load("{name}") is {cls}
"""


@click.command("new-task")
@click.argument("name")
@click.argument("directory", type=click.Path(), required=False)
@click.option("--file", "one_file", is_flag=True, help="Write a single file, NAME.py, which needs no installation.")
def new_task(name: str, directory: str | None, one_file: bool) -> None:
    """Start a task of your own: a plugin named NAME in DIRECTORY (default: accel-sft-NAME)."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name):
        raise UserError(f"NAME {name!r}: use lower-case letters, digits and hyphens, and begin with a letter")
    if name in (registry.RESERVED | registry.SHIPPED.keys() | registry.names().keys()):
        raise UserError(f"NAME {name!r}: a tool or an installed task has this name; choose another name")
    identifier, cls = re.sub("-+", "_", name), f"{name.title().replace('-', '')}Task"
    values = {"name": name, "module": f"accel_sft_{identifier}", "cls": cls, "version": accel_sft.__version__}
    if one_file:
        target = Path(directory or ".") / f"{identifier}.py"
        if not target.exists() and importlib.util.find_spec(identifier):
            raise UserError(f"NAME {identifier}: a module of Python or a library has this name; choose another name")
        templates = {target: _MODULE}
    else:
        target = Path(directory or f"accel-sft-{name}")
        templates = {target / "pyproject.toml": _PYPROJECT, target / f"{values['module']}.py": _MODULE}
        templates[target / f"tests/test_{identifier}.py"] = _TEST
    try:
        if target.exists() and (one_file or any(target.iterdir())):
            raise UserError(f"{target}: already exists; name another DIRECTORY")
        for path, template in templates.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(template.format(**values), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); name another DIRECTORY") from None
    word = name
    if one_file:
        word = str(target) if len(target.parts) > 1 else f"./{target}"
    install, test = ("", "") if one_file else (f"  pip install pytest -e {target}\n", f"\n  python -m pytest {target}")
    click.echo(f"Wrote {target}: a task with a sample of rows. Next:")
    click.echo(f"{install}  accel-sft {word} --max-steps 100\n  accel-sft check {word}{test}")
