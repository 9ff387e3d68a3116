"""Rehearses training on GPUs on a machine without one: the trainer's own code on fake CUDA tensors, as one of N ranks.

    python tests/support/rehearsal.py '[{"launch": "ddp", "adapter": "lora"}, ...]'

prints a line of JSON for each case (the fields of `Case`), with what a GPU would feel: where the host waits for it,
what is exchanged, how many operators are launched, in which precision products are, and the memory at its peak.
Fake tensors have shapes and no content; a fake process group exchanges nothing. What decides by content gets a
plausible value (`Watch`). Planted are the device (fake_cuda.py), the process group, the model's weights, and the kernel
of attention (`kernel_of`). All else between the launch file and the update is the trainer's, Accelerate's and
torch's own code.
"""

# ruff: noqa: E402, the device must be there before torch is imported

from __future__ import annotations

import fake_cuda

fake_cuda.load()

import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from places import CONFIGS
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed import DeviceMesh, device_mesh
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import import_utils

from accel_sft.api.config import TrainConfig
from accel_sft.batching.layouts import Batching
from accel_sft.chat.encoded import Encoded
from accel_sft.io.run_dir import RunDir
from accel_sft.launch import accelerator as launching
from accel_sft.launch.info import launch_of_this_process, launch_of_yaml
from accel_sft.models import cascade, load, prefix_attention
from accel_sft.models.cascade import VARLEN
from accel_sft.tracking.time_spent import OPTIMIZER
from accel_sft.training import step as training_step
from accel_sft.training.optimizer import Stepper, new_optimizer

SMALL: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
}
SETTINGS = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
LIBRARIES = ("accel_sft", "transformers", "accelerate", "peft")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"}
NO_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "lift_fresh", "set_"}
KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "broadcast_": "broadcast",
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One rehearsal.

    Attributes:
        rows: rows of a rank's step; `forwards` of them are accumulated.
        model: the content of a config.json.
        varlen: whether the GPU has the kernels of `attention: rows`.
    """

    launch: str = "ddp"
    ranks: int = 8
    adapter: str = "none"
    layout: str = "padded"
    attention: str = "mask"
    head: str = "pieces"
    gradient_checkpointing: bool = False
    precision: str = "bf16"
    rows: int = 4
    forwards: int = 2
    instruction: int = 24
    answer: int = 40
    steps: int = 2
    export: bool = True
    model: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(SMALL))
    varlen: bool = True


class Watch(TorchDispatchMode):
    """Counts, by part of the step, what a GPU would feel; lets operators go on that need a tensor's content.

    Attributes:
        part: what the trainer does now, from its own spans; the numbers of a step begin anew with `begin`.
        kept: how many elements of a boolean index are true.
        unmasked: whether batches come without a mask.
    """

    def __init__(self, unmasked: bool) -> None:
        super().__init__()
        self.part, self.kept, self.unmasked = "start", 0, unmasked
        self.begin()

    def begin(self) -> None:
        self.waits: list[tuple[str, str, str]] = []
        self.exchanges: list[tuple[str, str, int, int]] = []
        self.launches: Counter[str] = Counter()
        self.products: Counter[tuple[str, str, str]] = Counter()
        self.attention: Counter[str] = Counter()

    def wait(self, what: str) -> None:
        """Note that the host waits for the device here."""
        self.waits.append((self.part, what, _place()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):  # it calls operators on this rank's part
            return NotImplemented
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space:
            return self._exchange(name, func, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._content(func, args[0])
        if name == "_pin_memory":
            pinned = args[0].clone()
            pinned.is_pinned = lambda *device: True
            return pinned
        if name in ("_to_copy", "copy_"):
            self._copied(name, args, kwargs)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            args = (args[0], [part for index in args[1] for part in self._positions(index)], *args[2:])
        if name == "nonzero":
            self.wait("nonzero")
            return args[0].new_zeros((self.kept, args[0].ndim), dtype=torch.int64)
        if name == "_flash_attention_forward":
            self.attention[f"varlen, {str(args[0].dtype).removeprefix('torch.')}, bounds"] += 1
        result = func(*args, **kwargs)
        if name not in NO_KERNEL and not func.is_view and _on_device(result):
            self.launches[self.part] += 1
            if name in PRODUCTS:
                first = args[1] if name in ("addmm", "baddbmm") else args[0]
                dtype = str(first.dtype).removeprefix("torch.")
                self.products[self.part, dtype, _place() if dtype == "float32" else ""] += 1
        return result

    def _content(self, func: Any, tensor: torch.Tensor) -> Any:
        if tensor.device.type == "cuda":
            self.wait("item")
        elif tensor.constant is not None:
            return func(tensor)
        if tensor.dtype == torch.bool:
            # gradients are finite; rows without a mask are one sequence each; rows with one are padded
            return self.part == OPTIMIZER or self.unmasked
        return 1.0 if tensor.is_floating_point() else 1

    def _copied(self, name: str, args: Any, kwargs: Any) -> None:
        source = args[1] if name == "copy_" else args[0]
        into = (args[0].device if name == "copy_" else kwargs.get("device") or source.device).type
        free = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if source.device.type == "cuda" and into == "cpu" and not free:
            self.wait("copy to the host")
        if source.device.type == "cpu" and into == "cuda" and not (free and "is_pinned" in vars(source)):
            self.wait("copy from the host")

    def _positions(self, index: Any) -> list[Any]:
        """What stands for an index: a boolean one is turned into positions in each of its dimensions."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        self.wait("boolean index")
        return [index.new_zeros(self.kept, dtype=torch.int64) for _ in range(index.ndim)]

    def _exchange(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        size = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
        if name not in ("wait_tensor", "barrier"):
            kind = KINDS.get(name, name)
            if kind == "all-reduce":
                size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.exchanges.append((self.part, kind, size, _ranks(args)))
        return func(*args, **kwargs)


def _ranks(args: Any) -> int:
    """The number of ranks in the group that a collective is called for."""
    for argument in reversed(args):
        if isinstance(argument, str):
            return dist.distributed_c10d._resolve_process_group(argument).size()
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).size()
    return 0


