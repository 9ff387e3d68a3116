"""Audits a launch file before anything is loaded: unknown yaml keys, ignored settings, conflicts."""

import difflib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.limits import OF_ADAPTERS
from accel_sft.api.options import chosen, flag_of, shown
from accel_sft.io.findings import LEVELS, Finding, error, note, warning
from accel_sft.io.terminal import quiet
from accel_sft.io.text import one_line
from accel_sft.launch.deepspeed_ops import audit_compilers, operators
from accel_sft.launch.environment import device_count
from accel_sft.launch.info import Launch, launcher_parser
from accel_sft.launch.launcher import PRECISION
from accel_sft.launch.parallelism import audit_devices, audit_parallelism
from accel_sft.launch.precision import cpu_flags

BY_FILE = "accelerate launch --config_file FILE -m accel_sft ... (files: accel-sft launch-file)"
NVIDIA = Path("/dev/nvidiactl")
"""Exists if the NVIDIA driver runs and has given this machine, or this container, a GPU."""
_JSON_DEEPSPEED = """
    activation_checkpointing aio amp autotuning bf16 checkpoint comet comms_logger communication_data_type compile
    compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    disable_allgather disable_python_gc dump_state elasticity eigenvalue expert_parallel flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting
    hybrid_engine load_universal_checkpoint log_level managed_gradient_accumulation memory_breakdown nebula
    optimizer pipeline pld prescale_gradients progressive_layer_drop scheduler
    seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print tensor_parallel
    tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism use_node_local_storage vocabulary_size wandb wall_clock_breakdown
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
_CHANGES_TRAINING = "data_efficiency", "weight_quantization"
"""Sections of DeepSpeed's JSON by which it would choose or cut rows, drop layers, or quantize weights."""
_NOT_USED = {
    "train_batch_size": "--global-batch-size and --micro-batch-size decide",
    "train_micro_batch_size_per_gpu": "--global-batch-size and --micro-batch-size decide",
    "activation_checkpointing": "--gradient-checkpointing decides",
}
_AUDITED = "stage", "device", "ratio"
"""Keys of zero_optimization whose values `_zero` names in words of its own."""


def audit(config: TrainConfig, launch: Launch, devices: int | None = None) -> list[Finding]:
    """Audit a launch before anything is loaded. Returns the findings, errors first.

    Args:
        devices: the number of visible accelerators; None: they are counted.
    """
    devices = device_count() if devices is None else devices
    where = launch.config_file or "the launch"
    if sys.platform == "darwin" and launch.backend in ("deepspeed", "fsdp"):
        what = f"{where}: {'FSDP' if launch.backend == 'fsdp' else 'DeepSpeed'} does not run on macOS"
        return [error(what, "start it without accelerate launch: one process then runs on MPS or the CPU")]
    findings = [*_keys(launch), *_world(launch, devices, f"{where}"), *_precision(launch, devices)]
    findings += audit_parallelism(
        launch, f"{where}", batching=config.batching, micro_batch_size=config.micro_batch_size
    )
    findings += [*_adapter(config), *_not_used(launch, config, f"{where}")]
    where = launch.json_file or where
    if launch.backend == "deepspeed":
        findings += [*_deepspeed(launch, f"{where}"), *_refused(launch, f"{where}"), *_zero(config, launch, f"{where}")]
        findings += audit_compilers(operators(launch), devices)
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def refuse(findings: Iterable[Finding]) -> None:
    """Raise all errors among the findings together.

    Raises:
        UserError: one line for each error.
    """
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors:
        raise UserError(*errors)


