"""Attention to a shared prefix in one piece is the attention that rows get with a copy of it each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from accel_sft.batching.collate import prefixed_rows
from accel_sft.chat.encoded import Encoded
from accel_sft.models import cascade as module
from accel_sft.models.cascade import SHORT, cascade, cut_rows, probe_kernels, usable
from accel_sft.models.prefix_attention import install, rows_attention

install(torch.device("cpu"))


def sequence(prefix, sizes, heads, key_heads, size, dtype=torch.float32):
    """Query, key and value of a sequence in the layout models have, and its rows."""
    total = prefix + sum(sizes)
    drawn = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, total, count, size, generator=drawn, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]
    return tensors, prefixed_rows([Encoded(0, [0] * (prefix + size), 1) for size in sizes], prefix)


def by_mask(query, key, value, prefix, sizes, scale=None):
    """Every token sees the prefix and its own row, up to itself."""
    row = torch.tensor([-1] * prefix + [number for number, size in enumerate(sizes) for _ in range(size)])
    seen = ((row[None] == -1) | (row[:, None] == row[None])).tril()
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale).transpose(1, 2)


@pytest.mark.parametrize(
    ("prefix", "sizes", "heads", "scale"),
    [(1, [1, 1], (4, 4), None), (40, [90, 1, 2], (6, 2), 0.3), (300, [17] * 9, (6, 2), None)],
)
def test_rows_get_the_same_and_give_the_same_gradients(prefix, sizes, heads, scale, monkeypatch):
    calls = []
    monkeypatch.setattr("accel_sft.models.prefix_attention.cascade", lambda *args: calls.append(args) or cascade(*args))
    tensors, rows = sequence(prefix, sizes, *heads, 16, torch.float64)
    wanted = torch.randn(1, prefix + sum(sizes), heads[0], 16, dtype=torch.float64)
    expected = by_mask(*tensors, prefix, sizes, scale)
    layer = SimpleNamespace(num_key_value_groups=heads[0] // heads[1])
    got, _ = rows_attention(layer, *tensors, None, rows=rows, scaling=scale, dropout=0.0)
    assert calls, "it was computed in another way"
    assert all(part.shape[1] == count for part, count in zip(calls[0][:3], (heads[0], heads[1], heads[1]), strict=True))
    ours, theirs = (torch.autograd.grad(output, tensors, wanted) for output in (got, expected))
    torch.testing.assert_close((got, *ours), (expected, *theirs), rtol=1e-8, atol=1e-8)


def test_what_kernels_cannot_compute_is_refused(monkeypatch):
    tensors, rows = sequence(7, [5, 3], 2, 2, 16)
    for arguments in ({"dropout": 1e-9}, {"position_bias": torch.zeros(())}, {}):
        if not arguments:
            monkeypatch.setattr(module, "_right", {})
        with pytest.raises(NotImplementedError, match="no kernels for such rows"):
            rows_attention(None, *tensors, None, rows=rows, **arguments)


@pytest.mark.parametrize("prefix", [0, 7])
def test_autocast_casts_queries_and_keys_before_the_cut(prefix, monkeypatch):
    """Rotation gives queries and keys in float32; the product would cast them in any case."""
    (query, key, value), rows = sequence(prefix, [5, 3], 4, 2, 16)
    tensors = query, key, value.detach().bfloat16().requires_grad_()
    types = []
    for place in ("cascade", "prefix_attention"):
        name = f"accel_sft.models.{place}.cut_rows"
        monkeypatch.setattr(name, lambda tensor, rows: types.append(tensor.dtype) or cut_rows(tensor, rows))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = rows_attention(SimpleNamespace(num_key_value_groups=2), *tensors, None, rows=rows)
    assert [got.dtype, *types] == [torch.bfloat16] * 4
    expected = by_mask(*(tensor.float() for tensor in tensors), prefix, [5, 3])
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("length", [SHORT, SHORT + 1])
def test_gradients_of_half_precision_are_right_for_short_and_long_rows(length):
    tensors, rows = sequence(3, [length], 2, 2, 16, torch.bfloat16)
    got, _ = rows_attention(None, *tensors, None, rows=rows)
    gradients = torch.autograd.grad(got.float().square().sum(), tensors)
    assert {value.dtype for value in (got, *gradients)} == {torch.bfloat16}
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    wanted = torch.autograd.grad(by_mask(*exact, 3, [length]).square().sum(), exact)
    for one, other in zip(gradients, wanted, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def forget(monkeypatch):
    """Ask anew what torch has, for this test alone."""
    monkeypatch.setattr(module, "_right", {})
    probe_kernels(torch.device("cpu"))


@pytest.mark.parametrize("change", ["gone", "backward", "forward"])
def test_missing_or_changed_kernels_are_detected(change, monkeypatch):
    tensors, _ = sequence(7, [5, 3], 2, 2, 16)
    forget(monkeypatch)
    assert usable(*tensors)
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

    class Changed:
        def _scaled_dot_product_flash_attention_for_cpu(self, *args, **kwargs):
            output, sums = forward(*args, **kwargs)
            return output, sums * (2 if change == "forward" else 1)

        def _scaled_dot_product_flash_attention_for_cpu_backward(self, *args, **kwargs):
            return [2 * gradient if change == "backward" else gradient for gradient in backward(*args, **kwargs)]

    monkeypatch.setattr(torch.ops, "aten", object() if change == "gone" else Changed())
    forget(monkeypatch)
    assert not usable(*tensors)


def test_calls_of_gpu_kernels_have_their_shapes():
    tensors, rows = sequence(7, [5, 3], 4, 2, 16, torch.bfloat16)
    meta = [tensor.detach().to("meta").requires_grad_() for tensor in tensors]
    on_meta = {name: getattr(rows, name).to("meta") for name in ("own", "back", "again")}
    places = SimpleNamespace(prefix=7, longest=5, **on_meta)
    module.KERNELS["meta"] = module.KERNELS["cuda"]
    try:
        output = cascade(*meta, places, None)
        gradients = torch.autograd.grad(output.sum(), meta)
    finally:
        del module.KERNELS["meta"]
    assert output.shape == (1, 15, 4, 16)
    assert [one.shape for one in gradients] == [tensor.shape for tensor in tensors]


@pytest.mark.parametrize("mode", [torch.inference_mode(), torch.device("meta")], ids=["inference", "meta"])
def test_the_kernels_are_found_whatever_goes_on_around(mode, monkeypatch):
    tensors, _ = sequence(7, [5, 3], 2, 2, 16)
    with mode:
        forget(monkeypatch)
    assert usable(*tensors)
