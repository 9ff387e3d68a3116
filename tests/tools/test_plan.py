"""`accel-sft plan`: what a model's shape and a launch predict, against real models, DeepSpeed's code and real runs."""

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_nvml import Nvml
from places import CONFIGS
from planned import LLAMA_8B, QWEN_05B, QWEN_7B, QWEN_14B, count, job_of
from reference_job import JOB, layout
from transformers import AutoConfig, AutoModelForCausalLM

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.checkpoint.partition import MOMENTS
from accel_sft.evaluation import generate
from accel_sft.launch.precision import assume_precision
from accel_sft.memory import estimate as closed_form
from accel_sft.memory.estimate import COMPONENTS, PHASES, WITH_COPY, totals
from accel_sft.memory.flops import Peaks, peaks
from accel_sft.memory.model_config import read_shape
from accel_sft.memory.states import least_bytes, placed
from accel_sft.models.adapters import new_adapter
from accel_sft.models.tiny import TINY_SHAPE, TINY_VOCABULARY, build_tiny
from accel_sft.tools.plan import plans
from accel_sft.tools.plan.command import _EVAL_ROWS
from accel_sft.tools.plan.plans import GIB, PlannedMachine, machine
from accel_sft.tools.plan.speed import Speed, speed
from accel_sft.training import predicted

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 512, "head_dim": 24}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 80, "mlp_only_layers": [1]}
MORE = {"mixtral": EXPERTS, "qwen2_moe": {**EXPERTS, **SHARED, "moe_intermediate_size": 48}}


def config_of(family, **more):
    return AutoConfig.for_model(family, **{**SMALL, **MORE.get(family, {}), **more})


def test_published_vision_model_is_counted_exactly():
    gemma = {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240}}
    gemma["text_config"] |= {"num_hidden_layers": 34, "model_type": "gemma3_text"}
    gemma["vision_config"] = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    gemma["vision_config"] |= {"num_attention_heads": 16, "patch_size": 14, "image_size": 896, "vision_use_head": False}
    assert (count(gemma).parameters, count(gemma).other) == (4_300_079_472, 419_816_304)  # Gemma 3 4B


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", *MORE])
def test_every_family_is_counted_as_it_is_built(family):
    for tied in (True, False):
        config = config_of(family, tie_word_embeddings=tied)
        shape = count(config.to_diff_dict())
        assert shape.parameters == AutoModelForCausalLM.from_config(config).num_parameters()
        assert all(m.name in {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"} for m in matrices(shape, "attention"))
        assert bool(matrices(shape, "experts")) == (family in MORE)


def matrices(shape, group):
    return [matrix for block in shape.blocks for matrix in block.matrices if matrix.group == group]


@pytest.mark.parametrize("family", ["phi3", "gemma3_text", "qwen2_moe"])
@pytest.mark.parametrize("adapter", ["lora", "adalora"])
def test_an_adapter_is_counted_as_peft_makes_it(family, adapter):
    config = config_of(family)
    model = new_adapter(AutoModelForCausalLM.from_config(config), TrainConfig(adapter=adapter), 100, lambda line: None)
    real = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count(config.to_diff_dict()).trained(adapter) == real


def test_named_modules_count_alone_and_unknown_ones_are_refused():
    shape = count(QWEN_14B)
    assert shape.trained("lora", 8, "q_proj, v_proj") == 48 * 8 * (5120 + 5120 + 5120 + 1024)
    with pytest.raises(UserError, match="--lora-target-modules query: no such module; choose from q_proj"):
        shape.trained("lora", 8, "query,v_proj")
    with pytest.raises(UserError, match="--model odd: model_type no_such: its parameters cannot be counted"):
        read_shape({"model_type": "no_such"}, "odd")


@pytest.mark.parametrize(("name", "value"), [("num_hidden_layers", 10**5), ("vocab_size", "many")])
def test_impossible_sizes_are_refused_in_one_line(called, tmp_path, name, value):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_05B, name: value}))
    done = called("plan", "math", "--model", str(tmp_path), "--gpus", "0")
    assert done.status == 1
    assert f"config.json: {name} {value}: expected a whole number from 1 to" in done.output
    assert "Traceback" not in done.output


