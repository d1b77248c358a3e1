"""Write an associative scan as slices, concatenations and calls of its combine function.

``torch._higher_order_ops.associative_scan`` (the selective scan of Mamba and Jamba) is an operator that cannot be
traced under functionalisation. Written out it is ordinary, and can be proved causal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.trace.opaque_ops import is_pointwise_body

__all__ = ["associative_scan"]

Elements = list[Tensor]


def associative_scan(combine: fx.GraphModule, elements: Sequence[Tensor], others: Sequence[Any]) -> Elements:
    """Scan along dimension 0, inclusively (Blelloch 1990): combine pairs, scan, fill in.

    Args:
        combine: Maps the elements of a left and a right slice, then ``others``, to combined elements. If it is not
            pointwise, the operator is called unchanged.
        elements: Tensors [T, ...].
        others: Further inputs of the combine function.
    """
    if not is_pointwise_body(combine):
        kept: Elements = torch.ops.higher_order.associative_scan(combine, elements, others)
        return kept

    def pairwise(left: Elements, right: Elements) -> Elements:
        return list(fx.Interpreter(copy.deepcopy(combine)).run(*left, *right, *others))

    return _scan(list(elements), pairwise)


def _scan(elements: Elements, pairwise: Callable[[Elements, Elements], Elements]) -> Elements:
    count = elements[0].shape[0]
    if count < 2:
        return elements
    pairs = pairwise([x[: count - 1 : 2] for x in elements], [x[1::2] for x in elements])
    odd = _scan(pairs, pairwise)
    first = [x[:1] for x in elements]
    if count == 2:
        return [torch.cat(pieces) for pieces in zip(first, odd, strict=True)]
    rest = pairwise([x[: (count - 1) // 2] for x in odd], [x[2::2] for x in elements])
    even = [torch.cat(pieces) for pieces in zip(first, rest, strict=True)]
    return [_interleaved(*pieces) for pieces in zip(even, odd, strict=True)]


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """even[0], odd[0], even[1], ...; there may be one more even one."""
    count = odd.shape[0]
    mixed = torch.stack([even[:count], odd], dim=1).flatten(0, 1)
    return torch.cat([mixed, even[count:]])
