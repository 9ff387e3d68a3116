"""Liger's kernels and compiled blocks: used where they compute the same, and refused where they cannot run."""

from __future__ import annotations

import copy
import itertools
import sys
import types

import pytest
import torch
from accelerate import Accelerator
from click.testing import CliRunner
from forwards import rows
from transformers import LlamaConfig, LlamaForCausalLM

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.batching.trial import Trial
from accel_sft.cli.group import cli
from accel_sft.models import kernels
from accel_sft.training.checks import use_liger_kernels


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
        def put_in(model, **losses):
            assert losses == {"cross_entropy": False, "fused_linear_cross_entropy": False}
            if kernel is None:
                raise TypeError("Unsupported Qwen2 model type")
            for name, module in model.named_modules():
                if name.endswith("norm"):
                    kernel.__module__ = "liger_kernel.transformers.rms_norm"
                    module.forward = types.MethodType(kernel, module)

        functions = {"MODEL_TYPE_TO_APPLY_LIGER_FN": {"qwen2": put_in}, "_apply_liger_kernel_to_instance": put_in}
        monkeypatch.setattr(kernels, "liger", lambda: types.SimpleNamespace(**functions))

    return install


def trial(model, **settings):
    config = TrainConfig(**settings).resolved({"max_steps": 4})
    return Trial(Accelerator(cpu=True), copy.deepcopy(model), config, rows(), 0)


def test_what_cannot_be_is_refused_before_loading(monkeypatch, tmp_path):
    (line,) = TrainConfig(use_liger_kernel=True, compile=True).problems()
    assert line == "--use-liger-kernel and --compile would fuse the same layers: leave one of them out"
    command = ("math", "--train-examples", "8", "--use-liger-kernel", "--output-dir", str(tmp_path / "run"))
    with pytest.raises(UserError, match="--use-liger-kernel: Liger's kernels need a GPU; omit the option"):
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
    with pytest.raises(UserError, match="no kernels for models of type bloom; omit the option"):
        use_liger_kernels(trial(other))


@pytest.mark.long
def test_training_runs_compiled_after_more_variants_than_torchs_own_limit(monkeypatch):
    """The checks before the first step make forwards with and without gradients, dropout and masks."""
    compile_one = torch.nn.Module.compile  # no code is generated for the graphs, as their guards alone are at stake
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compile_one(self, backend="eager", **options)
    )
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model, ids = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **shape)), torch.arange(12)
    masks = [None, torch.ones(2, 6), torch.ones(2, 1, 6, 6).bool().tril(), torch.zeros(2, 1, 6, 6)]
    dynamo = torch._dynamo.config
    torch._dynamo.reset()
    with dynamo.patch(recompile_limit=dynamo.recompile_limit, fail_on_recompile_limit_hit=True):
        kernels.compile_blocks(model)
        for training, gradients, mask in itertools.product((True, False), (True, False), masks):
            model.train(training)
            with torch.set_grad_enabled(gradients):
                model(input_ids=ids.view(2, 6), attention_mask=mask, use_cache=False)
    torch._dynamo.reset()


def test_a_model_that_names_no_repeated_blocks_is_not_compiled():
    with pytest.raises(UserError, match=r"--compile: the model does not name its repeated blocks"):
        kernels.compile_blocks(torch.nn.Linear(2, 2))
