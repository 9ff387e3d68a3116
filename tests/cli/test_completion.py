"""What a shell completes, by the script that is printed: commands, tasks and files with tasks, options, values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_plugins import install, only_plugins_of

from accel_sft.__main__ import main
from accel_sft.cli.group import cli

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a task's file and a package of tasks that must not be imported."""
    site = tmp_path / "site"
    site.mkdir()
    install(site, "accel-sft-loud", "loud = accel_sft_loud:Good", "raise SystemExit('was imported')")
    (tmp_path / "mine.py").write_text("raise SystemExit('was imported')")
    monkeypatch.chdir(tmp_path)
    with only_plugins_of(site, monkeypatch):
        yield tmp_path


@pytest.fixture(params=SHELLS)
def complete(request, folder, monkeypatch, capsys):
    """What this shell is told to offer behind `accel-sft WORDS`, of which the last is not finished: kind and word."""

    def words(*typed):
        shell, line = request.param, " ".join(("accel-sft", *typed))
        monkeypatch.setenv("_ACCEL_SFT_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", typed[-1] if shell == "fish" else str(len(typed)))
        monkeypatch.setattr(sys, "argv", ["accel-sft"])
        with pytest.raises(SystemExit):
            main()
        out, err = capsys.readouterr()
        assert err == ""
        lines = out.rstrip("\n").splitlines()
        if shell == "zsh":
            return [*zip(lines[::3], lines[1::3], strict=False)]
        return [tuple(line.partition("\t")[0].split(",", 1)) for line in lines]

    return words


def test_every_shell_is_offered_commands_tasks_options_and_values(complete):
    assert {("plain", name) for name in ("loud", "plan", "compare", "completion")} <= {*complete("")}
    assert complete("lo") == [("plain", "loud")]
    assert complete("plan", "lo") == complete("check", "lo") == [("plain", "loud")]
    assert complete("loud", "--learn") == [("plain", "--learning-rate")]
    assert complete("plan", "loud", "--gpu-m") == [("plain", "--gpu-memory")]
    assert complete("loud", "--own-option", "3", "--adapter", "l") == [("plain", "lora")]
    assert ("plain", "--help-all") in complete("loud", "--help")
    assert ("plain", "z2_offload") in complete("launch-file", "z2")
    assert complete("completion", "") == [("plain", shell) for shell in SHELLS]


def test_every_shell_is_offered_files(complete):
    assert complete("./mi") == [("file", "./mi")]
    assert complete("./mine.py", "--learn") == [("plain", "--learning-rate")]
    for typed in (("loud", "--config", "r"), ("report", "r"), ("generate", "r"), ("loud", "--output-dir", "r")):
        assert complete(*typed) == [("file", "r")]
    Path("run.yaml").write_text("task: loud\n")
    assert complete("--config", "run.yaml", "--learn") == [("plain", "--learning-rate")]
    assert complete("--config", "none.yaml", "--learn") == []


def test_the_printed_script_completes_in_bash(folder):
    """`compopt` runs only where a key was pressed: in its place stands what says that files were asked for."""
    script = """
        eval "$(accel-sft completion bash)"
        complete -p accel-sft
        compopt() { printf '%s ' compopt "$@"; echo; }
        offered() { COMPREPLY=(); COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); _accel_sft_completion accel-sft; }
        offered accel-sft lo; echo "${COMPREPLY[@]}"
        offered accel-sft loud --adapter ''; echo "${COMPREPLY[@]}"
        offered accel-sft plan ./; echo "${#COMPREPLY[@]}"
        offered accel-sft check chat --metric e; echo "${COMPREPLY[@]}"
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    packages = os.pathsep.join(filter(None, (str(folder / "site"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": packages, "HOME": str(folder)}
    done = subprocess.run(["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "complete -o nosort -F _accel_sft_completion accel-sft",
        "loud",
        "none lora adalora",
        "compopt -o default ",
        "0",
        "exact",
    ]
    zsh = CliRunner().invoke(cli, ["completion", "zsh"]).output
    assert "compinit" in zsh, "a plain zsh has no completion before"
