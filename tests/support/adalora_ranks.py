"""Runs accel_sft, and has each rank write what AdaLoRA sees and chooses: `... -m adalora_ranks math ...`.

A line of `kept-rank-N.jsonl` in the run's folder has a step, a digest of the weights and importances that peft's
allocator had on this rank, and the ranks that it kept, by matrix. A rank fails if afterwards the optimizer's copy of a
weight, or the one that forwards compute with, is not what the allocator left.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import fsdp2_on_cpu
import torch

from accel_sft.models.adapters import AdaLora
from accel_sft.training.optimizer import Whole

after_step, put_back = AdaLora.after_step, Whole.put_back


def recorded(self, model, step, weights):
    changed = after_step(self, model, step, weights)
    allocator, digest = model.base_model.rankallocator, hashlib.sha256()
    for tensors in (weights, allocator.exp_avg_ipt, allocator.exp_avg_unc):
        for name in sorted(tensors):  # a resumed run has them in another order
            digest.update(tensors[name].detach().numpy().tobytes())
    kept = {
        name.replace(".default", ""): list(each) for name, each in (allocator.peft_config.rank_pattern or {}).items()
    }
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    for name in changed:
        rows = kept[name.removeprefix("base_model.model.").replace(".default", "")]
        assert not weights[name][~torch.tensor(rows)].any()
    folder = Path(sys.argv[sys.argv.index("--output-dir") + 1])
    with (folder / f"kept-rank-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "digest": digest.hexdigest(), "kept": kept}) + "\n")
    return changed


def checked(self, names):
    put_back(self, names)
    own = self._gathered(lambda partition: partition.tensor) if self.in_parts else {}
    for name in names:
        parameter = self.parameters[name]
        expected = self.copies.get(name, parameter)
        assert torch.equal(own.get(name, parameter), expected), name
        computes = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if hasattr(parameter, "ds_tensor"):  # gathering it here would end its being kept gathered
            begin, shard = parameter.ds_tensor.ds_numel * self.backend[0].process_index, parameter.ds_tensor
            part = expected.view(-1)[begin : begin + shard.numel()]
            assert torch.equal(shard[: len(part)], part.to(shard.dtype)), name
        if computes.numel() == expected.numel():
            assert torch.equal(computes, expected.to(computes.dtype)), name


if __name__ == "__main__":
    AdaLora.after_step, Whole.put_back = recorded, checked
    fsdp2_on_cpu.allow()

    from accel_sft.__main__ import main

    main()
