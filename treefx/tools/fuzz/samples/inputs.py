"""Make a call's inputs from a sample: leaves, results, strided views, with grad or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["Inputs"]


class Inputs:
    """Copies of the tensors of a sample.

    Args:
        given: Any tree of tensors and other values.
        kind: One of ``treefx.tools.fuzz.samples.sample.INPUTS``.

    Attributes:
        given: The same tree, its tensors of that kind.
        leaves: What gradients are asked of.
        tensors: The tensors of the tree, in order.
    """

    def __init__(self, given: Any, kind: str) -> None:
        self._kind = kind
        self.leaves: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self._copies: dict[int, Tensor] = {}
        self.given = tree_map_only(Tensor, self._copy, given)

    def _copy(self, x: Tensor) -> Tensor:
        if id(x) not in self._copies:
            self._copies[id(x)] = self._made(x)
            self.tensors.append(self._copies[id(x)])
        return self._copies[id(x)]

    def _made(self, x: Tensor) -> Tensor:
        if isinstance(x, torch.nn.Parameter):
            return x
        copied = x.detach().clone()
        if self._kind == "inference":
            return copied
        spread = self._kind == "view" and x.layout is torch.strided and x.dim() > 0
        leaf = _spread(copied) if spread else copied
        if x.requires_grad:
            leaf.requires_grad_()
            self.leaves.append(leaf)
        if self._kind in ("leaf", "no_grad"):
            return leaf
        made = leaf.clone()
        return made[..., 1::2] if spread else made


def _spread(x: Tensor) -> Tensor:
    """A contiguous tensor of which ``x`` is every second entry of the last dimension."""
    wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    wide[..., 1::2] = x
    return wide
