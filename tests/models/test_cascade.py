"""Attention to a shared prefix in one piece is the attention that rows get with a copy of it each."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forwards import loss_and_gradients
from forwards import rows as some_rows
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM
from varlen_on_cpu import backward, forward, varlen_on_cpu

from accel_sft.batching.collate import _rows
from accel_sft.batching.layouts import Batching
from accel_sft.models import cascade as module
from accel_sft.models.cascade import PADDED, SHORT, VARLEN, Varlen, cascade, probe_kernels, usable
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
    starts = prefix + np.cumsum(sizes) - sizes
    return tensors, _rows(np.array(sizes), starts, prefix)


def by_mask(query, key, value, prefix, sizes, scale=None):
    """Every token sees the prefix and its own row, up to itself."""
    row = torch.tensor([-1] * prefix + [number for number, size in enumerate(sizes) for _ in range(size)])
    seen = ((row[None] == -1) | (row[:, None] == row[None])).tril()
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale).transpose(1, 2)


SHAPES = [(1, [1, 1]), (7, [5, 3, 3, 1]), (40, [90, 1, 2]), (300, [17] * 9)]


class Exact(Varlen):
    """A GPU's kernels, for any type: what they compute is compared in float64."""

    dtype = torch.float64

    def size_for(self, dtype, head_size):
        return next(size for size in self.sizes if head_size <= size)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """CPUs have the kernels of GPUs, and use them."""
    with varlen_on_cpu():
        monkeypatch.setitem(module.KERNELS, "cpu", Exact())
        monkeypatch.setattr(module, "_right", {("cpu", size): True for size in Exact.sizes})
        yield


def compared(prefix, sizes, heads, scale, monkeypatch):
    """Output and gradients of rows' attention, and those of plain attention with a mask; the kernels must be used."""
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
    return (got, *ours), (expected, *theirs)


