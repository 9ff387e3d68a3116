"""Imports bitsandbytes, for the 8-bit optimizer too, and loads a base whose linear layers are in 4 bits (QLoRA)."""

from typing import Any

import torch

from accel_sft.api.errors import UserError


def bitsandbytes(flag: str) -> Any:
    """The package bitsandbytes.

    Raises:
        UserError: it is not installed, or does not work here; the error names the `flag` that needs it.
    """
    try:
        import bitsandbytes as package
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(f"{flag}: needs bitsandbytes ({error}); pip install 'accel-sft[bitsandbytes]'") from None
    return package


def in_4bit(name: str, settings: Any, compute: torch.dtype) -> dict[str, Any]:
    """Arguments of transformers' from_pretrained for QLoRA (Dettmers et al., 2023): NF4, with its scales in 8 bits.

    Args:
        settings: the model's configuration.
        compute: the type that weights are dequantized to for each product.
    Raises:
        UserError: bitsandbytes is not there, or the checkpoint is quantized already.
    """
    from transformers import BitsAndBytesConfig

    bitsandbytes("--load-in-4bit")
    if getattr(settings, "quantization_config", None):
        raise UserError(f"--load-in-4bit: the weights of {name} are quantized already; leave it out, or name others")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    return {"quantization_config": quantization}


def keep_as_trained(model: Any) -> None:
    """Have 4-bit weights on a CPU keep, in evaluation, the form in which they are trained on.

    In evaluation, on a CPU that multiplies bfloat16, bitsandbytes 0.50 repacks the weights, rounds their inputs, and
    cannot train on the weights afterwards.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
