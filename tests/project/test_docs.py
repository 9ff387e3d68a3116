"""README and docs name files, links and flags that are there, and the documentation builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest
from places import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted((ROOT / "docs").glob("*.md"))
OTHER_PROGRAMS = {"--logdir", "--editable"} | {"--dataset", "--local_dir"} | {"--shout", "--no-shout"}
OTHER_PROGRAMS |= {"--enable-lora", "--lora-modules", "--outfile", "--outtype"} | {"--all", "--no-deps", "--no-binary"}
OTHER_PROGRAMS |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time", "--requeue"}
OTHER_PROGRAMS |= {"--open-mode", "--kill-on-bad-exit", "--model_name", "--model_flavor", "--pretrain"}
"""Flags of TensorBoard, pip, modelscope, of the example task on a page, of vLLM, llama.cpp's converter,
.ci/run, Slurm, and scripts of torchtitan and ColossalAI; `accelerate launch` and torchrun are asked."""


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
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1100


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
    built = subprocess.run([*command, str(site)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    pages = sorted(site.glob("*.html"))
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= {page.name for page in pages}
    fetched = _Fetched()
    for page in pages:
        fetched.feed(page.read_text(encoding="utf-8"))
    assert fetched.addresses == []