def test_states_of_the_stages():
    """Bytes a parameter on two ranks: between steps, weights, float32 copies and moments."""
    parameters = count(QWEN_05B).parameters

    def bytes_each(name):
        return tuple(round(size / parameters, 2) for size in least_bytes(job_of(QWEN_05B, name)))

    bytes_of = {path.stem: bytes_each(path.stem) for path in CONFIGS.glob("*.yaml")}
    assert bytes_of == {
        "ddp": (16, 0),  # float32 weights, DDP's buckets, moments
        "fsdp2": (6, 0),
        "fsdp2_offload": (0, 6),
        "hsdp": (12, 0),  # a copy on each
        "z0": (14, 0),
        "z1": (8, 0),
        "z2": (8, 0),
        "z3": (9, 0),  # and gradients in float32
        "multinode_z3": (9, 0),
        "z3_sp": (9, 0),
        "tp": (6, 0),  # as fsdp2: float32 weights and moments, of which each rank has half
        "z2_offload": (2, 9),
        "z3_offload": (0, 9),
        "z3_twin_flow": (5.86, 4.36),  # 3 of 6 sub-groups stay on the device
        "z3_nvme": (0, 2),
    }


def test_tensor_parallelism_divides_states_and_inner_widths():
    cut, whole = (plans.estimate(job_of(QWEN_14B, name)).device["step"] for name in ("tp", "ddp"))
    assert cut["weights"] == whole["weights"] / 2
    assert cut["optimizer"] == whole["optimizer"] / 2
    assert 0.5 * whole["activations"] < cut["activations"] < 0.9 * whole["activations"]
    shape = count(QWEN_14B)
    assert shape.cut(1) == shape
    assert shape.cut(2).parameters - shape.ends == pytest.approx((shape.parameters - shape.ends) / 2, rel=1e-3)
    machine = PlannedMachine(gpus=4, gpu_bytes=24 * GIB, host_bytes=64 * GIB)
    assert plans.launch_of(CONFIGS / "tp.yaml", machine).tensor_ranks == 4


def test_adapters_base_is_frozen_and_small_in_every_state():
    full, lora = (job_of(QWEN_14B, "z0", adapter=adapter) for adapter in ("none", "lora"))
    assert least_bytes(lora)[0] == pytest.approx(2 * lora.shape.parameters, rel=0.03)
    assert least_bytes(full)[0] == 14 * full.shape.parameters


def test_constants_that_stand_behind_torch_are_the_trainer_s():
    assert 4 * (1 + len(MOMENTS)) == closed_form.CHECKPOINT_BYTES
    assert _EVAL_ROWS == generate.FEWEST_ROWS


def test_checkpointing_offload_and_sharding_save_memory_and_cost_time():
    plain, again = (job_of(QWEN_14B, "z3_offload", gradient_checkpointing=on) for on in (False, True))
    assert totals(closed_form.estimate(again).device)["step"] < totals(closed_form.estimate(plain).device)["step"] / 2
    assert speed(again, 65536).seconds > speed(plain, 65536).seconds
    seconds = {name: speed(job_of(QWEN_14B, name), 65536).seconds for name in ("z2", "z2_offload", "z3", "z3_nvme")}
    assert seconds["z2"] < min(seconds["z2_offload"], seconds["z3"])
    assert seconds["z2_offload"] < seconds["z3_nvme"]
    on_cpu = [speed(job_of(QWEN_05B, name, device="cpu", tokens=1024), 1024).seconds for name in ("z2", "z2_offload")]
    assert on_cpu[0] == on_cpu[1]  # 0.92 of the speed was measured


def plan_of(name, machine, **more):
    return plans.plan(name, CONFIGS / f"{name}.yaml", job_of(QWEN_14B, name, machine.gpus, **more), machine, 32768)