def _keys(launch: Launch) -> Iterator[Finding]:
    """Report keys that neither Accelerate nor DeepSpeed reads: the run would silently differ from the file."""
    if launch.config_file is None and launch.environment.get(PRECISION):
        what = "the launcher's yaml could not be found, so its keys were not checked"
        yield note(what, "start with accelerate launch --config_file FILE")
    sections = {name: launch.yaml.get(f"{name}_config") or {} for name in ("deepspeed", "fsdp", "parallelism")}
    for name, keys in _launcher_keys().items() if any(sections.values()) else ():
        for key in sorted(map(str, sections[name].keys() - keys)):
            prefixed = [f"{name}_config_{key}"] if f"{name}_config_{key}" in keys else []
            near = prefixed or difflib.get_close_matches(key, sorted(keys), n=1)
            what = f"{launch.config_file}: {name}_config.{one_line(key)} is unknown, and would be ignored in silence"
            yield error(what, f"did you mean {near[0]}?" if near else "remove it")
    for key in sorted(launch.json.keys() - {*_JSON_DEEPSPEED.split()}):
        what = f"{launch.json_file}: {one_line(key)} is unknown, and would be ignored in silence"
        near = difflib.get_close_matches(key, _JSON_DEEPSPEED.split(), n=1)
        yield error(what, f"did you mean {near[0]}?") if near else warning(what, "remove it")


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
    # of a file's ranks, those beyond the machine's devices have ended (`fitted`)
    fitted = "num_processes" not in launch.arguments and launch.world_size == devices
    if requested and launch.world_size != int(requested) and not (fitted and launch.world_size < int(requested)):
        fix = "set distributed_type to MULTI_GPU (data parallel, also on CPUs) or DEEPSPEED to start several processes"
        if launch.machines > 1 or str(launch.arguments.get("num_machines", "1")) != "1":
            fix = "make --num_processes (all machines together) a multiple of --num_machines"
        kind = launch.yaml.get("distributed_type")
        why = f" (distributed_type {one_line(str(kind))})" if kind else ""
        yield error(f"{where}: {requested} processes asked for, {launch.world_size} started{why}", fix)
    if devices:
        yield from audit_devices(launch, devices, where)
    if launch.backend == "fsdp" and not devices:
        what = f"{where}: FSDP needs GPUs; on CPUs each rank would silently train a model of its own"
        yield error(what, "accelerate_configs/z2.yaml or z3.yaml run on a CPU")
    if launch.backend == "megatron":
        yield error(f"{where}: MEGATRON_LM is not supported", "use DEEPSPEED, FSDP or MULTI_GPU")
    dropped = launch.environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if launch.backend == "deepspeed" and dropped:
        what = "ACCELERATE_USE_CPU is set: Accelerate would drop DeepSpeed in silence"
        yield error(what, "unset it; DeepSpeed finds the CPU by itself")
    hidden = launch.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or dropped or launch.yaml.get("use_cpu")
    if not devices and not hidden and NVIDIA.exists():
        what = f"torch {importlib.metadata.version('torch')} sees none of this machine's NVIDIA GPUs"
        fix = "update the driver (see nvidia-smi), or get torch for this driver: bash setup.sh in the checkout"
        yield error(what, f'{fix}; to train on the CPU, set CUDA_VISIBLE_DEVICES=""')
    if launch.yaml.get("use_cpu") and devices:
        what = f"{where}: use_cpu: true is ignored, {devices} GPUs will be used"
        yield warning(what, 'set CUDA_VISIBLE_DEVICES="" to train on the CPU')
    if not launch.environment.get(PRECISION) and launch.world_size > 1:
        what = f"{launch.world_size} processes, plain data parallel, in full precision"
        yield note(what, f"for more: {BY_FILE}")


def _precision(launch: Launch, devices: int) -> Iterator[Finding]:
    value, source = launch.named_precision or ("no", "the default")
    requested = launch.requested_precision
    if launch.json_enabled("bf16") == launch.json_enabled("fp16") == "true":
        yield error(f"{launch.json_file}: fp16 and bf16 are both enabled", "enable one of them")
    elif launch.json and requested and requested[0] != value:
        level = error if "mixed_precision" in launch.arguments else warning
        what = f"{source} fixes the precision to {value}, but the launch says {requested[0]}"
        yield level(what, 'set "enabled": "auto" in its bf16 and fp16 sections; --mixed_precision then decides')
    if value not in ("no", "fp16", "bf16", "fp8"):
        yield error(f"mixed_precision {shown(value)} ({source}) is unknown", "--mixed_precision bf16, fp16 or no")
    if value == "fp8":
        yield error(f"mixed_precision fp8 ({source}) is not supported", "--mixed_precision bf16")
    if value == "fp16" and not devices:
        yield error(f"mixed_precision fp16 ({source}) needs a GPU", "--mixed_precision bf16 or no")
    if value == "bf16" and devices:
        import torch

        if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
            what = f"mixed_precision bf16 ({source}): this GPU computes it by emulation, slowly"
            yield warning(what, "--mixed_precision fp16, or no")
    if value == "bf16" and not devices and not cpu_flags():
        what = f"mixed_precision bf16 ({source}): this CPU has no bf16 instructions; float32 is several times faster"
        yield warning(what, "--mixed_precision no, or leave the precision out: float32 is the default on this CPU")


