"""A launch that names no precision computes in what its ranks have instructions for; what is named wins."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import yaml
from accelerate.state import AcceleratorState
from conftest import accel_sft, finished, stopped

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.launch import host_memory, machine_state, precision
from accel_sft.launch.audit import audit
from accel_sft.launch.info import launch_of_yaml, read_launch
from accel_sft.tools.compare.settings import product
from accel_sft.tools.plan.plans import launch_of, machine

BARE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}
DEEPSPEED = BARE | {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
PROCESSORS = {
    "AMX": ("flags\t\t: fpu avx512f avx512_bf16 amx_tile amx_bf16", ["amx_bf16", "avx512_bf16"]),
    "AVX2": ("flags\t\t: fpu avx2 fma", []),
    "ARM": ("Features\t: fp asimd i8mm bf16", ["bf16"]),
    "no word": ("model name\t: bf16 avx512_bf16", []),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_cpu_computes_bf16_by_its_flags(kind, tmp_path, monkeypatch):
    text, expected = PROCESSORS[kind]
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\n{text}\nbugs\t\t: bf16\n")
    monkeypatch.setattr(host_memory, "SYSTEM", tmp_path)
    assert precision.cpu_flags() == expected
    monkeypatch.setattr(host_memory, "SYSTEM", tmp_path / "macOS")
    assert precision.cpu_flags() == []


def launch_of_a_rank(folder, content, *flags, deepspeed=None, arrived="no"):
    """The launch as a rank reads it: a yaml, flags, and a DeepSpeed JSON."""
    if deepspeed is not None:
        (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **deepspeed}))
        content = {**content, "deepspeed_config": {"deepspeed_config_file": str(folder / "ds.json")}}
    (folder / "launch.yaml").write_text(yaml.safe_dump(content))
    handed = {"ACCELERATE_MIXED_PRECISION": arrived, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    if content["distributed_type"] == "DEEPSPEED":
        handed["ACCELERATE_USE_DEEPSPEED"] = "true"
        handed |= {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / "ds.json")} if deepspeed is not None else {}
    command = ["accelerate", "launch", "--config_file", str(folder / "launch.yaml"), *flags]
    return read_launch(handed, command)


AUTO, BARE_NO, FLAG = {"bf16": {"enabled": "auto"}}, BARE | {"mixed_precision": "no"}, ("--mixed_precision", "bf16")
NAMED = {
    "nothing": ((BARE,), {}, None),
    "the launcher's own no": ((DEEPSPEED,), {}, None),
    "a flag": ((BARE, "--mixed-precision=no"), {}, ("no", "--mixed_precision")),
    "the yaml": ((BARE_NO,), {}, ("no", "launch.yaml")),
    "a flag over the yaml": ((BARE_NO, *FLAG), {"arrived": "bf16"}, ("bf16", "--mixed_precision")),
    "JSON on": ((DEEPSPEED,), {"deepspeed": {"bf16": {"enabled": True}}}, ("bf16", "ds.json")),
    "JSON off": ((DEEPSPEED,), {"deepspeed": {"bf16": {"enabled": False}}}, ("no", "ds.json")),
    "JSON without a word": ((DEEPSPEED,), {"deepspeed": {}}, None),
    "JSON auto and a flag": ((DEEPSPEED, *FLAG), {"deepspeed": AUTO, "arrived": "bf16"}, ("bf16", "--mixed_precision")),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_counts_as_named(case, tmp_path):
    given, more, expected = NAMED[case]
    named = launch_of_a_rank(tmp_path, *given, **more).named_precision
    assert named == expected or (named[0], named[1].rpartition("/")[2]) == expected
    assert read_launch({"ACCELERATE_MIXED_PRECISION": "bf16"}, []).named_precision[0] == "bf16"  # the user's own


ON_CPU, LACKS = SimpleNamespace(type="cpu"), "this CPU has no instructions for bf16"
SETTLED = {
    "instructions": (["amx_bf16"], None, "bf16", "this CPU has amx_bf16"),
    "none": ([], None, "no", LACKS),
    "none, begun in bf16": ([], "bf16", "bf16", f"the run's own; {LACKS}, and emulates it slowly"),
    "instructions, begun in float32": (["bf16"], "no", "no", "the run's own"),
    "begun in fp16 on a GPU": ([], "fp16", "no", LACKS),
}


@pytest.mark.parametrize("case", SETTLED)
def test_what_is_chosen_and_why(case, tmp_path, monkeypatch):
    flags, precision_of_run, value, why = SETTLED[case]
    monkeypatch.setattr(precision, "cpu_flags", lambda: flags)
    AcceleratorState._reset_state(reset_partial_state=True)
    launch = launch_of_a_rank(tmp_path, BARE)
    assert precision.choose_precision(launch, ON_CPU, precision_of_run).precision == (value, why)
    named = launch_of_a_rank(tmp_path, BARE | {"mixed_precision": "no"})
    assert precision.choose_precision(named, ON_CPU, "bf16") == named
    alone = read_launch({}, [])
    assert precision.choose_precision(alone, ON_CPU).precision == ("no", "the default without accelerate launch")


def test_machines_with_different_precisions_are_refused_on_every_rank(tmp_path, monkeypatch):
    named = launch_of_a_rank(tmp_path, BARE | {"mixed_precision": "bf16"}, arrived="bf16")
    other = launch_of_a_rank(tmp_path, BARE)
    refusals = []
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: refusals.extend(mine) or mine)
    for launch in (named, other):  # a rank that named one left the other waiting for it
        precision.choose_precision(launch, ON_CPU)
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: refusals)
    for launch in (named, other):
        with pytest.raises(UserError, match=r"ranks have different precisions \(bf16, none\); use"):
            precision.choose_precision(launch, ON_CPU)


def test_gpu_without_bf16_computes_in_float32_and_names_fp16(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "computes_bf16", lambda device: (False, "Tesla T4 has no bf16"))
    value, why = precision.choose_precision(launch_of_a_rank(tmp_path, BARE), SimpleNamespace(type="cuda")).precision
    assert (value, why) == ("no", "Tesla T4 has no bf16; --mixed_precision fp16 is faster there")


def test_bf16_on_a_cpu_that_emulates_it_warns(tmp_path, monkeypatch):
    launch = launch_of_a_rank(tmp_path, BARE | {"mixed_precision": "bf16"}, arrived="bf16")
    monkeypatch.setattr(precision, "cpu_flags", list)
    (finding,) = [one for one in audit(TrainConfig(), launch, 0) if "bf16" in one.what]
    assert (finding.level, "--mixed_precision no" in finding.fix) == ("warning", True)
    monkeypatch.setattr(precision, "cpu_flags", lambda: ["bf16"])
    assert not [one for one in audit(TrainConfig(), launch, 0) if "bf16" in one.what]


def test_plan_and_compare_follow_the_machine_that_they_are_for(tmp_path, monkeypatch):
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(BARE))
    monkeypatch.setattr(machine_state, "cpu_flags", list)
    emulating, computing = machine(0, None, 8), machine(2, 24, 64)
    assert launch_of(tmp_path / "bare.yaml", emulating).precision[0] == "no"
    assert launch_of(tmp_path / "bare.yaml", computing).precision[0] == "bf16"
    with monkeypatch.context() as has_gpu:
        has_gpu.setattr(machine_state, "nvidia_gpus", lambda: ("580.1", [{"capability": 9}, {"capability": 8}]))
        assert machine_state.this_machine_computes_bf16()
        assert launch_of(tmp_path / "bare.yaml", machine(0, None, 8)).precision[0] == "no"
    for flags, expected in ([], "no"), (["avx512_bf16"], "bf16"):
        monkeypatch.setattr(machine_state, "cpu_flags", lambda flags=flags: flags)
        (setting,), _ = product("math", {"bare": tmp_path / "bare.yaml"}, ["2"], [], {}, [])
        assert setting.launch["precision"] == expected


JOB = ("math", "--max-steps", "2", "--max-number", "20", "--validation-examples", "5")
JOB += ("--eval-every", "off", "--save-every", "1")
NONE = {"PLANTED_BF16": "none"}


def header(run):
    """The precision in the first line, which ends with it."""
    (line,) = re.findall(r"^run       .*", run.output, re.M)
    return re.search(r"(?:fp32|bf16) \(.*\)$", line)[0]


@pytest.mark.parametrize("yaml_name", [pytest.param("ddp", marks=pytest.mark.long), "z2"])
def test_one_rank_without_bf16_makes_every_backend_float32(yaml_name, tmp_path):
    environment = {"PLANTED_BF16": "amx_bf16", "PLANTED_BF16_1": "none"}
    run = finished(*JOB, yaml=yaml_name, environment=environment, run_dir=tmp_path / "run")
    assert header(run) == f"fp32 ({LACKS})"
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["launch"]["precision"] == "no"
    if yaml_name == "z2":
        assert record["launch"]["deepspeed_config"]["bf16"]["enabled"] is False
    assert launch_of_yaml(tmp_path / "run/launch.yaml").named_precision[0] == "no"


def test_json_without_precision_computes_and_records_bf16(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}))
    content = DEEPSPEED | {"deepspeed_config": {"deepspeed_config_file": str(tmp_path / "ds.json")}}
    (tmp_path / "json.yaml").write_text(yaml.safe_dump(content))
    given = {"yaml": str(tmp_path / "json"), "environment": {"PLANTED_BF16": "bf16"}, "run_dir": tmp_path / "run"}
    run = finished(*JOB, **given)
    assert header(run) == "bf16 (this CPU has bf16)"
    assert "fixes the precision" not in run.output
    written = launch_of_yaml(tmp_path / "run/launch.yaml")
    assert written.named_precision == ("bf16", str(tmp_path / "run/deepspeed.json"))


def test_resumed_run_keeps_and_reports_its_precision(launched, tmp_path):
    whole = launched("begun in bf16", *JOB, yaml="ddp", environment={"PLANTED_BF16": "bf16"})
    folder = stopped(whole, tmp_path / "run", 1)
    again = {"yaml": "ddp", "environment": NONE, "run_dir": folder}
    refused = accel_sft(*JOB, "--resume", "auto", launcher=("--mixed_precision", "no"), **again)
    assert refused.status != 0
    assert "this checkpoint has precision bf16, but this launch has float32" in " ".join(refused.output.split())
    resumed = finished(*JOB, "--resume", "auto", **again)
    assert header(resumed) == f"bf16 (the run's own; {LACKS}, and emulates it slowly)"
    final = [(run / "final/model.safetensors").read_bytes() for run in (whole.run_dir, folder)]
    assert final[0] == final[1]