def test_the_largest_forward_is_the_last_that_fits():
    machine = PlannedMachine(2, 16 * GIB, 500 * GIB)
    planned = plan_of("z3_offload", machine, eval_rows=0, gradient_checkpointing=True)
    assert planned.fits
    for tokens, fits in ((planned.largest_tokens, True), (planned.largest_tokens + 1, False)):
        assert closed_form.estimate(plans.with_tokens(planned.job, tokens)).fits(16 * GIB, 500 * GIB) is fits
    lora = plan_of("z3_offload", PlannedMachine(2, 24 * GIB, 180 * GIB), adapter="lora", gradient_checkpointing=True)
    assert lora.fits  # with fewer answers at once
    assert lora.more["eval_batch_size"] == lora.job.eval_rows < 64


LORA_7B = ("--adapter", "lora", "--gpus", "2", "--gpu-memory", "24", "--host-memory", "180")


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ((), "--gradient-checkpointing --eval-batch-size 32"),
        (("--gradient-checkpointing", "--eval-limit", "20"), ""),
        (("--gradient-checkpointing", "--metric", "loss"), ""),  # nothing is generated
    ],
)
def test_commonest_job_gets_fastest_launch_with_options_it_needs(called, models, given, flags):
    done = called("plan", "chat", "--model", str(models / "7b"), *LORA_7B, *given)
    assert done.status == 0, done.output
    *_, command = done.output.strip().splitlines()
    assert f"Recommended: ddp{f' with {flags}' if flags else ''}, the simplest" in " ".join(done.output.split())
    assert all(flag in command for flag in (*flags.split(), "--train-file TRAIN_FILE"))
    assert ("--eval-batch-size" in command) == bool(flags)


def test_full_7b_on_small_gpus_shows_host_disk_and_adapter(called, models):
    machine = ("--gpus", "2", "--gpu-memory", "24", "--host-memory", "128")
    done = called("plan", "chat", "--model", str(models / "7b"), *machine)
    table, _, printed = done.output.partition("\nmemory ")
    rows = [line.split() for line in table.splitlines() if re.match(r"\w+ +[0-9.]+!? +\w+ +[0-9.]+", line)]
    assert len(rows) >= 12
    assert all(float(row[3].rstrip("!")) <= 128 for row in rows if not row[3].endswith("!"))
    assert "dp_replicate 2 over 2 ranks (fsdp) is not supported" in " ".join(table.split())
    printed = " ".join(printed.split())
    assert "Recommended: z3_nvme" in printed
    assert "; --adapter lora needs far less memory, and with --load-in-4bit even less." in printed
    assert "a checkpoint 85.1 GiB, 3 at once (--keep-checkpoints 2); 127.7 GiB on the NVMe drive" in printed


# Tokens per second and GPU of published runs. torchtitan's is Llama 3.1 8B on 8 H100 under FSDP2, 2 rows of 8,192
# tokens, on a device between the SXM's and the NVL's peak, with every second matrix product recomputed
# (benchmarks/llama3_h100_202412_torchtitan.md in github.com/pytorch/torchtitan). AutoModel's is LoRA on one H100, 16
# forwards of 2 rows of 4,096 tokens (docs/performance-summary.md in github.com/NVIDIA-NeMo/Automodel).
PUBLISHED = {
    "full": (5762, LLAMA_8B, "fsdp2", 8, 16_384, 8192, {}),
    "full, compiled": (6667, LLAMA_8B, "fsdp2", 8, 16_384, 8192, {"compile": True}),
    "LoRA": (12_473, LLAMA_8B, "ddp", 1, 131_072, 4096, {"adapter": "lora"}),
    "LoRA, Qwen2.5 7B": (14_110, QWEN_7B, "ddp", 1, 131_072, 4096, {"adapter": "lora"}),
}


