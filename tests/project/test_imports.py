"""A package imports only from those the table allows, and what must answer at once imports no torch."""

import ast
import functools
import graphlib
import subprocess
import sys

import pytest
from fake_plugins import accel_sft, install
from places import ROOT

PACKAGE = ROOT / "accel_sft"
MAY_IMPORT = {
    "api": "",
    "io": "api",
    "rows": "api io",
    "launch": "api io",
    "results": "api io",
    "tracking": "api io launch results",
    "chat": "api io rows",
    "testing": "api chat",
    "resilience": "api io launch",
    "memory": "api io launch",
    "checkpoint": "api io launch memory",
    "models": "api io launch chat",
    "data": "api io launch rows chat",
    "batching": "api io launch chat memory models",
    "evaluation": "api io launch results rows chat models batching tracking",
    "training": "api io launch results rows chat data models batching tracking evaluation resilience checkpoint memory",
    "tools": "",
    "tools.report": "api io results tracking",
    "tools.doctor": "api io launch tracking",
    "tools.check": "api io launch results rows chat data models batching evaluation training",
    "tools.parity": "api io launch rows chat data models batching tracking evaluation resilience training commands",
    "tools.compare": "api io launch results models tracking tools.report",
    "tools.plan": "api io launch models batching evaluation memory",
    "tools.how_much": "api chat io results models tools.compare",
    "tools.verify": "api io launch results rows models tracking training",
    "tools.rehearse": "api io launch chat data models evaluation tracking training tools.check tools.plan",
    "commands": "api io launch results rows chat models batching tracking evaluation resilience training tools.check",
    "cli": "api io launch rows models resilience commands"
    " tools.check tools.compare tools.doctor tools.how_much tools.parity tools.plan tools.rehearse tools.report"
    " tools.verify",
}
"""What each package may import. The engine imports no tool, but for the quick check that `commands` makes before it
trains; tools import the engine."""
FACTS = {"__version__", "__file__"}
"""What any module may have of a bare `import accel_sft`."""
HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "numpy", "pyarrow", "scipy"}


