"""`--offload`: weights that stay on the disk, or on the host, until a layer needs them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import finished
from reference_job import layout
from weights import answerer

from accel_sft import UserError
from accel_sft.evaluation.answerer import Prompt
from accel_sft.launch.accelerator import own_folder
from accel_sft.models import pretrained

CHATS = [Prompt([{"role": "user", "content": f"{number}="}]) for number in (31, 7, 20, 45)]
IDS = torch.arange(3, 15)[None]


def test_answers_with_weights_on_the_disk_are_the_same(tiny):
    lines = []
    plain, placed = answerer(tiny), answerer(tiny, offload="disk", log=lines.append)
    assert lines == ["where the model's parts are: 1 on the disk"]
    assert all(parameter.is_meta for parameter in placed.model.parameters())
    with torch.no_grad():
        assert torch.equal(plain.model(IDS).logits, placed.model(IDS).logits)
    assert placed.answers(CHATS, 8) == plain.answers(CHATS, 8)
    assert "by transformers" not in placed.generator.message  # but by the decoder, as without
    assert all(parameter.is_meta for parameter in placed.model.parameters())


def test_an_adapter_is_to_be_merged_first(adapter):
    with pytest.raises(UserError, match="merge it first"):
        answerer(adapter, offload="disk")


def test_scores_with_weights_on_the_disk_are_the_runs_own(launched, tmp_path):
    run = layout(launched, "plain")
    done = finished(
        *("evaluate", "math", "--model", str(run.run_dir / "final"), "--offload", "disk", "--same-data"),
        run_dir=tmp_path / "offloaded",
    )
    assert "where the model's parts are: 1 on the disk" in done.output
    alone, own = done.result()["after"], run.result()["after"]
    for name in ("accuracy", "eval_loss"):
        assert alone[name] == pytest.approx(own[name], rel=1e-6)


def test_weights_get_three_quarters_of_the_memory_that_is_free(monkeypatch):
    monkeypatch.setattr(pretrained, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(pretrained.host_memory, "free_bytes", lambda: 400)
    assert pretrained.placing("host")["max_memory"] == {0: 750, "cpu": 300}
    assert pretrained.placing("disk")["max_memory"] == {0: 750, "cpu": 0}


def test_folder_that_cannot_be_made_is_named_in_one_line(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACCEL_SFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be loaded: .*Not a directory: '\S*/file/offload"):
        answerer(tiny, offload="disk")


def test_what_cannot_be_offloaded_is_one_line():
    pretrained.refuse_offload(None, ranks=2, quantized=True)
    for where, ranks, quantized, line in (
        ("host", 1, False, "--offload host: there is no GPU here"),
        ("disk", 2, False, "--offload works in a single process only"),
        ("disk", 1, True, "--offload: 4-bit weights cannot be offloaded"),
    ):
        with pytest.raises(UserError, match=line):
            pretrained.refuse_offload(where, ranks=ranks, quantized=quantized)


def test_what_a_killed_process_left_is_removed(tmp_path):
    left = tmp_path / f"{socket.gethostname()}-{2**22 + 1}"  # above the largest number of a process
    left.mkdir()
    mine = own_folder(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [mine]


def test_living_processs_folder_is_kept_where_proc_is_missing(tmp_path, monkeypatch):
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: "proc" not in path.parts and exists(path))  # as on macOS
    living = tmp_path / f"{socket.gethostname()}-{os.getppid()}"
    living.mkdir()
    own_folder(tmp_path)
    assert living.is_dir()


def test_ctrl_c_leaves_nothing_on_the_disk(tiny, cache):
    command = [sys.executable, "-m", "accel_sft", "generate", str(tiny), "--interactive"]
    talk = subprocess.Popen([*command, "--offload", "disk"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert any("where the model's parts are: 1 on the disk" in line for line in talk.stderr)
    (mine,) = (path for path in (cache / "offload").iterdir() if path.name.endswith(f"-{talk.pid}"))
    talk.send_signal(signal.SIGINT)
    talk.wait()
    assert not mine.exists()
