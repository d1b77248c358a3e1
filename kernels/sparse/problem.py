"""Describe an attention of queries to listed keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treefx.kernels.common import accumulation_dtype, sink_gradient

__all__ = ["Listed"]


@dataclass(frozen=True)
class Listed:
    """Hold the inputs of ``treefx::sparse_tree_attention``.

    Attributes:
        q: queries ``[H, N, D]``.
        k: keys ``[Hkv, N, D]``; H is a multiple of Hkv.
        v: values ``[Hkv, N, Dv]``.
        keys: int32 or int64 ``[N, K]``, the tokens that each query attends to, each at most once; -1 for none.
        scale: factor of q.k.
        sinks: one extra logit per query head ``[H]``, which takes weight and has no value; or ``None``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    scale: float
    sinks: Tensor | None = None

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.q.shape[0] // self.k.shape[0]

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return accumulation_dtype(self.q)

    def sink_gradient(self, grad_out: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        """Return the gradient of sinks, if there are any."""
        return [] if self.sinks is None else [sink_gradient(grad_out[None], out[None], lse[None], self.sinks)]

    def first_tokens(self, tokens: int, listed: int) -> Listed:
        """Return the same attention of the first tokens, to as many first keys of each list.

        Forms are compared on it, so numbers that are not finite are zeros.
        """
        keys = self.keys[:tokens, :listed]
        q, k, v = (x.detach()[:, :tokens].nan_to_num(0.0, 0.0, 0.0) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, keys=keys.masked_fill(keys >= tokens, -1))
