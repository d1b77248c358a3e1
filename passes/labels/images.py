"""Which vectors of a vision tower come from which image, proved operator by operator.

Two places hold the same vector, and give it the same gradient, where the same function of the parameters alone made it
of equal pixels. The proof labels the first dimension of all inputs behind the vectors (pixels [n, ...], their masks
[n, ...]) as rows of images, and applies the token-wise laws: none lets an element depend on another image. Equal
*values* would not do: a projection that starts at zero gives equal vectors for all images, and another gradient for
each.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import (
    FACT,
    Axis,
    Fact,
    Factor,
    Kind,
    ancestors,
    fact_of,
    plain_dims,
    set_fact,
    shape_of,
)
from treefx.passes.labels.laws.base import Call, find_law
from treefx.passes.labels.purity import impurity
from treefx.passes.labels.rows import factors_of
from treefx.passes.labels.token_inputs import Role
from treefx.passes.labels.uniformity import is_uniform

__all__ = ["Images", "find_images"]

aten = torch.ops.aten
_Laws = Mapping[Any, Callable[[Call], Fact]]


class _MixesImages(Exception):
    """An operator may let one image depend on another."""


@dataclass(frozen=True)
class _Single:
    """The ``law`` of a value of one image."""

    source: fx.Node
    index: int


@dataclass(frozen=True)
class Images:
    """The images behind the vectors of a source."""

    inputs: tuple[fx.Node, ...]
    """Inputs [n, ...], one entry per image; the vectors of an image are a function of its entries."""
    elements: Any
    """How many elements of the source, in order, belong to each image."""
    made: bool = False
    """Whether the inputs, one after another, are vectors of a tower outside of the graph; each counts as an image."""


def find_images(
    gm: fx.GraphModule, roles: Sequence[Role], source: fx.Node, vectors: Collection[fx.Node] = ()
) -> Images | None:
    """Find the images behind a value whose parts are functions of one image each.

    Apart from the image, only parameters may enter.

    Args:
        gm: The traced graph.
        roles: Role of each placeholder.
        source: A value of the graph.
        vectors: Inputs that a tower outside of the graph made; of these it is known which vectors are one function.
    """
    role_of = dict(zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True))
    made_of = {source, *ancestors(source)}
    behind = [node for node in gm.graph.nodes if node in made_of and _is_tensor(node)]
    images = tuple(node for node in behind if role_of.get(node) in ("input", "variable"))
    if not images or not all(map(shape_of, images)) or impurity(source) is not None:
        return None
    made = all(node in vectors for node in images)
    starts = _join(images, made_of) if made else images
    if not made and any(role_of[node] == "variable" for node in images):
        return None  # the gradient of a variable is another one for each image, however equal they are
    if made and len(starts) != 1 or len({str(shape_of(node)[0]) for node in starts}) != 1:
        return None
    with _facts_of_images(gm):
        try:
            for node in gm.graph.nodes:
                if node in made_of:
                    set_fact(node, _fact(node, starts, role_of))
        except (NoLaw, _MixesImages):
            return None
        dims = fact_of(source).dims
    factors = factors_of(dims or ())
    if not factors or factors[0].axis is not Axis.ROW:
        return None
    inputs: Any = starts[0].args[0] if made and starts != images else images
    return Images(tuple(inputs), math.prod(factor.size for factor in factors[1:]), made)


def _join(images: tuple[fx.Node, ...], made_of: set[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the value that joins vectors of several inputs, and alone reads them."""
    readers = {user for node in images for user in node.users if user in made_of}
    joins = next(iter(readers)) if len(readers) == 1 else images[0]
    parts: Any = joins.args[0] if joins.target is aten.cat.default and joins.args[1:] in ((), (0,)) else ()
    return (joins,) if {*parts} == {*images} else images


@contextmanager
def _facts_of_images(gm: fx.GraphModule) -> Iterator[None]:
    """Let laws see other facts meanwhile: those in which images are rows."""
    before = {node: node.meta.pop(FACT, None) for node in gm.graph.nodes}
    try:
        yield
    finally:
        for node, fact in before.items():
            node.meta.pop(FACT, None)
            if fact is not None:
                set_fact(node, fact)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _fact(node: fx.Node, images: Sequence[fx.Node], role_of: Mapping[fx.Node, Role]) -> Fact:
    if node in images:
        shape = shape_of(node)
        return Fact(Kind.PREFIX, ((Factor(Axis.ROW, shape[0]),), *plain_dims(shape[1:])))
    if node.op != "call_function":
        return Fact(Kind.INVARIANT, learned=role_of.get(node) == "parameter")
    facts = [fact_of(operand) for operand in node.all_input_nodes]
    if node.target is operator.getitem:
        source, position = node.args
        assert isinstance(source, fx.Node) and isinstance(position, int)
        parts = fact_of(source).parts
        return fact_of(source) if parts is None else parts[position]
    if all(fact.kind is Kind.INVARIANT for fact in facts):
        return Fact(Kind.INVARIANT, learned=any(fact.learned for fact in facts))
    singles = [fact.law for fact in facts if isinstance(fact.law, _Single)]
    if singles:
        return _joined(Call(node), singles)
    found = _OF_IMAGES.get(node.target) or find_law(node.target)
    if found is None:
        raise _MixesImages
    return found(Call(node))


