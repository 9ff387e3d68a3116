"""tests/gpu/run: what it keeps is whole or refused in a line, and a check that fails in its own way ends no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from places import ROOT

GPU = ROOT / "tests" / "gpu"


def script(*arguments, **environment):
    """tests/gpu/run with `fp16`, which under --tiny launches nothing."""
    command = ["bash", str(GPU / "run"), "--tiny", "--check", "fp16", *map(str, arguments)]
    env = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def test_results_are_kept_and_not_made_again(tmp_path):
    gone = {"a check of before": {"holds": "NO", "measured": "-", "seconds": 1}}
    (tmp_path / "tiny.json").write_text(json.dumps(gone))
    first = script("--state", tmp_path)
    assert first.returncode == 0, first.stderr
    assert "| fp16 | yes | a GPU's | 0 |" in first.stdout
    again = script("--state", tmp_path)
    assert "fp16: half precision" not in again.stdout
    assert "| fp16 | yes | a GPU's | 0 |" in again.stdout


@pytest.mark.parametrize("content", ["{", "[]", '{"fp16": 1}'])
def test_results_that_are_broken_are_told_in_a_line(tmp_path, content):
    (tmp_path / "tiny.json").write_text(content)
    refused = script("--state", tmp_path)
    assert refused.returncode == 1
    assert "tiny.json: holds no results of these checks; remove it" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (tmp_path / "tiny.json").read_text() == content


def test_a_state_that_is_no_folder_and_wheels_that_are_none_are_told_in_a_line(tmp_path):
    (tmp_path / "file").touch()
    refused = script("--state", tmp_path / "file")
    assert "cannot be kept there" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "no wheels in this folder" in script(WHEELS=str(tmp_path)).stderr


def test_a_check_that_fails_in_its_own_way_is_a_result(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(GPU))
    import checks
    import suite

    def broken(machine):
        raise KeyError("peak_device_memory_gib")

    monkeypatch.setattr(checks, "CHECKS", [suite.Check("broken", "it is not", 1, broken)])
    monkeypatch.setattr(sys, "argv", ["checks.py", "--tiny", "--state", str(tmp_path), "--minutes", "9"])
    with pytest.raises(SystemExit) as ended:
        checks.main()
    assert ended.value.code == 1
    assert "| broken | NO | KeyError: 'peak_device_memory_gib' | 0 |" in capsys.readouterr().out
