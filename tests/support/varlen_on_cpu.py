"""torch's FlashAttention of sequences by their bounds, on CPUs: plain formulas behind the real operators' schemas.

torch has these operators for CUDA devices alone. Registered for CPUs, they take what a GPU's would take, in the same
order, and return it in the same shapes; they compute in float64.
"""

from __future__ import annotations

import contextlib

import torch


def _segments(cum_q, cum_k):
    for at in range(len(cum_q) - 1):
        yield slice(cum_q[at], cum_q[at + 1]), slice(cum_k[at], cum_k[at + 1])


def _scores(query, key, scale, is_causal):
    """(heads, queries, keys) of one sequence, and what each query sees."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[1:], dtype=torch.bool)
    if is_causal:  # aligned at the last query and the last key
        seen = seen.tril(scores.shape[2] - scores.shape[1])
    return scores.masked_fill(~seen, -torch.inf)


def _checked(query, key, value, cum_q, cum_k, max_q, max_k):
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert all(bounds.is_contiguous() for bounds in (cum_q, cum_k))
    assert all(tensor.ndim == 3 and tensor.stride(-1) == 1 for tensor in (query, key, value))
    assert query.dtype == key.dtype == value.dtype
    assert (cum_q[-1], cum_k[-1]) == (len(query), len(key))
    assert len(key) == len(value)
    assert max_q > 1, "one query alone makes the kernel put its groups of heads in another order"
    assert max_q >= cum_q.diff().max()
    assert max_k >= cum_k.diff().max()
    return (tensor.double() for tensor in (query, key, value))


def forward(
    query, key, value, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None, **others
):
    assert not any((dropout_p, return_debug_mask, *others.values()))
    q, k, v = _checked(query, key, value, cum_q, cum_k, max_q, max_k)
    output, sums = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for of_q, of_k in _segments(cum_q.tolist(), cum_k.tolist()):
        scores = _scores(q[of_q], k[of_k], scale, is_causal)
        values = v[of_k].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        output[of_q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        sums[:, of_q] = scores.logsumexp(-1)
    of_sums = torch.float64 if query.dtype == torch.float64 else torch.float32
    nothing = torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)
    return (output.to(query.dtype), sums.to(of_sums), *nothing)


def backward(
    grad_out, query, key, value, out, logsumexp, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, rng_state, unused,
    *, scale=None, **others,
):  # fmt: skip
    assert not any((dropout_p, *others.values()))
    assert rng_state.dtype == torch.uint64
    assert logsumexp.is_contiguous()
    assert logsumexp.shape == (query.shape[1], query.shape[0])
    assert grad_out.stride(-1) == out.stride(-1) == 1
    q, k, v = _checked(query, key, value, cum_q, cum_k, max_q, max_k)
    grad, out, sums = grad_out.double(), out.double(), logsumexp.double()
    groups, by = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    of_query, of_key, of_value = (torch.zeros_like(each) for each in (q, k, v))
    for of_q, of_k in _segments(cum_q.tolist(), cum_k.tolist()):
        shares = (_scores(q[of_q], k[of_k], scale, is_causal) - sums[:, of_q, None]).exp()
        values, keys = (each[of_k].repeat_interleave(groups, dim=1) for each in (v, k))
        of_shares = torch.einsum("qhd,khd->hqk", grad[of_q], values)
        of_scores = shares * (of_shares - (grad[of_q] * out[of_q]).sum(-1).T[..., None]) * by
        of_query[of_q] = torch.einsum("hqk,khd->qhd", of_scores, keys)
        of_key[of_k] = torch.einsum("hqk,qhd->khd", of_scores, q[of_q]).unflatten(1, (-1, groups)).sum(2)
        of_value[of_k] = torch.einsum("hqk,qhd->khd", shares, grad[of_q]).unflatten(1, (-1, groups)).sum(2)
    return tuple(each.to(query.dtype) for each in (of_query, of_key, of_value))


@contextlib.contextmanager
def varlen_on_cpu(forward=forward, backward=backward):
    """Within this, CPUs have the operators."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield
