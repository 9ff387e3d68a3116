"""The bytes that a real model's forward, backward and first optimizer step take, followed on fake tensors.

Fake tensors have shapes and use no memory, so a model of any size can be followed without a GPU. The closed form of
`accel-sft plan` is compared with this simulation, by benchmarks/plan_accuracy.py and by tests. It follows activations,
logits, what else a backward needs, weights, gradients and AdamW's state of one rank, if nothing shards them.

The fake tensors are on the CPU, because a torch built without CUDA crashes if autograd meets a fake CUDA tensor. CPU
operators keep the same tensors for the backward as GPU operators (fused attention, grouped products of experts), with
two exceptions that are corrected here: dropout's mask, and an attention mask that a GPU does not get.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from transformers import AttentionInterface, AutoConfig

from accel_sft.api.config import TrainConfig
from accel_sft.batching.collate import Batch
from accel_sft.batching.loss import nll_sum
from accel_sft.memory.job import AS_CONFIGURED, Job
from accel_sft.models.adapters import new_adapter
from accel_sft.models.architecture import without_adapter
from accel_sft.models.prefix_attention import rows_attention
from accel_sft.models.pretrained import class_of, freeze_beyond_text

_ATTENTION = "accel_sft_simulated"
"""Name of our attention in transformers, which makes no mask for an attention that it does not know."""
_RESIDENT = {
    "weights": (_MemRefType.PARAM, _MemRefType.BUFFER),
    "gradients": (_MemRefType.GRAD,),
    "optimizer": (_MemRefType.OPT,),
}


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Bytes of a job's largest forward and backward, and of one rank's model if nothing shards it.

    Attributes:
        kept: what the blocks keep at the end of their forward.
        in_head: the peak within head and loss, including `kept` and gradients of the head's weights in flight.
        in_blocks: the peak elsewhere, including `kept`, recomputed activations and gradients in flight.
        weights: parameters and buffers.
        gradients: gradients of all trained parameters.
        optimizer: AdamW's state after its first step.
    """

    kept: float
    in_head: float
    in_blocks: float
    weights: float
    gradients: float
    optimizer: float

    @property
    def logits(self) -> float:
        """What head and loss take at the overall peak; 0 if the peak is in the blocks."""
        return max(self.in_head - self.kept, 0.0) if self.in_head >= self.in_blocks else 0.0

    @property
    def activations(self) -> float:
        """The rest of the overall peak."""
        return max(self.in_head, self.in_blocks) - self.logits


def forward_backward(job: Job, config: Mapping[str, Any]) -> Simulated:
    """The bytes that the job's largest forward, its backward and the first optimizer step take.

    Args:
        config: the content of the model's config.json.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _on_meta(job, config)
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _run(job, _made_fake(job, model))


def _on_meta(job: Job, config: Mapping[str, Any]) -> Any:
    """The model that `models.load.load_model` makes, but without weights."""
    AttentionInterface.register(_ATTENTION, _attention)
    settings = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = class_of(settings).from_config(settings, dtype=_dtype(job, job.loaded_bytes))
        if job.is_frozen:
            chosen = TrainConfig(
                model="simulated",
                lora_target_modules=job.target_modules,
                **{name: getattr(job, name) for name in AS_CONFIGURED if name.startswith(("adapter", "lora", "use"))},
            )
            model = new_adapter(model, chosen, 100, lambda line: None)
    freeze_beyond_text(model, lambda line: None)
    if job.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if job.is_frozen:
            model.enable_input_require_grads()
    return model.to(_dtype(job, job.computes_bytes)) if job.launch.backend in ("deepspeed", "fsdp") else model


def _made_fake(job: Job, model: Any) -> Any:
    """The model on fake tensors, in training mode and in the launch's precision."""
    model.to_empty(device="cpu")
    base = without_adapter(model)
    base.tie_weights()
    if base.config._attn_implementation == "sdpa":
        base.set_attn_implementation(_ATTENTION)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            module.forward = _dropout(module.p)
    if job.autocast:  # as accelerate prepares a model
        forward = torch.autocast("cpu", dtype=_dtype(job, job.computes_bytes))(model.forward)
        model.forward = convert_outputs_to_fp32(forward)
    return model.train()


