"""Prove that padding in front of a row leaves convolutions and recurrences in the state in which they start.

Hybrid models set hidden states to zero where a mask of the call marks padding. A graph is followed at one position
under an assumption: a value [B, T] of the inputs has a certain number there, and at all positions of its row before.
Each value then has one known number in all its elements there, or is unknown::

    h * mask                     0
    conv(x, w), no bias          0: its window holds zeros, as it does in front of a row
    silu(x)                      0
    x * rsqrt(sum(x * x) + eps)  0 * eps ** -0.5
    S = exp(g) S + k v^T         0: with k or v

Where all mixers get zeros that way, whatever the parameters are, such positions change no later one, and no gradient
passes through them: a row behind them runs as it would without them. Unknown values count as finite numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.causal.contract import Contracted
from treefx.passes.causal.tree_mixers import LibraryTree, TreeConvolution, TreeScan, Vanishing
from treefx.passes.labels.facts import Axis, Kind, fact_of
from treefx.passes.labels.laws.gradients import is_pointwise
from treefx.passes.labels.purity import impurity
from treefx.passes.trace.library_calls import call_of
from treefx.passes.trace.library_tree import leveled

__all__ = ["Blank", "find_blank"]

aten = torch.ops.aten
_COPIES = {aten._to_copy, aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy, aten.contiguous}
"""Pointwise without the tag."""
_MOVEMENTS = {
    aten.cat, aten.chunk, aten.expand, aten.flip, aten.movedim, aten.permute, aten.repeat, aten.reshape, aten.select,
    aten.slice, aten.split, aten.split_with_sizes, aten.squeeze, aten.stack, aten.t, aten.transpose, aten.unbind,
    aten.unsqueeze, aten.view, aten._unsafe_view,
}  # fmt: skip
"""Every element of the result is one of an operand."""
_KEEPING = {*_MOVEMENTS, aten.amax, aten.amin, aten.mean}
_SUMS = {aten.sum, aten.linalg_vector_norm, aten.cumsum}
"""Zero of zeros, along dimensions without tokens, and so is the derivative of a norm."""
_PRODUCTS = {aten.mul, aten.mm, aten.bmm}
_CHOOSING = {aten.mul, aten.where, aten.masked_fill}
_FILLED: dict[Any, Callable[[fx.Node], Any]] = {
    aten.scalar_tensor: lambda node: node.args[0],
    aten.full: lambda node: node.args[1],
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), lambda node: 0),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), lambda node: 1),
}
"""Constants of one number."""
_ON_ITSELF = {"device", "layout", "pin_memory", "memory_format", "non_blocking"}
_MOST = 16
"""Candidates per graph."""


@dataclass(frozen=True)
class Blank:
    """Positions that write nothing, if all before them in their row are such positions too."""

    node: fx.Node
    """A value [B, T] of the inputs alone."""
    number: int
    """Its number at these positions."""


def find_blank(nodes: Sequence[fx.Node]) -> Blank | None:
    """Find the positions that leave all mixers of a graph in the state in which they start.

    Args:
        nodes: The live nodes of a labelled graph, in order.
    """
    laws = [fact_of(node).law for node in nodes if node.op == "call_function"]
    if any(isinstance(law, Contracted) for law in laws):
        return None  # computed on rows, padding included
    for node in _candidates(nodes)[:_MOST]:
        for number in (0, 1):
            if _Position(node, number).starts_clean(nodes):
                return Blank(node, number)
    return None


def _candidates(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return values [B, T] of the inputs by which packed values are multiplied or chosen; inputs first."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if _packet(node) in _CHOOSING and fact_of(node).kind is Kind.PACKED:
            for operand in node.all_input_nodes:
                found.update(dict.fromkeys(item for item in _chain(operand) if _is_table(item)))
    return sorted(found, key=lambda node: node.op != "placeholder")


def _chain(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a function of the inputs, and what it was made of as long as that is one such value."""
    sources = [node]
    while len(sources) == 1 and fact_of(sources[0]).kind is Kind.PREFIX:
        yield sources[0]
        sources = [item for item in sources[0].all_input_nodes if fact_of(item).kind is not Kind.INVARIANT]


def _is_table(node: fx.Node) -> bool:
    dims = fact_of(node).dims
    axes = [[factor.axis for factor in dim] for dim in dims or ()]
    return axes == [[Axis.ROW], [Axis.TOKEN]] and impurity(node) is None


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


