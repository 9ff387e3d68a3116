"""Measures the FLOP/s of this machine's fastest matrix product, in turns with the trainers.

The setting `products` has (tokens, inputs, outputs) of layers' products; their backward's products are tried too.
`precisions` has the types. Each answer maps a type to the highest FLOP/s and the product that reached it.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from gate import Gate

LOOKS = 3
settings = json.loads(sys.argv[1])
gate = Gate(settings)


def seconds(one: torch.Tensor, other: torch.Tensor) -> float:
    """The shortest of LOOKS measured times."""
    found = []
    for _ in range(LOOKS):
        started = time.perf_counter()
        one @ other
        found.append(time.perf_counter() - started)
    return min(found)


while True:
    peaks = {}
    for precision in settings["precisions"]:
        for tokens, inputs, outputs in settings["products"]:
            shapes = ((tokens, inputs), (outputs, inputs), (tokens, outputs))
            hidden, weight, gradient = (torch.randn(shape).to(getattr(torch, precision)) for shape in shapes)
            for pair in ((hidden, weight.T), (gradient, weight), (gradient.T, hidden)):
                reached = 2 * tokens * inputs * outputs / seconds(*pair)
                sizes = (*pair[0].shape, pair[1].shape[1])
                peaks[precision] = max(peaks.get(precision, (0.0, ())), (reached, sizes))
    gate.note(peaks=peaks)
    gate.boundary()
