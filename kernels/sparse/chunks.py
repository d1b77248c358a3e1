"""Compute attention to listed keys with PyTorch's operators, a block of queries at a time.

The keys and values of a block are gathered, ``[Hkv, block, K, D]``: memory is bounded by the block. Each listed pair is
read once in the forward and once in the backward. Sums over queries, of a key's gradients, are made in
:func:`~treefx.kernels.common.accumulation_dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from treefx.kernels.sparse.problem import Listed

__all__ = ["backward", "forward"]

_BLOCK_ELEMENTS, _BLOCK_ELEMENTS_OF_DEVICES = 1 << 20, 1 << 26
"""Elements of the gathered keys, or values, of a block of queries: on the CPU they stay in its cache."""


def forward(given: Listed) -> tuple[Tensor, Tensor]:
    """Return the output ``[H, N, Dv]`` and the log-sum-exp ``[H, N]``."""
    given = _dense(given)
    heads, tokens, _ = given.q.shape
    out = given.q.new_empty(tokens, heads, given.v.shape[-1]).transpose(0, 1)
    lse = given.q.new_empty(heads, tokens, dtype=given.wide)
    for block in _blocks(given):
        score, _ = _scores(given, block)
        total = score.logsumexp(-1)
        if given.sinks is not None:
            total = torch.logaddexp(total, given.sinks.to(given.wide).view(-1, 1, given.group))
        weight = _weights(score, total)
        value = _gathered(given.v, _tokens(given, block)).to(given.wide)
        out[:, block] = _by_head(torch.matmul(weight, value)).to(out.dtype)
        lse[:, block] = _by_head(total[..., None])[..., 0]
    return out, lse


def backward(grad_out: Tensor, given: Listed, out: Tensor, lse: Tensor) -> list[Tensor]:
    """Return the gradients of q, k and v, and of sinks if there are any."""
    given = _dense(given)
    dq = torch.empty_like(given.q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(x.shape, dtype=given.wide, device=x.device) for x in (given.k, given.v))
    delta = (grad_out.to(given.wide) * out.to(given.wide)).sum(-1, keepdim=True)
    for block in _blocks(given):
        tokens = _tokens(given, block)
        score, key = _scores(given, block)
        weight = _weights(score, _by_query(given, lse[..., None], block)[..., 0])
        grad = _by_query(given, grad_out, block).to(given.wide)
        value = _gathered(given.v, tokens).to(given.wide)
        of_weight = torch.matmul(grad, value.transpose(-1, -2))
        of_score = given.scale * weight * (of_weight - _by_query(given, delta, block))
        query = _by_query(given, given.q, block).to(given.wide)
        dq[:, block] = _by_head(torch.matmul(of_score, key)).to(dq.dtype)
        at = tokens.flatten()
        dk.index_add_(1, at, torch.matmul(of_score.transpose(-1, -2), query).flatten(1, 2))
        dv.index_add_(1, at, torch.matmul(weight.transpose(-1, -2), grad).flatten(1, 2))
    return [dq, dk.to(given.k.dtype), dv.to(given.v.dtype), *given.sink_gradient(grad_out, out, lse)]


def _dense(given: Listed) -> Listed:
    """Return the same with dense keys and values: ``index_select`` would copy others whole for every block."""
    return replace(given, k=given.k.contiguous(), v=given.v.contiguous())


def _blocks(given: Listed) -> Iterator[slice]:
    """Yield blocks of queries whose keys are gathered at a time, in order."""
    tokens, listed = given.keys.shape
    each = given.k.shape[0] * listed * max(given.k.shape[-1], given.v.shape[-1])
    most = _BLOCK_ELEMENTS if given.q.device.type == "cpu" else _BLOCK_ELEMENTS_OF_DEVICES
    at_once = max(1, most // max(1, each))
    return (slice(start, start + at_once) for start in range(0, tokens, at_once))


def _tokens(given: Listed, block: slice) -> Tensor:
    """Return the listed tokens of a block, int64 ``[block, K]``.

    A missing one is the query's own token, with weight 0: a NaN of any other would reach this query.
    """
    keys = given.keys[block].long()
    own = torch.arange(given.q.shape[1], device=keys.device)[block]
    return torch.where(keys < 0, own[:, None], keys)


def _gathered(x: Tensor, tokens: Tensor) -> Tensor:
    """Return tokens of ``[Hkv, N, D]`` for a block of queries, ``[Hkv, block, K, D]``."""
    found = x.index_select(1, tokens.flatten())
    return found.view(x.shape[0], *tokens.shape, x.shape[2])


def _by_query(given: Listed, x: Tensor, block: slice) -> Tensor:
    """Return ``[H, N, D]`` of a block as ``[Hkv, block, group, D]``."""
    found = x[:, block]
    return found.reshape(-1, given.group, *found.shape[1:]).transpose(1, 2)


def _by_head(x: Tensor) -> Tensor:
    """Return ``[Hkv, block, group, D]`` as ``[H, block, D]``."""
    return x.transpose(1, 2).flatten(0, 1)


def _scores(given: Listed, block: slice) -> tuple[Tensor, Tensor]:
    """Return the scores ``[Hkv, block, group, K]`` of a block, -inf of missing keys, and its keys."""
    key = _gathered(given.k, _tokens(given, block)).to(given.wide)
    query = _by_query(given, given.q, block).to(given.wide)
    score = given.scale * torch.matmul(query, key.transpose(-1, -2))
    return score.masked_fill(given.keys[block][None, :, None, :] < 0, -torch.inf), key


def _weights(score: Tensor, total: Tensor) -> Tensor:
    """Return the probabilities; zeros where no key is listed, whose sum is -inf."""
    return torch.exp(score - total.masked_fill(total == -torch.inf, 0.0)[..., None])