def test_model_of_speed_meets_ratios_of_published_runs(monkeypatch):
    between = Peaks(912, 912, 456, 63, link=350, host_link=40)
    monkeypatch.setattr("accel_sft.tools.plan.speed.peaks", lambda name: between if name == "500 W" else peaks(name))
    measured, predicted = {}, {}
    for name, (tokens_per_second, config, file, ranks, step, row, more) in PUBLISHED.items():
        forward = min(step, 2 * row)
        job = job_of(config, file, ranks, tokens=forward, supervised_tokens=forward, **more)
        job = dataclasses.replace(job, launch=assume_precision(job.launch, True))
        gpu, recomputed = ("NVIDIA H100 80GB HBM3", [False]) if ranks == 1 else ("500 W", [False, True])
        tried = [dataclasses.replace(job, gradient_checkpointing=checkpointing) for checkpointing in recomputed]
        seconds = sum(speed(one, step, gpu, row).seconds for one in tried) / len(tried)
        measured[name], predicted[name] = tokens_per_second, step / seconds
    ratios = {name: predicted[name] / measured[name] for name in predicted}
    assert ratios == pytest.approx(dict.fromkeys(predicted, 1), abs=0.25)
    for name, other in itertools.combinations(predicted, 2):
        expected = pytest.approx(measured[name] / measured[other], rel=0.25)
        assert predicted[name] / predicted[other] == expected, (name, other)


TINY = {"model_type": "qwen2", "vocab_size": TINY_VOCABULARY, **TINY_SHAPE}


def test_short_steps_are_fastest_where_little_is_exchanged():
    for device in ("cpu", "cuda"):
        seconds = {
            name: speed(job_of(TINY, name, device=device, tokens=tokens), tokens).seconds
            for name, tokens in (("ddp", 480), ("z2", 480), ("z3", 480), ("tp", 960))
        }
        assert max(seconds["ddp"], seconds["z2"]) < min(seconds["z3"], seconds["tp"])
    machine = PlannedMachine(2, 24 * GIB, 64 * GIB)
    planned = plans.plan("ddp", CONFIGS / "ddp.yaml", job_of(TINY, "ddp", tokens=100), machine, 480.5)
    assert planned.speed.forwards == 1  # a fraction of a token is no forward of its own


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, content in {"14b": QWEN_14B, "7b": QWEN_7B, "05b": QWEN_05B}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(content))
    return folder


MACHINE = ("--gpus", "2", "--gpu-memory", "32", "--host-memory", "180")


@pytest.fixture
def plan(models, called):
    """`plan(...)`: what `accel-sft plan math` prints of a model on two GPUs."""
    return lambda *words, model="14b": called("plan", "math", "--model", str(models / model), *MACHINE, *words)


def test_the_table_names_every_launch_file_and_recommends_one(plan):
    of_training = ("--max-new-tokens", "30", "--output-dir", "runs/x", "--resume", "auto", "--patience", "2")
    done = plan("--adapter", "lora", "--gradient-checkpointing", "--max-length", "128", *of_training)
    assert done.status == 0
    head, _, command = done.output.rpartition("accelerate launch --config_file ")
    assert all(f"\n{path.stem} " in head for path in CONFIGS.glob("*.yaml"))
    assert max(map(len, head.splitlines())) <= 80
    assert "longest example has 128 tokens: --max-length" in head
    assert "Recommended: ddp with --eval-batch-size 8, the simplest" in head
    assert "-m accel_sft math --model" in command
    assert all(word in command for word in ("--adapter lora", *of_training))


def fitting(name, seconds, *, tight=False, machines=1):
    return plans.Plan(
        name=name,
        file=CONFIGS / f"{name}.yaml",
        job=SimpleNamespace(launch=SimpleNamespace(machines=machines, offload=lambda what: "none"), adapter="lora"),
        estimate=SimpleNamespace(),
        speed=Speed(seconds=seconds, sent_bytes=0.0, host_bytes=0.0, forwards=1),
        tight=tight,
    )


def test_one_machines_roomy_plan_is_recommended_and_others_explained():
    offload, barely = fitting("z3_offload", 2.0), fitting("z2", 1.0, tight=True)
    best, why = plans.recommended([fitting("multinode_z3", 1.0, machines=2), offload, barely])
    assert best is offload
    assert why == "the simplest of the fastest that fit"
    best, why = plans.recommended([fitting("multinode_z3", 1.0, machines=2, tight=True)])
    assert "; it needs 2 such machines; it leaves less than 8% of a memory free" in why


