"""Fixtures that many test modules share: the built-in model and its tokenizer, and a cache of the test's own."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a tiny model, which no test changes."""
    from models import make_tiny  # imports torch

    return make_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def model(tiny):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny)


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """The folder of a LoRA adapter on the tiny model."""
    from peft import LoraConfig
    from weights import save_adapter

    config = LoraConfig(r=12, target_modules="all-linear", task_type="CAUSAL_LM")
    return save_adapter(tiny, tmp_path_factory.mktemp("adapter") / "lora", config)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_SFT_CACHE", str(tmp_path / ".cache"))  # hidden from what reads `tmp_path` as data
    return tmp_path / ".cache"
