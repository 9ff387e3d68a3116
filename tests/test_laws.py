"""Law 1 on real processes: one curve for every layout."""

from __future__ import annotations

import pytest

STEPS = 6
JOB = ("math", "--max-steps", str(STEPS), "--global-batch-size", "10", "--validation-examples", "7")
JOB += ("--max-new-tokens", "6", "--seed", "7")
FP32 = ("--mixed_precision", "no")
ONCE = ("--eval-every", "off", "--save-every", "off")

LAYOUTS = {
    "plain": {},
    "ddp": {"yaml": "ddp", "launcher": FP32},
    "z0": {"yaml": "z0", "launcher": FP32},
    "z1": {"yaml": "z1", "launcher": FP32},
    "z2": {"yaml": "z2", "launcher": FP32},
    "z3": {"yaml": "z3", "launcher": FP32},
    "z2_offload": {"yaml": "z2_offload", "launcher": FP32},
    "z3_offload": {"yaml": "z3_offload", "launcher": FP32},
    "z2 alone": {"yaml": "z2", "launcher": (*FP32, "--num_processes", "1")},
}
MICRO = {"plain": "3", "ddp": "2", "z2": "2", "z3": "auto", "z1": "1"}


def layout(launched, name):
    """The reference job under a layout: the plain one in micro-batches of 3, others otherwise."""
    arguments = (*JOB, "--save-every", "3") if name in ("plain", "z2", "z3") else (*JOB, *ONCE)
    return launched(name, *arguments, "--micro-batch-size", MICRO.get(name, "auto"), **LAYOUTS[name])


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "plain"])
def test_every_layout_draws_the_same_curve(launched, name):
    reference, other = layout(launched, "plain").lines(), layout(launched, name).lines()
    assert [line["step"] for line in other] == list(range(1, STEPS + 1))
    for expected, line in zip(reference, other, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4)
        assert line["supervised_tokens"] == expected["supervised_tokens"]
        assert line["learning_rate"] == expected["learning_rate"]