def test_json_and_details_have_every_phase(plan):
    done = plan("--json", "--launch", "z2", "--launch", str(CONFIGS / "z3.yaml"))
    report = json.loads(done.output)
    assert [one["launch"] for one in report["plans"]] == ["z2", "z3"]
    assert set(report["plans"][0]["estimate"]["device"]) == set(PHASES)
    assert report["plans"][0]["over"] == ["device"]
    assert report["model"]["parameters"] == 14_770_033_664
    done = plan("--launch", "z3_offload")
    assert "z3_offload: GiB of one GPU" in done.output
    assert all(component[:11] in done.output for component in COMPONENTS)


LITTLE_HOST = ("--model", "tiny", "--gpus", "8", "--gpu-memory", "80", "--host-memory", "1")


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (("--launch", "z9"), ["--launch z9: no such file, and no launch file of this name is shipped"]),
        (("--ema-decay", "0.999", "--launch", "z3_nvme"), ["z3_offload.yaml"]),
        (LITTLE_HOST, ["No launch file fits. Try --adapter lora, --micro-batch-size auto, a lower --max-length"]),
        (("--launch", "z3_sp"), ["sequence parallelism is not predicted", "No launch file is recommended: each has a"]),
    ],
)
def test_plan_that_cannot_be_names_reason_and_way_out(plan, arguments, lines):
    done = plan(*arguments)
    output = " ".join(done.output.split())
    assert done.status != 0
    assert [line for line in (*lines, "Traceback") if line not in output] == ["Traceback"]


def test_gpus_of_unknown_memory_are_asked_for(monkeypatch):
    monkeypatch.setattr("accel_sft.tools.plan.plans.nvidia_gpus", lambda: (None, []))
    with pytest.raises(UserError, match="--gpu-memory: give the GiB of one GPU"):
        machine(2, None, 64)
    for bf16 in (True, False):
        monkeypatch.setattr("accel_sft.tools.plan.plans.this_machine_computes_bf16", lambda bf16=bf16, **_: bf16)
        assert machine(None, None, 64) == PlannedMachine(0, None, 64 * GIB, bf16=bf16)
        assert machine(0, None, 64) == PlannedMachine(0, None, 64 * GIB, bf16=bf16)
        assert machine(None, 24, 64) == machine(1, 24, 64) == PlannedMachine(1, 24 * GIB, 64 * GIB)
    gpus = [{"name": "NVIDIA H100 80GB HBM3", "memory_gib": 80.0}, {"name": "NVIDIA L40S", "memory_gib": 40.0}]
    monkeypatch.setattr("accel_sft.tools.plan.plans.nvidia_gpus", lambda: ("1", gpus))
    assert machine(None, None, 64) == PlannedMachine(2, 40 * GIB, 64 * GIB, bf16=False)
    monkeypatch.setattr("accel_sft.tools.plan.plans.nvidia_gpus", lambda: ("1", gpus[:1]))
    assert machine(None, None, 64).gpu == "NVIDIA H100 80GB HBM3"
    assert machine(8, 80, 64).gpu == ""  # those of another machine


def test_gpu_sharing_host_memory_is_planned_by_given_size(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(Name="NVIDIA GB10", MemoryInfo=None))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match="because the driver does not report it for NVIDIA GB10"):
        machine(None, None, 64)
    assert machine(None, 100, 64).gpu_bytes == 100 * GIB


def test_without_a_gpu_ranks_are_planned_in_host_memory(called, models):
    done = called("plan", "math", "--model", str(models / "05b"), "--gpus", "0", "--host-memory", "64", "--json")
    by_launch = {plan["launch"]: plan for plan in json.loads(done.output)["plans"]}
    assert by_launch["fsdp2"]["problem"] == "FSDP needs GPUs"
    assert by_launch["z2"]["estimate"]["device"] == {}
    assert by_launch["z2"]["ranks"] == 2
    assert by_launch["z2"]["host_peak_bytes"] == 2 * max(totals(by_launch["z2"]["estimate"]["host"]).values())


