"""The environment that `accelerate launch` hands to a rank, computed from a launch file without importing accelerate.

accelerate's own parser imports torch, which takes seconds. The rules here are those of accelerate 1.15, with the yaml's
oddities (a section's key applies whatever the backend, `enable_cpu_affinity` never does); a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.registry import suggestion

CONFIG_KEYS = """
    compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines gpu_ids
    main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity fp8_config
    deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16 tpu_name tpu_zone
    tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config
"""
"""Top-level keys of a launch file, in the order in which the launcher reads them. It refuses all others but two:"""
_OLD_KEYS = ("fp16", "dynamo_backend")
_BACKENDS = {"DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "MEGATRON_LM": "use_megatron_lm"} | {
    f"MULTI_{device}": "multi_gpu" for device in ("GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
}
"""The flag that a `distributed_type` stands for, first the ones that win over others."""
_ONE_PROCESS = ("NO", "MULTI_CPU")
_SWITCHES = ("cpu", "debug", "enable_cpu_affinity", "use_parallelism_config", *dict.fromkeys(_BACKENDS.values()))
_SWITCHES += ("dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")
_FLOATS = ("gradient_clipping",)
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
_DEEPSPEED = {
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "GRADIENT_CLIPPING",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_FSDP = {
    "version": "1",
    "sharding_strategy": "FULL_SHARD",
    "reshard_after_forward": True,
    "offload_params": False,
    "min_num_params": 100_000_000,
    "auto_wrap_policy": None,
    "transformer_layer_cls_to_wrap": None,
    "backward_prefetch": None,
    "state_dict_type": None,
    "forward_prefetch": False,
    "use_orig_params": True,
    "cpu_ram_efficient_loading": True,
    "sync_module_states": True,
    "activation_checkpointing": False,
    "activation_checkpointing_offload": False,
    "ignored_modules": None,
}
"""What the launcher hands over where the file names nothing; None: nothing."""
_AS_WRITTEN = """
    sharding_strategy auto_wrap_policy transformer_cls_to_wrap backward_prefetch state_dict_type ignored_modules
    deepspeed_config_file deepspeed_moe_layer_cls_names
