"""A script for real ranks: what each of them gets from every collective, and the launch.

    accelerate launch --config_file accelerate_configs/ddp.yaml -m one_world --output-dir FOLDER

Writes the answers of a rank to FOLDER/RANK.json, and the launch as it was resolved to FOLDER/launch.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.launch import collectives as c
from accel_sft.launch.accelerator import create_accelerator
from accel_sft.launch.audit import audit, refuse
from accel_sft.launch.describe import describe, launch_record
from accel_sft.launch.environment import prepare_environment
from accel_sft.launch.info import launch_of_this_process
from accel_sft.resilience.exit import leave_together


def refused(call, *arguments):
    try:
        return call(*arguments)
    except UserError as error:
        return error.problems


def fails(line):
    raise UserError(line, "and more")


def answers(accelerator):
    rank, team = accelerator.process_index, c.Team(accelerator)
    return {
        "decided_by_main": c.decided_by_main(accelerator, lambda: rank),
        "decided_by_main refuses": refused(c.decided_by_main, accelerator, lambda: fails(f"rank {rank}")),
        "by_each_rank": c.by_each_rank(lambda: rank),
        "by_each_rank refuses": refused(c.by_each_rank, lambda: fails(f"rank {rank}") if rank else rank),
        "first_reason": c.first_reason(f"rank {rank}" if rank else None),
        "no reason": c.first_reason(None),
        "any_rank": [c.any_rank(rank == 1), c.any_rank(False)],
        "largest_of_ranks": c.largest_of_ranks(rank + 0.5),
        "largest": c.largest({"a": rank, "b": rank if rank else None, "c": None}, "most_"),
        "gather_numbers": c.gather_numbers([rank, 2**53 - rank]),
        "firsts": team.firsts(lambda: rank),
        "local": list(team.local_ranks),
    }


if __name__ == "__main__":
    prepare_environment()
    folder, config, launch = Path(sys.argv[-1]), TrainConfig(), launch_of_this_process()
    folder.mkdir(exist_ok=True)
    refuse(audit(config, launch))
    accelerator, launch = create_accelerator(config, launch)
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(answers(accelerator)))
    if accelerator.is_main_process:
        cudnn = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED"), torch.backends.cuda.cudnn_sdp_enabled()
        found = {"record": launch_record(accelerator, launch), "line": describe(accelerator, launch)}
        (folder / "launch.json").write_text(json.dumps(found | {"cudnn": cudnn}))
    leave_together()
