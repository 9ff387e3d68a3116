"""Audits a launch file before anything is loaded: unknown yaml keys, ignored settings, conflicts."""

import difflib
import importlib.metadata
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.limits import OF_ADAPTERS
from accel_sft.api.options import chosen, flag_of, shown
from accel_sft.io.findings import LEVELS, Finding, error, warning
from accel_sft.io.terminal import quiet
from accel_sft.io.text import one_line
from accel_sft.launch.deepspeed_ops import audit_compilers, operators
from accel_sft.launch.environment import device_count
from accel_sft.launch.info import Launch, launcher_parser
from accel_sft.launch.parallelism import audit_devices, audit_parallelism
from accel_sft.launch.precision import computes_bf16

BY_FILE = "accelerate launch --config_file FILE -m accel_sft ... (files: accel-sft launch-file)"
NVIDIA = Path("/dev/nvidiactl")
"""Exists if the NVIDIA driver runs and has given this machine, or this container, a GPU."""
_JSON_DEEPSPEED = """
    activation_checkpointing aio autotuning bf16 checkpoint comet comms_logger communication_data_type compile
    csv_monitor data_efficiency data_types dataloader_drop_last disable_allgather disable_python_gc dump_state
    expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
    gradient_predivide_factor hybrid_engine load_universal_checkpoint log_level managed_gradient_accumulation
    memory_breakdown optimizer pipeline prescale_gradients scheduler
    seq_parallel_communication_data_type steps_per_print tensor_parallel
    tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism use_node_local_storage vocabulary_size wandb wall_clock_breakdown
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
_REFUSED = {
    "data_efficiency": "changes what a step learns",
    "weight_quantization": "changes what a step learns",
    "zenflow": "applies a part of each gradient some steps late",
    "torch_autocast": "would compute in a different precision from the run's",
    "tensor_parallel": "is not supported: use accelerate_configs/tp.yaml instead",
    "optimizer": "must not be set: --learning-rate and --weight-decay decide",
    "scheduler": "must not be set: --lr-scheduler decides",
}
"""Sections of DeepSpeed's JSON that would change the mathematics of a step, each with its effect."""
_LOSSY = "zero_quantized_weights", "zero_quantized_gradients", "communication_data_type", "grad_accum_dtype"
"""Keys of DeepSpeed's JSON that can make gradients less exact."""
_DECIDED = {
    "gradient_accumulation_steps": "--global-batch-size",
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_clipping": "--max-grad-norm",
    "activation_checkpointing": "--gradient-checkpointing",
    "dynamo_backend": "--compile",
}
"""Keys of a launch that have no effect, each with the trainer's option that replaces the key."""


def audit(config: TrainConfig, launch: Launch, devices: int | None = None) -> list[Finding]:
    """Audit a launch before anything is loaded. `devices` is the number of visible accelerators; None: count them.
    Returns the findings, errors first."""
    devices = device_count() if devices is None else devices
    where = f"{launch.config_file or 'the launch'}"
    if sys.platform == "darwin" and launch.backend in ("deepspeed", "fsdp"):
        what = f"{where}: {'FSDP' if launch.backend == 'fsdp' else 'DeepSpeed'} does not run on macOS"
        return [error(what, "start it without accelerate launch: one process then runs on MPS or the CPU")]
    findings = [*_keys(launch), *_world(launch, devices, where), *_precision(launch, devices)]
    settings = {name: getattr(config, name) for name in ("batching", "micro_batch_size", "loss")}
    findings += audit_parallelism(launch, where, **settings)
    findings += [*_not_used(launch, config, where)]
    if launch.backend == "deepspeed":
        findings += _deepspeed(launch, f"{launch.json_file or where}")
        findings += audit_compilers(operators(launch), devices)
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def refuse(findings: Iterable[Finding]) -> None:
    """Raise all errors among the findings together, as a UserError with a line for each."""
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors:
        raise UserError(*errors)


def _keys(launch: Launch) -> Iterator[Finding]:
    """Report keys that neither Accelerate nor DeepSpeed reads: the run would silently differ from the file."""
    sections = {name: launch.yaml.get(f"{name}_config") or {} for name in ("deepspeed", "fsdp", "parallelism")}
    for name, known in _launcher_keys().items() if any(sections.values()) else ():
        yield from _unknown(f"{launch.config_file}: {name}_config.", sections[name], known)
    yield from _unknown(f"{launch.json_file}: ", launch.json, {*_JSON_DEEPSPEED.split()})