def _adapter(config: TrainConfig) -> Iterator[Finding]:
    for name in chosen(config, OF_ADAPTERS) if config.adapter == "none" else ():
        flag = flag_of(name)
        what = f"{flag} {getattr(config, name)} is not used: --adapter none trains all weights"
        yield warning(what, f"add --adapter lora, or leave out {flag}")


def _not_used(launch: Launch, config: TrainConfig, where: str) -> Iterator[Finding]:
    """Report what the launch gives to training scripts or to DeepSpeed, and the trainer's own options decide."""
    given = {**launch.yaml, **(launch.yaml.get("dynamo_config") or {}), **launch.arguments}

    def named(key: str) -> Any:
        places = launch.json.get(key), given.get(key), launch.environment.get(f"ACCELERATE_{key.upper()}")
        return next((value for value in places if value is not None), None)

    backend = one_line(str(named("dynamo_backend") or "no"))
    if backend.lower() not in ("no", "false") and not config.compile:
        yield warning(f"{where}: dynamo_backend {backend} is not used", "remove it; --compile compiles")
    places = dict.fromkeys(launch.json, launch.json_file)
    steps, clip = named("gradient_accumulation_steps"), named("gradient_clipping")
    if _differs(steps or 1, 1):
        place = places.get("gradient_accumulation_steps", where)
        what = f"{place}: gradient_accumulation_steps {one_line(str(steps))} is not used"
        yield warning(what, "remove it; --global-batch-size decides the rows of a step")
    if _differs(clip, config.max_grad_norm):
        place, norm = places.get("gradient_clipping", where), _number(clip)
        what = f"{place}: gradient_clipping {one_line(str(clip))} is not used"
        fix = "remove it" if norm is None else f"remove it, or set --max-grad-norm {norm:g}"
        yield warning(f"{what}, --max-grad-norm {config.max_grad_norm:g} is", fix)


def _differs(value: Any, wanted: float) -> bool:
    """Whether a launch names another number than `wanted`, or what is no number."""
    return value not in (None, "auto") and _number(value) != wanted


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _deepspeed(launch: Launch, where: str) -> Iterator[Finding]:
    """Report keys of DeepSpeed's JSON that the trainer's options decide, or that change what is learnt."""
    for key, why in _NOT_USED.items():
        if launch.json.get(key, "auto") != "auto":
            yield warning(f"{where}: {key} is not used", f"remove it; {why}")
    if _enabled(launch.json.get("torch_autocast") or {}):
        what = f"{where}: torch_autocast would compute in another precision than the run's"
        yield error(what, "remove it; its bf16 or fp16 section, or --mixed_precision, sets the precision")
    lossy = {key: launch.zero.get(key) for key in ("zero_quantized_weights", "zero_quantized_gradients")}
    lossy["communication_data_type"] = launch.json.get("communication_data_type")
    precision = (launch.named_precision or ("", ""))[0]
    if precision == "no":  # otherwise `describe` says how much the sums lose
        lossy["grad_accum_dtype"] = (launch.json.get("data_types") or {}).get("grad_accum_dtype")
    for key, value in lossy.items():
        if value and value not in ("auto", "fp32", precision):
            what = f"{where}: {key} {one_line(str(value).lower())}: gradients are less exact than under other launches"
            yield warning(what, "remove it, unless speed matters more")
    for key in _CHANGES_TRAINING:
        section = launch.json.get(key)
        if section and _enabled(section):
            yield error(f"{where}: {key} changes what a step learns", "remove it, or disable it")
    for key, flags in (("optimizer", "--learning-rate, --weight-decay"), ("scheduler", "--lr-scheduler")):
        if key in launch.json:
            yield error(f"{where}: {key} must not be set, because the trainer creates it", f"use {flags}")


