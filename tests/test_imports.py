"""A module imports only from groups to its left, and what must answer at once imports no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from fake_plugins import accel_sft, install

PACKAGE = Path(__file__).parent.parent / "accel_sft"
GROUPS = [
    {"pulse"},
    {"options", "keeper", "cascade", "sealed", "host", "whereabouts"},
    {"identity", "json_stream", "markdown", "progress", "launched", "terminal", "postmortem"},
    {"cache", "operators", "environment", "stopping", "failure"},
    {"watch"},
    {"rows", "task", "config", "config_file"},
    {"contract", "template"},
    {"registry"},
    {"chat", "tiny", "report", "console", "attention", "merging", "holding"},
    {
        "audit",
        "system",
        "shards",
        "metrics_file",
        "dashboards",
        "collate",
        "card",
        "store",
        "decoding",
        "server",
        "health",
    },
    {"room", "record"},
    {"batching", "data", "model", "optim", "loss", "launch", "tracking", "checkpoint", "tokens"},
    {"prepare", "exactness", "learning"},
    {"generate", "run_folder", "layout", "outcome"},
    {"evaluate", "vllm"},
    {"fitting"},
    {"train", "judge", "compare"},
    {"scaffold", "cli_options"},
    {"cli"},
    {"__main__"},
]
STANDARD_LIBRARY_ONLY = (
    "pulse",
    "options",
    "keeper",
    "sealed",
    "progress",
    "identity",
    "json_stream",
    "cache",
    "rows",
    "task",
    "contract",
    "registry",
)
NO_TORCH = (
    "config",
    "config_file",
    "report",
    "card",
    "tiny",
    "cli",
    "cli_options",
    "scaffold",
    "failure",
    "audit",
    "launched",
    "operators",
    "environment",
    "terminal",
)
PLACE = {name: place for place, names in enumerate(GROUPS) for name in names}
MODULES = sorted(path.stem for path in PACKAGE.rglob("*.py") if path.stem != "__init__")


def imported_by(module):
    """Modules of this package that a module imports anywhere, functions included."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "accel_sft":
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accel_sft."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("accel_sft."))
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{module}: relative import"


def test_every_module_has_a_place():
    assert set(MODULES) - PLACE.keys() == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_left(module):
    assert [other for other in imported_by(module) if PLACE.get(other, 99) >= PLACE.get(module, -1)] == []


def loaded_after(code):
    script = f"import sys; before = set(sys.modules); {code}; print(*(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in result.stdout.split()}


def test_what_a_plugin_author_imports_is_standard_library_only():
    code = "import " + ", ".join(f"accel_sft.{module}" for module in STANDARD_LIBRARY_ONLY)
    third_party = loaded_after(code) - sys.stdlib_module_names - {"accel_sft"}
    assert {name for name in third_party if not name.startswith("_")} == set()


def test_what_answers_at_once_imports_no_torch():
    code = "import " + ", ".join(f"accel_sft.{module}" for module in NO_TORCH)
    assert loaded_after(code) & {"torch", "transformers", "accelerate", "deepspeed", "numpy", "pyarrow"} == set()


BASH = {"_ACCEL_SFT_COMPLETE": "bash_complete"}
COMMANDS = {
    "help": ("--help", {}, "quick"),
    "version": ("--version", {}, "accel-sft, version"),
    "tasks": ("tasks", {}, "quick"),
    "help of a task": ("quick --help", {}, "--learning-rate"),
    "help of evaluate": ("evaluate --help", {}, "quick"),
    "completion": ("", {**BASH, "COMP_WORDS": "accel-sft q", "COMP_CWORD": "1"}, "plain,quick"),
    "completion of options": ("", {**BASH, "COMP_WORDS": "accel-sft quick --le", "COMP_CWORD": "2"}, "--learning-rate"),
}
REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "accelerate", "deepspeed", "numpy", "pyarrow"):
            raise RuntimeError(f"{name} was imported")
sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.parametrize(("command", "env", "answer"), COMMANDS.values(), ids=COMMANDS)
def test_the_commands_that_answer_at_once_do_without_torch(tmp_path, command, env, answer):
    install(tmp_path, "accel-sft-quick", "quick = accel_sft_quick:Good")
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    result = accel_sft(*command.split(), site=tmp_path, env=env)
    assert (result.returncode, result.stderr) == (0, "")
    assert answer in result.stdout


def test_the_refusal_above_fires(tmp_path):
    install(tmp_path, "accel-sft-quick", "quick = accel_sft_quick:Good", "import torch\n")
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    assert "RuntimeError: torch was imported" in accel_sft("tasks", site=tmp_path).stdout
