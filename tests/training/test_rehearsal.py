"""What a GPU would feel of a step, rehearsed on fake CUDA tensors and a fake process group (support/rehearsal.py)."""

from __future__ import annotations

import os
import shutil
from itertools import product

import pytest
import torch
from packaging.version import Version

import plan_accuracy

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not shutil.which(os.environ.get("CXX", "g++")),
    reason="a rehearsal is for a torch without CUDA, and compiles its stand-in for a device",
)
KERNEL = {
    ("shared", "rows"): "varlen",
    ("packed", "rows"): "varlen",
    ("shared", "mask"): "efficient",
    ("padded", "mask"): "efficient",
    ("padded", "causal"): "flash",
}
"""The kernel of attention for each layout, on a GPU that has FlashAttention for bounds."""
DDP, FSDP2, HSDP = ({"launch": name, "ranks": ranks} for name, ranks in plan_accuracy.SHARDED)
SHARED, PACKED, PADDED = ({"layout": layout, "attention": way} for layout, way in plan_accuracy.LAYOUTS)
LORA, RECOMPUTED = {"adapter": "lora"}, {"gradient_checkpointing": True}
BLOCKS = 2
QUICK = [
    DDP | PADDED,
    DDP | PACKED | LORA | RECOMPUTED,
    HSDP | SHARED | RECOMPUTED,
]
"""Cases of the default run: each launch's exchanges, each layout, full and LoRA, activations kept and recomputed."""
EVERY = [
    launch | layout | adapter | activations
    for launch, layout, adapter, activations in product(
        (DDP, DDP | {"ranks": 16}, FSDP2, FSDP2 | {"ranks": 16}, HSDP),
        (SHARED, {"layout": "shared", "attention": "mask"}, PACKED, PADDED, {"layout": "padded", "attention": "mask"}),
        ({}, LORA),
        ({}, RECOMPUTED),
    )
]
NAMED = {
    ("between", "item", "accel_sft/training/step.py"): "the step's loss, which each rank tells the others",
    ("wait for ranks", "copy from the host", "accel_sft/launch/collectives.py"): "those numbers, on an idle GPU",
    ("wait for ranks", "tolist", "accel_sft/launch/collectives.py"): "those of all ranks: is the step to be kept?",
    ("optimizer step", "item", "accel_sft/training/optimizer.py"): "the gradient's norm: is it finite?",
}
"""Where the host waits for the device once a step, and for what."""
BY_MASK = {
    ("forward", "boolean index", "transformers/modeling_utils.py"): "transformers takes labelled positions as a mask",
    ("backward", "boolean index", "torch's autograd"): "the same mask",
    ("forward", "item", "transformers/masking_utils.py"): "transformers asks whether a row is several, or is padded",
}
"""Where it waits once in each forward of padded rows."""


@pytest.fixture(scope="module")
def quick():
    if Version(torch.__version__) < Version("2.13"):
        pytest.skip("fake_cuda.cpp is written for the headers of torch 2.13")
    return [*plan_accuracy.rehearsed(QUICK)]


def check(rehearsed):
    """A step's waits, exchanges, products and kernels of attention are those that its launch is designed for."""
    case = {"adapter": "none"} | rehearsed["case"]
    places = [(part, what, where.rpartition(":")[0] or where) for part, what, where in rehearsed["waits"]]
    once = [place for place in places if not (case["layout"] == "padded" and place in BY_MASK)]
    assert all(once.count(place) == 1 for place in NAMED), once
    assert all(places.count(place) <= 2 for place in BY_MASK), places  # in each of two forwards
    beyond = [place for place in once if place not in NAMED]
    assert len(beyond) <= 1, beyond
    assert {dtype for _, dtype, *_ in rehearsed["products"]} == {"bfloat16"}, rehearsed["products"]
    assert {name.split(",")[0] for name in rehearsed["attention"]} == {KERNEL[case["layout"], case["attention"]]}
    assert not any("float32" in name for name in rehearsed["attention"]), rehearsed["attention"]
    counted, reduced = {}, set()
    for part, kind, ranks, count, size in rehearsed["exchanges"]:
        if part not in ("wait for ranks", "optimizer step"):
            before = counted.get((kind, ranks), (0, 0))
            counted[kind, ranks] = before[0] + count, before[1] + size
            reduced |= {part} if kind != "all-gather" else set()
    assert "forward" not in reduced
    if case["launch"] == "ddp":
        # of the last backward alone: its bytes are those of all gradients, once
        assert counted == {("all-reduce", case["ranks"]): (1, 4 * rehearsed["trained"])}
        return
    groups = BLOCKS + (case["adapter"] == "none")  # the embedding, which is the head, is frozen under an adapter
    shards = 8 if case["launch"] == "hsdp" else case["ranks"]
    # in each of two forwards: else every rank would keep whole gradients
    assert counted.pop(("reduce-scatter", shards))[0] == 2 * groups
    assert counted.pop(("all-gather", shards))[0] >= 2 * 2 * BLOCKS
    if case["launch"] == "hsdp":
        # of the last backward alone: the gradients of this rank's shard, once
        assert counted.pop(("all-reduce", case["ranks"] // shards)) == (groups, 4 * rehearsed["trained"] // shards)
    assert not counted


@pytest.mark.parametrize("cases", ["quick", pytest.param("every", marks=pytest.mark.long)])
def test_step_has_the_designed_waits_exchanges_and_products(cases, quick):
    for rehearsed in quick if cases == "quick" else plan_accuracy.rehearsed(EVERY):
        check(rehearsed)


def test_export_copies_every_sharded_weight_to_the_host_once(quick):
    for rehearsed in quick:
        copies = [where for _, what, where in rehearsed["export"]["waits"] if what == "copy to the host"]
        gathered = sum(count for _, kind, _, count, _ in rehearsed["export"]["exchanges"] if kind == "all-gather")
        assert len(copies) == len(rehearsed["export"]["waits"]) == gathered


@pytest.mark.long
def test_plan_agrees_with_torchs_tracker():
    wanted = [plan_accuracy.cut(case, 6) for case in plan_accuracy.rehearsed_cases()]
    unnamed = [{key: value for key, value in case.items() if key != "name"} for case in wanted]
    errors = []
    for case, rehearsed in zip(wanted, plan_accuracy.rehearsed(unnamed), strict=True):
        predicted = plan_accuracy.predicted_simulation({**case, **rehearsed})["step"] * plan_accuracy.GIB
        errors.append(abs(predicted / max(rehearsed["peak"].values()) - 1))
    assert sum(errors) / len(errors) <= 0.05, errors
    assert max(errors) <= 0.12, errors
