"""A task in one file: what is loaded, refused and recorded, whose code may run, and that it trains on two ranks."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from conftest import accel_sft as run
from fake_plugins import GOOD
from places import CONFIGS

from accel_sft.api import registry
from accel_sft.api.errors import UserError
from accel_sft.api.task_file import file_record, same_task
from accel_sft.rows.fingerprint import code_fingerprint


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def refused(word):
    with pytest.raises(UserError) as caught:
        registry.load(word)
    assert all(len(line.splitlines()) == 1 for line in caught.value.problems)
    return str(caught.value)


def test_task_files_fingerprint_follows_its_content(folder):
    Path("math.py").write_text(GOOD)  # Python's own module of this name stays what it is
    task = registry.load("./math.py")(size=3)
    assert task.dataset("train") == [0, 1, 2]
    assert sys.modules["math"].sqrt(4) == 2
    record, code = file_record(type(task)), code_fingerprint(task)
    assert (record["path"], record["class"], len(record["sha256"])) == (str(folder / "math.py"), "Good", 64)
    Path("math.py").write_text(GOOD + "# changed\n")
    again = registry.load("math.py:Good")(size=3)
    assert file_record(type(again))["sha256"] != record["sha256"]
    assert code is not None
    assert code_fingerprint(again) != code
    assert file_record(dict) is None


def test_module_beside_the_file_is_found(folder, capsys):
    Path("mine.py").write_text("from size_of_mine import SIZE\n" + GOOD.replace("option(10", "option(SIZE"))
    Path("size_of_mine.py").write_text("SIZE = 7\nprint('hello')\n")
    cls = registry.load("mine.py")
    assert capsys.readouterr() == ("", "hello\n")  # what a module prints goes to standard error
    assert len(cls().dataset("train")) == 7
    assert code_fingerprint(cls()) is None  # the other file decides too: every message is read


FAULTS = {
    "missing": (None, "", "cannot be read (No such file or directory)"),
    "no Python": ("x = 1\ndef (", "", "cannot be imported: SyntaxError: invalid syntax (it.py:2)"),
    "relative import": ("from .size import SIZE", "", "relative import with no known parent package (it.py:1)"),
    "no task": ("x = 1", "", "no subclass of accel_sft.Task"),
    "two tasks": (GOOD + GOOD[GOOD.index("@") :].replace("Good", "Other"), "", "it.py:Good or it.py:Other"),
    "no such task": (GOOD, ":Best", "no class Best in this file; it has Good"),
}


@pytest.mark.parametrize(("source", "name", "cause"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_used_is_told_in_one_line(folder, source, name, cause):
    if source is not None:
        Path("it.py").write_text(source)
    line = refused(f"it.py{name}")
    assert line.startswith("task it.py: ")
    assert cause in line


def test_two_words_may_name_the_same_file(folder):
    assert same_task("./mine.py", f"{folder / 'mine.py'}:Mine")
    assert same_task("math", "math")
    for word, other in (("mine.py:A", "mine.py:B"), ("mine.py", "b/mine.py"), ("math", "ner"), ("mine.py", "mine")):
        assert not same_task(word, other)


EDITS = """from pathlib import Path

        Path(__file__).with_name("ddp.yaml").write_text("num_processes: 7")
        return list(range(self.size))"""
"""The launch file is edited while the run reads its data."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a file on two ranks, from its folder."""
    folder = tmp_path_factory.mktemp("file")
    (folder / "mine.py").write_text(GOOD.replace("return list(range(self.size))", EDITS))
    shutil.copy(CONFIGS / "ddp.yaml", folder)
    words = (str(folder / "mine.py"), "--max-steps", "2", "--save-every", "1", "--global-batch-size", "4")
    return run(*words, yaml=str(folder / "ddp"), launcher=("--mixed_precision", "no"), run_dir=folder / "run")


def test_task_file_trains_on_two_ranks_and_is_recorded(trained):
    assert trained.status == 0, trained.output[-4000:]
    record = json.loads((trained.run_dir / "run.json").read_text())
    assert record["task"] == "mine.py"
    assert (record["task_file"]["class"], record["launch"]["processes"]) == ("Good", 2)
    launch = yaml.safe_load((trained.run_dir / "launch.yaml").read_text())
    assert (launch["mixed_precision"], launch["num_processes"]) == ("no", 2), "as it was when the run was launched"
    assert yaml.safe_load(record["launch"]["yaml"])["distributed_type"] == "MULTI_GPU"
    evaluated = f"accel-sft evaluate {trained.arguments[0]}:Good --model "
    assert "".join(evaluated.split()) in "".join(trained.output.split()), "the last line's command finds the file"


def test_resume_reports_a_changed_file_and_refuses_another_class(trained):
    file, result = Path(trained.arguments[0]), trained.run_dir / "result.json"
    result.write_text('{"status": "running"}')
    source = GOOD.replace("class Good", "class Other")
    file.write_text(GOOD + "\n\n" + source[source.index("@") :])
    words = ("--resume", "auto", *trained.arguments[1:])
    other = run(f"{file}:Other", *words, run_dir=trained.run_dir)
    assert other.status != 0
    assert "the run was started with mine.py Good, not mine.py Other" in other.output
    result.write_text('{"status": "running"}')
    same = run(f"{file}:Good", *words, run_dir=trained.run_dir)
    assert same.status == 0, same.output[-4000:]
    assert "the task's code or libraries have changed since the last start" in same.output
    assert not (trained.run_dir / "launch.yaml").exists()  # of a start with a launcher
    assert yaml.safe_load((trained.run_dir / "run.yaml").read_text())["task"] == f"{file}:Good"