def _first_dimension(call: Call, node: Any) -> None:
    """Check that a value's first dimension is that of images, and no other is.

    Raises:
        _MixesImages: It is not.
    """
    axes = [[factor.axis for factor in dim] for dim in call.dims(node)] if call.labelled(node) else []
    if axes[:1] != [[Axis.ROW]] or any(algebra.has_tokens(dim) for dim in call.dims(node)[1:]):
        raise _MixesImages


def _each_by_itself(call: Call) -> Fact:
    """y[n] = f(x[n], w): a convolution or a pooling of a batch of images."""
    source, *others = call.operands
    shape = shape_of(call.node)
    _first_dimension(call, source)
    if any(map(call.labelled, others)) or len(shape) != len(shape_of(source)):
        raise _MixesImages
    return call.result((call.dims(source)[0], *plain_dims(shape[1:])))


def _attention(call: Call) -> Fact:
    """Label y[n] = attention(q[n], k[n], v[n]), with each patch seeing its own image."""
    query, key, value, mask = (call.arg(i, name) for i, name in enumerate(("query", "key", "value", "attn_mask")))
    for node in (query, key, value):
        _first_dimension(call, node)
    if call.arg(4, "dropout_p", 0.0) != 0:
        raise _MixesImages
    if isinstance(mask, fx.Node) and call.labelled(mask):
        _first_dimension(call, mask)
        if len(shape_of(mask)) != len(shape_of(query)):
            raise _MixesImages
    elif isinstance(mask, fx.Node) and len(shape_of(mask)) == len(shape_of(query)) and not is_uniform(mask, 0):
        raise _MixesImages
    return call.result((call.dims(query)[0], *plain_dims(shape_of(call.node)[1:])))


def _single(call: Call) -> Fact:
    """x[i] of a value [n, ...]: that of one image, or a selection along another dimension."""
    source = call.node_arg(0)
    if call.arg(1, "dim") % len(call.dims(source)) or not algebra.has_tokens(call.dims(source)[0]):
        law = find_law(call.node.target)
        assert law is not None
        return law(call)
    _first_dimension(call, source)
    result = call.result(call.dims(source)[1:])
    return replace(result, law=_Single(source, int(call.arg(2, "index")) % int(shape_of(source)[0])))


def _singles(call: Call) -> Fact:
    """x[0], x[1], ... of a value [n, ...]."""
    source = call.node_arg(0)
    if call.arg(1, "dim", 0) % len(call.dims(source)):
        raise _MixesImages
    _first_dimension(call, source)
    part = call.result(call.dims(source)[1:])
    parts = tuple(replace(part, law=_Single(source, i)) for i in range(len(call.node.meta["val"])))
    return Fact(part.kind, parts=parts, learned=part.learned)


def _joined(call: Call, singles: Sequence[_Single]) -> Fact:
    """Label all x[i] of a value [n, ...] joined again, in order.

    A model may take a batch of images for a list of them.
    """
    source = singles[0].source
    pieces = call.node.args[0]
    stacks = call.node.target is aten.stack.default
    if not (stacks or call.node.target is aten.cat.default) or call.arg(1, "dim", 0) != 0:
        raise _MixesImages
    assert isinstance(pieces, list | tuple)
    given = [fact_of(piece).law for piece in pieces if isinstance(piece, fx.Node)]
    row, *others = fact_of(source).dims or ((),)
    if given != [_Single(source, i) for i in range(int(row[0].size))]:
        raise _MixesImages
    return call.result((row, *others) if stacks else ((*row, *others[0]), *others[1:]))


_OF_IMAGES: _Laws = {
    aten.select.int: _single,
    aten.unbind.int: _singles,
    aten.convolution.default: _each_by_itself,
    aten.avg_pool2d.default: _each_by_itself,
    aten._adaptive_avg_pool2d.default: _each_by_itself,
    torch.ops.treefx.attention.default: _attention,
}
"""Operators that run over images as they do over any batch; for tokens they have other laws, or none."""
