"""The launch: what each yaml resolves to, what the audit refuses, and real ranks that are one world."""

import contextlib
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState
from places import CONFIGS, ROOT

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.io import terminal
from accel_sft.launch import audit as auditing
from accel_sft.launch import child, deepspeed_ops, describe, environment, host_memory, precision
from accel_sft.launch.accelerator import create_accelerator, verify_engine
from accel_sft.launch.audit import audit, refuse
from accel_sft.launch.environment import threads_per_process, usable_cores
from accel_sft.launch.info import launch_of_this_process, launch_of_yaml, read_launch

Z2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 2},
    "num_machines": 1,
    "num_processes": 2,
    "mixed_precision": "bf16",
}
DDP = {key: value for key, value in Z2.items() if key != "deepspeed_config"} | {"distributed_type": "MULTI_GPU"}
JSON = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}


def zero(**section):
    """A launch file of ZeRO with this section."""
    return Z2 | {"deepspeed_config": section}


Z2_OFFLOAD = zero(zero_stage=2, offload_optimizer_device="cpu")


def written(folder, content, name="launch.yaml"):
    path = folder / name
    as_text = json.dumps if name.endswith(".json") else yaml.safe_dump
    path.write_text(content if isinstance(content, str) else as_text(content))
    return path


def with_json(folder, content):
    """A launch file that names a DeepSpeed JSON of this content."""
    return zero(deepspeed_config_file=str(written(folder, content, "ds.json")))


def lines(findings, level):
    return [str(finding) for finding in findings if finding.level == level]


def audited(folder, content, *flags, devices=0, **settings):
    """The findings about a launch file of this content."""
    return audit(TrainConfig(**settings), launch_of_yaml(written(folder, content), *flags), devices)


@pytest.fixture
def built(monkeypatch):
    """A machine on which every operator can be compiled and bf16 is fast: what this one lacks is not the subject."""
    monkeypatch.setattr(auditing, "audit_compilers", lambda needed, devices: [])
    monkeypatch.setattr(precision, "cpu_flags", lambda: ["avx512_bf16"])


@pytest.mark.parametrize(
    ("name", "backend", "stage", "optimizer", "param"),
    [
        ("ddp", "ddp", 0, "none", "none"),
        ("fsdp2", "fsdp", 0, "none", "none"),
        ("fsdp2_offload", "fsdp", 0, "cpu", "cpu"),
        ("hsdp", "fsdp", 0, "none", "none"),
        ("z0", "deepspeed", 0, "none", "none"),
        ("z1", "deepspeed", 1, "none", "none"),
        ("z2", "deepspeed", 2, "none", "none"),
        ("z2_offload", "deepspeed", 2, "cpu", "none"),
        ("z3", "deepspeed", 3, "none", "none"),
        ("z3_offload", "deepspeed", 3, "cpu", "cpu"),
        ("z3_twin_flow", "deepspeed", 3, "cpu", "none"),
        ("z3_nvme", "deepspeed", 3, "nvme", "nvme"),
        ("multinode_z3", "deepspeed", 3, "none", "none"),
        ("z3_sp", "deepspeed", 3, "none", "none"),
        ("tp", "ddp", 0, "none", "none"),
    ],
)
def test_shipped_yaml_is_clean_and_what_its_name_says(name, backend, stage, optimizer, param, built):
    path, flags, machines = CONFIGS / f"{name}.yaml", [], 1
    assert load_config_from_file(str(path)).num_processes == (4 if name == "hsdp" else 2)
    if name.startswith("multinode"):
        flags, machines = ["--machine_rank", "1", "--main_process_ip", "127.0.0.1"], 2
    launch = launch_of_yaml(path, *flags)
    assert audit(TrainConfig(), launch, devices=launch.world_size if backend == "fsdp" else 0) == []
    assert (launch.backend, launch.stage, launch.machines) == (backend, stage, machines)
    assert launch.named_precision is None
    assert (launch.offload("optimizer"), launch.offload("param")) == (optimizer, param)
    assert launch.shard_ranks == 2
    assert launch.sequence_ranks == (2 if name == "z3_sp" else 1)
    assert launch.tensor_ranks == (2 if name == "tp" else 1)
    assert launch.shards_weights == (name == "tp" or stage == 3 or backend == "fsdp")
    of_tests = test_shipped_yaml_is_clean_and_what_its_name_says.pytestmark[0].args[1]
    assert {name for name, *_ in of_tests} == {path.stem for path in CONFIGS.glob("*.yaml")}


