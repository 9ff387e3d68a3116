"""Attention to a shared prefix in one piece is the attention that rows get with a copy of it each."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from accel_sft.batching.collate import _rows
from accel_sft.models import cascade as module
from accel_sft.models.cascade import cascade, usable
from accel_sft.models.prefix_attention import install, rows_attention

install()


def sequence(prefix, sizes, heads, key_heads, size, dtype=torch.float32):
    """Query, key and value of a sequence in the layout models have, and its rows."""
    total = prefix + sum(sizes)
    drawn = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, total, count, size, generator=drawn, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]
    starts = prefix + np.cumsum(sizes) - sizes
    return tensors, _rows(np.array(sizes), starts, prefix)


def by_mask(query, key, value, prefix, sizes, scale=None):
    """Every token sees the prefix and its own row, up to itself."""
    row = torch.tensor([-1] * prefix + [number for number, size in enumerate(sizes) for _ in range(size)])
    seen = ((row[None] == -1) | (row[:, None] == row[None])).tril()
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale).transpose(1, 2)


SHAPES = [(1, [1, 1]), (7, [5, 3, 3, 1]), (40, [90, 1, 2]), (300, [17] * 9)]


@pytest.mark.parametrize(("prefix", "sizes"), SHAPES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_rows_get_the_same_and_give_the_same_gradients(prefix, sizes, heads, scale, monkeypatch):
    calls = []
    monkeypatch.setattr("accel_sft.models.prefix_attention.cascade", lambda *args: calls.append(1) or cascade(*args))
    tensors, rows = sequence(prefix, sizes, *heads, 16, torch.float64)
    wanted = torch.randn(1, prefix + sum(sizes), heads[0], 16, dtype=torch.float64)
    expected = by_mask(*tensors, prefix, sizes, scale)
    layer = SimpleNamespace(num_key_value_groups=heads[0] // heads[1])
    got, _ = rows_attention(layer, *tensors, None, rows=rows, scaling=scale, dropout=0.0)
    assert calls, "it was computed in another way"
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    ours, theirs = (torch.autograd.grad(output, tensors, wanted) for output in (got, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("why", ["dropout", "bias", "autocast", "kernels"])
def test_what_it_cannot_do_is_done_with_copies(why, monkeypatch):
    monkeypatch.setattr("accel_sft.models.prefix_attention.cascade", lambda *args: pytest.fail("it was used"))
    tensors, rows = sequence(7, [5, 3], 2, 2, 16)
    arguments = {"dropout": {"dropout": 1e-9}, "bias": {"position_bias": torch.zeros(())}}.get(why, {})
    if why == "kernels":
        monkeypatch.setattr("accel_sft.models.prefix_attention.usable", lambda *tensors: False)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=why == "autocast"):
        got, _ = rows_attention(None, *tensors, None, rows=rows, **arguments)
    tolerance = 0.02 if why == "autocast" else 1e-5
    torch.testing.assert_close(got.float(), by_mask(*tensors, 7, [5, 3]), rtol=tolerance, atol=tolerance)


def test_reduced_precision_keeps_its_type_and_is_as_near_as_plain_attention():
    tensors, rows = sequence(40, [9, 4, 30], 4, 4, 32, torch.bfloat16)
    got, _ = rows_attention(None, *tensors, None, rows=rows)
    gradients = torch.autograd.grad(got.float().square().sum(), tensors)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = by_mask(*exact, 40, [9, 4, 30])
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    assert got.dtype == torch.bfloat16
    for found, true in zip((got, *gradients), (expected, *wanted), strict=True):
        assert (found - true).norm() <= 0.02 * true.norm()


def forget(monkeypatch):
    """Ask anew what torch has, for this test alone."""
    monkeypatch.setattr(module, "_known", None)
    module.probe_kernels()


@pytest.mark.parametrize("change", ["gone", "backward", "forward"])
def test_kernels_that_are_gone_or_mean_something_else_are_found_out(change, monkeypatch):
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


@pytest.mark.parametrize("mode", ["inference", "meta", "bfloat16", "no gradients"])
def test_the_kernels_are_found_whatever_goes_on_around(mode, monkeypatch):
    tensors, _ = sequence(7, [5, 3], 2, 2, 16)
    with contextlib.ExitStack() as stack:
        if mode == "bfloat16":
            torch.set_default_dtype(torch.bfloat16)
            stack.callback(torch.set_default_dtype, torch.float32)
        else:
            modes = {
                "inference": torch.inference_mode,
                "meta": lambda: torch.device("meta"),
                "no gradients": torch.no_grad,
            }
            stack.enter_context(modes[mode]())
        forget(monkeypatch)
    assert usable(*tensors)