@functools.cache
def modules():
    """Dotted name below accel_sft, and file, of each module; a package by its own name."""
    pairs = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        pairs.append((".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts), path))
    return pairs


def imported_by(name, source):
    """Dotted names below accel_sft of what a module imports anywhere, functions included."""
    known = dict(modules())
    for node in ast.walk(ast.parse(source)):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{name}: relative import"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "accel_sft":
            inside = node.module.partition(".")[2]
            for alias in node.names:
                module = f"{inside}.{alias.name}".strip(".")
                yield module if module in known else inside or "__init__"
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("accel_sft."))
            yield from ("__init__" for alias in node.names if alias.name == "accel_sft" and alias.asname)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "accel_sft":
            yield from {node.attr} - FACTS  # behind a bare `import accel_sft`


def package_of(name):
    """The package of the table that a module is in: of nested ones the innermost; "" for a module of the root."""
    parts = name.split(".")
    return next((".".join(parts[:end]) for end in (2, 1) if ".".join(parts[:end]) in MAY_IMPORT), "")


def not_allowed(name, source):
    """What a module of a package imports from packages that the table does not name, and from the root."""
    package = package_of(name)
    allowed = {package, *MAY_IMPORT[package].split()}
    return [other for other in imported_by(name, source) if package_of(other) not in allowed]


def test_modules_are_in_packages_of_the_table():
    folders = {".".join(path.parent.relative_to(PACKAGE).parts) for _, path in modules()}
    assert folders == {"", *MAY_IMPORT}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_the_table_allows(package):
    inside = [(name, path) for name, path in modules() if package_of(name) == package]
    found = {name: not_allowed(name, path.read_text(encoding="utf-8")) for name, path in inside}
    assert {name: others for name, others in found.items() if others} == {}


@pytest.mark.parametrize(
    ("module", "line", "forbidden"),
    [
        ("io.files", "from accel_sft.training import folder", True),
        ("io.files", "import accel_sft\naccel_sft.training.folder.Lock()", True),
        ("tools.report.page", "from accel_sft.tools.compare import settings", True),
        ("tools.compare.command", "from accel_sft.tools.report import page", False),
    ],
)
def test_imports_against_the_table_are_found(module, line, forbidden):
    assert bool(not_allowed(module, "import json\n" + line)) == forbidden


def test_modules_do_not_import_in_circles():
    graph = {name: set(imported_by(name, path.read_text(encoding="utf-8"))) for name, path in modules()}
    for package in MAY_IMPORT:
        graph.pop(package, None)  # their __init__ is a docstring
    graphlib.TopologicalSorter(graph).prepare()


def test_package_inits_are_docstrings():
    for name, path in modules():
        if path.name == "__init__.py" and name not in ("__init__", "testing"):  # what authors of tasks import
            assert [type(node) for node in ast.parse(path.read_text(encoding="utf-8")).body] == [ast.Expr], name


def test_plugin_authors_import_the_standard_library_only():
    names = "accel_sft.testing, accel_sft.api.registry, accel_sft.api.task_file, accel_sft.rows.rows"
    script = f"import sys; before = set(sys.modules); import {names}; print(*(set(sys.modules) - before))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    packages = {name.split(".")[0] for name in printed.split()} - sys.stdlib_module_names - {"accel_sft"}
    assert {name for name in packages if not name.startswith("_")} == set()


BASH = {"_ACCEL_SFT_COMPLETE": "bash_complete"}
COMMANDS = {
    "help": ("--help", {}, "quick"),
    "tasks": ("tasks", {}, "quick"),
    "launch-file": ("launch-file z2", {}, "zero_stage: 2"),
    "help of plan": ("plan quick --help", {}, "--gpu-memory"),
    "completion": ("", {**BASH, "COMP_WORDS": "accel-sft q", "COMP_CWORD": "1"}, "plain,quick"),
    "completion of options": ("", {**BASH, "COMP_WORDS": "accel-sft quick --le", "COMP_CWORD": "2"}, "--learning-rate"),
}
REFUSE = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in {HEAVY!r}:
            raise RuntimeError(name + " was imported")
sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.parametrize(("command", "env", "answer"), COMMANDS.values(), ids=COMMANDS)
def test_quick_commands_do_without_torch(tmp_path, command, env, answer):
    install(tmp_path, "accel-sft-quick", "quick = accel_sft_quick:Good")
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    result = accel_sft(*command.split(), site=tmp_path, env=env)
    assert (result.returncode, result.stderr) == (0, "")
    assert answer in result.stdout


LOST_ROWS = (
    "--train-file {folder}/row.jsonl: cannot be read (No such file or directory); name "
    "a JSON, JSONL, CSV, Parquet or text file that exists; did you mean {folder}/rows.jsonl?"
)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("chat --train-file rows.jsonl,{folder}/row.jsonl", LOST_ROWS),
        ("evaluate chat --model M --train-file {folder}/row.jsonl", LOST_ROWS),
        ("export-data chat OUT --train-file {folder}/row.jsonl", LOST_ROWS),
        ("generate runs/lost hi", "RUN_OR_MODEL 'runs/lost': no such folder"),
        ("serve runs/lost", "RUN runs/lost: no such folder"),
        ("parity runs/lost --url http://127.0.0.1:9/v1", "RUN runs/lost: no run.json there"),
        ("verify runs/lost", "runs/lost: no run.json in it"),
        ("report runs/lost", "RUN runs/lost: no such folder"),
        ("evaluate math --model org/model --base runs/lost", "--base 'runs/lost': no such folder"),
        ("math --model /lost/model", "--model '/lost/model': no such folder"),
    ],
)
def test_lost_rows_and_folders_are_refused_without_torch(tmp_path, command, line):
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    (tmp_path / "rows.jsonl").touch()
    result = accel_sft(*command.format(folder=tmp_path).split(), site=tmp_path, cwd=tmp_path)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert result.stderr.startswith(f"Error: {line.format(folder=tmp_path)}")


def test_no_module_is_longer_than_450_lines():
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules()}
    assert {name: count for name, count in lines.items() if count > 450} == {}