@pytest.mark.parametrize(("prefix", "sizes"), SHAPES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_rows_get_the_same_and_give_the_same_gradients(prefix, sizes, heads, scale, monkeypatch):
    results, expected = compared(prefix, sizes, heads, scale, monkeypatch)
    torch.testing.assert_close(results, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("prefix", "sizes"), [*SHAPES, (0, [5, 3, 1]), (0, [1, 1]), (1, [1])])
@pytest.mark.parametrize(("heads", "scale"), [((4, 4), None), ((6, 2), 0.3)])
def test_so_do_rows_on_a_gpu_by_their_bounds(prefix, sizes, heads, scale, monkeypatch, as_on_a_gpu):
    results, expected = compared(prefix, sizes, heads, scale, monkeypatch)
    torch.testing.assert_close(results, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("layout", ["shared", "packed"])
def test_a_model_learns_on_a_gpu_what_padded_rows_teach(layout, as_on_a_gpu):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).double()
    expected, theirs = loss_and_gradients(model, Batching("padded", 4096), some_rows(9))
    got, ours = loss_and_gradients(model, Batching(layout, 300, attention="rows"), some_rows(9))
    assert got == pytest.approx(expected, rel=1e-6)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-12, name


def test_stand_ins_for_gpu_kernels_have_their_shapes():
    query, key = torch.randn(8, 4, 16), torch.randn(8, 2, 16)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    where, how = (bounds, bounds, 5, 5, 0.0, True), (torch.empty(2, dtype=torch.uint64), torch.empty(0))
    with varlen_on_cpu():
        ours = torch.ops.aten._flash_attention_forward(query, key, key, *where, False)[:2]
        back = torch.ops.aten._flash_attention_backward(query, query, key, key, *ours, *where, *how)
    meta = [tensor.to("meta") for tensor in (query, key, key)]
    on_meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in where]
    real = torch.ops.aten._flash_attention_forward(*meta, *on_meta, False)[:2]
    of_real = torch.ops.aten._flash_attention_backward(
        meta[0], *meta, *real, *on_meta, *(value.to("meta") for value in how)
    )
    for one, other in zip((*ours, *back), (*real, *of_real), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("why", ["dropout", "bias", "kernels"])
def test_what_it_cannot_do_is_done_with_copies(why, monkeypatch):
    monkeypatch.setattr("accel_sft.models.prefix_attention.cascade", lambda *args: pytest.fail("it was used"))
    tensors, rows = sequence(7, [5, 3], 2, 2, 16)
    arguments = {"dropout": {"dropout": 1e-9}, "bias": {"position_bias": torch.zeros(())}}.get(why, {})
    if why == "kernels":
        monkeypatch.setattr("accel_sft.models.prefix_attention.usable", lambda *tensors: None)
    got, _ = rows_attention(None, *tensors, None, rows=rows, **arguments)
    torch.testing.assert_close(got, by_mask(*tensors, 7, [5, 3]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copied", [True, False])
def test_autocast_casts_queries_and_keys_before_the_cut(copied, monkeypatch):
    """Rotation gives queries and keys in float32; the product would cast them in any case."""
    (query, key, value), rows = sequence(7, [5, 3], 4, 2, 16)
    tensors = query, key, value.detach().bfloat16().requires_grad_()
    if copied:
        monkeypatch.setattr("accel_sft.models.prefix_attention.usable", lambda *tensors: None)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda one: one)
    with torch.autocast("cpu", dtype=torch.bfloat16), hooks:
        got, _ = rows_attention(SimpleNamespace(num_key_value_groups=2), *tensors, None, rows=rows)
    assert got.dtype == torch.bfloat16
    assert {value.dtype for value in saved if value.is_floating_point() and value.ndim > 3} == {torch.bfloat16}
    expected = by_mask(*(tensor.float() for tensor in tensors), 7, [5, 3])
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


def test_reduced_precision_is_as_near_as_plain_attention():
    tensors, rows = sequence(40, [9, 4, 30], 4, 4, 32, torch.bfloat16)
    got, _ = rows_attention(None, *tensors, None, rows=rows)
    gradients = torch.autograd.grad(got.float().square().sum(), tensors)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = by_mask(*exact, 40, [9, 4, 30])
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    assert got.dtype == torch.bfloat16
    for approximate, true in zip((got, *gradients), (expected, *wanted), strict=True):
        assert (approximate - true).norm() <= 0.02 * true.norm()


class Backwards(TorchDispatchMode):
    """The types in which attention's backward is computed meanwhile."""

    def __init__(self):
        super().__init__()
        self.types = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.types.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("length", "dtype"), [(SHORT, torch.float32), (SHORT + 1, torch.bfloat16)])
def test_in_half_precision_short_rows_have_their_backward_in_float32(length, dtype):
    tensors, rows = sequence(3, [length], 2, 2, 16, torch.bfloat16)
    with Backwards() as backwards:
        got, _ = rows_attention(None, *tensors, None, rows=rows)
        gradients = torch.autograd.grad(got.float().square().sum(), tensors)
    assert {value.dtype for value in (got, *gradients)} == {torch.bfloat16}
    assert set(backwards.types) == {dtype, torch.float32}  # the prefix has three keys
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
    assert usable(*tensors, 7) is PADDED
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
    assert not usable(*tensors, 7)


@pytest.mark.parametrize("change", ["gone", "backward", "forward"])
def test_so_are_those_of_a_gpu(change, monkeypatch, as_on_a_gpu):
    tensors, _ = sequence(7, [5, 3], 4, 2, 16, torch.bfloat16)
    monkeypatch.setitem(module.KERNELS, "cpu", VARLEN)
    forget(monkeypatch)
    assert usable(*tensors, 7) is VARLEN
    assert not usable(*(tensor.float() for tensor in tensors), 7), "there are none for float32"
    assert not usable(*(tensor[..., :12] for tensor in tensors), 7), "there are none for this size of a head"

    def other_sums(*args, **kwargs):
        output, sums, *others = forward(*args, **kwargs)
        return (output, 2 * sums, *others)

    def refuses_wide_heads(gradient, query, *args, **kwargs):
        if query.shape[-1] > 192:
            raise RuntimeError("head dim 256 requires A100")
        return backward(gradient, query, *args, **kwargs)

    if change == "gone":
        monkeypatch.setattr(torch.ops, "aten", object())
        forget(monkeypatch)
    else:
        changed = {"forward": other_sums} if change == "forward" else {"backward": refuses_wide_heads}
        with varlen_on_cpu(**changed):
            forget(monkeypatch)
    assert bool(usable(*tensors, 7)) == (change == "backward")
    assert not usable(*sequence(7, [5, 3], 2, 2, 256, torch.bfloat16)[0], 7)


def test_a_compiler_takes_the_kernels_as_they_are(as_on_a_gpu):
    tensors, rows = sequence(7, [5, 3], 4, 2, 16, torch.float64)

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def compiled(*tensors):
        return cascade(*tensors, rows, None, module.KERNELS["cpu"])

    gradients = torch.autograd.grad(compiled(*tensors).square().sum(), tensors)
    expected = torch.autograd.grad(by_mask(*tensors, 7, [5, 3]).square().sum(), tensors)
    torch.testing.assert_close(gradients, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mode", ["inference", "meta", "bfloat16", "no gradients"])
def test_the_kernels_are_found_whatever_goes_on_around(mode, monkeypatch):
    tensors, _ = sequence(7, [5, 3], 2, 2, 16)
    with contextlib.ExitStack() as stack:
        if mode == "bfloat16":
            torch.set_default_dtype(torch.bfloat16)
            stack.callback(torch.set_default_dtype, torch.float32)
        elif mode == "meta":
            stack.enter_context(torch.device("meta"))
        else:
            stack.enter_context(torch.inference_mode() if mode == "inference" else torch.no_grad())
        forget(monkeypatch)
    assert usable(*tensors, 7)
