"""What holds under every ZeRO stage and offload, shown by two real ranks that go through all of them (layouts.py)."""

from __future__ import annotations

import json

import fsdp2_on_cpu
import pytest
from conftest import AS_COUNTED, accel_sft
from places import SUPPORT

pytestmark = pytest.mark.timeout(900)
LAYOUTS = ["ddp", "z0", "z1", "z2", "z2_offload", "z3", "z3_offload", "z3_twin_flow"]
LAYOUTS += ["fsdp2", "fsdp2_offload"] if fsdp2_on_cpu.RUNS_HERE else []


def found(folder, *layouts, **options):
    """What two ranks, or the launcher's number, found out under these layouts, one after the other in one process."""
    here = {"PYTHONPATH": str(SUPPORT)}
    done = accel_sft(str(folder), *layouts, yaml="ddp", module="layouts", environment=here, **options)
    assert done.status == 0, done.output[-6000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory):
    return found(tmp_path_factory.mktemp("layouts"), *LAYOUTS)


def test_twin_flow_has_states_in_both_of_its_optimizers(everywhere):
    assert everywhere["z3_twin_flow no"]["optimizers"] == ["AdamW", "DeepSpeedCPUAdam"]
    assert everywhere["z3_offload no"]["optimizers"] == ["DeepSpeedCPUAdam"]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_run_ends_with_the_same_bits(everywhere, name, precision):
    run = everywhere[f"{name} {precision}"]
    assert run["resumed"] == run["whole"]
    assert len(set(run["losses"])) == len(run["losses"])


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory):
    layouts = [name for name in ("ddp", "z2", "z3", "fsdp2") if name in LAYOUTS]
    folder = tmp_path_factory.mktemp("three")
    return found(folder, "resumed", *layouts, launcher=("--num_processes", "3"))


@pytest.mark.parametrize("name", [name for name in ("ddp", "z2", "z3", "fsdp2") if name in LAYOUTS])
def test_resumed_run_on_three_ranks_has_the_same_bits(three_ranks, name):
    """Unlike by two, a division by three and a product with a third differ in the last bit."""
    assert three_ranks[name]["resumed"] == three_ranks[name]["whole"]


def test_resumed_run_in_half_precision_ends_with_the_same_bits(everywhere):
    run = everywhere["ddp bfloat16"]
    assert run["resumed"] == run["whole"]


@pytest.mark.parametrize("at", range(len(LAYOUTS)))
def test_what_one_layout_wrote_another_goes_on_from(everywhere, at):
    run = everywhere[f"{LAYOUTS[at - 1]} to {LAYOUTS[at]}"]
    assert run["got"] == pytest.approx(run["expected"], rel=1e-6)
    assert run["averaged"] == pytest.approx(everywhere[LAYOUTS[at]]["averaged"], rel=1e-5, abs=1e-5)


def test_averages_are_those_of_the_weights_after_each_step(everywhere):
    found = everywhere["averages"]
    assert found["got"] == pytest.approx(found["expected"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "ddp"])
def test_averages_are_the_same(everywhere, name):
    assert everywhere[name]["averaged"] == pytest.approx(everywhere["ddp"]["averaged"], rel=1e-5, abs=1e-5)


def test_rank_that_cannot_write_ends_all_with_its_line(everywhere):
    (failed, told, said, there), *others = everywhere["refused"]
    assert (failed, told, there) == (False, True, False)
    assert said.endswith(": the disk is full; free space, then go on with --resume auto")
    assert others == [[True, True, said, False]]


@pytest.mark.parametrize("name", ["z2", "z3"])
def test_bf16_sums_the_gradients_of_a_steps_forwards_in_float32(everywhere, name):
    once, many = everywhere[f"{name} norms"]
    assert many == pytest.approx(once, rel=1e-6)


def test_ddp_keeps_no_gradients_beside_its_buckets(everywhere):
    assert everywhere["beside the buckets"] == 0


@pytest.mark.skipif("fsdp2" not in LAYOUTS, reason="this torch's FSDP2 does not run on CPUs")
@pytest.mark.parametrize("what", ["gradients", "sharded", "losses", "averages", "restored"])
def test_fsdp_holds_shards_and_rounds_no_losses(everywhere, what):
    assert everywhere["only under fsdp2"][what]


@pytest.mark.nvme
def test_what_is_on_a_disk_meanwhile_comes_back_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the disk's folder is made, to be removed as the interpreter ends
    there = found(tmp_path, "z3_nvme", "z2", real=True)
    for precision in ("no", "bf16"):
        assert there[f"z3_nvme {precision}"]["resumed"] == there[f"z3_nvme {precision}"]["whole"]
    for way in ("z3_nvme to z2", "z2 to z3_nvme"):
        assert there[way]["got"] == pytest.approx(there[way]["expected"], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "ddp"])
def test_the_curve_is_the_same(everywhere, name):
    assert everywhere[name]["losses"] == pytest.approx(everywhere["ddp"]["losses"], rel=1e-5)


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_nonfinite_step_on_one_rank_changes_no_rank(everywhere, name, precision, how):
    assert everywhere[f"{name} {precision}"][how] == {"told": True, "kept": True, "goes on": True}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "z3" not in name and "fsdp2" not in name])
def test_step_without_room_is_repeated_by_all_ranks(everywhere, name):
    run = everywhere[name]
    assert run["cramped"] == pytest.approx(run["losses"][-len(run["cramped"]) :], rel=1e-6)
    assert 0 < run["tokens"] <= 12  # half of three rows, or less


@AS_COUNTED
@pytest.mark.parametrize(
    "name", [n for n in LAYOUTS if "offload" not in n and "twin" not in n]
)  # not the host's memory
def test_reserved_memory_covers_the_first_two_steps(everywhere, name):
    memory = everywhere[f"{name} memory"]
    for what in memory.keys() - {"reserved"}:
        assert memory[what] <= memory["reserved"] + 4096, what  # counters, and what rows differ by
