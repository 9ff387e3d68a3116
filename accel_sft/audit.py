"""What this launch really resolves to, and what is wrong with it, before anything is loaded.

`accelerate launch` hands its yaml over through environment variables and drops what it does not know without a word.
So the yaml itself is read again, its path taken from the launcher's own command line (our parent process).
"""

from __future__ import annotations

import ctypes.util
import dataclasses
import difflib
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accel_sft.config import TrainConfig
from accel_sft.options import UserError

OPERATORS = {
    "deepspeed_shm_comm": "ranks on a CPU exchange tensors through it, about 40 s",
    "cpu_adam": "the optimizer on the host, 1-4 minutes",
    "async_io": "NVMe offload, 1-3 minutes",
}
"""DeepSpeed operators that our configurations need, compiled on first use and kept per user."""

_YAML_DEEPSPEED = """
    deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter
    deepspeed_moe_layer_cls_names deepspeed_multinode_launcher gradient_accumulation_steps gradient_clipping
    offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path
    zero3_init_flag zero3_save_16bit_model zero_stage
"""
_YAML_FSDP = """
    activation_checkpointing activation_checkpointing_offload auto_wrap_policy backward_prefetch
    cpu_ram_efficient_loading forward_prefetch ignored_modules min_num_params offload_params reshard_after_forward
    sharding_strategy state_dict_type sync_module_states transformer_layer_cls_to_wrap use_orig_params version
"""
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


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to know about the launch. An `error` stops the run, a `warning` or a `note` is printed."""

    level: str
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what}: {self.mend}"


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launch as this rank sees it: what was asked for (command line, yaml, JSON) and what arrived (environment).

    Attributes:
        arguments: the launcher's own flags by name without dashes, `num_processes`; empty when there is no launcher.
        config_file, text, yaml: the `--config_file`, its text and its content.
        json_file, json: the DeepSpeed JSON the yaml names, and its content; None and {} without one.
        environment: the variables that `accelerate launch` sets for a rank.
    """

    arguments: Mapping[str, str]
    config_file: Path | None
    text: str
    yaml: Mapping[str, Any]
    json_file: Path | None
    json: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def world_size(self) -> int:
        return int(self.environment.get("WORLD_SIZE", 1))

    @property
    def local_world_size(self) -> int:
        return int(self.environment.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def machines(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    @property
    def backend(self) -> str:
        """`deepspeed`, `fsdp`, `megatron`, `ddp` or `plain`: which library runs the ranks."""
        for name in ("deepspeed", "fsdp", "megatron_lm"):
            if self.environment.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true":
                return name.removesuffix("_lm")
        return "ddp" if self.world_size > 1 else "plain"

    @property
    def zero(self) -> Mapping[str, Any]:
        """The JSON's `zero_optimization`, {} in the yaml form."""
        return self.json.get("zero_optimization") or {}

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 without DeepSpeed."""
        if self.backend != "deepspeed":
            return 0
        return int(self.zero.get("stage", 0) if self.json_file else self._deepspeed_variable("ZERO_STAGE", "2"))

    def offload(self, what: str) -> str:
        """Where `optimizer` or `param` is offloaded to: none, cpu or nvme."""
        if self.backend != "deepspeed":
            return "none"
        if self.json_file:
            return str((self.zero.get(f"offload_{what}") or {}).get("device", "none"))
        return self._deepspeed_variable(f"OFFLOAD_{what.upper()}_DEVICE", "none")

    def nvme_path(self, what: str) -> Path:
        """The folder for `optimizer` or `param` under NVMe offload. The launcher reads this key and never passes it
        on (accelerate 1.15), so it is taken from the command line or the yaml."""
        key = f"offload_{what}_nvme_path"
        inside = (self.zero.get(f"offload_{what}") or {}).get("nvme_path")
        named = self.arguments.get(key) or (self.yaml.get("deepspeed_config") or {}).get(key) or inside
        return Path(str(named or "nvme_offload"))

    @property
    def gathers_16bit_weights(self) -> bool:
        if self.json_file:
            return self.zero.get("stage3_gather_16bit_weights_on_model_save") is True
        return self._deepspeed_variable("ZERO3_SAVE_16BIT_MODEL", "false").lower() == "true"

    @property
    def precision(self) -> tuple[str, str]:
        """(`bf16`, `fp16`, `fp8` or `no`, what decided it). A JSON that says true or false beats the command line."""
        for name in ("bf16", "fp16"):
            if str((self.json.get(name) or {}).get("enabled")).lower() == "true":
                return name, f"{self.json_file}"
        value = self.environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        fixed = (self.json.get(value) or {}).get("enabled") if value in ("bf16", "fp16") else None
        if str(fixed).lower() == "false":
            return "no", f"{self.json_file}"
        if "mixed_precision" in self.arguments:
            return value, "--mixed_precision"
        if self.yaml.get("mixed_precision") is not None:
            return value, f"{self.config_file}"
        return value, "the default"

    def _deepspeed_variable(self, name: str, default: str) -> str:
        return self.environment.get(f"ACCELERATE_DEEPSPEED_{name}", default)


def read_launch(
    environment: Mapping[str, str] | None = None, command: list[str] | None = None, folder: Path | None = None
) -> Launch:
    """Read the launch this process is a rank of.

    Args:
        environment: instead of `os.environ`.
        command: the launcher's command line, instead of that of the nearest `accelerate launch` above this process.
        folder: where the launcher was started, for relative paths.
    Raises:
        UserError: the DeepSpeed JSON that the yaml names cannot be read.
    """
    import yaml

    environment = os.environ if environment is None else environment
    if command is None:
        command, folder = _launcher()
    folder = folder or Path.cwd()
    arguments = _arguments(command)
    config_file, text, content = arguments.get("config_file"), "", {}
    if config_file is None and command:
        config_file = _default_config_file(environment)
    if config_file is not None:
        text = (folder / config_file).read_text(encoding="utf-8")
        content = yaml.safe_load(text) or {}
    json_file, loaded = None, {}
    named = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if named and environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        json_file = Path(named)
        try:
            loaded = json.loads((folder / json_file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"deepspeed_config_file {named}: cannot be read as JSON: {error}") from None
    path = None if config_file is None else Path(config_file)
    return Launch(arguments, path, text, content, json_file, loaded, dict(environment))


def launcher_arguments() -> dict[str, str]:
    """The flags of the `accelerate launch` that started this process, without dashes; empty without one."""
    return _arguments(_launcher()[0])


def _launcher() -> tuple[list[str], Path | None]:
    """Command line and folder of the `accelerate launch` that started this process, ([], None) without one."""
    if "LOCAL_RANK" not in os.environ and "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return [], None
    import psutil

    for process in psutil.Process().parents():
        try:
            command = process.cmdline()
            if any(re.search(r"accelerate([-_.]|$)", Path(word).name) for word in command[:3]) or (
                len(command) > 2 and command[1] == "-m" and command[2].startswith("accelerate")
            ):
                return command, Path(process.cwd())
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return [], None


def _arguments(command: list[str]) -> dict[str, str]:
    """The launcher's own `--name value` flags. Those of the script are spelled with dashes we do not share."""
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


def _default_config_file(environment: Mapping[str, str]) -> str | None:
    """The file that `accelerate config` writes, used by a launch that names none."""
    cache = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(environment.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    path = home / "accelerate" / "default_config.yaml"
    return str(path) if path.is_file() else None


def device_count() -> int:
    """Accelerators that ranks can be spread over (0 on a CPU-only machine, and for Apple's, which joins no group)."""
    import torch

    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type == "mps":
        return 0
    return torch.accelerator.device_count()


def audit(config: TrainConfig, launch: Launch | None = None, devices: int | None = None) -> list[Finding]:
    """Everything to know about this launch before paying for it, errors first.

    Args:
        launch: instead of the one this process is a rank of.
        devices: accelerators visible, instead of counting them.
    Raises:
        UserError: the DeepSpeed JSON cannot be read.
    """
    launch = launch or read_launch()
    devices = device_count() if devices is None else devices
    found = [*_keys(launch), *_world(launch, devices), *_precision(launch, devices)]
    if launch.backend == "deepspeed":
        found += [*_ignored(launch, config), *_zero(launch, devices), *_operators(launch, devices)]
    return sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.level))


def refuse(findings: Iterable[Finding]) -> None:
    """Raise all errors among the findings together.

    Raises:
        UserError: one line an error.
    """
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors:
        raise UserError(*errors)


def _keys(launch: Launch) -> list[Finding]:
    """Keys that nobody reads: dropped in silence, so that the run is not the one that was described."""
    found = []
    if launch.config_file is None and launch.environment.get("ACCELERATE_MIXED_PRECISION"):
        what = "the launcher's yaml could not be found, so its keys were not checked"
        found.append(Finding("note", what, "start with accelerate launch --config_file FILE"))
    for section, known in (("deepspeed_config", _YAML_DEEPSPEED.split()), ("fsdp_config", _YAML_FSDP.split())):
        for key in launch.yaml.get(section) or {}:
            if key.removeprefix("fsdp_") not in known and key not in known:
                found.append(_unknown(f"{launch.config_file}: {section}.{key}", key.removeprefix("fsdp_"), known))
    found += [_unknown(f"{launch.json_file}: {key}", key, _JSON_DEEPSPEED.split()) for key in launch.json]
    return [finding for finding in found if finding]


def _unknown(where: str, key: str, known: list[str]) -> Finding | None:
    if key in known:
        return None
    near = difflib.get_close_matches(key, known, n=1)
    what = f"{where} is unknown, and would be ignored in silence"
    if near:
        return Finding("error", what, f"did you mean {near[0]}?")
    return Finding("error" if "_config." in where else "warning", what, "remove it")


def _world(launch: Launch, devices: int) -> list[Finding]:
    found = []
    where = launch.config_file or "the launch"
    asked = launch.arguments.get("num_processes") or launch.yaml.get("num_processes")
    if asked and int(asked) != launch.world_size:
        kind = launch.yaml.get("distributed_type")
        mend = "distributed_type MULTI_GPU (plain data parallel, on a CPU too) or DEEPSPEED starts several"
        if launch.machines > 1 or str(launch.arguments.get("num_machines", "1")) != "1":
            mend = "make --num_processes (all machines together) a multiple of --num_machines"
        found.append(
            Finding("error", f"{where}: {asked} processes asked for, {launch.world_size} started ({kind})", mend)
        )
    if devices and launch.local_world_size > devices:
        what = f"{launch.local_world_size} processes on this machine, {devices} GPUs"
        found.append(Finding("error", what, f"--num_processes {devices * launch.machines}"))
    if launch.backend == "fsdp" and not devices:
        what = f"{where}: FSDP needs GPUs; on a CPU each rank would train alone, in silence"
        found.append(Finding("error", what, "accelerate_configs/z2.yaml or z3.yaml run on a CPU"))
    if launch.backend == "megatron":
        found.append(Finding("error", f"{where}: MEGATRON_LM is not supported", "use DEEPSPEED, FSDP or MULTI_GPU"))
    dropped = launch.environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if launch.backend == "deepspeed" and dropped:
        what = "ACCELERATE_USE_CPU is set: Accelerate would drop DeepSpeed in silence"
        found.append(Finding("error", what, "unset it; DeepSpeed finds the CPU by itself"))
    if launch.yaml.get("use_cpu") and devices:
        what = f"{where}: use_cpu: true is ignored, {devices} GPUs will be used"
        found.append(Finding("warning", what, 'set CUDA_VISIBLE_DEVICES="" to train on the CPU'))
    if not launch.environment.get("ACCELERATE_MIXED_PRECISION"):
        what = "started without accelerate launch: one process, full precision"
        found.append(
            Finding("note", what, "accelerate launch --config_file accelerate_configs/z2.yaml -m accel_sft ...")
        )
    return found


def _precision(launch: Launch, devices: int) -> list[Finding]:
    found = []
    value, source = launch.precision
    asked = launch.environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    both = [name for name in ("bf16", "fp16") if str((launch.json.get(name) or {}).get("enabled")).lower() == "true"]
    if len(both) == 2:
        found.append(Finding("error", f"{launch.json_file}: fp16 and bf16 are both enabled", "enable one of them"))
    elif launch.json and asked != value:
        what = f"{source} fixes the precision to {value}, the launch says {asked}"
        level = "error" if "mixed_precision" in launch.arguments else "warning"
        found.append(Finding(level, what, 'write "enabled": "auto" there, then --mixed_precision decides'))
    if value == "fp8":
        found.append(Finding("error", f"mixed_precision fp8 ({source}) is not supported", "--mixed_precision bf16"))
    if value == "fp16" and not devices:
        found.append(Finding("error", f"mixed_precision fp16 ({source}) needs a GPU", "--mixed_precision bf16 or no"))
    if value == "bf16" and devices:
        import torch

        if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
            what = f"mixed_precision bf16 ({source}): this GPU computes it by emulation, slowly"
            found.append(Finding("warning", what, "--mixed_precision fp16, or no"))
    return found


def _ignored(launch: Launch, config: TrainConfig) -> list[Finding]:
    """Settings that DeepSpeed would take from the launch, and that are the trainer's own here."""
    found = []
    where = launch.json_file or launch.config_file or "the launch"
    steps = launch.json.get("gradient_accumulation_steps")
    steps = steps or launch.environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if str(steps) not in ("auto", "1"):
        mend = "remove it; --global-batch-size says what a step learns from"
        found.append(Finding("warning", f"{where}: gradient_accumulation_steps {steps} is not used", mend))
    clip = launch.json.get("gradient_clipping")
    clip = launch.environment.get("ACCELERATE_GRADIENT_CLIPPING", "auto") if clip is None else clip
    if clip != "auto" and float(clip) != config.max_grad_norm:
        what = f"{where}: gradient_clipping {clip} is not used, --max-grad-norm {config.max_grad_norm:g} is"
        found.append(Finding("warning", what, f"remove it, or say --max-grad-norm {clip}"))
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if launch.json.get(key, "auto") != "auto":
            mend = "remove it; --global-batch-size and --micro-batch-size decide"
            found.append(Finding("warning", f"{where}: {key} is not used", mend))
    for key, flags in (("optimizer", "--learning-rate, --weight-decay"), ("scheduler", "--lr-scheduler")):
        if key in launch.json:
            found.append(Finding("error", f"{where}: {key} belongs to the trainer", f"remove it; {flags} decide"))
    return found


def _zero(launch: Launch, devices: int) -> list[Finding]:
    found = []
    where = launch.json_file or launch.config_file or "the launch"
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return [Finding("error", f"{where} needs DeepSpeed, which is not installed", "pip install deepspeed")]
    if _numbers(version) < (0, 18, 3):
        what = f"DeepSpeed {version}: 0.17.6 to 0.18.2 compute wrong ZeRO-2 gradients, older ones are untested"
        found.append(Finding("error", what, "pip install -U deepspeed"))
    if launch.stage not in (0, 1, 2, 3):
        found.append(Finding("error", f"{where}: ZeRO stage {launch.stage} does not exist", "0, 1, 2 or 3"))
    if launch.stage == 3 and not launch.gathers_16bit_weights:
        key = "stage3_gather_16bit_weights_on_model_save" if launch.json_file else "zero3_save_16bit_model"
        what = f"{where}: without {key} the export at the end of a ZeRO-3 run fails"
        found.append(Finding("error", what, f"add {key}: true"))
    for what, least in (("optimizer", 1), ("param", 3)):
        device = launch.offload(what)
        if device not in ("none", "cpu", "nvme"):
            found.append(Finding("error", f"{where}: offload_{what} {device} is unknown", "none, cpu or nvme"))
        elif device != "none" and launch.stage < (3 if device == "nvme" else least):
            needed = 3 if device == "nvme" else least
            line = f"{where}: offload_{what} to {device} needs stage {needed}, this is stage {launch.stage}"
            found.append(Finding("error", line, f"zero_stage: {needed}, or no offload"))
    return found


def operators(launch: Launch, devices: int) -> list[str]:
    """The DeepSpeed operators this launch needs, by name."""
    if launch.backend != "deepspeed":
        return []
    places = {launch.offload("optimizer"), launch.offload("param")}
    needed = [] if devices else ["deepspeed_shm_comm"]
    needed += ["cpu_adam"] if launch.offload("optimizer") != "none" else []
    return needed + (["async_io"] if "nvme" in places else [])


def _operators(launch: Launch, devices: int) -> list[Finding]:
    """Can the operators be compiled, and will they be now? A failure surfaces minutes later inside ninja otherwise."""
    needed = operators(launch, devices)
    if not needed:
        return []
    found = []
    names = ", ".join(needed)
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        what = f"DeepSpeed compiles {names} here, and there is no C++ compiler ({compiler})"
        found.append(Finding("error", what, "install g++ (apt-get install g++), or use accelerate_configs/ddp.yaml"))
    elif (major := _compiler_major(compiler)) is not None and major < 9:
        what = f"DeepSpeed compiles {names} here, and {compiler} is GCC {major}"
        found.append(Finding("error", what, "GCC 9 or newer is needed; name it in CXX"))
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        what = f"DeepSpeed compiles {names} here, and Python's headers are missing"
        found.append(Finding("error", what, "install python3-dev for this Python (apt-get install python3-dev)"))
    if not shutil.which("ninja"):
        found.append(Finding("error", f"DeepSpeed compiles {names} here, and ninja is missing", "pip install ninja"))
    if "async_io" in needed and not _has_libaio():
        what = "NVMe offload needs libaio with its header, which is missing"
        found.append(Finding("error", what, "apt-get install libaio-dev, or use accelerate_configs/z3_offload.yaml"))
    if devices and "cpu_adam" in needed and not _has_nvcc():
        what = "the offloaded optimizer is compiled against CUDA, and nvcc is missing"
        found.append(Finding("error", what, "install the CUDA toolkit of torch's version and set CUDA_HOME"))
    for name in needed:
        folder = extensions_folder() / name
        lock = folder / "lock"
        if lock.exists() and time.time() - lock.stat().st_mtime > 60:  # younger: another rank of this launch
            what = f"{lock}: another process compiles {name}, or was killed while it did; this run will wait for it"
            found.append(Finding("warning", what, "delete the file if no other launch is running"))
        elif not (folder / f"{name}.so").is_file():
            what = f"DeepSpeed compiles {name} now ({OPERATORS[name]}), once per machine"
            found.append(Finding("note", what, "nothing to do but wait"))
    return found


def extensions_folder() -> Path:
    """Where torch keeps compiled operators, per Python and CUDA version."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    import sys

    import torch

    kind = "cpu"
    if torch.version.hip or torch.version.cuda:
        kind = f"rocm{torch.version.hip}" if torch.version.hip else f"cu{torch.version.cuda}"
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return cache / "torch_extensions" / f"{python}_{kind.replace('.', '')}"


@functools.cache
def _compiler_major(compiler: str) -> int | None:
    """GCC's major version, None for another compiler (Clang answers --version differently)."""
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    if "Free Software Foundation" not in answer:
        return None
    numbers = re.search(r"(\d+)\.\d+\.\d+", answer)
    return int(numbers.group(1)) if numbers else None


def _has_libaio() -> bool:
    named = re.findall(r"-I\s*(\S+)", os.environ.get("CFLAGS", "")) + os.environ.get("CPATH", "").split(":")
    folders = [*filter(None, named), "/usr/include", "/usr/local/include", sysconfig.get_paths()["data"] + "/include"]
    return any(Path(folder, "libaio.h").is_file() for folder in folders) and bool(
        ctypes.util.find_library("aio") or os.environ.get("LDFLAGS")
    )


def _has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return bool(shutil.which("nvcc")) or Path(home, "bin", "nvcc").is_file()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
