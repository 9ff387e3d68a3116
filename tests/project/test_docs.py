"""README and docs name files, links and flags that are there, and the documentation builds without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml
from places import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted((ROOT / "docs").glob("*.md"))
OTHER_PROGRAMS = {"--logdir", "--editable"} | {"--dataset", "--local_dir"} | {"--shout", "--no-shout"}
OTHER_PROGRAMS |= {"--enable-lora", "--lora-modules", "--outfile", "--outtype"} | {"--all", "--no-deps", "--no-binary"}
OTHER_PROGRAMS |= {"--test"}  # setup.sh
OTHER_PROGRAMS |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time", "--requeue"}
OTHER_PROGRAMS |= {"--open-mode", "--signal", "--kill-on-bad-exit", "--model_name", "--model_flavor", "--pretrain"}
OTHER_PROGRAMS |= {"--gpus", "--minutes", "--check", "--again", "--state", "--tiny", "--list"}
"""Flags of TensorBoard, pip, modelscope, of the example task on a page, of vLLM, llama.cpp's converter,
.ci/run, Slurm, scripts of torchtitan and ColossalAI, and tests/gpu/run; `accelerate launch` and torchrun are asked."""


def _prose(page: Path) -> str:
    """The page without its code blocks, in which `](` is no link."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def _flags_of(command: click.Command, name: str = "accel-sft") -> set[str]:
    context = click.Context(command, info_name=name)
    flags = {flag for parameter in command.get_params(context) for flag in (*parameter.opts, *parameter.secondary_opts)}
    for each in command.list_commands(context) if isinstance(command, click.Group) else ():
        flags |= _flags_of(command.get_command(context, each), each)
    return flags


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_first_command_of_the_readme_stands_within_its_first_twenty_lines():
    beginning = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:20]
    assert any(line.startswith("bash setup.sh && ") for line in beginning)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page):
    links = re.findall(r"\]\(([^)\s]+)\)", _prose(page))
    relative = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in relative if not (page.parent / link).exists()] == []


def test_the_readme_has_links_and_pictures():
    assert {"docs/architecture.md", "docs/images/row-to-step.svg"} <= set(
        re.findall(r"\]\(([^)\s]+)\)", _prose(ROOT / "README.md"))
    )


def test_every_flag_that_a_page_names_is_an_option_of_its_program():
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    from accel_sft.cli.group import cli

    launchers = {*launch_command_parser()._option_string_actions, *get_args_parser()._option_string_actions}
    known = _flags_of(cli) | launchers | OTHER_PROGRAMS | {"--parallelism_config_"}  # and its names
    assert {"--max-length", "--train-file", "--base", "--no-compile", "--max_restarts"} <= known
    unknown = {}
    for page in PAGES:
        named = re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text(encoding="utf-8"))
        if wrong := sorted(set(named) - known):
            unknown[page.name] = wrong
    assert unknown == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_is_there(page):
    named = re.findall(
        r"`((?:accel_sft|accelerate_configs|benchmarks|docs|tasks|tests)/[\w./-]*)`", page.read_text("utf-8")
    )
    assert page.name != "architecture.md" or len(set(named)) > 30
    assert [path for path in sorted(set(named)) if not (ROOT / path).exists()] == []


def test_the_architecture_answers_ten_questions_each_with_a_file():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Ten questions")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| question")]
    assert len(rows) == 10
    assert [row for row in rows if not re.search(r"`accel_sft/\w+/\w+\.py`", row)] == []


class _Fetched(HTMLParser):
    """What a browser fetches from other servers when it opens a page. Links to click on are not among it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get("src") or (values.get("href") if tag == "link" else None) or ""
        if re.match(r"(https?:)?//", address):
            self.addresses.append(address)


def test_the_documentation_builds_without_warnings_and_its_pages_fetch_nothing(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-d", str(tmp_path / "cache"), "docs"]
    site = tmp_path / "site"
    built = subprocess.run([*command, str(site)], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = sorted(site.glob("*.html"))
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= {page.name for page in pages}
    fetched = _Fetched()
    for page in pages:
        fetched.feed(page.read_text(encoding="utf-8"))
    assert fetched.addresses == []


def _options_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("options_page", ROOT / "docs/options.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def _options_on_the_page() -> dict[str, list[str]]:
    """The options in each part of the page of options, by the part's heading: Training, or the name of a tool."""
    _, *parts = re.split(r"^## (.+)\n", (ROOT / "docs/options.md").read_text(encoding="utf-8"), flags=re.M)
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: re.findall(r"^\| `(--[\w-]+)` \|", text, re.M) for name, text in texts.items()}


def _options_of(*words: str) -> dict[str, str]:
    """The options of a command of `math` but the task's own, each with its help."""
    from accel_sft.api.options import settings
    from accel_sft.cli.group import cli

    command = cli
    for word in words:
        command = command.get_command(click.Context(command), word)
    of_task = {setting.name for setting in settings(command.task_class)}
    params = [p for p in command.get_params(click.Context(command)) if isinstance(p, click.Option)]
    found = {p.opts[-1]: p.help for p in params if p.name not in of_task}
    return {flag: help for flag, help in found.items() if not flag.startswith("--no-")}  # of `compare`: switches


def test_the_page_of_options_is_what_its_script_makes():
    made = _options_script().make_page()
    assert (ROOT / "docs/options.md").read_text(encoding="utf-8") == made, "run: python docs/options.py"


def test_the_page_of_options_has_each_option_once_where_it_belongs():
    page, training = _options_on_the_page(), _options_of("math")
    assert page.pop("Training") == [*training]
    assert {*page} == {"evaluate", "plan", "check", "compare", "how-much"}
    for tool, on_page in page.items():
        added = [flag for flag, help in _options_of(tool, "math").items() if training.get(flag) != help]
        assert sorted(on_page) == sorted(added), tool
        assert added, tool


def test_every_sentence_about_an_option_is_of_one_that_is_there():
    sentences = yaml.safe_load((ROOT / "docs/options.yaml").read_text(encoding="utf-8"))
    page = {name.lower(): sorted(flags) for name, flags in _options_on_the_page().items()}
    assert {part: sorted(f"--{name}" for name in of_part) for part, of_part in sentences.items()} == page