class _Position:
    """The known numbers of values at a position, as tensors without dimensions.

    A number that is not finite, or at which a derivative is not, is NaN.
    """

    def __init__(self, node: fx.Node, number: int) -> None:
        self._known: dict[fx.Node, Tensor] = {node: torch.tensor(number, dtype=_dtype(node), device="cpu")}

    def starts_clean(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether every mixer among the nodes gets zeros."""
        for node in nodes:
            if node.op != "call_function" or node in self._known:
                continue
            law = fact_of(node).law
            written = _written(law)
            if written is not None:
                if not any(map(self._is_zero, written)):
                    return False
                if self._reads_zeros(law):
                    self._known[node] = torch.zeros((), dtype=_dtype(node), device="cpu")
            elif isinstance(law, Vanishing):
                self._known[node] = torch.zeros((), dtype=_dtype(node), device="cpu")
            else:
                number = self._number(node)
                if number is not None:
                    self._known[node] = number
        return True

    def _is_zero(self, node: Any) -> bool:
        return node in self._known and bool(self._known[node] == 0)

    def _reads_zeros(self, law: Any) -> bool:
        """Whether the result of a mixer without a past is zero."""
        if isinstance(law, TreeConvolution):
            return law.bias is None
        if isinstance(law, TreeScan):
            return law.weight is None or self._is_zero(law.roles["skip"].source)
        return True

    def _number(self, node: fx.Node) -> Tensor | None:
        """The number of an operator with a token-wise law; None where it is unknown."""
        if _packet(node) in _FILLED:
            fill = _FILLED[_packet(node)](node)
            return torch.tensor(fill, dtype=_dtype(node), device="cpu") if isinstance(fill, int | float) else None
        read = [item for item in node.all_input_nodes if isinstance(item.meta.get("val"), Tensor | list | tuple)]
        if not any(item in self._known for item in read):
            return None
        if node.target is operator.getitem:
            return self._known[node.args[0]]  # type: ignore[index]
        fact, packet = fact_of(node), _packet(node)
        if packet is aten.linalg_vector_norm and node.args[1:2] not in ((), (2,), (1,)):
            return None
        if fact.kind not in (Kind.PACKED, Kind.PREFIX) or fact.law is not None or not _is_of_tokens(node):
            return None
        known = [self._known[item] for item in read if item in self._known]
        if packet in (aten.where, aten.masked_fill):
            return self._chosen(node)
        if any(bool(item != item) for item in known):
            return torch.tensor(torch.nan, dtype=torch.float64, device="cpu")
        if packet in _PRODUCTS and len(known) < len(read):
            return torch.zeros((), dtype=_dtype(node), device="cpu") if bool(known[0] == 0) else None
        if len(known) < len(read):
            return None
        if packet in _KEEPING | _SUMS | _PRODUCTS - {aten.mul}:
            keeps = packet in _KEEPING or bool(known[0] == 0)
            return known[0].to(_dtype(node)) if keeps and all(item == known[0] for item in known) else None
        if packet is aten.constant_pad_nd:
            pads, fill = node.args[1], node.args[2] if len(node.args) > 2 else 0
            return known[0] if max(pads) <= 0 or bool(known[0] == fill) else None  # type: ignore[arg-type]
        return self._computed(node) if packet in _COPIES or is_pointwise(node.target) else None

    def _chosen(self, node: fx.Node) -> Tensor | None:
        """The branch that a known condition takes."""
        first, second, third = node.args[:3]
        fills = _packet(node) is aten.masked_fill
        condition, chosen, other = (second, third, first) if fills else (first, second, third)
        if condition not in self._known:
            return None
        branch = chosen if bool(self._known[condition]) else other  # type: ignore[index]
        if isinstance(branch, fx.Node):
            found = self._known.get(branch)
            return None if found is None else found.to(_dtype(node))
        return torch.tensor(branch, dtype=_dtype(node), device="cpu")

    def _computed(self, node: fx.Node) -> Tensor | None:
        """Run a pointwise operator on numbers."""
        if any(item not in self._known for item in node.all_input_nodes):
            return None  # a size
        kwargs = {name: item for name, item in node.kwargs.items() if name not in _ON_ITSELF}
        with torch.inference_mode(False), torch.enable_grad():
            leaves = {item: self._known[item].clone() for item in node.all_input_nodes}
            inner = [x.requires_grad_() for x in leaves.values() if x.is_floating_point()]
            args, kwargs = fx.node.map_arg((node.args, kwargs), leaves.__getitem__)
            try:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
                slopes = torch.autograd.grad(value, inner, allow_unused=True) if value.requires_grad else ()
            except (RuntimeError, TypeError, ZeroDivisionError):
                return None
        finite = all(bool(x.isfinite()) for x in (value, *slopes) if x is not None)
        found: Tensor = value.detach().to(_dtype(node))
        return found if finite else torch.tensor(torch.nan, dtype=torch.float64, device="cpu")


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.meta["val"]
    dtype: torch.dtype = (value[0] if isinstance(value, list | tuple) else value).dtype
    return dtype


def _is_of_tokens(node: fx.Node) -> bool:
    """Whether each element of a value, or of all its parts, belongs to one token."""
    fact = fact_of(node)
    facts = [fact] if fact.parts is None else fact.parts
    return all(
        item.dims is not None and {f.axis for dim in item.dims for f in dim} <= {Axis.ROW, Axis.TOKEN, Axis.PLAIN}
        for item in facts
    )


def _written(law: Any) -> list[fx.Node] | None:
    """Return the factors of what a mixer keeps of a token, any of which may be zero; None for other laws."""
    if isinstance(law, TreeConvolution):
        return [law.source]
    if isinstance(law, TreeScan):
        return [law.roles[role].source for role in ("k", "v", "step") if role in law.roles]
    if isinstance(law, LibraryTree):
        call = call_of(law.key)
        how = leveled(call)
        assert how is not None
        return [call.arguments(law.tensors)[how.like]]  # the values written, without which the result is zero too
    return None
