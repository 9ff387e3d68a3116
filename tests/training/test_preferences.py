"""Pairs of answers: their tokens, their loss in every layout, launch and after a kill, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from forwards import CPU, WAYS, batching_of

from accel_sft.api.config import TrainConfig
from accel_sft.chat.encoded import Pair
from accel_sft.models.prefix_attention import install
from accel_sft.training.preference import Preference

install(CPU)


def pairs(count=9, instruction=12, seed=0):
    """Pairs with a common instruction, of which two have the same question."""
    draw, made = np.random.default_rng(seed), []
    common = draw.integers(1, 97, instruction).tolist()
    for index in range(count):
        prompt = common + draw.integers(1, 4, 1 + index % 4).tolist()
        chosen, rejected = (draw.integers(1, 97, draw.integers(1, 20)).tolist() for _ in range(2))
        both = len(prompt), len(prompt) + len(chosen)
        made.append(Pair(index, prompt + chosen + rejected, both[1], (both,)))
    return made


def preference(**settings):
    reference = -np.random.default_rng(1).random((9, 2), np.float32) * 40
    return Preference(TrainConfig(loss="dpo", **settings), reference)


def sums_and_gradients(model, loss, batching, examples, ranks=1):
    model, total = copy.deepcopy(model), 0.0
    for forward in (forward for rank in batching.divide(examples, ranks) for forward in rank):
        sums = loss(model, batching.batch(forward, 0, CPU), forward)
        sums[0].backward()
        total = total + sums.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("way", [*WAYS, ("packed", "alone")])
@pytest.mark.parametrize(("tokens", "rows", "checkpointing"), [(4096, None, False), (90, None, False), (0, 2, True)])
def test_every_layout_gives_the_loss_and_gradients_of_single_rows(model, way, tokens, rows, checkpointing):
    model = copy.deepcopy(model).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, examples = preference(dpo_sft_weight=0.3), pairs()
    if way[1] == "alone":  # a forward of one pair shares its prompt alone
        way, tokens, rows = ("packed", "rows"), 0, 1
    expected, wanted = sums_and_gradients(model, loss, batching_of(("padded", "mask"), 0, 1), examples)
    batching = batching_of(way, tokens, rows)
    got, gradients = sums_and_gradients(model, loss, batching, examples, ranks=3)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-5)
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).norm() <= 4e-6 * gradient.norm() + 1e-9, name
    if batching.way.one_sequence and way[0] != "padded":  # the prompt of a pair is computed once
        computed = [batching.way.tokens_in(forward) for forward in batching.divide(examples, 1)[0]]
        assert sum(computed) <= sum(len(row.input_ids) for row in examples)


def by_hand(model, ids, prompt):
    logs = model(torch.tensor([ids])).logits.log_softmax(-1)[0]
    return sum(logs[at - 1, ids[at]].item() for at in range(prompt, len(ids))), len(ids) - prompt


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
@torch.no_grad()
def test_the_loss_is_that_of_the_papers_by_hand(model, kind):
    loss = preference(dpo_beta=0.3, dpo_sft_weight=0.5)
    loss = dataclasses.replace(loss, config=dataclasses.replace(loss.config, loss=kind))
    examples, expected = pairs(), 0.0
    for row in examples:
        (chosen, tokens), (rejected, others) = (by_hand(model, s.input_ids, s.prompt_length) for s in row.sequences)
        gain, other_gain = chosen - loss.reference[row.index][0], rejected - loss.reference[row.index][1]
        if kind == "ipo":
            expected += (gain / tokens - other_gain / others - 1 / 0.6) ** 2
        else:
            expected -= math.log(1 / (1 + math.exp(-0.3 * (gain - other_gain))))
        expected -= 0.5 * chosen / tokens
    batching = batching_of(("shared", "rows"), 4096)
    assert loss(model, batching.batch(examples, 0, CPU), examples)[0].item() == pytest.approx(expected, rel=1e-5)
