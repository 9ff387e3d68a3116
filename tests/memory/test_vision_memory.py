"""What a vision tower takes by the closed form, against a real one's forward; and the row with most pixels."""

import pytest
import torch
import vision
from planned import allocated, job_of
from transformers import AutoModelForImageTextToText

from accel_sft.memory.activations import PIXEL, tower_bytes
from accel_sft.memory.model_config import read_config
from accel_sft.memory.shape import tower

EYES = {"embed_dim": 256, "hidden_size": 32, "mlp_ratio": 4, "depth": 3, "num_heads": 4, "patch_size": 14}
PATCHES = 1024


@pytest.mark.parametrize("trained", [False, True])
def test_a_tower_takes_what_is_counted(tmp_path, trained):
    """Bytes that the tower's forward leaves, and its peak, beside its pixels."""
    folder = vision.make(tmp_path, "qwen2_vl", eyes=EYES)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).train().requires_grad_(trained)
    pixels, grid = torch.zeros(PATCHES, 3 * 2 * 14**2), torch.tensor([[1, 32, 32]])
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
