"""Turns an exported PiSSA or OLoRA adapter, which began as a part of the weights, into a LoRA for the original ones."""

from pathlib import Path


def convert(folder: Path, start: Path) -> None:
    """Rewrite the adapter saved in `folder` as what it has learnt since `start`, at twice its rank.

    The difference to the original weights is B A - B0 A0 = [B, -B0] [A; A0]. peft's own conversion loads the start into
    the model as a second adapter, beside weights that DeepSpeed or FSDP may have sharded; this one works on files.

    Args:
        start: the file that `models.adapter_start.keep` wrote.
    """
    import torch
    from peft import LoraConfig
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    for name, before in load_file(start).items():
        if ".lora_A." in name:
            weights[name] = torch.cat([weights[name].float(), before], dim=0)
        else:
            weights[name] = torch.cat([weights[name].float(), -before], dim=1)
    save_file(weights, file, metadata={"format": "pt"})
    config = LoraConfig.from_pretrained(str(folder))
    config.r *= 2
    config.lora_alpha *= 2
    config.init_lora_weights = True
    config.save_pretrained(folder)
