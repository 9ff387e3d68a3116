"""Law 1: which examples a step learns from depends on data, seed and global batch size, and on nothing else."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from models import make_tiny
from transformers import AutoModelForCausalLM

from accel_sft.chat import IGNORED, Encoded
from accel_sft.data import AUTO_MICRO_BATCH_TOKENS, StepPlan, collate, micro_batch_examples
from accel_sft.loss import nll_sum

GENERATOR = np.random.default_rng(0)
LENGTHS = GENERATOR.integers(4, 90, 23)
SUPERVISED = np.maximum(LENGTHS // 3, 1)


def plan(global_batch_size=5, epochs=3.0, max_steps=None, seed=1):
    return StepPlan(
        LENGTHS, SUPERVISED, seed=seed, global_batch_size=global_batch_size, epochs=epochs, max_steps=max_steps
    )


@pytest.mark.parametrize("global_batch_size", [1, 5, 23, 40])
@pytest.mark.parametrize("epochs", [1.0, 2.0, 3.0])
def test_every_example_is_seen_once_an_epoch(global_batch_size, epochs):
    steps = plan(global_batch_size, epochs)
    seen = np.concatenate([steps.examples(step) for step in range(steps.total_steps)])
    assert len(seen) == epochs * 23
    for epoch in np.split(seen, int(epochs)):
        assert sorted(epoch) == list(range(23))


def test_epochs_are_shuffled_differently_and_seeds_too():
    steps = plan(23, 2.0)
    assert list(steps.examples(0)) != list(steps.examples(1))
    assert list(steps.examples(0)) != list(plan(23, 2.0, seed=2).examples(0))


def test_a_step_is_a_pure_function():
    forward, backward = plan(), plan()
    steps = range(forward.total_steps)
    there = [list(forward.examples(step)) for step in steps]
    back = [list(backward.examples(step)) for step in reversed(steps)]
    assert there == back[::-1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 64])
def test_ranks_share_a_step_whole_and_in_equally_many_micro_batches(world_size, micro_batch_size):
    steps = plan(7)
    for step in range(steps.total_steps):
        shares = [
            steps.micro_batches(step, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
            for rank in range(world_size)
        ]
        assert len({len(batches) for batches, _ in shares}) == 1
        run = [row for batches, _ in shares for rows in batches for row in rows]
        assert sorted(run) == sorted(steps.examples(step))
        assert all(len(rows) <= micro_batch_size for batches, _ in shares for rows in batches)
        assert {total for _, total in shares} == {SUPERVISED[steps.examples(step)].sum()}


def test_ranks_carry_near_equal_tokens():
    steps = StepPlan(LENGTHS, SUPERVISED, seed=0, global_batch_size=20, epochs=1, max_steps=None)
    loads = [
        sum(LENGTHS[rows].sum() for rows in steps.micro_batches(0, rank=r, world_size=2, micro_batch_size=4)[0])
        for r in (0, 1)
    ]
    assert abs(loads[0] - loads[1]) <= LENGTHS.max() / 2


def test_the_epoch_ends_where_it_ends():
    steps = plan(5, 3.0)
    ends = [step for step in range(1, steps.total_steps + 1) if steps.ends_epoch(step)]
    assert ends == [math.ceil(23 * epoch / 5) for epoch in (1, 2, 3)]
    assert steps.epoch(steps.total_steps) == 3.0


def test_a_fraction_of_an_epoch_is_at_least_one_step():
    assert plan(5, 0.01).total_steps == 1
    assert len(plan(5, 0.01).examples(0)) == 1


def test_the_automatic_micro_batch_keeps_to_its_tokens():
    assert micro_batch_examples("auto", 100, 64, 2) == 32
    assert micro_batch_examples("auto", 2048, 64, 2) == AUTO_MICRO_BATCH_TOKENS // 2048
    assert micro_batch_examples("auto", 10**6, 64, 2) == 1
    assert micro_batch_examples("3", 10**6, 64, 2) == 3


EXAMPLES = [Encoded(0, [5, 6, 7, 8, 3], 3), Encoded(1, [5, 9, 3], 1)]


def test_labels_stand_on_answers_only_even_where_pad_is_the_end_of_turn():
    batch = collate(EXAMPLES, pad_token_id=3, device=torch.device("cpu"))
    assert batch["labels"].tolist() == [[IGNORED] * 3 + [8, 3], [IGNORED, 9, 3, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert batch["input_ids"][1].tolist() == [5, 9, 3, 3, 3]


def test_the_loss_is_that_of_the_supervised_tokens_and_padding_adds_none(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "tiny"))
    together = nll_sum(model, collate(EXAMPLES, 0, torch.device("cpu")))
    apart = [nll_sum(model, collate([example], 0, torch.device("cpu"))) for example in EXAMPLES]
    assert together.item() == pytest.approx(sum(part.item() for part in apart), rel=1e-5)

    by_hand = 0.0
    for example in EXAMPLES:
        ids = torch.tensor([example.input_ids])
        logs = model(ids).logits.log_softmax(-1)[0]
        by_hand -= sum(logs[t - 1, ids[0, t]].item() for t in range(example.prompt_length, ids.shape[1]))
    assert together.item() == pytest.approx(by_hand, rel=1e-5)


def test_a_micro_batch_without_examples_gives_a_connected_zero(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "tiny"))
    expected = copy.deepcopy(model)
    loss = nll_sum(model, collate([], 0, torch.device("cpu")))
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
