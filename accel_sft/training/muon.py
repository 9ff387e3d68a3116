"""Muon for the matrices of a model's blocks or of an adapter, beside AdamW for everything else, as one optimizer."""

from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon (Jordan et al., 2024) and torch.optim.AdamW as one optimizer, with common groups and state.

    Muon's updates are scaled to the size of AdamW's (Liu et al., 2025, arXiv 2502.16982), so learning rate and weight
    decay mean the same for both.

    Args:
        groups: groups of parameters, with their `weight_decay`.
        matrices: the parameters that Muon updates, each of two dimensions.
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
            self._optimizers[True] = torch.optim.Muon(muon, lr=adam["lr"], adjust_lr_fn="match_rms_adamw")
        if others := [part for part in parts if not part["of_muon"]]:
            self._optimizers[False] = torch.optim.AdamW(others, **adam, fused=True)
        owned = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        super().__init__(owned, {"fused": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step of both optimizers."""
        assert closure is None
        for of_muon, optimizer in self._optimizers.items():
            # a library may have replaced the groups' dictionaries
            optimizer.param_groups = [group for group in self.param_groups if group["of_muon"] is of_muon]
            optimizer.state = self.state
            optimizer.step()


def within_blocks(model: Any) -> list[torch.nn.Parameter]:
    """Return the matrices for Muon to update: not embedding and head, which are tables of vectors, and not experts
    that are stacked in one tensor, which torch's Muon does not take."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in tables]
