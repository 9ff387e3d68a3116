"""Muon for the matrices of a model's blocks or of an adapter, beside AdamW for everything else, as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon (Jordan et al., 2024) and torch.optim.AdamW over the same groups and the same states.

    Updates of Muon have the size of AdamW's (Liu et al., 2025, arXiv 2502.16982): learning rate and weight decay mean
    what they mean for AdamW.

    Args:
        groups: of parameters, with their `weight_decay`.
        matrices: those that Muon steps, each of two dimensions.
        adam: AdamW's learning rate, betas and eps.
    """

    def __init__(self, groups: list[dict[str, Any]], matrices: list[torch.nn.Parameter], adam: dict[str, Any]) -> None:
        chosen, parts = {id(matrix) for matrix in matrices}, []
        for group in groups:
            for of_muon in (True, False):
                if params := [p for p in group["params"] if (id(p) in chosen) is of_muon]:
                    parts.append({**group, "params": params, "of_muon": of_muon})
        self._optimizers: dict[bool, torch.optim.Optimizer] = {}
        if muon := [part for part in parts if part["of_muon"]]:
            rate = {"lr": adam["lr"], "adjust_lr_fn": "match_rms_adamw"}
            self._optimizers[True] = torch.optim.Muon(muon, **rate)
        if others := [part for part in parts if not part["of_muon"]]:
            self._optimizers[False] = torch.optim.AdamW(others, **adam, fused=True)
        owned = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        super().__init__(owned, {"fused": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One step of both."""
        assert closure is None
        for of_muon, optimizer in self._optimizers.items():
            # a library may have put other dictionaries in their place
            optimizer.param_groups = [group for group in self.param_groups if group["of_muon"] is of_muon]
            optimizer.state = self.state
            optimizer.step()


def within_blocks(model: Any) -> list[torch.nn.Parameter]:
    """The trained matrices but for embedding and head, which are tables of vectors, and for experts in one tensor,
    which torch's Muon does not take."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in tables]
