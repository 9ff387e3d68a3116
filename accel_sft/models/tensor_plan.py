"""Checks that transformers' own plan cuts a model exactly over the ranks of tensor parallelism."""

import importlib.metadata
from typing import Any

from packaging.version import Version

from accel_sft.api.errors import UserError

_EXACT = """
    colwise colwise_gather_output colwise_rep embedding_rowwise rowwise rowwise_rep rowwise_split_input
"""
"""Styles of transformers 5.23's plans whose loss and gradients are one process's
(tests/launch/test_tensor_parallel.py). Not among them: `replicated_with_grad_allreduce`, which after a step's second
backward counts the first gradient once per rank."""
LOWEST_TORCH = "2.7"
"""Lowest torch under which transformers cuts weights: its distribute_tensor() has `src_data_rank`."""
_INSTEAD = "train with accelerate_configs/z3.yaml, which shares out any model's weights"


def check_plan(name: str, settings: Any, kind: Any, ranks: int, *, images: bool) -> None:
    """Raise UserError unless the model can be cut over this many ranks; call it before its weights are loaded.

    Args:
        settings: the model's configuration.
        kind: the auto class that loads it.
    """
    text = settings.get_text_config(decoder=True)
    of_class = getattr(kind._model_mapping.get(type(settings), None), "_tp_plan", None) or {}
    plan, problem = dict(getattr(text, "base_model_tp_plan", None) or {}), None
    heads = {"num_attention_heads": "attention heads", "num_key_value_heads": "heads of keys and values"}
    counts = {what: getattr(text, key, None) for key, what in heads.items()}
    uneven = [f"{count} {what}" for what, count in counts.items() if isinstance(count, int) and count % ranks]
    if images:
        problem = "the data has images, and plans cut language models only"
    elif not plan:
        problem = "transformers has no plan (base_model_tp_plan) for it"
    elif unknown := sorted({*plan.values(), *of_class.values()} - {*_EXACT.split()}):
        problem = f"its plan has styles that are not known to be exact here ({', '.join(unknown)})"
    elif uneven:
        problem = f"its {' and '.join(uneven)} cannot be divided among {ranks} ranks"
    elif getattr(settings, "quantization_config", None):
        problem = "its weights are quantized"
    if problem:
        raise UserError(f"--model {name}: tensor parallelism cannot cut it, {problem}; {_INSTEAD}")


def cut_over(ranks: int) -> dict[str, Any]:
    """Return the arguments of from_pretrained by which each rank loads its part, by the model's plan.

    Raises:
        UserError: the installed torch is too old for it.
    """
    if Version(found := importlib.metadata.version("torch")) < Version(LOWEST_TORCH):
        raise UserError(f"tensor parallelism needs torch {LOWEST_TORCH} or newer, and {found} is installed; {_INSTEAD}")
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks)}
