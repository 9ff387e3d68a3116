"""`--compile`: what is trained runs compiled, also after the checks before the first step."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accel_sft.models import kernels


@pytest.fixture
def runs(monkeypatch):
    """Counts the calls of compiled graphs; nothing is generated for them, as their guards alone are at stake."""
    counted = []

    def backend(graph, _):
        return lambda *inputs: counted.append(1) or graph.forward(*inputs)

    compile_one = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compile_one(self, backend=backend, **options)
    )
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield counted
    torch._dynamo.reset()


def tiny_llama():
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **shape))


def every_variant(model):
    """Forwards as the checks before the first step make them: with and without gradients, dropout, masks."""
    ids = torch.arange(12).view(2, 6) % 60
    masks = [None, torch.ones(2, 6), torch.ones(2, 1, 6, 6).bool().tril(), torch.zeros(2, 1, 6, 6)]
    for training, gradients, mask in itertools.product((True, False), (True, False), masks):
        model.train(training)
        with torch.set_grad_enabled(gradients):
            model(input_ids=ids, attention_mask=mask, use_cache=False)


def test_training_runs_compiled_after_more_variants_than_torchs_own_limit(runs):
    model = tiny_llama()
    kernels.compile_blocks(model)
    every_variant(model)
    runs.clear()
    model.train()
    model(input_ids=torch.arange(14).view(2, 7) % 60, use_cache=False).logits.sum().backward()
    assert len(runs) == model.config.num_hidden_layers