def _refused(launch: Launch, where: str) -> Iterator[Finding]:
    """Report what DeepSpeed itself would refuse at the start: removed keys, and unknown ones within sections."""
    if not launch.json:
        return
    with quiet(None):  # as it is imported, it says which device it has found
        from deepspeed.runtime import config as settings
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
        from pydantic import ValidationError
    removed = {key: text for key, text in settings._REMOVED_TOP_LEVEL_CONFIG_KEYS.items() if key in launch.json}
    removed |= {key: text for key, text in settings._REMOVED_ZERO_CONFIG_KEYS.items() if key in launch.zero}
    for key, text in removed.items():
        yield error(f"{where}: {key}: DeepSpeed refuses it ({one_line(text.partition('. ')[0], 90)})", "remove it")
    models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    for section, model in models.items():
        problems: list[Any] = []
        try:
            model(**(launch.json.get(section) or {}))
        except ValidationError as refusal:
            problems = [problem for problem in refusal.errors() if not {*problem["loc"]} & {*_AUDITED, *removed}]
        for problem in problems:
            place = ".".join(map(str, (section, *problem["loc"])))
            if problem["type"] != "extra_forbidden":
                yield error(f"{where}: {place}: DeepSpeed refuses its value", one_line(problem["msg"], 80))
                continue
            fields = {**model.model_fields, **DeepSpeedZeroOffloadOptimizerConfig.model_fields}
            names = [field.alias or name for name, field in fields.items()]
            near = difflib.get_close_matches(str(problem["loc"][-1]), names, n=1)
            yield error(f"{where}: {one_line(place)} is unknown", f"did you mean {near[0]}?" if near else "remove it")


def _enabled(section: Any) -> bool:
    """Whether a section of DeepSpeed's JSON is in use: itself, or one inside of it, is not `"enabled": false`."""
    if not isinstance(section, dict) or "enabled" in section:
        return bool(section["enabled"] if isinstance(section, dict) else section)
    parts = [part for part in section.values() if isinstance(part, dict)]
    return any(map(_enabled, parts)) if parts else bool(section)


def _zero(config: TrainConfig, launch: Launch, where: str) -> Iterator[Finding]:
    if launch.json_file and "stage" not in launch.zero:
        yield error(f"{where}: zero_optimization.stage is missing", 'add "zero_optimization": {"stage": 2}, say')
    if launch.stage not in (0, 1, 2, 3):
        yield error(f"{where}: ZeRO stage {launch.stage} does not exist", "0, 1, 2 or 3")
    if launch.stage == 3 and config.compile:
        what = "--compile under ZeRO-3: DeepSpeed's hooks interrupt compiled code at each layer, so it saves little"
        yield warning(what, "leave it out, or use accelerate_configs/fsdp2.yaml")
    if launch.stage == 3 and not launch.gathers_16bit_weights:
        key = "stage3_gather_16bit_weights_on_model_save" if launch.json_file else "zero3_save_16bit_model"
        what = f"{where}: without {key} the export at the end of a ZeRO-3 run fails"
        yield error(what, f"add {key}: true")
    if (launch.json.get("zero_optimization") or {}).get("zenflow"):
        what = f"{where}: zenflow applies a part of each gradient some steps late: a step is no longer of its own rows"
        yield error(what, "remove it; offload_optimizer alone keeps every step exact")
    if launch.offload_ratio != 1:
        place = f"{where}: offload_optimizer ratio"
        if not 0 <= launch.offload_ratio <= 1:
            yield error(f"{place} is no number from 0 to 1", "the share of the optimizer that is on the host, as 0.5")
        elif launch.stage < 3 or launch.offload("optimizer") != "cpu":
            what = f"{place} {launch.offload_ratio:g}: only stage 3 with device cpu offloads a part"
            yield error(what, "remove it, or see accelerate_configs/z3_twin_flow.json")
    for what, least in (("optimizer", 1), ("param", 3)):
        device = launch.offload(what)
        needed = {"none": 0, "cpu": least, "nvme": 3}.get(device)
        if needed is None:
            yield error(f"{where}: offload_{what} {device} is unknown", "none, cpu or nvme")
        elif launch.stage < needed:
            line = f"{where}: offload_{what} to {device} needs stage {needed}, this is stage {launch.stage}"
            yield error(line, f"zero_stage: {needed}, or no offload")
