"""Compute gradients of a separable bias (learned ALiBi slopes) from dq and dk.

The gradient of a bias ``r(q) + c(k)`` needs no scores: with ``ds`` the gradient of the logits it is
``sum_q R(q) dr(q) + sum_k C(k) dc(k)`` with the row sums R and the column sums C of ds. ATen's backward does not return
them, but it does where q and k have more features. Member g of a group of query heads gets ``q = 1`` in feature g,
where every ``k = 0``, so that ``dk = sum_q ds * q`` is C there; all keys get ``k = 1`` in one more, where every
``q = 0``, so that dq is R there. No logit changes.

Both parts are taken relative to a tile's middle query: from ``r(q)`` and ``c(k)`` as they are, which grow with the
length of the tree, a sum of ds would lose its digits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, accumulation_dtype, autograd_enabled
from treefx.kernels.cpu.scored_tiles import is_separable
from treefx.kernels.score import Expr
from treefx.kernels.tiles.structure import Ranges, find_structure
from treefx.kernels.tiles.tile_keys import evaluate_tile, to_tensor

__all__ = ["BiasGradients", "bias_is_summable"]

_MULTIPLE = 8
"""The kernel's vectors: heads have a multiple of this many features."""


def bias_is_summable(factor: float, bias: Expr | None) -> bool:
    """Return whether the sums of ds, read off dq and dk, give a bias's gradients."""
    return factor != 0.0 and (bias is None or is_separable(bias))


class BiasGradients:
    """Collects the gradients of the marked buffers over the tiles of one backward.

    Args:
        inputs: the tensors of the attention.
        bias: the term added to the scaled product; ``None``: the buffers only decide visibility.
        factor: of the product.
        buffer_grads: which buffers want a gradient.
        width: features of a head before :meth:`extended`.
    """

    def __init__(
        self, inputs: Inputs, bias: Expr | None, factor: float, buffer_grads: Sequence[bool], width: int
    ) -> None:
        self.bias, self.factor, self.width = bias, factor, width
        self.group = inputs.q.shape[1] // inputs.k.shape[1]
        self.structure, self.outside = find_structure(inputs.subtree_end), inputs.outside
        with autograd_enabled():
            self.leaves = inputs.as_leaves(accumulation_dtype(inputs.q), buffer_grads)
        self.marked = [buffer for buffer, wanted in zip(self.leaves.buffers, buffer_grads, strict=True) if wanted]
        self.sums = [torch.zeros_like(buffer, requires_grad=False) for buffer in self.marked]

    def extended(self, q: Tensor, k: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
        """Return q, k and the other tensors of heads, widened by features for the sums.

        They are in the accumulation type.
        """
        extra = -(-(self.width + self.group + 1) // _MULTIPLE) * _MULTIPLE - self.width
        dtype = accumulation_dtype(q)
        wide = [torch.nn.functional.pad(tensor.to(dtype), (0, extra)) for tensor in (q, k, *others)]
        member = torch.arange(q.shape[1]) % self.group
        wide[0][:, torch.arange(q.shape[1]), :, self.width + member] = 1.0
        wide[1][..., self.width + self.group] = 1.0
        return wide

    def add(self, start: int, stop: int, keys: Ranges, part_q: Tensor, part_k: Tensor) -> None:
        """Add a tile's share.

        Args:
            start: first query.
            stop: exclusive last query.
            keys: its keys.
            part_q: gradient of the tile's extended queries ``[B, H, Q, W]``.
            part_k: gradient of its extended keys ``[B, Hkv, K, W]``.
        """
        if self.bias is None:
            return
        rows = part_q[..., self.width + self.group, None] / self.factor
        columns = part_k[..., self.width : self.width + self.group].transpose(2, 3).flatten(1, 2)[:, :, None]
        whole = rows.sum(dim=2, keepdim=True)
        group, middle = self.structure.group(start, stop), (start + stop) // 2
        with autograd_enabled():
            itself = torch.tensor([middle + self.outside])
            row_terms = evaluate_tile(self.bias, self.leaves, group, itself)
            key_terms = evaluate_tile(self.bias, self.leaves, group, to_tensor(keys), query=middle)
            origin = evaluate_tile(self.bias, self.leaves, group, itself, query=middle)
            pairs = ((row_terms, rows), (key_terms, columns / self.factor), (origin, -whole))
            used = [(value.expand_as(grad), grad) for value, grad in pairs if value.requires_grad]
        if not used:
            return
        values, grads = zip(*used, strict=True)
        parts = torch.autograd.grad(values, self.marked, grads, allow_unused=True)
        for total, part in zip(self.sums, parts, strict=True):
            if part is not None:
                total += part
