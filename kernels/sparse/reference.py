"""Compute attention to listed keys by its definition, as a dense mask; in any floating dtype.

With s = scale * q.k of listed pairs and -inf of all others, and one more logit of a sink per head, if there are sinks:
lse = log sum exp(s), and out = exp(s - lse) v. A query without a listed key gives 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treefx.kernels.common import autograd_enabled
from treefx.kernels.sparse.problem import Listed

__all__ = ["backward", "forward"]


def forward(given: Listed) -> tuple[Tensor, Tensor]:
    """Return the output ``[H, N, Dv]`` and the log-sum-exp ``[H, N]``."""
    out, lse = _attend(given, given.q, given.k, given.v, given.sinks)
    return out.to(given.q.dtype), lse


def backward(grad_out: Tensor, given: Listed, out: Tensor, lse: Tensor) -> list[Tensor]:
    """Return the gradients of q, k and v, and of sinks if there are any."""
    inputs = [given.q, given.k, given.v, *([] if given.sinks is None else [given.sinks])]
    with autograd_enabled():
        leaves = [x.detach().to(given.wide).requires_grad_() for x in inputs]
        found, _ = _attend(given, *leaves)
        grads = torch.autograd.grad(found, leaves, grad_out.to(given.wide))
    return [grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)]


def _attend(given: Listed, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(given.wide) for x in (q, k, v))
    tokens = k.shape[1]
    places = torch.where(given.keys < 0, tokens, given.keys).long()
    listed = torch.zeros(len(places), tokens + 1, dtype=torch.bool, device=q.device).scatter_(1, places, True)[:, :-1]
    k, v = (x.repeat_interleave(given.group, 0) for x in (k, v))
    score = (given.scale * (q @ k.transpose(1, 2))).masked_fill(~listed, -torch.inf)
    lse = score.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(given.wide)[:, None])
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return weight @ v, lse.detach()
