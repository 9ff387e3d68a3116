"""README and docs name files, links and flags that are there, and the documentation builds without a warning."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import click
import pytest
from accelerate.commands.launch import launch_command_parser
from places import ROOT
from torch.distributed.run import get_args_parser

from accel_sft.api import registry
from accel_sft.cli.group import cli
from accel_sft.evaluation.scoring import aggregated, check_scoring, scored

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted((ROOT / "docs").glob("*.md"))
HOW_TO = (ROOT / "docs/how-to.md").read_text(encoding="utf-8")
OF_ACCELERATE = {*launch_command_parser()._option_string_actions}
OTHER_PROGRAMS = {
    *("--logdir", "--editable", "--no-deps", "--no-binary", "--dataset", "--local_dir"),  # TensorBoard, pip, modelscope
    *("--enable-lora", "--lora-modules", "--outfile", "--outtype"),  # vLLM, llama.cpp's converter
    *("--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time", "--requeue"),  # Slurm
    *("--open-mode", "--signal", "--kill-on-bad-exit"),
    *("--model_name", "--model_flavor", "--pretrain"),  # scripts of torchtitan and ColossalAI
    *("--all", "--test", "--collect-only", "--last-failed"),  # .ci/run, setup.sh, pytest
    *("--shout", "--no-shout"),  # the example task on a page
}


def _prose(page: Path) -> str:
    """The page without its code blocks, in which `](` is no link."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def _flags_of(command: click.Command) -> set[str]:
    """The command's own options and those of its commands."""
    context = click.Context(command)
    flags = {flag for parameter in command.get_params(context) for flag in (*parameter.opts, *parameter.secondary_opts)}
    names = command.list_commands(context) if isinstance(command, click.Group) else ()
    return flags.union(*(_flags_of(command.get_command(context, name)) for name in names))


def test_readme_is_short_and_begins_with_a_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 900
    assert any(line.startswith("bash setup.sh && ") for line in readme.splitlines()[:20])


def test_flags_of_pages_are_options_of_their_programs():
    known = _flags_of(cli) | OF_ACCELERATE | {*get_args_parser()._option_string_actions} | OTHER_PROGRAMS
    known |= {"--parallelism_config_"}  # and its names
    assert {"--max-length", "--train-file", "--base", "--no-compile", "--max_restarts"} <= known
    unknown = {}
    for page in PAGES:
        named = re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text(encoding="utf-8"))
        if wrong := sorted(set(named) - known):
            unknown[page.name] = wrong
    assert unknown == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_paths_and_tests_that_a_page_names_exist(page):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page))]
    relative = [link for link in links if not re.match("[a-z]+:", link)]
    assert [link for link in relative if not (page.parent / link).exists()] == []
    folders = r"(?:accel_sft|accelerate_configs|benchmarks|docs|tasks|tests)/[\w./-]*"
    named = set(re.findall(rf"`({folders})(?:::(\w+)(…?))?`", page.read_text(encoding="utf-8")))
    assert len(named) > {"architecture.md": 30, "faults.md": 30, "known-bugs.md": 10}.get(page.name, -1)
    for path, test, more in sorted(named):
        assert (ROOT / path).exists(), path
        if test:
            begins = rf"^def {test}\w*\(" if more else rf"^def {test}\("
            assert re.search(begins, (ROOT / path).read_text(encoding="utf-8"), re.M), (path, test)


@pytest.mark.long
def test_documentation_builds_without_warnings_and_fetches_nothing(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-d", str(tmp_path / "cache"), "docs"]
    site = tmp_path / "site"
    built = subprocess.run([*command, str(site)], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = sorted(site.glob("*.html"))
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= {page.name for page in pages}
    fetched = r'<(?!a\s)[^>]*\s(?:src|href)="((?:https?:)?//[^"]*)"'  # what a link leads to is not fetched
    assert [address for page in pages for address in re.findall(fetched, page.read_text(encoding="utf-8"))] == []


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The working directory, with the page's task in it."""
    (source,) = re.findall(r"^```python\n# first_word.py\n(.*?)^```", HOW_TO, re.S | re.M)
    (tmp_path / "first_word.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("accel_sft_file_first_word", None)


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
    assert problem == "--metric exact: this task scores answers by first_word; leave it out"


def test_variables_of_the_reference_are_in_the_source():
    reference = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    table = reference.partition("## Environment variables")[2].partition("\n## ")[0]
    named = re.findall(r"`([A-Z][A-Z0-9_]+)(?:=\w+)?`", re.sub(r" \| .*", "", table))
    named = [name for name in named if name != "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]  # torchrun's own
    assert len(named) >= 40
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "accel_sft").rglob("*.py"))
    read_by_a_library = {"HTTPS_PROXY", "NO_COLOR", "TMPDIR"}
    assert read_by_a_library <= set(named)
    assert [name for name in named if not re.search(rf"\b{name}\b", source)] == ["HTTPS_PROXY"]  # libraries' own


def test_page_of_options_is_what_its_script_makes():
    made = runpy.run_path(str(ROOT / "docs/options.py"))["make_page"]()
    assert (ROOT / "docs/options.md").read_text(encoding="utf-8") == made, "run: python docs/options.py"
