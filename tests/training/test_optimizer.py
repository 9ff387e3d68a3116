"""The learning rate of every step by value, and what AdamW does with a rate, its moments and weight decay."""

import math

import pytest
import torch

from accel_sft.api.config import TrainConfig, changed
from accel_sft.training.optimizer import new_optimizer
from accel_sft.training.state import learning_rate

HALF = 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 + math.cos(3 * math.pi / 4))
RATES = {
    "linear": ({"lr_scheduler": "linear", "warmup_ratio": 0.0}, [1, 0.75, 0.5, 0.25]),
    "cosine": ({"warmup_ratio": 0.0}, [1, *HALF]),
    "cosine after a started step": ({"warmup_ratio": 0.03}, [1, 1, *HALF]),  # 0.15 steps are one
    "constant after three": ({"lr_scheduler": "constant", "warmup_ratio": 0.5}, [1 / 3, 2 / 3, 1, 1, 1, 1]),
    "all warm-up": ({"warmup_ratio": 1.0}, [0.25, 0.5, 0.75, 1]),
    "steps win over the ratio": ({"warmup_ratio": 1.0, "warmup_steps": 2, "lr_scheduler": "constant"}, [0.5, 1, 1, 1]),
    "cosine to a tenth": ({"warmup_steps": 0, "min_lr_ratio": 0.1}, [1, *(0.1 + 0.9 * part for part in HALF)]),
    "wsd": ({"lr_scheduler": "wsd", "warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]),
    "wsd from its warm-up on": ({"lr_scheduler": "wsd", "decay_ratio": 1.0, "warmup_steps": 2}, [0.5, 1, 1, 0.5]),
}


@pytest.mark.parametrize("name", RATES)
def test_the_rate_of_every_step_by_value(name):
    settings, expected = RATES[name]
    config = TrainConfig(learning_rate=2e-3, **settings)
    assert config.problems() == []
    rates = [learning_rate(step, len(expected), config) for step in range(len(expected))]
    assert rates == pytest.approx([2e-3 * share for share in expected], rel=1e-12)


def test_run_without_recorded_rates_resumes_with_the_earlier_defaults():
    now = TrainConfig(learning_rate=1e-3).as_dict()
    before = {name: value for name, value in now.items() if name not in ("warmup_steps", "decay_ratio", "min_lr_ratio")}
    assert changed(before, now) == []
    assert len(changed(before, {**now, "min_lr_ratio": 0.1, "warmup_steps": 3})) == 2


def test_adamw_decays_matrices_only_at_its_rate_and_moments():
    model = torch.nn.Linear(3, 2)
    settings = {"learning_rate": 0.01, "adam_beta1": 0.7, "adam_beta2": 0.9, "weight_decay": 0.5}
    optimizer = new_optimizer(model, TrainConfig(**settings))
    assert type(optimizer) is torch.optim.AdamW
    assert [(group["params"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ([model.weight], 0.5),
        ([model.bias], 0.0),
    ]
    assert {(group["lr"], group["betas"], group["eps"]) for group in optimizer.param_groups} == {
        (0.01, (0.7, 0.9), 1e-8)
    }