FSDP = DDP | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
PRINTS = """
import json, os, sys
if os.environ.get("RANK", "0") == "0":
    open(sys.argv[1], "w").write(json.dumps(dict(os.environ)))
"""


def test_launch_read_from_yaml_equals_a_real_ranks(tmp_path):
    path = written(tmp_path, zero(deepspeed_config_file=str(written(tmp_path, JSON, "ds.json"))))
    script, answer, flags = tmp_path / "rank.py", tmp_path / "answer.json", ["--mixed_precision", "no"]
    script.write_text(PRINTS)
    accelerate = Path(sysconfig.get_path("scripts"), "accelerate")
    command = [accelerate, "launch", "--config_file", path, "--main_process_port", "0", *flags, script, answer]
    subprocess.run(command, check=True, capture_output=True)
    launch, real = launch_of_yaml(path, *flags), json.loads(answer.read_text())
    read = r"ACCELERATE_(?!CONFIG_DS)|FSDP_|PARALLELISM_CONFIG_|(LOCAL_)?(WORLD_SIZE|RANK)$"
    of_both = [{name: of[name] for name in of if re.match(read, name)} for of in (launch.environment, real)]
    assert of_both[0] == of_both[1]
    assert (launch.world_size, launch.machines) == (2, 1)


def test_second_machine_numbers_its_ranks_after_the_first():
    path = CONFIGS / "multinode_z3.yaml"
    flags = ["--num_processes", "8", "--machine_rank", "1", "--main_process_ip", "127.0.0.1"]
    launch = launch_of_yaml(path, *flags)
    assert (launch.world_size, launch.local_world_size, launch.machines) == (8, 4, 2)
    assert launch.environment["RANK"] == "4"


