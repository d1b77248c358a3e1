"""Define the law of ``masked_scatter``: image vectors in place of embeddings.

The source holds one vector per place, in the order of the places over all rows, so a place is known by its number. That
number, or the image that stands there (``treefx.passes.labels.images``), becomes part of the identity of the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Axis, Fact, Kind, fact_of, shape_of
from treefx.passes.labels.laws.base import Call, law
from treefx.passes.labels.uniformity import is_uniform

__all__ = ["Placed"]

aten = torch.ops.aten
_NOT_VECTORS = "puts values between tokens that are no vector per token of [rows, tokens, features]"


@dataclass(frozen=True)
class Placed:
    """The ``law`` of embeddings of which some are replaced by vectors of a source."""

    target: fx.Node
    """The embeddings [B, T, D]."""
    mask: fx.Node
    """bool [B, T, 1] or [B, T, D], True at places; a function of the inputs alone."""
    source: fx.Node
    """Any shape, read in order: D elements for each place."""


@law(aten.masked_scatter)
def masked_scatter(call: Call) -> Fact:
    """y[b, t] = source[number of places before (b, t)] at places, x[b, t] elsewhere."""
    target, mask, source = (call.node_arg(i) for i in range(3))
    if fact_of(target).kind is not Kind.PACKED or fact_of(mask).kind is not Kind.PREFIX or call.labelled(source):
        raise NoLaw("puts values between tokens that are made of tokens, at places that are not known from the inputs")
    dims = call.dims(target)
    axes = [[factor.axis for factor in dim if factor.axis is not Axis.PLAIN] for dim in dims]
    places = call.dims(mask)
    if axes != [[Axis.ROW], [Axis.TOKEN], []] or any(len(dim) != 1 for dim in dims[:2]):
        raise NoLaw(_NOT_VECTORS)
    if len(places) != 3 or not all(map(algebra.same_tokens, places[:2], dims[:2])) or not is_uniform(mask, 2):
        raise NoLaw(_NOT_VECTORS)
    if any(size == 0 for size in shape_of(source)):
        raise NoLaw(_NOT_VECTORS)
    learned = any(fact_of(node).learned for node in call.operands)
    return Fact(Kind.PACKED, dims, law=Placed(target, mask, source), learned=learned)
