"""Follows the memory of a model on fake tensors by torch's MemTracker: the peak in each part of forward and backward.

MemTracker is not a public part of torch; tests/tools/test_plan_simulation.py tests what is relied on here.
"""

from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

_RESIDENT = {
    "weights": (_MemRefType.PARAM, _MemRefType.BUFFER),
    "gradients": (_MemRefType.GRAD,),
    "optimizer": (_MemRefType.OPT,),
}


class PeakTracker(MemTracker):
    """The peaks of transient memory in two parts of forward and backward, `blocks` and `head`.

    A weight's gradient is transient until it reaches the place where gradients are kept, which the gradients of earlier
    forwards have filled from the start. MemTracker's peaks by module, most of its work, are left out.
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
        # linear layer's gradient is a view, and further ones in place. Autograd makes a new tensor of fake ones each
        # time, so only the first addition counts here.
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