def test_a_run_records_predicted_beside_measured_and_leaves_its_lengths(launched, called):
    run = layout(launched, "plain")
    result = run.result()
    assert set(result["memory"]["host"]) == set(PHASES) == set(result["memory_by_phase"])
    for phase, pair in result["memory"]["host"].items():
        assert pair["measured_gib"] == result["memory_by_phase"][phase]["peak_host_memory_gib"]
        assert 0.5 < pair["predicted_gib"] / pair["measured_gib"] < 2  # this process was forked, and shares much
    assert "## Memory by phase, predicted and measured" in (run.run_dir / "report.md").read_text()
    planned = called("plan", *JOB, "--gpus", "0")
    built = json.loads((run.run_dir / "base/config.json").read_text())["vocab_size"]
    assert built < TINY_VOCABULARY  # the most that plan can assume before a run here
    base = AutoModelForCausalLM.from_pretrained(run.run_dir / "base")
    assert f"qwen2, {base.num_parameters():,} parameters" in planned.output
    assert "of the data as it was tokenized here" in planned.output.replace("\n         ", " ")


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_launch_whose_processes_cannot_hold_the_weights_is_refused(monkeypatch, name):
    """Every process loads float32 weights whole, before they go to its GPU, or are sharded."""
    job = job_of(QWEN_14B, name, 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    monkeypatch.setattr(predicted.host_memory, "free_bytes", lambda: 256 * GIB)
    needed = 8 * 4 * job.shape.parameters / GIB
    line = f"8 processes in host memory: the model states alone take {needed:.1f} GiB"
    with pytest.raises(UserError, match=line):
        predicted._misfits(job, force=False)
    assert line in predicted._misfits(job, force=True)[0]
    assert not predicted._misfits(job_of(QWEN_14B, "z3", 8), force=False)


def test_launch_that_cannot_fit_is_refused_before_loading(called, tmp_path):
    build_tiny(tmp_path / "model", ["1 + 1", "2 + 2"] * 20, 0)
    config = json.loads((tmp_path / "model/config.json").read_text())
    job = ("math", "--model", str(tmp_path / "model"), "--max-steps", "1", "--train-examples", "50")
    large = {**config, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 400, "layer_types": None}
    (tmp_path / "model/config.json").write_text(json.dumps(large))
    done = called(*job, run_dir=tmp_path / "refused")
    assert done.status == 1
    assert "the model states alone take" in done.output
    assert "or add --force" in done.output
    result = tmp_path / "refused/result.json"
    assert not result.exists() or "model states" in json.loads(result.read_text())["error"]


@pytest.mark.parametrize(("name", "ranks"), [("z2", 2), ("ddp", 1)])
def test_copies_of_checkpoints_are_counted_and_do_not_decide_fit(name, ranks):
    saving, never = (closed_form.estimate(job_of(QWEN_05B, name, saves=saves)) for saves in (True, False))
    with_copy, without = (totals(estimate.host) for estimate in (saving, never))
    more = {phase: with_copy[phase] - without[phase] for phase in without}
    parameters, largest = 494_032_768, 151_936 * 896
    copy = 12 * (parameters / 2 if ranks == 2 else largest + (parameters - largest) / 2)
    copy *= job_of(QWEN_05B, name).rounding(4)
    assert more == {phase: pytest.approx(copy if phase in WITH_COPY else 0) for phase in without}
    assert saving.device_peak_bytes == never.device_peak_bytes
    larger = closed_form.estimate(job_of(QWEN_7B, name))
    assert larger.fits(None, 0.6 * larger.host_peak_bytes)  # which loading the weights takes under ddp and fsdp2


def test_blocks_of_pinned_memory_are_counted_as_powers_of_two():
    """Those of torch's host allocator, for each of two ranks of z2_offload, whose moments are not pinned."""
    part = 7_615_616_512 / 2
    matrices = [(28 * 2, 3584 * 3584), (28 * 2, 3584 * 512), (28 * 3, 3584 * 18944), (2, 152_064 * 3584)]
    powers = [(28 * 2, 2**24), (28 * 2, 2**21), (28 * 3, 2**27), (2, 2**30)]
    factor = sum(n * size for n, size in powers) / sum(n * size for n, size in matrices)
    largest = 2 * 152_064 * 3584
    requested = 2 * part + largest + 12 * part + 2 * part  # as computed with, the largest, and copies for the disk
    more = 2 * (2**34 - 4 * part) + 2**33 - 2 * part + 2**31 - largest + 2 * part * (factor - 1)
    planned = closed_form.estimate(job_of(QWEN_7B, "z2_offload")).host["step"]["buffers"]
    assert planned == pytest.approx(requested + more, rel=1e-6)
    assert placed(job_of(QWEN_7B, "z2_offload", device="cpu"))[1].buffers == 2 * part + largest  # on a CPU none is


def test_train_only_is_counted_as_if_all_were_trained(plan):
    done = plan("--train-only", r"layers\.(0|1)\.", "--launch", "z2")
    assert "counted as if all were trained (--train-only)" in " ".join(done.output.split())
    some, whole = (job_of(QWEN_14B, "z2", train_only=pattern) for pattern in ("norm", None))
    assert closed_form.estimate(some) == closed_form.estimate(whole)
    assert least_bytes(some)[0] == placed(some)[0].weights < least_bytes(whole)[0]  # no run is refused that may fit


@pytest.mark.parametrize(
    ("name", "place", "share"),
    [
        *(("ddp", "device", 1), ("z0", "device", 1), ("z2", "device", 2), ("z2_offload", "host", 2)),
        *(("z3", "device", 2), ("fsdp2", "device", 2), ("fsdp2_offload", "host", 2)),
    ],
)
def test_averages_are_counted_where_the_optimizer_steps(name, place, share):
    before, after = (closed_form.estimate(job_of(QWEN_05B, name, ema_decay=decay)) for decay in (None, 0.999))
    for where in ("device", "host"):
        for phase, parts in getattr(after, where).items():
            held = 4 * 494_032_768 / share if where == place and phase != "load" else 0
            assert parts["optimizer"] - getattr(before, where)[phase]["optimizer"] == pytest.approx(held)


def with_key(job, key, value):
    """The job under a DeepSpeed JSON of its own, which has a value at a key of `zero_optimization`."""
    zero = json.loads(json.dumps(job.launch.zero))
    section, _, last = key.rpartition(".")
    (zero[section] if section else zero)[last] = value
    return dataclasses.replace(job, launch=dataclasses.replace(job.launch, json={"zero_optimization": zero}))


def test_values_of_json_are_counted_or_the_launchs_problem():
    shipped = job_of(QWEN_05B, "z3")
    automatic = with_key(shipped, "reduce_bucket_size", "auto")  # by the hidden size
    assert [placed(job)[0].buffers for job in (automatic, shipped)] == [2 * 896**2, 2 * 5e8]
    for ratio in ("half", 2):
        job = with_key(job_of(QWEN_05B, "z3_twin_flow"), "offload_optimizer", {"device": "cpu", "ratio": ratio})
        planned = plans.plan("z3_twin_flow", Path("z3.yaml"), job, PlannedMachine(2, 80 * GIB, 200 * GIB), 2048)
        assert planned.problem == "its offload_optimizer ratio is not a number from 0 to 1"


def test_the_page_of_zero_keys_says_what_plan_counts():
    page = (CONFIGS.parent / "docs" / "zero-keys.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \| \S+ \| (\S+) \| (\S+) \| (\S+) \|$", page, re.M)
    assert len(rows) == 9
    for name, key, value, gpu, host in rows:
        shipped = job_of(QWEN_7B, name, 8, tokens=4096, supervised_tokens=4096)
        own = with_key(shipped, key, json.loads(value.strip("`")))
        before, after = closed_form.estimate(shipped), closed_form.estimate(own)
        assert float(gpu) == round((after.device_peak_bytes - before.device_peak_bytes) / GIB, 2), key
        assert float(host) == round((after.host_peak_bytes - before.host_peak_bytes) / GIB, 2), key