REFUSED = {
    "an unknown key": (Z2 | {"num_proceses": 2}, "unknown keys (['num_proceses'])"),
    "no backend": ({"num_processes": 2}, "A `distributed_type` must be specified"),
    "fewer processes than machines": (Z2 | {"num_machines": 3}, "num_processes 2 on 3 machines: give at least one"),
    "a bare no": (Z2 | {"mixed_precision": False}, "in quotes: YAML reads a bare no as false"),
    "no JSON": (zero(deepspeed_config_file="none.json"), "none.json: cannot be read as JSON"),
    "JSON without an end": (zero(deepspeed_config_file="/dev/zero"), "/dev/zero: cannot be read as JSON"),
    "no keys": (["a", "b"], "write one `key: value` per line"),
    "half": ("a: [", "launch.yaml: cannot be read"),
    "deep": ("[" * 5000, "launch.yaml: cannot be read"),
    "none": (None, "launch.yaml: cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_launcher_would_refuse_is_refused_in_a_line(case, tmp_path):
    content, expected = REFUSED[case]
    if content is not None:
        written(tmp_path, content)
    with pytest.raises(UserError, match=re.escape(expected)) as raised:
        launch_of_yaml(tmp_path / "launch.yaml")
    assert len(raised.value.problems) == 1


def test_a_flag_that_the_launcher_refuses_is_named(tmp_path):
    with pytest.raises(UserError, match=r"refuse it: .*error: argument --zero_stage.*: invalid int") as raised:
        launch_of_yaml(written(tmp_path, Z2), "--zero_stage", "two")
    assert "usage" not in str(raised.value)


def test_nvme_path_is_read_where_the_launcher_forgets_it(tmp_path):
    section = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/fast"}
    path = written(tmp_path, zero(**section))
    assert launch_of_yaml(path).nvme_path("param") == Path("/fast")
    assert launch_of_yaml(path, "--offload_param_nvme_path", "/faster").nvme_path("param") == Path("/faster")
    assert launch_of_yaml(path).nvme_path("optimizer") == Path("nvme_offload")


def sized(content, processes=None, **sizes):
    """A launch file with these sizes of `parallelism_config`, and perhaps another number of processes."""
    named = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    return content | {"parallelism_config": named, "num_processes": processes or content["num_processes"]}


REFUSED_YAML = {
    "typo in the yaml": (zero(zero_stage=2, zero_sage=3), 0, "did you mean zero_stage"),
    "no such stage": (zero(zero_stage=4), 0, "DeepSpeed refuses zero_optimization.stage"),
    "typo for fsdp": (DDP | {"fsdp_config": {"fsdp_reshard_after_foward": True}}, 0, "reshard_after_forward"),
    "no gather": (zero(zero_stage=3), 0, "add zero3_save_16bit_model: true"),
    "offload too low": (zero(zero_stage=2, offload_param_device="cpu"), 0, "offload_param to cpu needs ZeRO stage 3"),
    "fp16 on a CPU": (Z2 | {"mixed_precision": "fp16"}, 0, "needs a GPU"),
    "more ranks than GPUs": (Z2, 1, "--num_processes 1"),
    "FSDP 1": (FSDP | {"fsdp_config": {}}, 2, "FSDP 1 is not supported: set fsdp_version: 2"),
    "FSDP on a CPU": (FSDP, 0, "z2.yaml or z3.yaml, which run on CPUs"),
    "groups of one": (sized(FSDP, 2, dp_replicate=2), 2, "dp_replicate 2 over 2 ranks (fsdp) is not supported"),
    "unequal groups": (sized(FSDP, 5, dp_replicate=2), 5, "is not supported"),
    "another size of a group": (sized(FSDP, 4, dp_replicate=2, dp_shard=4), 4, "is not supported"),
    "groups without FSDP": (sized(DDP, dp_replicate=2), 2, "is not supported"),
    "size without its prefix": (Z2 | {"parallelism_config": {"tp_size": 2}}, 0, "mean parallelism_config_tp_size?"),
    "TP beside data parallelism": (sized(DDP, 4, tp=2), 4, "tp 2 over 4 ranks (ddp) is not supported"),
    "TP in float16": (sized(DDP, tp=2) | {"mixed_precision": "fp16"}, 2, "ranks would see different overflows"),
    "context parallelism": (sized(FSDP, 4, cp=2), 4, "is not supported"),
    "shared rows without DeepSpeed": (sized(DDP, sp=2), 2, "is not supported"),
    "rows shared by unequal groups": (sized(Z2, 3, sp=2), 0, "sp 2 over 3 ranks (deepspeed) is not supported"),
    "rows shared and groups": (sized(Z2, sp=2, dp_replicate=2), 0, "is not supported"),
    "a size by flag": (Z2, 0, "_sp_size would be silently ignored", "--parallelism_config_sp_size 2", {}),
    "fewer ranks than asked for": (DDP | {"distributed_type": "NO"}, 0, "2 processes requested, but 1 started: set"),
    "packed rows that are shared": (sized(Z2, sp=2), 0, "--batching: under sequ", "", {"batching": "packed"}),
    "several rows shared": (sized(Z2, sp=2), 0, "--micro-batch-size: under sequ", "", {"micro_batch_size": "4"}),
}


def offloading(stage, **more):
    """A DeepSpeed JSON that offloads the optimizer at this stage."""
    return {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", **more}}}


ZENFLOW = offloading(2)["zero_optimization"] | {"zenflow": {"topk_ratio": 0.1}}
REFUSED_JSON = {
    "tensor parallelism": (JSON | {"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel is not supported"),
    "typo": (JSON | {"gradient_cliping": 1.0}, "did you mean gradient_clipping?"),
    "fp16 and bf16": (JSON | {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
    "optimizer": (JSON | {"optimizer": {"type": "AdamW"}}, "--learning-rate"),
    "ratio in words": (offloading(3, ratio="half"), "DeepSpeed refuses zero_optimization.offload_optimizer.ratio"),
    "zenflow": ({"zero_optimization": ZENFLOW}, "zenflow applies a part of"),
    "no ZeRO": ({"bf16": {"enabled": "auto"}}, "ds.json: zero_optimization.stage is missing: add"),
    "no gather": ({"zero_optimization": {"stage": 3}}, "stage3_gather_16bit_weights_on_model_save: true"),
    "autocast": (JSON | {"torch_autocast": {"enabled": True, "dtype": "float16"}}, "precision from the run's"),
    "data efficiency": (JSON | {"data_efficiency": {"enabled": True}}, "data_efficiency changes what a step learns"),
    "removed": (JSON | {"curriculum_learning": {"enabled": True}}, "curriculum_learning is unknown: remove it"),
    "data types in a word": (JSON | {"data_types": "fp32"}, "data_types: expected keys with values"),
    "another precision by flag": (JSON | {"bf16": {"enabled": True}}, '"auto"', "--mixed_precision no"),
    "an allreduce of shared rows": (
        {"zero_optimization": {"stage": 3, "reduce_scatter": False}},
        "reduce_scatter false, DeepSpeed would scale gradients by the size of parameters",
        "",
        {"sp": 2},
    ),
}


@pytest.mark.parametrize("case", REFUSED_YAML)
def test_launch_files_that_cannot_train_are_refused(case, tmp_path, built):
    content, devices, expected, flags, settings = (*REFUSED_YAML[case], "", {})[:5]
    with pytest.raises(UserError, match=re.escape(expected)):
        refuse(audited(tmp_path, content, *flags.split(), devices=devices, **settings))


@pytest.mark.parametrize("case", REFUSED_JSON)
def test_deepspeed_json_that_cannot_train_is_refused(case, tmp_path, built):
    content, expected, flags, sizes = (*REFUSED_JSON[case], "", {})[:4]
    launch = with_json(tmp_path, content)
    with pytest.raises(UserError, match=re.escape(expected)):
        refuse(audited(tmp_path, sized(launch, **sizes) if sizes else launch, *flags.split()))


def test_all_errors_are_raised_together(tmp_path, built):
    with pytest.raises(UserError) as raised:
        refuse(audited(tmp_path, zero(zero_stage=3, zero_sage=3) | {"mixed_precision": "fp16"}))
    assert len(raised.value.problems) == 3


Z2_ACCUMULATES = zero(zero_stage=2, gradient_accumulation_steps=4)
ZERO_PP = {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}
WARNS = {
    "accumulation": (Z2_ACCUMULATES, "", "gradient_accumulation_steps 4 is not used"),
    "compiler": (DDP | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "", "dynamo_backend INDUCTOR is not used"),
    "clipping by flag": (DDP, "--gradient_clipping 0.1", "gradient_clipping 0.1 is not used: remove it; --max-grad"),
    "clipping in a word": (JSON | {"gradient_clipping": "x"}, "ds.json: gradient_clipping x is not used: remove it"),
    "precision": (JSON | {"bf16": {"enabled": False}}, "fixes the precision to no"),
    "exchange": (JSON | {"communication_data_type": "fp16"}, "communication_data_type fp16 makes gradients less"),
    "ZeRO++": (ZERO_PP, "zero_quantized_gradients true makes gradients less exact"),
}
"""A launch file and flags, or a DeepSpeed JSON, and the warning."""


@pytest.mark.parametrize("case", WARNS)
def test_launcher_settings_without_effect_are_named(case, tmp_path, built):
    content, *flags, expected = WARNS[case]
    content = content if flags else with_json(tmp_path, content)
    findings = audited(tmp_path, content, *"".join(flags).split())
    assert lines(findings, "error") == []
    (line,) = lines(findings, "warning")
    assert expected in line


def test_what_is_usual_gives_no_finding(tmp_path, built):
    flags = "--gradient_accumulation_steps 1 --gradient_clipping 0.5 --dynamo_backend no"
    assert audited(tmp_path, DDP, *flags.split(), max_grad_norm=0.5) == []
    assert audited(tmp_path, zero(zero_stage=2, gradient_clipping=1.0)) == []
    assert audited(tmp_path, sized(Z2, sp=2), batching="padded", micro_batch_size="1") == []
    for section in ({"enabled": False}, {}):
        assert audited(tmp_path, with_json(tmp_path, JSON | {"data_efficiency": section})) == []


def test_srun_without_a_launcher_is_a_warning(built):
    def warned(**variables):
        return lines(audit(TrainConfig(), read_launch(variables, []), 0), "warning")

    (line,) = warned(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")
    assert line.startswith("srun starts 2 separate runs: no launcher joins them: let srun start one")
    ranks = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert warned(SLURM_NTASKS="2") == warned(SLURM_STEP_NUM_TASKS="2", **ranks) == []


def test_use_cpu_drops_deepspeed_or_hides_gpus(tmp_path, built, monkeypatch):
    assert "CUDA_VISIBLE_DEVICES" in lines(audited(tmp_path, DDP | {"use_cpu": True}, devices=2), "warning")[0]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert "drop DeepSpeed" in lines(audited(tmp_path, Z2), "error")[0]


def test_missing_tools_are_named(tmp_path, monkeypatch):
    section = {"zero_stage": 3, "zero3_save_16bit_model": True, "offload_optimizer_device": "nvme"}
    launch = launch_of_yaml(written(tmp_path, zero(**section)))
    monkeypatch.setattr(deepspeed_ops.shutil, "which", lambda name: None)
    monkeypatch.setattr(deepspeed_ops.sysconfig, "get_paths", lambda: {"include": str(tmp_path), "data": str(tmp_path)})
    monkeypatch.setattr(deepspeed_ops.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    monkeypatch.delenv("LDFLAGS", raising=False)
    errors = "\n".join(lines(audit(TrainConfig(), launch, devices=0), "error"))
    for fix in ("install g++", "python3-dev", "libaio-dev"):
        assert fix in errors
    assert lines(audited(tmp_path, Z2), "error") == []
    monkeypatch.setattr(deepspeed_ops, "waiting", lambda what: what)
    compiled = "cpu_adam (the optimizer on the host, 1-4 minutes), async_io (NVMe offload, 1-3 minutes)"
    assert deepspeed_ops.compiling(launch) == f"DeepSpeed compiles, once per machine, {compiled}"
    for name in ("cpu_adam", "async_io"):
        deepspeed_ops.library(name).touch()
    assert isinstance(deepspeed_ops.compiling(launch), contextlib.nullcontext)


def test_only_the_disk_operator_needs_the_cuda_toolkit(tmp_path, monkeypatch):
    which = deepspeed_ops.shutil.which
    monkeypatch.setattr(deepspeed_ops.shutil, "which", lambda name: None if name == "nvcc" else which(name))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for device in ("cpu", "nvme"):
        content = zero(zero_stage=3, zero3_save_16bit_model=True, offload_optimizer_device=device)
        errors = "\n".join(lines(audited(tmp_path, content, devices=2), "error"))
        assert ("nvcc is missing" in errors) is (device == "nvme")


def test_unseen_gpu_is_an_error_unless_hidden_on_purpose(tmp_path, built, monkeypatch):
    monkeypatch.setattr(auditing, "NVIDIA", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "sees none of this machine's NVIDIA GPUs" in "\n".join(lines(audited(tmp_path, DDP), "error"))
    assert not lines(audited(tmp_path, DDP, devices=2), "error")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not lines(audited(tmp_path, DDP), "error")


def test_old_gcc_is_refused(tmp_path, monkeypatch):
    old = tmp_path / "old-gcc"
    old.write_text('#!/bin/sh\necho "g++ 8.5.0"\necho "Copyright (C) 2018 Free Software Foundation, Inc."\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert any("GCC 8" in line for line in lines(audited(tmp_path, Z2_OFFLOAD), "error"))


def test_lock_of_a_compilation_is_named_and_stays(tmp_path, monkeypatch):
    """torch waits for it, and for ever if that compilation was killed."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    lock.touch()
    assert [*deepspeed_ops.audit_locks("cpu_adam")] == []  # young: this launch's other rank
    os.utime(lock, (0, 0))
    (finding,) = deepspeed_ops.audit_locks("cpu_adam")
    assert "this run will wait for it: delete the file if no other launch is running" in str(finding)
    assert lock.exists()


TWO_RANKS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def test_ranks_share_the_cores_unless_the_user_set_threads(monkeypatch):
    for variables, threads in (
        (TWO_RANKS | {"OMP_NUM_THREADS": "1"}, max(1, usable_cores() // 2)),  # the launcher's own
        (TWO_RANKS | {"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({}, usable_cores()),
    ):
        monkeypatch.setattr(os, "environ", variables)
        assert threads_per_process() == threads


GROUPS = "sys/fs/cgroup"
QUOTAS = {
    "the group above in version 2": {
        "proc/self/cgroup": "0::/job/step",
        **{f"{GROUPS}/{name}cpu.max": "max 100000" for name in ("", "job/step/")},
        f"{GROUPS}/job/cpu.max": "250000 100000",
    },
    "version 1": {
        "proc/self/cgroup": "4:cpu,cpuacct:/job\n0::/",
        **{f"{GROUPS}/cpu,cpuacct/{name}cpu.cfs_period_us": "100000" for name in ("", "job/")},
        f"{GROUPS}/cpu,cpuacct/job/cpu.cfs_quota_us": "250000",
        f"{GROUPS}/cpu,cpuacct/cpu.cfs_quota_us": "-1",
    },
}


@pytest.mark.parametrize("files", QUOTAS.values(), ids=QUOTAS)
def test_cpu_quota_of_any_cgroup_limits_cores(tmp_path, monkeypatch, files):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(host_memory, "SYSTEM", tmp_path)
    assert usable_cores() == 3


@pytest.fixture
def prepared(monkeypatch):
    """`prepared(...)`: the variables that `prepare_environment` leaves in a process which began with these."""

    def prepare(**variables):
        monkeypatch.setattr(os, "environ", variables)
        environment.prepare_environment()
        return variables

    thresholds = gc.get_threshold()
    yield prepare
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "3"}])
def test_launch_from_command_gets_users_threads_only(tmp_path, given, prepared, monkeypatch):
    """Ranks would keep this process's own number, all cores, as the user's."""
    monkeypatch.setattr(environment, "usable_cores", lambda: 8)
    users = given.get("OMP_NUM_THREADS")
    assert prepared(**prepared(**given))["OMP_NUM_THREADS"] == (users or "8")
    prints = "import os; print(os.environ.get('OMP_NUM_THREADS'))"
    child.launch([sys.executable, "-c", prints], {}, tmp_path, tmp_path / "log", 60.0, lambda: None)
    assert (tmp_path / "log").read_text().strip() == str(users)


def test_the_ninja_beside_this_python_comes_before_the_systems(tmp_path, prepared):
    """Another version's log is not understood, and all operators would be compiled anew."""
    systems = tmp_path / "ninja"
    systems.write_text("#!/bin/sh\n")
    systems.chmod(0o755)
    before = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    assert shutil.which("ninja", path=before) == str(systems)
    after = prepared(PATH=before)["PATH"]
    assert shutil.which("ninja", path=after) == str(Path(sysconfig.get_path("scripts"), "ninja"))


def test_gpu_allocator_fills_gaps_unless_the_user_set_it(prepared):
    name = "PYTORCH_CUDA_ALLOC_CONF"
    assert prepared()[name] == "expandable_segments:True"
    assert prepared(**{name: "backend:native"})[name] == "backend:native"
    assert name not in prepared(PYTORCH_ALLOC_CONF="backend:native")


def test_verify_engine_reports_each_difference(tmp_path, monkeypatch):
    for name, value in launch_of_yaml(written(tmp_path, Z2)).environment.items():
        monkeypatch.setenv(name, value)
    engine = SimpleNamespace(
        bfloat16_enabled=lambda: False,
        fp16_enabled=lambda: False,
        zero_optimization_stage=lambda: 1,
        gradient_clipping=lambda: 1.0,
        gradient_accumulation_steps=lambda: 4,
        seq_dp_world_size=1,
    )
    with pytest.raises(UserError) as raised:
        verify_engine(SimpleNamespace(num_processes=2), launch_of_this_process(), engine, max_grad_norm=0.5)
    differing = [line.split(":")[0] for line in raised.value.problems]
    assert differing == ["ZeRO stage", "clipping", "gradient accumulation", "precision", "ranks"]


QUIET = """
import os, pathlib, subprocess, sys
from accel_sft.io.terminal import quiet, terminal
folder = pathlib.Path(sys.argv[1])
with quiet(folder / "logs" / "rank-0.log") as ours:
    print("from Python")
    subprocess.run(["echo", "from a compiler"])
    os.write(2, b"from C\\n")
    print("ours", file=ours)
    with quiet(folder / "inner.log"):
        print("deeper")
        print("ours too", file=terminal())
    print("outer again")
print("after")
try:
    with quiet(None):
        print("would be lost")
        raise RuntimeError
except RuntimeError:
    pass
with quiet(folder / "never.log", debug=True):
    print("debugging")
"""


def test_quiet_leaves_chatter_to_the_file(tmp_path):
    done = subprocess.run([sys.executable, "-c", QUIET, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "would be lost\n")
    assert done.stdout.splitlines() == ["ours", "ours too", "after", "debugging"]
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert sorted(filter(None, log.splitlines())) == ["from C", "from Python", "from a compiler", "outer again"]
    assert (tmp_path / "inner.log").read_text() == "deeper\n"
    assert not (tmp_path / "never.log").exists()


def test_only_long_waits_are_reported_with_their_seconds(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SECONDS_OF_SILENCE", 0.05)
    with terminal.waiting("DeepSpeed compiles cpu_adam"):
        time.sleep(0.5)
    with terminal.waiting("nothing"):
        pass
    assert re.fullmatch(r"(DeepSpeed compiles cpu_adam: \d s so far\n){2,3}", capsys.readouterr().out)


TORCHRUN = ["/x/python", "bin/torchrun", "--nproc_per_node", "2", "-m", "accel_sft", "math"]
LAUNCHER = ["/x/python3", "/x/bin/accelerate", "launch", "--config_file", "z 2.yaml", "-m", "accel_sft", "math"]
AUTO = "--output-dir a --resume auto"


@pytest.mark.parametrize(
    ("above", "typed", "output_dir", "expected"),
    [
        (LAUNCHER, "", None, f"/x/bin/accelerate launch --config_file 'z 2.yaml' -m accel_sft math {AUTO}"),
        (TORCHRUN, "a rank's own", None, f"bin/torchrun --nproc_per_node 2 -m accel_sft math {AUTO}"),
        ([], "python -m accel_sft math", None, f"python -m accel_sft math {AUTO}"),
        ([], "/x/python bin/accel-sft math", None, f"bin/accel-sft math {AUTO}"),
        ([], "x --hf-token a --output-dir r", "r", "x --hf-token '***' --output-dir r --resume auto"),
        ([], "x --resume=auto --output-dir r", "r", "x --resume=auto --output-dir r"),
    ],
)
def test_command_to_continue_a_run_is_its_first_command(above, typed, output_dir, expected, monkeypatch):
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID") if above else ():
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [SimpleNamespace(cmdline=lambda: above, cwd=os.getcwd)])
    monkeypatch.setattr(sys, "orig_argv", typed.split())
    assert describe.resume_command(Path.cwd() / "a", output_dir) == expected


def test_ranks_that_would_train_alone_are_refused():
    """As Accelerate lets the ranks of FSDP on a CPU, were it not for the audit."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(UserError, match="each of 2 processes would train alone"):
        create_accelerator(TrainConfig(), read_launch(TWO_RANKS, []))
    AcceleratorState._reset_state(reset_partial_state=True)


PARALLEL = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set, MASTER_ADDR is not set, MASTER_PORT is not set: unset WORLD_SIZE"),
        ({"WORLD_SIZE": "abc", "RANK": "-1"}, "WORLD_SIZE is 'abc', RANK is '-1'"),
        (PARALLEL | {"PARALLELISM_CONFIG_TP_SIZE": "two"}, "PARALLELISM_CONFIG_TP_SIZE is 'two': expected a number of"),
        ({"ACCELERATE_MIXED_PRECISION": "evil"}, "mixed_precision evil (ACCELERATE_MIXED_PRECISION) is not supported"),
    ],
)
def test_what_no_launcher_sets_is_refused_in_a_line(variables, message, prepared):
    with pytest.raises(UserError) as raised:
        refuse(audit(TrainConfig(), read_launch(prepared(**variables), []), 0))
    (line,) = raised.value.problems
    assert line.startswith(message)


@pytest.mark.parametrize("named", ["ds.json", "more/ds.json"])
def test_deepspeed_json_beside_the_launch_file_is_second_choice(tmp_path, monkeypatch, named):
    (tmp_path / "files" / "more").mkdir(parents=True)
    (tmp_path / "here" / "more").mkdir(parents=True)
    file = written(tmp_path / "files", zero(deepspeed_config_file=named))
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=rf"deepspeed_config_file {named}: cannot be read"):
        launch_of_yaml(file)
    (tmp_path / "files" / named).write_text('{"zero_optimization": {"stage": 1}}')
    assert launch_of_yaml(file).stage == 1
    (tmp_path / "here" / named).write_text('{"zero_optimization": {"stage": 2}}')
    assert launch_of_yaml(file).stage == 2
