"""The same command gives the same bits with the default options (law 3)."""

from __future__ import annotations

import json

from conftest import finished
from reference_job import FP32, JOB, ONCE, layout, own_task, same_curve, same_weights

DROPOUT = ("math", "--adapter", "lora", "--lora-dropout", "0.1", "--max-steps", "20", "--global-batch-size", "10")
DROPOUT += ("--train-examples", "500", "--seed", "7", "--eval-every", "off", "--save-every", "20")


def test_same_command_ends_with_the_same_bits(launched, tmp_path):
    first = layout(launched, "plain with recomputed activations")
    environment = {"ACCEL_SFT_CACHE": str(tmp_path / "cache")}
    finished(*first.arguments, run_dir=tmp_path / "run", environment=environment)
    same_weights(first.run_dir, tmp_path / "run")


def test_ranks_killed_before_a_checkpoint_end_with_the_same_bits(tmp_path, own_machine):
    options = {"yaml": "ddp", "launcher": FP32}
    whole = finished(*DROPOUT, run_dir=tmp_path / "whole", **options)
    run_dir = tmp_path / "run"
    with own_machine.started("run", "ddp", *DROPOUT[1:], launcher=FP32) as launch:
        launch.until_step(1)
    assert not list(run_dir.glob("checkpoints/*"))
    assert (run_dir / "batching.json").is_file()
    resumed = finished(*DROPOUT, "--resume", "auto", run_dir=run_dir, **options)
    assert "per forward, as before" in " ".join(resumed.output.split())
    same_weights(whole.run_dir, run_dir)
    assert [line["loss"] for line in resumed.lines()] == [line["loss"] for line in whole.lines()]


ASKING = """
def messages(self, example):
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    return super().messages(example)
"""


def test_deterministic_asks_for_kernels_that_repeat_every_bit(launched, tmp_path):
    task = own_task(tmp_path, ASKING)
    run = finished(task, *JOB[1:], *ONCE, "--deterministic", run_dir=tmp_path / "run")
    same_curve(layout(launched, "plain").lines(), run.lines())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["deterministic"] is True
