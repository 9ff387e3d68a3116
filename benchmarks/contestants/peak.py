"""Measures what matrix products reach on this machine, in turns with the trainers: the best of some products.

`products` of the settings has (tokens, inputs, outputs) of a layer's product; those of its backward are tried too.
`precisions` has the types. Each answer has FLOP/s, and which product it was, by type.
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
    """The least of LOOKS times."""
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
