"""The reference job under FSDP2 on two CPU ranks."""

from places import SUPPORT
from safetensors.torch import load_file

FP32 = {"launcher": ("--mixed_precision", "no")}
SHARDED = {"yaml": "fsdp2", "module": "fsdp2_on_cpu", "environment": {"PYTHONPATH": str(SUPPORT)}, **FP32}


def weights(folder):
    (file,) = folder.glob("*.safetensors")
    return load_file(file)
