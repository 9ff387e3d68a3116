"""Makes rows, and computes their loss and gradients in a batching's forwards."""

from __future__ import annotations

import copy

import numpy as np
import torch

from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.chat.encoded import Encoded

CPU = torch.device("cpu")
WAYS = [("shared", "rows"), ("shared", "cache"), ("packed", "rows"), ("padded", "causal"), ("padded", "mask")]


def batching_of(way, tokens, rows=None, **rest):
    layout, attention = way
    return Batching(layout, tokens, rows, attention=attention, **rest)


def rows(count=23, seed=0, instruction=12, longest=40, vocabulary=97):
    """Rows with a common instruction, one of few questions, so that some occur twice, and an answer."""
    draw = np.random.default_rng(seed)
    common = draw.integers(1, vocabulary, instruction).tolist()
    made = []
    for index in range(count):
        question = draw.integers(1, 4, draw.integers(1, 5)).tolist()
        answer = draw.integers(1, vocabulary, draw.integers(1, longest)).tolist()
        made.append(Encoded(index, common + question + answer, instruction + len(question)))
    return made


def computed_tokens(batching, examples):
    return sum(batching.way.tokens_in(rows) for rows in batching.divide(examples, 1)[0])


def loss_and_gradients(model, batching, examples, world_size=1):
    model = copy.deepcopy(model)
    total = 0.0
    for forwards in batching.divide(examples, world_size):
        for forward in forwards:
            part = nll_sum(model, batching.batch(forward, 0, CPU))
            part.backward()
            total += part.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}
