"""Compute a batch of chunks of a linear recurrence: outputs, states and gradients.

With the running sum t of the decays' logarithms inside a chunk, D_ij = exp(t_i - t_j) for j <= i, and the state S that
comes in::

    n = v                                         without erasing
    (1 + W) n = v - exp(t) w S,                   W = (w k^T * D) below the diagonal
    out = (q k^T * D) n + exp(t) q S
    S_out = exp(t_L) S + k^T (exp(t_L - t) n)

Queries and keys may be shared by groups of heads: all decays are applied to what has as many heads as v. A state is
``[G, D, R * E]`` for G groups of R heads, so that one product serves a group. Padded tokens are zero: they write
nothing, and a logarithm of zero decays nothing.

Running sums of logarithms are float64, for any inputs: a decay is the difference of two of them, which one
strong decay in the chunk makes large, and the gradient of a logarithm is what two sums over pairs of tokens differ by.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Chunk", "Gradients", "split"]


def split(x: Tensor, dim: int, size: int) -> Tensor:
    """Dimension ``dim`` as two, the first of the given size."""
    return x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])


@dataclass(frozen=True)
class Gradients:
    """Hold gradients of the inputs of a batch of chunks; ``w`` is None without an erase."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    w: Tensor | None


@dataclass(frozen=True)
class Chunk:
    """C chunks of L tokens.

    Attributes:
        q: reads the state ``[C, G, L, D]``.
        k: writes it ``[C, G, L, D]``.
        v: values written ``[C, H, L, E]``.
        g: logarithm of the decay ``[C, H, L]``.
        w: reads erased values ``[C, H, L, D]``, with G = H; None without an erase.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    w: Tensor | None

    @cached_property
    def total(self) -> Tensor:
        """t, float64 ``[C, H, L]``."""
        return self.g.cumsum(-1, dtype=torch.float64)

    @cached_property
    def entering(self) -> Tensor:
        """Return exp(t), ``[C, H, L, 1]``: the remaining share of the incoming state."""
        return self.total.exp().to(self.g.dtype)[..., None]

    @cached_property
    def leaving(self) -> Tensor:
        """Return exp(t_L - t), ``[C, H, L, 1]``: the remaining share of each write at the end."""
        if self._is_one_token:
            return torch.ones_like(self.g)[..., None]
        return (self.total[..., -1:] - self.total).exp().to(self.g.dtype)[..., None]

    @cached_property
    def decay(self) -> Tensor:
        """D, ``[C, H, L, L]``."""
        if self._is_one_token:
            return torch.ones_like(self.g)[..., None]
        length = self.total.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=self.g.device).triu_(1)
        difference = (self.total[..., :, None] - self.total[..., None, :]).to(self.g.dtype)
        return difference.masked_fill_(future, -torch.inf).exp_()

    @property
    def _is_one_token(self) -> bool:
        """Return whether decays within the chunk are 1, also for logarithms that are not finite."""
        return self.g.shape[-1] == 1

    @cached_property
    def mixing(self) -> Tensor:
        """q k^T * D, ``[C, H, L, L]``."""
        return self._for_heads(self.q @ self.k.mT) * self.decay

    @cached_property
    def erasing(self) -> Tensor:
        """W, ``[C, H, L, L]``."""
        assert self.w is not None
        return (self.w @ self.k.mT).mul_(self.decay).tril_(-1)

    @property
    def gate(self) -> Tensor:
        """exp(t_L) as it multiplies a state, ``[C, G, 1, R * E]``."""
        return self._for_states(self.total[..., -1].exp().to(self.g.dtype))

    @cached_property
    def transfer(self) -> tuple[Tensor, Tensor] | None:
        """Return key and read of ``-key^T (read S)``, which the chunk takes from the state."""
        if self.w is None:
            return None
        return self.k * self.leaving, self.solve(self.w * self.entering)

    def solve(self, x: Tensor, transposed: bool = False) -> Tensor:
        """(1 + W)^-1 x, or that of the transpose."""
        matrix = self.erasing.mT if transposed else self.erasing
        solved: Tensor = torch.linalg.solve_triangular(matrix, x, upper=transposed, unitriangular=True)
        return solved

    def written(self, state: Tensor | None) -> Tensor:
        """n, ``[C, H, L, E]``, given the incoming states (None: zero)."""
        if self.w is None:
            return self.v
        return self.solve(self.v if state is None else self.v - self.entering * self.read(self.w, state))

    def outgoing(self) -> Tensor:
        """The outgoing states for incoming zeros, ``[C, G, D, R * E]``."""
        return self.k.mT @ self.grouped(self.written(None) * self.leaving)

    def output(self, state: Tensor) -> Tensor:
        """``[C, H, L, E]`` for the incoming states ``[C, G, D, R * E]``."""
        return (self.mixing @ self.written(state)).addcmul_(self.entering, self.read(self.q, state))

    def read(self, x: Tensor, state: Tensor) -> Tensor:
        """x S, ``[C, H, L, E]``."""
        product = x @ state
        chunks, groups, length, _ = product.shape
        return product.reshape(chunks, groups, length, -1, self.v.shape[-1]).transpose(2, 3).flatten(1, 2)

    def grouped(self, x: Tensor) -> Tensor:
        """``[C, H, L, E]`` as ``[C, G, L, R * E]``."""
        return split(x, 1, self.q.shape[1]).transpose(2, 3).flatten(3)

    # Backward ---------------------------------------------------------------------------------------------------------

    def incoming_gradient(self, grad: Tensor) -> Tensor:
        """Return the gradient of incoming states by the outputs, whose gradient is ``grad``."""
        found = self.q.mT @ self.grouped(self.entering * grad)
        if self.w is None:
            return found
        residual = self.solve(self.mixing.mT @ grad, transposed=True)
        return found - self.w.mT @ (self.entering * residual)

    def backward(self, grad: Tensor, state: Tensor, outgoing: Tensor | None) -> Gradients:
        """Of all inputs.

        Args:
            grad: of the outputs ``[C, H, L, E]``.
            state: the incoming states.
            outgoing: gradients of the outgoing states; None where these are unused.
        """
        written = self.written(state)
        scores = (grad @ written.mT).mul_(self.decay)  # of q k^T, per head
        of_written = self.mixing.mT @ grad
        faded = self.entering * grad
        total = (faded * self.read(self.q, state)).sum(-1, dtype=torch.float64)
        q = self.grouped(faded) @ state.mT
        k = torch.zeros_like(self.k)
        if outgoing is not None:
            kept = self.leaving * self.read(self.k, outgoing)
            of_written = of_written + kept
            k += self.grouped(self.leaving * written) @ outgoing.mT
            self._add_outgoing(total, (kept * written).sum(-1, dtype=torch.float64), state, outgoing)
        self._add_products(total, scores, self._for_heads(self.q @ self.k.mT))
        shared = split(scores, 1, self.q.shape[1]).sum(2)
        q += shared @ self.k
        k += shared.mT @ self.q
        w = None
        if self.w is not None:
            of_written, w = self._erased(total, k, of_written, written, state)
        g = total.flip(-1).cumsum(-1).flip(-1).to(self.g.dtype)
        return Gradients(q, k, of_written, g, w)

    def _erased(
        self, total: Tensor, k: Tensor, of_written: Tensor, written: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of v and w; those of t and k are added to."""
        assert self.w is not None
        residual = self.solve(of_written, transposed=True)
        faded = self.entering * residual
        total -= (faded * self.read(self.w, state)).sum(-1, dtype=torch.float64)
        pairs = (residual @ written.mT).tril_(-1).mul_(self.decay).neg_()
        self._add_products(total, pairs, self.w @ self.k.mT)
        k += pairs.mT @ self.w
        return residual, pairs @ self.k - faded @ state.mT

    def _add_products(self, total: Tensor, grad: Tensor, product: Tensor) -> None:
        """Add the gradient of t through D; ``grad`` is that of a product times D, D applied."""
        if self._is_one_token:
            return
        through = grad * product
        total += through.sum(-1, dtype=torch.float64)
        total -= through.sum(-2, dtype=torch.float64)

    def _add_outgoing(self, total: Tensor, kept: Tensor, state: Tensor, outgoing: Tensor) -> None:
        """The gradient of t through exp(t_L) and exp(t_L - t); ``total`` and ``kept`` are float64."""
        gated = (state * outgoing * self.gate).sum(2)  # [C, G, R * E]
        if not self._is_one_token:
            total -= kept
            total[..., -1] += kept.sum(-1)
        total[..., -1] += split(gated, 2, gated.shape[2] // self.v.shape[-1]).sum(-1).flatten(1)

    def _for_heads(self, x: Tensor) -> Tensor:
        """``[C, G, ...]`` as ``[C, H, ...]``."""
        repeats = self.v.shape[1] // x.shape[1]
        return x if repeats == 1 else x.repeat_interleave(repeats, 1)

    def _for_states(self, x: Tensor) -> Tensor:
        """``[C, H]`` as ``[C, G, 1, R * E]``."""
        return split(x, 1, self.q.shape[1]).repeat_interleave(self.v.shape[-1], -1).unsqueeze(2)
