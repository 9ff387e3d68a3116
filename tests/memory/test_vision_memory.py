"""What a vision tower takes by the closed form, against a real one's forward; and the row with most pixels."""

import pytest
import torch
import vision
from planned import allocated, job_of, saved_for_backward
from transformers import AutoModelForImageTextToText

from accel_sft.memory.activations import PIXEL, tower_bytes
from accel_sft.memory.model_config import read_config
from accel_sft.memory.shape import tower

EYES = {"embed_dim": 256, "hidden_size": 32, "mlp_ratio": 4, "depth": 3, "num_heads": 4, "patch_size": 14}
PATCHES = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vision.make(tmp_path_factory.mktemp("model"), "qwen2_vl", eyes=EYES)


def really_allocated(folder, trained):
    """Bytes that the tower's forward leaves, and its peak, as torch's allocator reports."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).train().requires_grad_(trained)
    pixels, grid = torch.zeros(PATCHES, 3 * 2 * 14**2), torch.tensor([[1, 32, 32]])
    sizes = allocated(lambda: model.get_image_features(pixels, grid))
    return sizes[-1], sizes.max()


def counted(folder, launch, pixels, trained):
    """What the closed form counts that the tower keeps, and holds at once, beside its pixels."""
    job = job_of(read_config(folder), launch, pixels=pixels, train_only="." if trained else None)
    return [size - PIXEL * pixels for size in tower_bytes(job)]


@pytest.mark.parametrize("trained", [False, True])
def test_a_tower_takes_what_is_counted(folder, trained):
    measured, most = counted(folder, "z2", PATCHES * 3 * 2 * 14**2, trained)
    really_kept, really_most = really_allocated(folder, trained)
    assert most == pytest.approx(really_most, rel=0.1)
    assert measured == (pytest.approx(really_kept, rel=0.1) if trained else 0)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_what_autocast_keeps_is_counted(tmp_path, family):
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 3}
    sizes |= {"depth": 3, "patch_size": 14, "image_size": 448, "vision_use_head": False}
    eyes = EYES if family == "qwen2_vl" else sizes
    folder = vision.make(tmp_path / "model", family, eyes=eyes)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    images = torch.zeros(PATCHES, 3 * 2 * 14**2), torch.tensor([[1, 32, 32]])
    if family == "gemma3":
        images = (torch.zeros(1, 3, 448, 448),)
    with torch.autocast("cpu", torch.bfloat16), saved_for_backward(model) as saved:
        features = model.get_image_features(*images)
    assert features is not None
    measured, _ = counted(folder, "ddp", images[0].numel(), True)
    assert measured == pytest.approx(saved(), rel=0.1)


def test_a_tower_s_sizes_have_several_names():
    siglip = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
    assert (tower(siglip).inner, tower(siglip).values) == (4304, 588)
    qwen = {"embed_dim": 1280, "hidden_size": 3584, "depth": 32, "in_chans": 3, "patch_size": 14}
    assert (tower(qwen).width, tower(qwen).inner) == (1280, 5120)
    assert tower({**qwen, "temporal_patch_size": 2}).values == 1176
    assert tower({}) is None
