"""Adapter types: what is merged, trained on and resumed, and what cannot be."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from accelerate import Accelerator
from models import loaded
from peft import AdaLoraConfig, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.api.limits import ADAPTERS, launch_problem
from accel_sft.api.options import settings
from accel_sft.models.adapters import TYPES, type_of
from accel_sft.training.optimizer import Stepper

LORA = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
ADALORA = {"init_r": 4, "target_r": 2, "total_step": 30, "tinit": 2, "tfinal": 5, "deltaT": 2}
CONFIGS = {"lora": LoraConfig(r=2, **LORA), "adalora": AdaLoraConfig(**ADALORA, **LORA)}


def adapted(tiny, config):
    torch.manual_seed(0)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), copy.deepcopy(config))  # peft fills it in


def test_each_type_is_a_choice_that_every_backend_trains():
    assert ADAPTERS.keys() == TYPES.keys()
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert all({*recorded.values()} <= fields for recorded in ADAPTERS.values())
    (choices,) = (setting.choices for setting in settings(TrainConfig) if setting.name == "adapter")
    assert choices == ("none", *ADAPTERS)
    for name, backend in itertools.product(choices, ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP")):
        assert launch_problem(TrainConfig(adapter=name), backend, 3) is None


def test_under_autocast_no_layer_casts_its_input_for_the_adapter(tiny):
    """Autocast would cast it back; the copy would be kept for the backward."""
    for precision in ("bf16", "no"):
        layers = loaded(tiny, 9, precision=precision, adapter="lora").modules()
        casts = {layer.cast_input_dtype_enabled for layer in layers if hasattr(layer, "cast_input_dtype_enabled")}
        assert casts == {precision == "no"}


def test_unmergeable_adapter_is_refused_for_full_training(tiny, tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    adapted(tiny, config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"adapters of type prompt_tuning cannot be merged into weights"):
        loaded(tmp_path, 10)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_adapter_is_merged_for_full_training(tiny, tmp_path, config):
    model = adapted(tiny, config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    whole, ids = loaded(tmp_path, 10).eval(), torch.tensor([[1, 2, 3, 4]])
    assert type_of(whole) is None
    assert all(parameter.requires_grad for parameter in whole.parameters())
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(whole(ids).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_that_is_trained_on_keeps_type_and_rank(tiny, tmp_path, name):
    config, (other,) = CONFIGS[name], CONFIGS.keys() - {name}
    adapted(tiny, config).save_pretrained(tmp_path)
    same = {"lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
    assert type_of(loaded(tmp_path, 10, adapter=name, lora_r=2, **same)) == name
    with pytest.raises(UserError, match=r"--lora-r 3: the adapter in .* has 2; give that"):
        loaded(tmp_path, 10, adapter=name, lora_r=3, **same)
    with pytest.raises(UserError, match=rf"--adapter {other.upper()}: the adapter in .* has {name.upper()}; give"):
        loaded(tmp_path, 10, adapter=other, lora_r=2, **same)


def test_final_ranks_of_adalora_wait_for_a_finite_gradient(tiny, tmp_path):
    few = {"init_r": 4, "target_r": 2, "total_step": 8, "tinit": 1, "tfinal": 3, "deltaT": 9}  # final in step 5 alone
    model, ids = adapted(tiny, AdaLoraConfig(**few, **LORA)), torch.tensor([[1, 2, 3, 4]])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    stepper, ranks = Stepper(Accelerator(cpu=True), model, optimizer, 1.0), []
    for step in range(8):
        stepper.backward(model(ids, labels=ids).loss * (float("nan") if step == 5 else 1))
        stepper.update(step)
        pattern = model.peft_config["default"].rank_pattern or {}
        ranks.append(sum(map(sum, pattern.values())))
    matrices = len(pattern)
    assert ranks == [0] * 6 + [2 * matrices] * 2
    with torch.no_grad():
        expected = model.eval()(ids).logits
        model.save_pretrained(tmp_path)
        weights = load_file(tmp_path / "adapter_model.safetensors")
        assert sum(len(tensor) for name, tensor in weights.items() if "lora_E" in name) == 2 * matrices
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path).eval()
        torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(expected, AutoModelForCausalLM.from_pretrained(tiny)(ids).logits, atol=1e-2)
