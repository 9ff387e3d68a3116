"""The closed form against a model followed on fake tensors, and fake tensors against real ones."""

import itertools
import statistics

import pytest
import torch
from conftest import AS_COUNTED
from planned import allocated, job_of, model
from transformers import AutoConfig, AutoModelForCausalLM

from accel_sft.batching import collate, loss
from accel_sft.memory.activations import peak_bytes
from simulated_memory import forward_backward

GIB = 2**30
SMALL = model("qwen2", 128, 384, 3, 4, 2, 2048, tied=True)
LARGE = model("qwen2", 1024, 4096, 2, 16, 8, 50_000, tied=True, head_dim=64, pad_token_id=0)
EXPERTS = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
}


def job(config, launch="z0", **more):
    return job_of(config, launch, **{"tokens": 512, "supervised_tokens": 300, **more})


def really_allocated(config, head, recomputed):
    """Bytes at the peak of a real forward and backward besides weights and gradients, as torch's allocator reports."""
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).train()
    if recomputed:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in network.parameters():  # those of earlier forwards are where gradients are kept
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ids, keep = torch.zeros(1, 512, dtype=torch.long), torch.arange(211, 511)
    inputs = {"input_ids": ids, "position_ids": torch.arange(512)[None], "attention_mask": None}
    batch = collate.Batch(inputs, keep, torch.zeros(300, dtype=torch.long), head)
    return allocated(lambda: loss.nll_sum(network, batch).backward()).max()


@pytest.mark.parametrize(
    ("head", "most", "tied", "recomputed"),
    # pieces of 128 tokens, whose logits are most, and of 8, where the gradients of the head's weights are
    [("labelled", None, True, False), ("pieces", 128, True, True), ("pieces", 8, False, False)],
)
def test_fake_tensors_take_what_real_ones_do(monkeypatch, head, most, tied, recomputed):
    config = {**SMALL, "tie_word_embeddings": tied}
    if most:
        monkeypatch.setattr(loss, "MOST_LOGITS", most * config["vocab_size"])
    simulated = forward_backward(job(config, head=head, gradient_checkpointing=recomputed), config)
    real = really_allocated(config, head, recomputed)
    assert simulated.activations + simulated.logits == pytest.approx(real, rel=0.02)


FEW = [
    ("qwen2", "z2", {}),
    ("qwen3_moe", "z2", {"tokens": 3072}),
]
OTHERS = [
    ("qwen2", "ddp", {}),
    ("llama", "z2", {"head": "labelled"}),
    ("llama", "fsdp2", {"tokens": 3072, "supervised_tokens": 200}),
    ("phi3", "z2", {"lora_dropout": 0.1}),
    ("mixtral", "z2", {}),
]


@AS_COUNTED
@pytest.mark.parametrize("forwards", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])
def test_closed_form_meets_simulation(forwards):
    """By 10% in the mean, and by 20% at worst."""
    differences = {}
    for (family, launch, more), recomputed, adapter in itertools.product(forwards, (False, True), ("none", "lora")):
        config = {**LARGE, "model_type": family, **EXPERTS.get(family, {})}
        how = {"adapter": adapter, "gradient_checkpointing": recomputed, "tokens": 1024, "head": "pieces", **more}
        planned = job(config, launch, **how)
        simulated = forward_backward(planned, config)
        expected = simulated.activations + simulated.logits
        differences[family, launch, recomputed, adapter] = abs(sum(peak_bytes(planned).values()) / expected - 1)
    assert {case: difference for case, difference in differences.items() if difference > 0.2} == {}
    assert statistics.mean(differences.values()) < 0.1
