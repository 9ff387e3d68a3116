"""Computes the variables that `accelerate launch` gives a rank and `Launch` reads, without importing accelerate.

accelerate's own parser imports torch, which takes seconds. The rules here are those of accelerate 1.15, with an
oddity of its yaml: a section's key applies whatever the backend is. A test compares the results of both.
"""

from collections.abc import Collection, Mapping
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.registry import suggestion
from accel_sft.io.text import one_line
from accel_sft.launch.launcher import PRECISION, is_launcher

CONFIG_KEYS = """
    compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines gpu_ids
    main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity fp8_config
    deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16 tpu_name tpu_zone
    tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config
"""
"""Top-level keys of a launch file. The launcher refuses all others except `_OLD_KEYS`."""
_OLD_KEYS = ("fp16", "dynamo_backend")
_SECTIONS = ("deepspeed_config", "parallelism_config", "megatron_lm_config", "mpirun_config")
"""Sections of a launch file whose keys count as top-level keys; in the other sections keys have a prefix."""
_BACKENDS = {"DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "MEGATRON_LM": "use_megatron_lm"} | {
    f"MULTI_{device}": "multi_gpu" for device in ("GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
}
"""The launcher's flag for each `distributed_type`; an earlier flag wins over later ones."""
_ONE_PROCESS = ("NO", "MULTI_CPU")
DIMENSIONS = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
"""Dimensions of Accelerate's ParallelismConfig; each has a size in ranks."""
_MOST = 1_000_000
"""Largest number of processes, machines or ranks that is accepted."""
_PREFIXED = ("fsdp_config",)
"""Sections that are read here and whose keys have the section's prefix, which a file may leave out."""
_DEEPSPEED = {
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "GRADIENT_CLIPPING",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "DEEPSPEED_CONFIG_FILE",
}


def rank_environment(content: Mapping[str, Any], flags: Mapping[str, str], where: str) -> dict[str, str]:
    """The variables that the launcher sets for the first rank of a machine, as far as this package reads them.

    Args:
        content: the launch file's content.
        flags: the launcher's own, by name without dashes; they win over the file. The value of a switch is not read.
        where: the file, for errors.
    Raises:
        UserError: the launcher would refuse the file, or a value of it.
    """
    args = _arguments(content, flags, where)
    processes, machines = (_number(args, name, where) for name in ("num_processes", "num_machines"))
    found = {PRECISION: _precision(args, where)}
    backend = _backend(args, where)
    if backend is None:
        return found | {"ACCELERATE_USE_CPU": str("cpu" in args or bool(args.get("use_cpu")))}
    if backend != "multi_gpu":
        found[f"ACCELERATE_{backend.upper()}"] = "true"
    for key, variable in _DEEPSPEED.items() if backend == "use_deepspeed" else ():
        if args.get(key) is not None:
            value = str(args[key])
            found[f"ACCELERATE_{variable}"] = value if key == "deepspeed_config_file" else value.lower()
    if backend == "use_fsdp":
        found["FSDP_VERSION"] = str(args.get("fsdp_version", 1))
        found["FSDP_OFFLOAD_PARAMS"] = str(args.get("fsdp_offload_params", False)).lower()
    if _names_parallelism(content, flags):
        found["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        for name in DIMENSIONS:
            key = f"parallelism_config_{name}_size"
            found[key.upper()] = str(_number({key: args.get(key, 1)}, key, where))
    if processes < machines:
        raise UserError(f"{where}: num_processes {processes} on {machines} machines: give at least one for each")
    here = processes // machines
    machine = args.get("machine_rank") or 0
    if not str(machine).isdecimal():
        raise UserError(f"{where}: machine_rank {one_line(str(machine))}: give --machine_rank a number, from 0")
    rank = here * int(machine) if machines > 1 else 0
    return found | {
        "WORLD_SIZE": str(here * machines),
        "LOCAL_WORLD_SIZE": str(here),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
    }


def launcher_flags(command: list[str]) -> dict[str, str]:
    """The launcher's own `--name value` flags, by name without dashes.

    Words from `-m` or `--module` on are not read. A script's own flags are read too, but have other names.
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


def own_words(command: list[str], without: Collection[str] = ()) -> list[str]:
    """Return the launcher's flags as they were typed, up to the module that it starts; [] if it starts a script.

    Args:
        without: flags, by name without dashes, that are left out together with their values.
    """
    begin = next((at + 1 for at, word in enumerate(command[:3]) if is_launcher(word)), len(command))
    begin += command[begin : begin + 1] == ["launch"]
    end = next((at for at in range(begin, len(command)) if command[at] in ("-m", "--module")), begin)
    kept: list[str] = []
    skip = False
    for word in command[begin:end]:
        name, equals, _ = word.partition("=")
        left_out = word.startswith("--") and name[2:].replace("-", "_") in without
        if not skip and not left_out:
            kept.append(word)
        skip = left_out and not equals
    return kept


def _arguments(content: Mapping[str, Any], flags: Mapping[str, str], where: str) -> dict[str, Any]:
    """The settings as the launcher merges them: flags win over the file's sections, and these over its other keys."""
    known = CONFIG_KEYS.split()
    for key in content:
        if key not in known and key not in _OLD_KEYS:
            shown = one_line(str(key))
            raise UserError(f"{where}: {shown}: the launcher knows no such key{suggestion(str(key), known)}")
    if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        shown = one_line(str(content["compute_environment"]))
        raise UserError(f"{where}: compute_environment {shown}: write LOCAL_MACHINE")
    args = dict(content)
    for name in _SECTIONS:
        if isinstance(content.get(name), dict):
            args |= content[name]
    for name in _PREFIXED:
        prefix, section = name.removesuffix("_config"), content.get(name)
        for key, value in section.items() if isinstance(section, dict) else ():
            args[key if key.startswith(prefix) else f"{prefix}_{key}"] = value
    args |= flags
    if "gradient_clipping" in flags:
        args["gradient_clipping"] = float(flags["gradient_clipping"])  # as the launcher's parser reads it
    return args


def _names_parallelism(content: Mapping[str, Any], flags: Mapping[str, str]) -> bool:
    """Whether the launcher hands sizes of dimensions to ranks; if a flag names a backend, the file's do not count."""
    named = any(flag in flags for flag in _BACKENDS.values())
    return "use_parallelism_config" in flags if named else content.get("parallelism_config", {}) != {}


def _precision(args: Mapping[str, Any], where: str) -> str:
    before = "fp16" if args.get("fp16") and "mixed_precision" not in args else "no"
    precision = before if args.get("mixed_precision") is None else args["mixed_precision"]
    if precision not in ("no", "fp16", "bf16", "fp8"):
        quoted = " (in quotes: YAML reads a bare no as false)" if precision is False else ""
        shown = one_line(str(precision))
        raise UserError(f"{where}: mixed_precision {shown} is unknown; write bf16, fp16, fp8 or 'no'{quoted}")
    return precision


def _backend(args: Mapping[str, Any], where: str) -> str | None:
    """Return the flag of the backend that starts the ranks; None if one process is started."""
    kind = args.get("distributed_type")
    kind = "NO" if kind is False else kind  # as YAML reads a bare NO
    if not isinstance(kind, str) or kind not in (*_BACKENDS, *_ONE_PROCESS):
        kind = one_line(str(kind))
        near = suggestion(kind, _BACKENDS)
        raise UserError(f"{where}: distributed_type {kind} is not supported{near or '; write DEEPSPEED or MULTI_GPU'}")
    if "cpu" in args:
        return None
    return next((flag for flag in _BACKENDS.values() if flag in args), _BACKENDS.get(kind))


def _number(args: Mapping[str, Any], name: str, where: str) -> int:
    value: Any = args.get(name)
    if value is None and (name == "num_machines" or args.get("distributed_type") in (*_ONE_PROCESS, False)):
        return 1
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if not 1 <= number <= _MOST:
        found = "is missing" if value is None else f"is beyond {_MOST:,}" if number > _MOST else one_line(str(value))
        raise UserError(f"{where}: {name} {found}: give --{name} at least 1")
    return number