def _run(job: Job, model: Any) -> Simulated:
    tracker = PeakTracker(model)
    tracker.track_external(model)
    head = model.get_output_embeddings()
    kept: list[int] = []

    def enter_head(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        kept.append(tracker.passing())
        tracker.begin("head")
        inputs[0].register_hook(lambda gradient: tracker.begin("blocks"))

    handle = head.register_forward_pre_hook(enter_head)
    # our attention takes all rows packed into one; a model without fused attention takes padded rows
    in_one = without_adapter(model).config._attn_implementation == _ATTENTION
    batch = _batch(job, 1 if in_one else max(job.rows, 1))
    with tracker:
        nll_sum(model, batch).backward()
    handle.remove()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    with tracker:
        optimizer.step()
    in_head = tracker.peaks["head"]
    return Simulated(kept=kept[0], in_head=in_head, in_blocks=tracker.peaks["blocks"], **tracker.resident())


def _batch(job: Job, rows: int) -> Batch:
    """The largest forward as `rows` rows of equal length, the last tokens of each supervised."""
    length = max(job.tokens // rows, 2)
    supervised = min(max(job.supervised_tokens // rows, 1), length - 1)
    inputs: dict[str, Any] = {"input_ids": torch.zeros(rows, length, dtype=torch.long), "attention_mask": None}
    inputs["position_ids"] = torch.arange(length)[None].expand(rows, -1)
    keep, count = torch.arange(length - 1 - supervised, length - 1), rows * supervised
    return Batch(inputs, keep, torch.zeros(count, dtype=torch.long), job.head)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    *args: Any,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    more.pop("is_causal", None)
    return rows_attention(module, query, key, value, mask, *args, **more)


def _dropout(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Dropout as on a GPU, where the mask takes one byte for each element."""
    return lambda hidden: torch.native_dropout(hidden, share, True)[0]


def _dtype(job: Job, itemsize: int) -> torch.dtype:
    """float32 for 4 bytes; for 2 the half precision that the launch or `--dtype` names."""
    if itemsize == 4:
        return torch.float32
    return torch.float16 if "fp16" in (job.precision, job.dtype.replace("float", "fp")) else torch.bfloat16


class PeakTracker(MemTracker):
    """The peaks of transient memory in two parts of forward and backward, `blocks` and `head`.

    A weight's gradient is transient until it is added to the kept gradients, which earlier forwards have filled from
    the start. MemTracker's peaks by module, which are most of its work, are left out.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.shapes = {parameter.shape for parameter in model.parameters() if parameter.requires_grad}
        self.added: set[torch.Size] = set()
        self.part, self.peaks = "blocks", {"blocks": 0, "head": 0}

    def begin(self, part: str) -> None:
        """Count peaks for this part from now on."""
        self.part = part

    def passing(self) -> int:
        """Bytes of transient memory (activations and temporaries) now."""
        kinds = _MemRefType.ACT, _MemRefType.TEMP
        return sum(of_device[kind] for of_device in self._curr_mem_snap.values() for kind in kinds)

    def resident(self) -> dict[str, int]:
        """Bytes of `weights` (parameters and buffers), `gradients` and the `optimizer`'s state, now."""
        found = [*self.get_tracker_snapshot("current").values()]
        return {
            name: sum(of_device[kind] for of_device in found for kind in kinds) for name, kinds in _RESIDENT.items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A weight that is used more than once has its gradients added up: the first two into a new tensor, since a
        # linear layer's gradient is a view, and further ones in place. With fake tensors autograd makes a new tensor
        # each time, so only the first addition counts here.
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled() and args[0].shape in self.shapes:
            if args[0].shape in self.added:
                return args[0]
            self.added.add(args[0].shape)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track_module_params_and_buffers(
        self, module: torch.nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        """Replaces the tracker's own hooks on gradients, which fail on frozen parameters."""
        hooked = self._param_to_grad_hook_handles
        for parameter in module.parameters() if install_grad_hooks else ():
            if parameter.requires_grad and parameter not in hooked:
                marks = parameter.register_hook(self._is_gradient)
                hooked[parameter] = (
                    marks,
                    parameter.register_post_accumulate_grad_hook(lambda parameter: self._is_gradient(parameter.grad)),
                )
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    def _is_gradient(self, gradient: torch.Tensor) -> None:
        self._update_and_maybe_create_winfos(gradient, _MemRefType.GRAD)

    def _update_peak_stats(self, peak_state: Any) -> None:
        self.peaks[self.part] = max(self.peaks[self.part], self.passing())