def _unknown(place: str, section: Mapping[str, Any], known: set[str]) -> Iterator[Finding]:
    names = sorted(known)
    for key in sorted(map(str, section.keys() - known)):
        near = [name for name in names if name.endswith(f"_{key}")] or difflib.get_close_matches(key, names, 1, 0.85)
        what = f"{place}{one_line(key)} is unknown"
        yield error(what, f"did you mean {near[0]}?" if near else "remove it")


def _launcher_keys() -> dict[str, set[str]]:
    """The keys that `accelerate launch` reads from each section of a launch file, taken from its own flags."""
    flags = vars(launcher_parser().parse_args(["train.py"]))
    fsdp = {flag for flag in flags if flag.startswith("fsdp_")}
    return {
        "deepspeed": {flag for flag in flags if not flag.startswith(("fsdp_", "fp8_", "megatron_", "parallelism_"))},
        "fsdp": fsdp | {flag.removeprefix("fsdp_") for flag in fsdp} | {"ignored_modules", "fsdp_ignored_modules"},
        "parallelism": {flag for flag in flags if flag.startswith("parallelism_config_")},
    }


def _world(launch: Launch, devices: int, where: str) -> Iterator[Finding]:
    requested = launch.arguments.get("num_processes") or launch.yaml.get("num_processes")
    # if a file asks for more ranks than the machine has devices, the surplus ranks have ended (`fitted`)
    fitted = "num_processes" not in launch.arguments and launch.world_size == devices
    if requested and launch.world_size != int(requested) and not (fitted and launch.world_size < int(requested)):
        what = f"{where}: {requested} processes requested, but {launch.world_size} started"
        yield error(what, "set distributed_type to MULTI_GPU or DEEPSPEED; start the same number on all machines")
    tasks = launch.environment.get("SLURM_STEP_NUM_TASKS", "1")  # not set in an sbatch script without srun
    if launch.world_size == 1 and tasks != "1":
        fix = "let srun start one accelerate launch per machine (docs/multinode.md)"
        yield warning(f"srun starts {tasks} separate runs: no launcher joins them", fix)
    if devices:
        yield from audit_devices(launch, devices, where)
    if launch.backend == "fsdp" and not devices:
        what = f"{where}: FSDP needs GPUs; on CPUs each rank would silently train a model of its own"
        yield error(what, "use accelerate_configs/z2.yaml or z3.yaml, which run on CPUs")
    if launch.backend == "megatron":
        yield error(f"{where}: MEGATRON_LM is not supported", "use DEEPSPEED, FSDP or MULTI_GPU")
    dropped = launch.environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if launch.backend == "deepspeed" and dropped:
        what = "ACCELERATE_USE_CPU is set, so Accelerate would silently drop DeepSpeed"
        yield error(what, "unset it; DeepSpeed finds the CPU by itself")
    hidden = launch.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or dropped or launch.yaml.get("use_cpu")
    if not devices and not hidden and NVIDIA.exists():
        what = f"torch {importlib.metadata.version('torch')} sees none of this machine's NVIDIA GPUs"
        fix = "update the driver (see nvidia-smi), or get torch for this driver: bash setup.sh in the checkout"
        yield error(what, f'{fix}; to train on the CPU, set CUDA_VISIBLE_DEVICES=""')
    if launch.yaml.get("use_cpu") and devices:
        what = f"{where}: use_cpu: true has no effect, and {devices} GPUs will be used"
        yield warning(what, 'set CUDA_VISIBLE_DEVICES="" to train on the CPU')


def _precision(launch: Launch, devices: int) -> Iterator[Finding]:
    value, source = launch.named_precision or ("no", "the default")
    requested = launch.requested_precision
    if launch.json_enabled("bf16") == launch.json_enabled("fp16") == "true":
        yield error(f"{launch.json_file}: fp16 and bf16 are both enabled", "enable one of them")
    elif launch.json and requested and requested[0] != value:
        level = error if "mixed_precision" in launch.arguments else warning
        what = f"{source} fixes the precision to {value}, but the launch says {requested[0]}"
        yield level(what, 'set "enabled": "auto" in the JSON\'s bf16 and fp16 sections; --mixed_precision then decides')
    if value not in ("no", "fp16", "bf16"):
        yield error(f"mixed_precision {shown(value)} ({source}) is not supported", "use bf16, fp16 or no")
    if value == "fp16" and not devices:
        yield error(f"mixed_precision fp16 ({source}) needs a GPU", "use --mixed_precision bf16 or no")
    if value == "bf16":
        import torch

        if not devices or torch.cuda.is_available():
            able, why = computes_bf16(torch.device("cuda" if devices else "cpu"))
            if not able:
                what = f"mixed_precision bf16 ({source}): {why}, and emulates it slowly"
                yield warning(what, f"use --mixed_precision {'fp16' if devices else 'no'}")


