"""Counts the FLOPs (floating-point operations) that a model needs, and lists devices' peaks, for MFU and `plan`.

Model FLOPs utilization (MFU) is model FLOPs per second over the device's peak. FLOPs are counted as in NeMo AutoModel:

- A trained matrix takes 6 FLOPs for each element and token: 2 in the forward, 2 for the input's gradient, 2 for the
  matrix's gradient. A frozen matrix takes 4, an adapter's matrices take 6. Embeddings, norms and biases count as 0.
- Attention takes 12 for each query-key pair and each element of a query, because both of its products have two operands
  that need gradients; a row of T tokens has T^2 / 2 pairs. Under LoRA, AutoModel counts two thirds of that, although
  attention needs the same gradients: with 4,096 tokens and 8 billion parameters, the MFU here is 3% higher.
- The head counts for supervised tokens only, because the loss needs no other logits.
- A prefix that rows share counts once, because it is computed once; padding never counts. So MFU shows how well a
  device is used. Tokens per second count the prefix in each row, and show how much sharing saves.
- Recomputation by gradient checkpointing does not count: that would be hardware FLOPs utilization (HFU).

Only a token's chosen experts count. A vision tower counts as 0, a sliding window as full attention. A module that
`--lora-modules-to-save` trains in full counts as frozen.
"""

import dataclasses
import re
from typing import NamedTuple

from accel_sft.memory.job import Job


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """FLOPs that training takes per token, per supervised token (in addition), and per query-key pair."""

    token: float
    supervised_token: float
    pair: float

    def total(self, tokens: float, supervised_tokens: float, pairs: float) -> float:
        """FLOPs of these numbers of tokens (computed, without padding), supervised tokens and query-key pairs."""
        return self.token * tokens + self.supervised_token * supervised_tokens + self.pair * pairs


def model_flops(job: Job) -> ModelFlops:
    """The FLOPs of this job's model; they do not depend on the launch, or on gradient checkpointing."""
    shape, of_element = job.shape, 4 if job.is_frozen else 6
    head = shape.vocab_size * shape.hidden_size
    adapter = 6 * job.adapter_matrices if job.is_frozen else 0
    blocks = of_element * (shape.active_parameters - head)
    return ModelFlops(blocks + adapter, of_element * head, 12 * shape.layers * shape.heads * shape.head_dim)


class Peaks(NamedTuple):
    """A device's dense peaks in TFLOP/s by computing type, accumulating in float32; None for a type that it lacks.

    `link` is the rate, in GB/s, at which one GPU sends to the other GPUs of its machine: about 0.8 of NVLink's rate in
    one direction, or without NVLink the rate of PCIe 4.0 or 5.0. `host_link` is the rate between GPU and host.
    """

    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float
    link: float = 12
    host_link: float = 10


_NAMED = (
    (r"GB200", Peaks(2500, 2500, 1250, 80, 700, 100)),
    (r"B200", Peaks(2250, 2250, 1125, 75, 700, 40)),
    (r"H200 NVL", Peaks(835, 835, 417, 60, 40, 40)),
    (r"H100 NVL", Peaks(835, 835, 417, 60, 40, 40)),
    (r"H100 PCIe", Peaks(756, 756, 378, 51, 40, 40)),
    (r"GH200.*", Peaks(989, 989, 495, 67, 350, 100)),
    (r"H(100|200|800)( \d+GB HBM\w+)?", Peaks(989, 989, 495, 67, 350, 40)),
    (r"H20", Peaks(148, 148, 74, 44, 350, 40)),
    (r"A[18]00[ -]SXM.*", Peaks(312, 312, 156, 19.5, 230, 20)),
    (r"A[18]00[ -].*", Peaks(312, 312, 156, 19.5, 20, 20)),
    (r"A30", Peaks(165, 165, 82, 10.3)),
    (r"A10", Peaks(125, 125, 62, 31)),
    (r"A10G", Peaks(70, 70, 35, 31)),
    (r"(RTX )?A6000", Peaks(155, 155, 77, 39)),
    (r"A40", Peaks(150, 150, 75, 37)),
    (r"L4", Peaks(121, 121, 60, 30)),
    (r"L40S", Peaks(362, 362, 183, 92)),
    (r"L40", Peaks(181, 181, 91, 91)),
    (r"RTX 6000 Ada Generation", Peaks(364, 364, 182, 91)),
    (r"RTX PRO 6000 Blackwell Workstation Edition", Peaks(504, 504, 252, 126, 25, 40)),
    (r"GeForce RTX 3090", Peaks(71, 71, 36, 36)),
    (r"GeForce RTX 3090 Ti", Peaks(80, 80, 40, 40)),
    (r"GeForce RTX 4090", Peaks(165, 165, 83, 83)),
    (r"GeForce RTX 5090", Peaks(210, 210, 105, 105, 25, 40)),
    (r"V100-SXM.*", Peaks(None, 125, None, 15.7, 120)),
    (r"V100-PCIE.*", Peaks(None, 112, None, 14)),
    (r"T4", Peaks(None, 65, None, 8.1)),
)
"""Peaks by the device's full name without its maker, from NVIDIA's data sheets and white papers; sparse peaks are
halved. Slices of a device (MIG) and variants that are not listed are unknown."""


def peaks(device_name: str) -> Peaks | None:
    """The peaks of the device that torch and NVML call `name`; None for an unknown device."""
    name = re.sub(r"^(NVIDIA|Tesla) ", "", device_name)
    return next((row for pattern, row in _NAMED if re.fullmatch(pattern, name) and "MIG" not in name), None)


def peak_flops(device_name: str, precision: str) -> float | None:
    """The device's peak in FLOP/s at this precision; None if it is not known."""
    teraflops = getattr(peaks(device_name), precision, None) if precision in ("bf16", "fp16", "tf32", "fp32") else None
    return teraflops * 1e12 if teraflops else None
