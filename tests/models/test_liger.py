"""Liger's kernels: refused where they cannot run, and where a model's loss or gradients would be others with them."""

from __future__ import annotations

import copy
import importlib.machinery
import sys
import types

import pytest
import torch
from accelerate import Accelerator
from click.testing import CliRunner
from forwards import rows
from transformers import AutoModelForCausalLM

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.batching.trial import Trial
from accel_sft.cli.group import cli
from accel_sft.models import kernels
from accel_sft.training.checks import use_liger_kernels


@pytest.fixture(scope="module")
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny)


def norm(self, hidden):
    """RMSNorm, in the order in which a kernel computes it."""
    return self.weight * (hidden * (hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())


def forgets_the_weight(self, hidden):
    return norm(self, hidden) / self.weight.detach()


def loses_gradients(self, hidden):
    return norm(self, hidden.detach()) + 0 * hidden


@pytest.fixture
def package(monkeypatch):
    """A liger-kernel whose one kernel, of RMSNorm, is the function given; it knows Qwen2 alone, as `tiny` is one."""

    def install(kernel):
        def put_in(model, *, cross_entropy, fused_linear_cross_entropy):
            assert not cross_entropy
            assert not fused_linear_cross_entropy
            if kernel is None:
                raise TypeError("Unsupported Qwen2 model type")
            for name, module in model.named_modules():
                if name.endswith("norm"):
                    kernel.__module__ = "liger_kernel.transformers.rms_norm"
                    module.forward = types.MethodType(kernel, module)

        patch = types.ModuleType("liger_kernel.transformers.monkey_patch")
        patch.MODEL_TYPE_TO_APPLY_LIGER_FN, patch._apply_liger_kernel_to_instance = {"qwen2": put_in}, put_in
        above = types.ModuleType("liger_kernel.transformers")
        above.monkey_patch = patch
        for name, module in {"liger_kernel": types.ModuleType("liger_kernel"), above.__name__: above}.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(kernels, "device_count", lambda: 1)

    return install


def trial(model, **settings):
    config = TrainConfig(**settings).resolved({"max_steps": 4})
    return Trial(Accelerator(cpu=True), copy.deepcopy(model), config, rows(), 0)


def test_what_cannot_be_is_refused_before_loading(monkeypatch, tmp_path):
    (line,) = TrainConfig(use_liger_kernel=True, compile=True).problems()
    assert line == "--use-liger-kernel and --compile would fuse the same layers: leave one of them out"
    command = ("math", "--train-examples", "8", "--use-liger-kernel", "--output-dir", str(tmp_path / "run"))
    with pytest.raises(UserError, match="--use-liger-kernel: its kernels need a GPU; leave it out"):
        CliRunner().invoke(cli, command, catch_exceptions=False)
    monkeypatch.setattr(kernels, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UserError, match=r"needs liger-kernel \(.*\); pip install 'accel-sft\[liger\]'"):
        kernels.liger()


def test_kernels_that_compute_the_same_are_used_and_compared(model, package):
    package(norm)
    subject = trial(model)
    line = use_liger_kernels(subject)
    assert line.startswith("Liger's kernels compute 9 layers: the loss of ")
    assert "of their norm" in line
    assert subject.model.model.norm.forward.__func__ is norm
    assert all(parameter.grad is None for parameter in subject.model.parameters())


@pytest.mark.parametrize("kernel", [forgets_the_weight, loses_gradients])
def test_kernels_that_compute_another_loss_or_gradient_are_refused(model, package, kernel):
    package(kernel)
    learnt = copy.deepcopy(model)
    torch.nn.init.uniform_(learnt.model.norm.weight)
    with pytest.raises(UserError, match=r"--use-liger-kernel: .* is off by .*; leave it out"):
        use_liger_kernels(trial(learnt))


def test_family_without_fitting_kernels_is_refused(model, package):
    package(None)
    with pytest.raises(UserError, match=r"do not fit this model of type qwen2 \(Unsupported Qwen2 model type\)"):
        use_liger_kernels(trial(model))
    other = copy.deepcopy(model)
    other.config.model_type = "bloom"
    with pytest.raises(UserError, match="no kernels for models of type bloom; leave it out"):
        use_liger_kernels(trial(other))
