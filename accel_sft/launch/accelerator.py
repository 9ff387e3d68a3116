"""Builds the Accelerator, prepares the model with it, and writes and verifies DeepSpeed's settings."""

import atexit
import contextlib
import dataclasses
import datetime
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch.distributed import PrefixStore, TCPStore, distributed_c10d, register_rendezvous_handler
from torch.nn.parallel import DistributedDataParallel

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.io.terminal import terminal, waiting, wrapped
from accel_sft.launch import groups
from accel_sft.launch.collectives import WITHOUT_LIMIT
from accel_sft.launch.deepspeed_ops import audit_locks, compiling, operators, spare_unused_operator
from accel_sft.launch.environment import WITHOUT_CUDNN, device_count, threads_per_process
from accel_sft.launch.info import Launch
from accel_sft.launch.launcher import restarts, under_launcher
from accel_sft.launch.parallelism import parallelism_config
from accel_sft.launch.precision import choose_precision


def create_accelerator(
    config: TrainConfig, launch: Launch, *, train: bool = True, precision_of_run: str | None = None
) -> tuple[Accelerator, Launch]:
    """Form the process group and build the Accelerator. Returns the Accelerator, and the launch with its precision.

    The trainer itself decides accumulation boundaries and the schedule, so DeepSpeed is configured with one micro-batch
    a step, never with the real batch. Without `train`, sequence parallelism is off: each rank has rows of its own.
    `precision_of_run` is the precision of the resumed or evaluated run, used if the launch names none.
    """
    _set_up_torch(config)
    devices = device_count()
    if launch.environment.get("LOCAL_RANK", "0") == "0":  # each machine compiles for itself
        for finding in (finding for name in operators(launch) for finding in audit_locks(name)):
            print(wrapped(f"{finding.level}: {finding}"), file=terminal(), flush=True)
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"  # this variable wins over Accelerator's argument
    group = _group_settings(config, launch, devices)
    plugin = _deepspeed_plugin(config, launch, devices) if launch.backend == "deepspeed" else None
    # make gradients views of DDP's communication buckets: separate gradients would take 4 more bytes a parameter
    handlers = [group, DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    cpu = launch.backend == "ddp" and not devices
    with _waiting_for_ranks(launch):
        state = PartialState(cpu, **group.to_kwargs())  # forms the process group
    launch = choose_precision(launch, state.device, precision_of_run)
    if plugin and launch.sums_in_float32:
        types = plugin.deepspeed_config.get("data_types") or {}  # the JSON may set other types and not this one
        plugin.deepspeed_config["data_types"] = {**types, "grad_accum_dtype": "fp32"}
    dimensions = parallelism_config(launch, train=train)
    accelerator = Accelerator(
        mixed_precision=launch.precision[0],
        deepspeed_plugin=plugin,
        cpu=cpu,
        kwargs_handlers=handlers,
        parallelism_config=ParallelismConfig(tp_size=1) if launch.tensor_ranks > 1 else dimensions,
    )
    if launch.tensor_ranks > 1:  # set afterwards: accelerate 1.15 refuses these sizes on CPUs
        accelerator.state.parallelism_config = dimensions
    if accelerator.is_fsdp2 and (policy := accelerator.state.fsdp_plugin.mixed_precision_policy):
        # only the computation has reduced precision: each token's loss and the averaged gradients stay in float32
        policy = dataclasses.replace(policy, output_dtype=None, reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    if accelerator.num_processes != launch.world_size:
        raise UserError(
            f"{launch.config_file or 'the launch'}: each of {launch.world_size} processes would train alone; start "
            "from accelerate_configs/ddp.yaml or z0.yaml to z3.yaml"
        )
    return accelerator, launch


def _set_up_torch(config: TrainConfig) -> None:
    """Set torch's threads and kernels (repeatable ones with `--deterministic`). Call this before CUDA starts."""
    if config.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # a fixed workspace: otherwise cuBLAS's sums may vary
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers passes it to the flash-attn package
        torch.use_deterministic_algorithms(True)
        # filling would only take time, because nothing reads uninitialized memory
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # a property
    torch.set_num_threads(threads_per_process())
    torch.backends.cuda.enable_cudnn_sdp(os.environ.get(WITHOUT_CUDNN[0]) != WITHOUT_CUDNN[1])


def _group_settings(config: TrainConfig, launch: Launch, devices: int) -> InitProcessGroupKwargs:
    group: dict[str, Any] = {}
    if restarts() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        register_rendezvous_handler("attempt", _rendezvous_of_this_attempt)  # type: ignore[no-untyped-call] # torch's
        group["init_method"] = "attempt://"
    if launch.world_size > 1:
        group["timeout"] = group_timeout(config.hang_timeout)
        # DeepSpeed, Ulysses and HSDP create groups without a timeout, some of them during training. NCCL's default
        # would end a rank after 600 s without naming the hung rank, so this timeout becomes the default
        distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = group["timeout"]
    if launch.backend == "deepspeed" and not devices:
        group["backend"] = "gloo"
    return InitProcessGroupKwargs(**group)


def _waiting_for_ranks(launch: Launch) -> contextlib.AbstractContextManager[None]:
    """Context manager that shows a line while a rank without a launcher waits: WORLD_SIZE may be set by mistake."""
    if launch.world_size == 1 or under_launcher():
        return contextlib.nullcontext()
    place = f"{launch.environment.get('MASTER_ADDR')}:{launch.environment.get('MASTER_PORT')}"
    return waiting(f"waiting for {launch.world_size} processes at {place}; unset WORLD_SIZE to start one process")


def group_timeout(hang_timeout: int) -> datetime.timedelta:
    """How long a rank may wait in a collective: longer than `--hang-timeout` (0: no limit), because the watchdog names
    the hung rank and torch's error does not, and at least an hour, because a rank may be downloading a model."""
    return datetime.timedelta(seconds=max(hang_timeout + 300, 3600)) if hang_timeout else WITHOUT_LIMIT


def _rendezvous_of_this_attempt(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and world size. The store's prefix hides addresses that the previous attempt wrote."""
    host, port, rank, ranks = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    store = TCPStore(host, int(port), int(ranks), is_master=False)
    yield PrefixStore(f"attempt-{restarts()}", store), int(rank), int(ranks)


def _deepspeed_plugin(config: TrainConfig, launch: Launch, devices: int) -> DeepSpeedPlugin:
    if not devices:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        spare_unused_operator()
    plugin = DeepSpeedPlugin(hf_ds_config=str(launch.json_file) if launch.json_file else None)
    resolved: dict[str, Any] = plugin.deepspeed_config
    resolved.update(
        train_micro_batch_size_per_gpu=1,
        train_batch_size="auto",
        gradient_accumulation_steps=1,
        gradient_clipping=float(config.max_grad_norm),
        zero_allow_untested_optimizer=True,
        wall_clock_breakdown=False,
        steps_per_print=sys.maxsize,
    )
    zero = resolved["zero_optimization"]
    if launch.json_file is None and launch.stage:
        zero.update(overlap_comm=bool(devices), contiguous_gradients=True, reduce_scatter=True)
        if launch.stage < 3:
            zero.update(reduce_bucket_size=int(2e8), allgather_bucket_size=int(2e8))
    for what in ("optimizer", "param"):
        place = launch.offload(what)
        if place == "none":
            zero.pop(f"offload_{what}", None)
        elif launch.json_file is None:
            zero[f"offload_{what}"]["pin_memory"] = bool(devices)
        if place == "nvme":
            zero[f"offload_{what}"]["nvme_path"] = str(own_folder(launch.nvme_path(what)))
    return plugin


def own_folder(root: Path) -> Path:
    """Make a folder for this process's swap files. It is removed at exit; after a kill, a later process removes it."""
    root.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    for left in root.glob(f"{host}-*"):
        number = left.name.rpartition("-")[2]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    folder = (root / f"{host}-{os.getpid()}").resolve()
    folder.mkdir(exist_ok=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def prepare_model(
    accelerator: Accelerator, launch: Launch, model: Any, optimizer: Any, max_grad_norm: float
) -> tuple[Any, Any]:
    """Call `accelerator.prepare`, keep the optimizer at step 0, and verify DeepSpeed's settings.

    DeepSpeed's stage 0 in half precision makes an optimizer step with zero gradients while its engine is built. This
    step would decay the weights, and Adam's bias correction would count it. So the learning rate is 0 meanwhile, and
    the optimizer's state is cleared afterwards.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _name_blocks(accelerator, model)
    with compiling(launch):
        model, optimizer = groups.prepare(accelerator, model, optimizer)
    if isinstance(model, DistributedDataParallel):
        # buffers (rotary position angles) are equal on all ranks; broadcasting them would make each forward wait
        model.broadcast_buffers = False
        _arrange_buckets(model)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    if type(optimizer.optimizer).__name__ in ("FP16_UnfusedOptimizer", "FP16_Optimizer"):
        optimizer.optimizer.optimizer.state.clear()
    _gather_with_their_modules(model)
    verify_engine(accelerator, launch, model, max_grad_norm)
    return model, optimizer


def _arrange_buckets(model: DistributedDataParallel) -> None:
    """Run a backward on zeros before the first step. DDP then rebuilds its buckets, and gradients are views of them."""
    # Otherwise DDP would rebuild them after the first step's backward, which multiplies gradients by 1/N, while later
    # backwards divide by N: on three or more ranks, a resumed run would have different bits. The gradients of the first
    # step would also need extra memory. The gradients of the weights' sum arrive in about the order of a real backward.
    model.reducer.prepare_for_backward([])
    total = torch.stack([weight.sum().float() for weight in model.parameters() if weight.requires_grad]).sum()
    (0 * total).backward()  # type: ignore[no-untyped-call] # torch's
    model.reducer._rebuild_buckets()


def _gather_with_their_modules(model: torch.nn.Module) -> None:
    """Make ZeRO-3 gather a module's ParameterDict entries (AdaLoRA's layers have them) before that module's forward.
    Otherwise DeepSpeed would gather them on access, in a different order than in the step that DeepSpeed recorded."""
    for module in model.modules():
        for child in module.children():
            for parameter in child.parameters() if isinstance(child, torch.nn.ParameterDict) else ():
                if hasattr(parameter, "ds_id"):
                    import deepspeed

                    deepspeed.zero.register_external_parameter(module, parameter)


def shard_for_evaluation(accelerator: Accelerator, model: Any) -> Any:
    """Prepare a model for evaluation only: ZeRO-3 or FSDP shards its weights over the ranks. Under tensor parallelism
    the weights are sharded already."""
    if groups.tensor_ranks(accelerator) > 1:
        return groups.prepare(accelerator, model)
    if not accelerator.is_fsdp2:
        model = accelerator.prepare(model)
        _gather_with_their_modules(model)
        return model
    _name_blocks(accelerator, model)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))  # FSDP2 needs an optimizer
    return model


def _name_blocks(accelerator: Accelerator, model: Any) -> None:
    """Name the blocks that FSDP shards one by one, unless the launch names them. Accelerate's own choice fails for
    models such as Gemma 3, which also name block classes of other models in the same family."""
    if accelerator.is_fsdp2 and (plugin := accelerator.state.fsdp_plugin).transformer_cls_names_to_wrap is None:
        classes = {type(module).__name__ for module in model.modules()}
        plugin.transformer_cls_names_to_wrap = sorted(classes & {*(getattr(model, "_no_split_modules", None) or ())})


def verify_engine(accelerator: Accelerator, launch: Launch, model: Any, max_grad_norm: float) -> None:
    """Raise UserError if a prepared DeepSpeed engine does not have the requested settings."""
    if launch.backend != "deepspeed":
        return
    precision = "bf16" if model.bfloat16_enabled() else "fp16" if model.fp16_enabled() else "no"
    pairs = {
        "ZeRO stage": (launch.stage, model.zero_optimization_stage()),
        "clipping": (float(max_grad_norm), float(model.gradient_clipping())),
        "gradient accumulation": (1, model.gradient_accumulation_steps()),
        "precision": (launch.precision[0], precision),
        "ranks": (accelerator.num_processes, model.seq_dp_world_size),
    }
    wrong = [f"{name}: DeepSpeed has {real}, not {wanted}" for name, (wanted, real) in pairs.items() if wanted != real]
    if wrong:
        raise UserError(*wrong)