"""
"""Values that are handed over as they are; all others in lower case."""
_DYNAMO = {"mode": "default", "use_fullgraph": False, "use_dynamic": False, "use_regional_compilation": False}


def rank_environment(content: Mapping[str, Any], flags: Mapping[str, str], where: str) -> dict[str, str]:
    """The variables that the launcher sets for the first rank of a machine.

    Left out are those that depend on the machine (addresses, ports, threads) and the details of fp8, Megatron-LM and
    parallelism_config, none of which this package trains with.

    Args:
        content: of the launch file.
        flags: the launcher's own, by name without dashes; they win over the file. The value of a switch is not read.
        where: the file, for errors.
    Raises:
        UserError: the launcher would refuse the file, or a value of it.
    """
    given: dict[str, Any] = {name: True if name in _SWITCHES else value for name, value in flags.items()}
    given |= {name: float(flags[name]) for name in _FLOATS if name in flags}
    args = _arguments(content, given, where)
    processes, machines = (_number(args, name, where) for name in ("num_processes", "num_machines"))
    precision = given.get("mixed_precision") or content.get("mixed_precision")
    if precision is None:
        precision = "fp16" if content.get("fp16") and "mixed_precision" not in content else "no"
    if precision not in ("no", "fp16", "bf16", "fp8"):
        quoted = " (in quotes: YAML reads a bare no as false)" if precision is False else ""
        raise UserError(f"{where}: mixed_precision {precision} is unknown; write bf16, fp16, fp8 or 'no'{quoted}")
    found = {"ACCELERATE_MIXED_PRECISION": str(precision)}
    if given.get("debug") or content.get("debug"):
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if args["gpu_ids"] not in (None, "all"):
        found["CUDA_VISIBLE_DEVICES"] = str(args["gpu_ids"])
    if args.get("enable_cpu_affinity"):
        found["ACCELERATE_CPU_AFFINITY"] = "1"
    backend = _backend(content, given, where)
    if backend == "use_deepspeed":
        from_file = given.get("mixed_precision") is None and content.get("mixed_precision") is not None
        fields = [*(content.get("deepspeed_config") or {}), *(["mixed_precision"] if from_file else [])]
        found |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields).lower()}
        found |= {f"ACCELERATE_{v}": _text(k, args[k]) for k, v in _DEEPSPEED.items() if args.get(k) is not None}
    else:
        found["ACCELERATE_DYNAMO_BACKEND"] = str(args.get("dynamo_backend") or "no").upper()
        found |= {f"ACCELERATE_DYNAMO_{k.upper()}": str(args.get(f"dynamo_{k}", v)) for k, v in _DYNAMO.items()}
    if backend == "use_fsdp":
        values = {key: args.get(f"fsdp_{key}", usual) for key, usual in _FSDP.items()}
        values["transformer_cls_to_wrap"] = values.pop("transformer_layer_cls_to_wrap")
        found["ACCELERATE_USE_FSDP"] = "true"
        found |= {f"FSDP_{key.upper()}": _text(key, value) for key, value in values.items() if value is not None}
    elif backend == "use_megatron_lm":
        found["ACCELERATE_USE_MEGATRON_LM"] = "true"
    if backend is None:
        return found | {"ACCELERATE_USE_CPU": str(bool(given.get("cpu") or content.get("use_cpu")))}
    if given.get("use_parallelism_config") or content.get("parallelism_config"):
        found["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    here = processes // machines
    rank = here * int(args.get("machine_rank") or 0) if machines > 1 else 0
    return found | {
        "WORLD_SIZE": str(here * machines),
        "LOCAL_WORLD_SIZE": str(here),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
    }


def launcher_flags(command: list[str]) -> dict[str, str]:
    """The launcher's own `--name value` flags, by name without dashes.

    Those before `-m` or `--module`; a script's flags with other names do no harm.
    """
    found: dict[str, str] = {}
    for index, word in enumerate(command):
        if (word == "-m" and index > 2) or word == "--module":
            break
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            if not value and index + 1 < len(command):
                value = command[index + 1]
            found.setdefault(name.replace("-", "_"), value)
    return found


def _arguments(content: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flags over the file, as the launcher merges them: a section's key stands beside those outside of it."""
    known = CONFIG_KEYS.split()
    for key in content:
        if key not in known and key not in _OLD_KEYS:
            raise UserError(f"{where}: {key}: the launcher knows no such key{suggestion(str(key), known)}")
    if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise UserError(f"{where}: compute_environment {content['compute_environment']}: write LOCAL_MACHINE")
    sections = dict(content)
    if content.get("dynamo_backend", "NO") != "NO":
        sections["dynamo_config"] = {"dynamo_backend": content["dynamo_backend"]}
    args = {"enable_cpu_affinity": False, "num_machines": given.get("num_machines"), "gpu_ids": None} | dict(given)
    for name in known:
        value, prefix = sections.get(name), _PREFIXES.get(name, "")
        if isinstance(value, dict):
            named = {key if key.startswith(prefix) else prefix + key: each for key, each in value.items()}
            args |= {key: each for key, each in named.items() if key not in given}
        elif args.get(name) is None:
            args[name] = value
    return args


def _backend(content: Mapping[str, Any], given: Mapping[str, Any], where: str) -> str | None:
    """The flag of the backend that starts the ranks; None: one process."""
    kind = content.get("distributed_type")
    kind = "NO" if kind is False else kind  # as YAML reads a bare NO
    if kind not in _BACKENDS and kind not in _ONE_PROCESS:
        near = suggestion(str(kind), _BACKENDS)
        raise UserError(f"{where}: distributed_type {kind} is not supported{near or '; write DEEPSPEED or MULTI_GPU'}")
    if "cpu" in given:
        return None
    return next((flag for flag in _BACKENDS.values() if flag in given), _BACKENDS.get(kind))


def _number(args: Mapping[str, Any], name: str, where: str) -> int:
    usual = {"num_machines": 1} | ({"num_processes": 1} if args["distributed_type"] in (*_ONE_PROCESS, False) else {})
    value = usual.get(name) if args.get(name) is None else args[name]
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise UserError(f"{where}: {name} {'is missing' if value is None else value}: give --{name} at least 1")
    return number


def _text(key: str, value: Any) -> str:
    return str(value) if key in _AS_WRITTEN.split() else str(value).lower()