def _not_used(launch: Launch, config: TrainConfig, where: str) -> Iterator[Finding]:
    """Report settings without effect: adapter options without an adapter, and keys replaced by trainer options."""
    for name in chosen(config, OF_ADAPTERS) if config.adapter == "none" else ():
        flag = flag_of(name)
        what = f"{flag} {getattr(config, name)} is not used: --adapter none trains all weights"
        yield warning(what, f"add --adapter lora, or leave out {flag}")
    sections = (launch.yaml.get(name) or {} for name in ("deepspeed_config", "dynamo_config"))
    given: dict[str, Any] = dict(launch.yaml)
    for section in (*sections, launch.arguments, launch.json):
        given |= section
    usual = {"gradient_accumulation_steps": 1.0, "gradient_clipping": float(config.max_grad_norm)}
    for key, option in _DECIDED.items():
        value, same = one_line(str(given.get(key))), usual.get(key, math.nan)
        if value.lower() not in ("none", "auto", "no", "false", f"{same:g}", str(same)):
            place = launch.json_file if key in launch.json else where
            yield warning(f"{place}: {key} {value} is not used", f"remove it; {option} decides")


def _deepspeed(launch: Launch, where: str) -> Iterator[Finding]:
    """Report DeepSpeed settings that change the training result, and those that DeepSpeed would refuse at the start."""
    given = {**launch.json, **(launch.json.get("data_types") or {}), **launch.zero}
    for key, effect in _REFUSED.items():
        section = given.get(key)
        if section and not (isinstance(section, dict) and section.get("enabled") is False):
            yield error(f"{where}: {key} {effect}", "remove it")
    exact = None, False, "auto", "fp32", (launch.named_precision or ("", ""))[0]
    for key in _LOSSY:
        if given.get(key) not in exact:
            what = f"{where}: {key} {one_line(str(given[key]).lower())} makes gradients less exact than by default"
            yield warning(what, "remove it, unless speed matters more")
    yield from _invalid(launch, where)
    if launch.json_file and "stage" not in launch.zero:
        yield error(f"{where}: zero_optimization.stage is missing", 'add for example "zero_optimization": {"stage": 2}')
    if launch.stage == 3 and not launch.gathers_16bit_weights:
        key = "stage3_gather_16bit_weights_on_model_save" if launch.json_file else "zero3_save_16bit_model"
        what = f"{where}: without {key} the export at the end of a ZeRO-3 run fails"
        yield error(what, f"add {key}: true")
    for what, least in (("optimizer", 1), ("param", 3)):
        device = launch.offload(what)
        if launch.stage < (needed := {"cpu": least, "nvme": 3}.get(device, 0)):
            problem = f"{where}: offload_{what} to {device} needs ZeRO stage {needed}, not {launch.stage}"
            yield error(problem, f"set zero_stage to {needed}, or offload nothing")


def _invalid(launch: Launch, where: str) -> Iterator[Finding]:
    """Report keys and values that DeepSpeed's pydantic models of its settings refuse."""
    with quiet(None):  # on import, DeepSpeed prints which device it has found
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from pydantic import ValidationError
    of_yaml = {f"offload_{what}": {"device": launch.offload(what)} for what in ("optimizer", "param")}
    zero = launch.zero if launch.json_file else {"stage": launch.stage, **of_yaml}
    sections = {**launch.json, "zero_optimization": zero}
    models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    for section, model in models.items():
        try:
            model(**(sections.get(section) or {}))
        except ValidationError as refusal:
            for problem in refusal.errors():
                place = ".".join(map(str, (section, *problem["loc"])))
                yield error(f"{where}: DeepSpeed refuses {one_line(place)}", one_line(problem["msg"], 80))
