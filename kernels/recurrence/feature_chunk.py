"""Compute chunks of a recurrence with one decay per key feature: Kimi delta attention.

With the running sum t ``[L, D]`` of the decays' logarithms inside a chunk, and the incoming state S ``[D, E]``::

    A(x, y)_ij = sum over d of x_id y_jd exp(t_id - t_jd)     for j <= i
    (1 + A(w, k) below the diagonal) n = v - (exp(t) * w) S   without erasing n = v
    out = A(q, k) n + (exp(t) * q) S
    S_out = exp(t_L) * S + (exp(t_L - t) * k)^T n

Each pair of tokens has its own exponent, which is at most 0 where logarithms are: a quotient of two exponentials of
sums would overflow. So chunks are short. Running sums are float64, as in ``scan_chunk``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from treefx.kernels.common import autograd_enabled
from treefx.kernels.recurrence.scan_chunk import Gradients

__all__ = ["FeatureChunk"]


@dataclass(frozen=True)
class FeatureChunk:
    """Hold C chunks of L tokens; each head has queries and keys.

    Attributes:
        q: queries, which read the state ``[C, H, L, D]``.
        k: keys, which write it ``[C, H, L, D]``.
        v: the written values ``[C, H, L, E]``.
        g: logarithm of the decay ``[C, H, L, D]``.
        w: queries of the erased values ``[C, H, L, D]``; None without erasing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    w: Tensor | None

    @cached_property
    def total(self) -> Tensor:
        """Compute t, float64."""
        return self.g.cumsum(-2, dtype=torch.float64)

    @cached_property
    def entering(self) -> Tensor:
        """Compute exp(t), the remaining share of the incoming state."""
        return self.total.exp().to(self.g.dtype)

    @cached_property
    def leaving(self) -> Tensor:
        """Compute exp(t_L - t), the remaining share of each token's write at the end."""
        if self._is_one_token:
            return torch.ones_like(self.g)
        return (self.total[..., -1:, :] - self.total).exp().to(self.g.dtype)

    @cached_property
    def decay(self) -> Tensor:
        """Compute exp(t_i - t_j), ``[C, H, L, L, D]``; 0 where j is later."""
        if self._is_one_token:
            return torch.ones_like(self.g)[..., None, :]
        length = self.total.shape[-2]
        future = torch.ones(length, length, dtype=torch.bool, device=self.g.device).triu_(1)
        difference = (self.total[..., :, None, :] - self.total[..., None, :, :]).to(self.g.dtype)
        return difference.masked_fill(future[..., None], -torch.inf).exp()

    @property
    def _is_one_token(self) -> bool:
        return self.g.shape[-2] == 1

    def _pairs(self, x: Tensor) -> Tensor:
        """Compute A(x, k), ``[C, H, L, L]``."""
        return (x[..., :, None, :] * self.k[..., None, :, :] * self.decay).sum(-1)

    @cached_property
    def mixing(self) -> Tensor:
        """Compute A(q, k)."""
        return self._pairs(self.q)

    @cached_property
    def erasing(self) -> Tensor:
        """Compute A(w, k) below the diagonal."""
        assert self.w is not None
        return self._pairs(self.w).tril(-1)

    @property
    def gate(self) -> Tensor:
        """Return exp(t_L) in the shape that multiplies a state, ``[C, H, D, 1]``."""
        return self.entering[..., -1, :, None]

    @cached_property
    def transfer(self) -> tuple[Tensor, Tensor] | None:
        """Return the erased part of the incoming state, as key and read of ``-key^T (read S)``."""
        return None if self.w is None else (self.k * self.leaving, self._solve(self.w * self.entering))

    def _solve(self, x: Tensor, transposed: bool = False) -> Tensor:
        matrix = self.erasing.mT if transposed else self.erasing
        solved: Tensor = torch.linalg.solve_triangular(matrix, x, upper=transposed, unitriangular=True)
        return solved

    def _written(self, state: Tensor | None) -> Tensor:
        """Compute n, ``[C, H, L, E]``, for the incoming states (None: zero)."""
        if self.w is None:
            return self.v
        return self._solve(self.v if state is None else self.v - (self.w * self.entering) @ state)

    def outgoing(self) -> Tensor:
        """Compute the outgoing states for incoming zeros, ``[C, H, D, E]``."""
        return (self.k * self.leaving).mT @ self._written(None)

    def output(self, state: Tensor) -> Tensor:
        """Compute the outputs ``[C, H, L, E]`` for the incoming states ``[C, H, D, E]``."""
        return self.mixing @ self._written(state) + (self.q * self.entering) @ state

    def incoming_gradient(self, grad: Tensor) -> Tensor:
        """Compute the gradient of the incoming states through the outputs.

        ``grad`` is the gradient of the outputs.
        """
        found = (self.q * self.entering).mT @ grad
        if self.w is None:
            return found
        return found - (self.w * self.entering).mT @ self._solve(self.mixing.mT @ grad, transposed=True)

    def backward(self, grad: Tensor, state: Tensor, outgoing: Tensor | None) -> Gradients:
        """Compute the gradients of all inputs, by autograd through the chunk.

        Args:
            grad: gradient of the outputs ``[C, H, L, E]``.
            state: the incoming states.
            outgoing: gradients of the outgoing states; None where no chunk reads those.
        """
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
        with autograd_enabled():
            again = FeatureChunk(**{"w": None, **leaves})
            total = (again.output(state) * grad).sum()
            if outgoing is not None:
                kept = (again.k * again.leaving).mT @ again._written(state)
                total = total + ((again.gate * state + kept) * outgoing).sum()
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        pairs = zip(leaves.items(), found, strict=True)
        of = {name: torch.zeros_like(x) if gradient is None else gradient for (name, x), gradient in pairs}
        return Gradients(of["q"], of["k"], of["v"], of["g"], of.get("w"))
