"""What shared rows keep for their backward, and what a vision tower takes, is what the closed form expects."""

from __future__ import annotations

import dataclasses
import json

import architectures
import pytest
import torch
import vision
from conftest import AS_COUNTED
from planned import allocated, job_of, saved_for_backward
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.chat.encoded import Encoded
from accel_sft.memory.activations import PIXEL, forward_bytes, peak_bytes, tower_bytes
from accel_sft.memory.model_config import read_config, read_shape
from accel_sft.memory.shape import tower
from accel_sft.models.prefix_attention import install

# tokens of the prefix, own tokens of a row, rows
SHAPES = [(64, 64, 16), pytest.param(512, 16, 64, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def model():
    """A model with as many heads to a head of keys as Qwen2 7B, and as wide a feed-forward for its size."""
    install(torch.device("cpu"))
    shape = {"hidden_size": 448, "intermediate_size": 2368, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "use_sliding_window": False}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **heads)).bfloat16().train()


def kept_by(model, batching, rows):
    """Bytes that a forward keeps for its backward, beside the weights."""
    with saved_for_backward(model) as saved:
        nll_sum(model, batching.batch(rows, 0, torch.device("cpu")))
    return saved()


@AS_COUNTED
@pytest.mark.parametrize(("prefix", "own", "count"), SHAPES)
def test_the_bytes_kept_for_the_backward_are_those_expected(model, prefix, own, count):
    draw = torch.Generator().manual_seed(0)
    common, *others = (torch.randint(1, 512, (size,), generator=draw).tolist() for size in (prefix, *[own] * count))
    rows = [Encoded(index, common + row, prefix + own // 2) for index, row in enumerate(others)]
    batching = Batching("shared", prefix + own * count, attention="rows", head="labelled")
    measured, way = kept_by(model, batching, rows), batching.way
    planned = forward_bytes(job_of_rows(model, "z2", True, way.tokens_in(rows), way.copied_keys(rows)))
    assert planned / 1.3 < measured < 1.3 * planned


def job_of_rows(model, name, bf16, tokens, copied_keys):
    """A job of `plan` on GPUs with this forward, of which almost nothing is supervised."""
    forward = {"tokens": tokens, "supervised_tokens": 1, "rows": 2, "copied_keys": copied_keys}
    return job_of(model.config.to_dict(), name, bf16=bf16, **forward)


@pytest.mark.parametrize("recomputed", [False, True])
def test_plan_counts_copies_where_a_gpu_makes_them(model, recomputed):
    def bytes_more(launch, bf16, **changes):
        with_copies, without = (
            dataclasses.replace(
                job_of_rows(model, launch, bf16, 512, keys), gradient_checkpointing=recomputed, **changes
            )
            for keys in (4096, 0)
        )
        peaks = [sum(peak_bytes(job).values()) for job in (with_copies, without)]
        return peaks[0] - peaks[1]

    assert bytes_more("ddp", False) == (1 if recomputed else 2) * 2 * 4 * 448 * 4096  # float32, by layer
    assert bytes_more("z2", True) == bytes_more("ddp", False, device="cpu") == 0
    assert bytes_more("z2", True, in_cache=True) > 0


class Tokenizer:
    eos_token_id, pad_token_id = 1, 0

    def __len__(self):
        return 256


LONG = ("qwen3_5_text", "granitemoehybrid", "falcon_h1", "zamba2", "nemotron_h", "olmo_hybrid")


@AS_COUNTED
@pytest.mark.parametrize("attention", ["cache", "causal"])
@pytest.mark.parametrize("family", ["lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_what_layers_with_a_state_keep_is_counted(family, attention):
    config = architectures.configuration(family, Tokenizer())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    draw = torch.Generator().manual_seed(0)
    common, *others = (torch.randint(2, 250, (size,), generator=draw).tolist() for size in (100, *range(20, 60, 5)))
    rows = [Encoded(index, common + row, len(common) + 15) for index, row in enumerate(others)]
    batching = Batching("shared" if attention == "cache" else "padded", 10**6, attention=attention)
    measured, way = kept_by(model, batching, rows), batching.way
    job = job_of(
        json.loads(config.to_json_string()),
        device="cpu",
        bf16=False,
        tokens=way.tokens_in(rows),
        supervised_tokens=sum(row.supervised_tokens for row in rows),
        rows=len(rows),
        head="labelled",
        copied_keys=way.copied_keys(rows),
        in_cache=attention == "cache",
    )
    assert all(block.recurrent for block in job.shape.blocks if any(m.group == "recurrent" for m in block.matrices))
    assert measured / 1.12 < forward_bytes(job) < 1.12 * measured


EYES = {"embed_dim": 256, "hidden_size": 32, "mlp_ratio": 4, "depth": 3, "num_heads": 4, "patch_size": 14}


@pytest.mark.parametrize("trained", [False, True])
def test_a_tower_takes_what_is_counted(tmp_path, trained):
    """Bytes that the tower's forward leaves, and its peak, beside its pixels."""
    folder = vision.make(tmp_path, "qwen2_vl", eyes=EYES)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).train().requires_grad_(trained)
    pixels, grid = torch.zeros(1024, 3 * 2 * 14**2), torch.tensor([[1, 32, 32]])
    sizes = allocated(lambda: model.get_image_features(pixels, grid))
    job = job_of(read_config(folder), pixels=pixels.numel(), train_only="." if trained else None)
    left, most = (size - PIXEL * pixels.numel() for size in tower_bytes(job))
    assert most == pytest.approx(sizes.max(), rel=0.2)
    assert left == (pytest.approx(sizes[-1], rel=0.2) if trained else 0)


def test_a_tower_s_sizes_have_several_names():
    siglip = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
    assert (tower(siglip).inner, tower(siglip).values) == (4304, 588)
    qwen = {"embed_dim": 1280, "hidden_size": 3584, "depth": 32, "in_chans": 3, "patch_size": 14}
    assert (tower(qwen).width, tower(qwen).inner) == (1280, 5120)
    assert tower({**qwen, "temporal_patch_size": 2}).values == 1176
    assert tower({}) is None


def test_parts_of_a_model_are_counted_unsharded_under_zero_3(tmp_path):
    config = read_config(vision.make(tmp_path / "model", "gemma3"))
    on = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # while it lives, from_config shards over all ranks
    assert (on.is_zero3(), read_shape(config, "gemma3").family) == (True, "gemma3")
