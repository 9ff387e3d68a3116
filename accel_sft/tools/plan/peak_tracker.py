"""Memory of a model on fake tensors, as torch's MemTracker follows it: the peak of each part of a forward and backward.

MemTracker is not a public part of torch; tests/tools/test_plan_simulation.py holds what is relied on here.
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
    """Peaks of what comes and goes, by the part of a forward and backward in which they are: `blocks` or `head`.

    Gradients of weights count while they are on their way, and no more once they are where gradients are kept: those of
    earlier forwards are there from the start. Peaks by module, the most of the tracker's work, are left out.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.shapes = {parameter.shape for parameter in model.parameters() if parameter.requires_grad}
        self.added: set[torch.Size] = set()
        self.part, self.peaks = "blocks", {"blocks": 0, "head": 0}

    def begin(self, part: str) -> None:
        """From here on it is this part's peak."""
        self.part = part

    def passing(self) -> int:
        """Bytes of what comes and goes, now."""
        kinds = _MemRefType.ACT, _MemRefType.TEMP
        return sum(of_device[kind] for of_device in self._curr_mem_snap.values() for kind in kinds)

    def resident(self) -> dict[str, int]:
        """Bytes of `weights` (parameters and buffers), `gradients` and the `optimizer`'s state, now."""
        found = [*self.get_tracker_snapshot("current").values()]
        return {
            name: sum(of_device[kind] for of_device in found for kind in kinds) for name, kinds in _RESIDENT.items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Gradients of a weight that is used more than once are added up: the first two into a new tensor, for the
        # linear layer's is a view, then in place, which autograd does not do to fake tensors.
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled() and args[0].shape in self.shapes:
            if args[0].shape in self.added:
                return args[0]
            self.added.add(args[0].shape)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track_module_params_and_buffers(
        self, module: torch.nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        """Without the tracker's own hooks on gradients, which fail on frozen parameters."""
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