def _on_device(result: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda" for leaf in tree_leaves(result))


def _place() -> str:
    """File and line of the innermost frame of this package or of a library above torch; of torch if there is none."""
    frame, lowest = sys._getframe(2), ""
    while frame := frame.f_back:
        parts = Path(
            frame.f_code.co_filename.rpartition("site-packages")[2]
        ).parts  # what is above may be named like a library
        for library in LIBRARIES:
            if library in parts and "support" not in parts:
                inside = parts[len(parts) - 1 - parts[::-1].index(library) :]
                return f"{'/'.join(inside)}:{frame.f_lineno}"
        if not lowest and "distributed" in parts:
            lowest = f"torch/{'/'.join(parts[parts.index('distributed') :])}:{frame.f_lineno}"
    return lowest or "torch's autograd"


def kernel_of(query: torch.Tensor, key: torch.Tensor, masked: bool, causal: bool) -> str:
    """The kernel that torch's scaled_dot_product_attention takes on an H100 while cuDNN's comes last.

    A torch without CUDA cannot be asked. The rules are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`
    (torch 2.6 to 2.13) in torch's order of preference, as far as this package's calls reach them.
    """
    half, size = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    oblong = causal and query.shape[2] != key.shape[2]
    if half and size <= 256 and not masked and not oblong:
        return "flash"
    if query.shape[1] == key.shape[1] and size % (8 if half else 4) == 0:
        return "efficient"
    return "cudnn" if half and size % 8 == 0 and size <= 256 and not oblong else "math"


def _attention(watch: Watch) -> Any:
    """Attention by `kernel_of`."""
    aten = torch.ops.aten

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cuda"):  # as autocast does for this function
            query, key, value = (each.to(torch.get_autocast_dtype("cuda")) for each in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(query.dtype)
        chosen = kernel_of(query, key, attn_mask is not None, is_causal)
        mask = "tensor" if attn_mask is not None else "causal" if is_causal else "none"
        watch.attention[f"{chosen}, {str(query.dtype).removeprefix('torch.')}, {mask}"] += 1
        if chosen == "flash":  # it reads each key head for several query heads, as its Meta function does
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if chosen == "efficient":
            if attn_mask is not None:
                if attn_mask.dtype == torch.bool:
                    shape = (*attn_mask.shape[:-1], -attn_mask.shape[-1] // 8 * -8)
                    added = query.new_zeros(shape)[..., : attn_mask.shape[-1]]
                    attn_mask = added.masked_fill_(~attn_mask, -math.inf)
                attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
            logsumexp = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, logsumexp, dropout_p, is_causal, scale=scale
            )[0]
        if query.shape[1] != key.shape[1]:
            key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale
        )[0]

    return attend


class Peak(MemTracker):
    """torch's tracker without its peaks by module, which are most of its work, and whose hooks fail on frozen weights.

    `by_part` has the largest total for each part of the step.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch, self.by_part = watch, {}

    def bytes_now(self) -> int:
        return sum(kinds["Total"] for device, kinds in self._curr_mem_snap.items() if device.type == "cuda")

    def _by_module(self, *arguments: Any) -> None: ...

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _by_module

    def _update_peak_stats(self, peak_state: Any) -> None:
        part = self.watch.part
        self.by_part[part] = max(self.by_part.get(part, 0), self.bytes_now())


def _model(case: Case) -> Any:
    """Replaces `pretrained`: a model on fake CUDA tensors, whose weights need not be loaded."""

    def made(name: str, config: TrainConfig, dtype: torch.dtype, **more: Any) -> Any:
        settings = AutoConfig.for_model(**case.model)
        settings._attn_implementation = "sdpa"
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(settings, dtype=dtype)

    return made


def _apply(module: torch.nn.Module, change: Any, recurse: bool = True) -> torch.nn.Module:
    """Replaces `Module._apply`, which cannot move fake tensors. The model is made on the device and in its precision,
    so only new adapters move, which are not tied to anything and not yet known to an optimizer."""
    for each in module.modules() if recurse else [module]:
        for name, tensor in (*each._parameters.items(), *each._buffers.items()):
            if tensor is None:
                continue
            with torch.no_grad():
                changed = change(tensor)
            if (changed.device, changed.dtype) != (tensor.device, tensor.dtype) and name in each._parameters:
                each._parameters[name] = torch.nn.Parameter(changed, tensor.requires_grad)
            elif name in each._buffers:
                each._buffers[name] = changed
    return module


def _rows(case: Case, number: int) -> list[Encoded]:
    """A step's rows for all ranks: a common instruction, and answers of different lengths."""
    draw = np.random.default_rng(number)
    rows = []
    for index in range(case.rows * case.ranks):
        answer = case.answer - index % 3
        ids = [*range(3, 3 + case.instruction), *draw.integers(3, case.model["vocab_size"], answer + 4).tolist()]
        rows.append(Encoded(index, ids, case.instruction + 4))
    return rows


def _over_ranks(model: Any, ranks: int) -> None:
    """Give DDP the exchange that it has by itself, but whose result is a tensor: a fake group's has none."""

    def reduced(state: Any, bucket: Any) -> torch.futures.Future:
        buffer = bucket.buffer()
        dist.all_reduce(buffer.div_(ranks))
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(buffer)
        return future

    # torch compares the annotations with its classes, not with strings
    reduced.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(None, reduced)
    model.reducer, model.logger = _Reducer(model.reducer), mock.Mock()  # the logger asks for the times of CUDA's events


def _real(function: Any) -> Any:
    """The function outside of all modes."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **options)

    return called


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """A mesh of ranks is a tensor that must have a content: it is made outside of all modes."""
    made = (_fully_shard, "_init_default_mesh"), (device_mesh, "init_device_mesh")
    with contextlib.ExitStack() as stack:
        for owner, name in (*made, (DeviceMesh, "__init__"), (DeviceMesh, "__getitem__")):
            stack.enter_context(mock.patch.object(owner, name, _real(getattr(owner, name))))
        yield


class _Reducer:
    """DDP's reducer, whose buckets stay as they are made: it would sort them anew by content."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


class Rehearsal:
    """The trainer's parts for one case, prepared."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        config = TrainConfig(
            model="rehearsal",
            adapter=case.adapter,
            attn_implementation="sdpa",
            gradient_checkpointing=case.gradient_checkpointing,
        ).resolved({})
        self.accelerator, launch = launching.create_accelerator(config, launch_of_this_process())
        source: Any = SimpleNamespace(weights=str(folder), adapter=None)
        with mock.patch.object(load, "pretrained", _model(case)):
            model = load.load_model(
                source, config, precision=self.accelerator.mixed_precision, deepspeed=False, total_steps=case.steps
            )
        optimizer = new_optimizer(model, config)
        arrange = launching._arrange_buckets

        def arranged(model: Any) -> None:
            _over_ranks(model, case.ranks)
            arrange(model)

        with mock.patch.object(launching, "_arrange_buckets", arranged):
            self.model, self.optimizer = launching.prepare_model(
                self.accelerator, launch, model, optimizer, config.max_grad_norm
            )
        if case.attention == "rows":
            prefix_attention.install()
            # a probe compares numbers, which fake tensors have not: the kernels pass it, as on an H100
            cascade._right.update({("cuda", size): case.varlen for size in VARLEN.sizes})
        stepper = Stepper(self.accelerator, self.model, self.optimizer, config.max_grad_norm)
        per_forward = case.rows // case.forwards
        longest = case.instruction + 4 + case.answer
        tokens = (
            per_forward * longest if case.layout != "shared" else case.instruction + per_forward * (4 + case.answer)
        )
        rows = per_forward if case.layout == "padded" else None
        batching = Batching(case.layout, tokens, rows, attention=case.attention, head=case.head)
        self.train_step = training_step.TrainStep(stepper, batching, 0, RunDir(folder), print)
        self.stepper = stepper

    def step(self, number: int) -> None:
        """One optimizer step, in the order of `Trainer.loop`."""
        rows = _rows(self.case, number)
        supervised = sum(row.supervised_tokens for row in rows)
        self.stepper.set_learning_rate(1e-4)
        share, oom = self.train_step.forward_backward(rows, supervised, number + 1)
        training_step.reduce_step(share, oom, 0, [0.0] * 4)
        self.stepper.update(number)


def _parts(watch: Watch) -> Any:
    """Replaces `record_function`, so that the trainer's own spans name the part of the step that runs."""

    class Span:
        def __init__(self, name: str) -> None:
            self.name = name.removeprefix("accel_sft: ")

        def __enter__(self) -> None:
            self.before, watch.part = watch.part, self.name

        def __exit__(self, *error: object) -> None:
            watch.part = self.before

    return Span


def rehearse(case: Case) -> dict[str, Any]:
    """Prepare and make the case's steps; returns what the last step counted."""
    for name in [name for name in os.environ if name.startswith(SETTINGS)]:
        del os.environ[name]
    flags = ("--main_process_port", "0", "--mixed_precision", case.precision, "--num_processes", str(case.ranks))
    told = launch_of_yaml(CONFIGS / f"{case.launch}.yaml", *flags).environment
    os.environ.update({name: value for name, value in told.items() if name.startswith(SETTINGS)})
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(case.ranks), LOCAL_WORLD_SIZE=str(min(case.ranks, 8)))
    AcceleratorState._reset_state(reset_partial_state=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
    watch = Watch(case.attention == "causal")
    kept = training_step.nll_sum

    def nll_sum(model: Any, batch: Any) -> torch.Tensor:
        watch.kept = len(batch.targets)
        return kept(model, batch)

    def tolist(tensor: FakeTensor) -> Any:
        if tensor.device.type == "cuda":
            watch.wait("tolist")
        return np.zeros(tuple(tensor.shape)).tolist()

    def gathered(objects: list[Any], mine: Any, group: Any = None) -> None:
        watch.exchanges.append((watch.part, "objects", 0, len(objects)))
        objects[:] = [mine] * len(objects)

    tracker = Peak(watch)
    with (
        mock.patch.object(dist, "all_gather_object", gathered),
        mock.patch.object(PartialState, "_prepare_backend", return_value=("fake", DistributedType.MULTI_GPU)),
        mock.patch.object(PartialState, "set_device", lambda state: setattr(state, "device", torch.device("cuda", 0))),
        mock.patch.object(training_step, "nll_sum", nll_sum),
        mock.patch.object(training_step, "_now"),  # it needs CUDA's events
        mock.patch.object(FakeTensor, "tolist", tolist),
        # else transformers would take the way of a traced model, which asks for no content
        mock.patch.object(import_utils, "is_fake_tensor", return_value=False),
        mock.patch.object(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention(watch)),
        mock.patch.object(torch.nn.Module, "_apply", _apply),
        _real_meshes(),
        mock.patch.object(torch.profiler, "record_function", _parts(watch)),
        mock.patch.object(torch.nn.parallel.distributed, "_verify_param_shape_across_processes"),
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory() as folder,
        FakeTensorMode(allow_non_fake_inputs=True),
        tracker,
        watch,
    ):
        warnings.simplefilter("ignore")
        job = Rehearsal(case, Path(folder))
        job.model.train()
        for number in range(case.steps):
            watch.begin()
            tracker.by_part.clear()
            watch.part = "between"
            job.step(number)
        found: dict[str, Any] = _counted(watch)
        found["peak"] = dict(tracker.by_part)
        found["trained"] = sum(each.numel() for each in job.model.parameters() if each.requires_grad)
        found["forward"] = job.train_step.largest_forward
        if case.export:
            watch.begin()
            watch.part = "export"
            job.accelerator.get_state_dict(job.model)
            found["export"] = _counted(watch)
    del job
    gc.collect()
    return found


def _counted(watch: Watch) -> dict[str, Any]:
    exchanges: dict[tuple[str, str, int], list[int]] = {}
    for part, kind, size, ranks in watch.exchanges:
        exchanges.setdefault((part, kind, ranks), []).append(size)
    return {
        "waits": [list(each) for each in watch.waits],
        "exchanges": [[*key, len(sizes), sum(sizes)] for key, sizes in exchanges.items()],
        "launches": dict(watch.launches),
        "products": [[*key, count] for key, count in watch.products.items()],
        "attention": dict(watch.attention),
    }


def main(cases: list[dict[str, Any]]) -> None:
    fake_cuda.plant(8)
    for case in cases:
        print(json.dumps({"case": case, **rehearse(Case(**case))}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
