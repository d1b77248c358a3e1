"""Measure workspaces of attentions on the CPU that hold a number per head, query and key.

The dense reference, which runs float64, has all queries against all keys. Eager tiles, which run logits that are not
linear in q.k (softcap) and gradients of biases that are no sums of a query's and a key's term, have up to 256 queries
against all keys. How many such tensors there are at a time depends on the score. Both are measured on the operator
itself, once per operator, score and shapes of heads: the bytes per pair on narrow heads, and per key on those at hand.
"""

from functools import cache
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx

from treefx.kernels.common import accumulation_dtype
from treefx.kernels.cpu.bias_gradients import bias_is_summable
from treefx.kernels.cpu.rectangles import MIN_ROWS, TILE_ELEMENTS
from treefx.kernels.score import Score
from treefx.planning.cost.liveness import size_expression
from treefx.planning.cost.memory import quick_collections, track_peak

__all__ = ["pair_workspace"]

_FORWARD = torch.ops.treefx.tree_attention.default
_BACKWARD = torch.ops.treefx.tree_attention_backward.default
_TILE_ROWS = 2 * MIN_ROWS
_MASK_BYTES = 4
"""Of a tile's conditions per query and key, in a forest of many forks; the measured chains have few."""
_NARROW = 8
_DENSE_SIZES = (256, 0), (128, 128)
_TILED_SIZES = (2048, 0), (1024, 1024)
"""Own tokens and those of the boundary: many tiles, each of which is made while the one before is still held."""


class _Operand(NamedTuple):
    """A tensor of a graph, its sizes in the graph's symbols."""

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype


class _Call(NamedTuple):
    """One attention of a graph, hashable."""

    target: Any
    arguments: tuple[Any, ...]
    tokens: sympy.Expr
    outside: sympy.Expr
    is_dense: bool
    threads: int


def pair_workspace(node: fx.Node) -> sympy.Expr | None:
    """Bytes of an attention's workspace in symbols, besides its results; None where it holds no number per pair.

    The reference takes its queries in blocks of a quarter of a gigabyte of scores in float64: from there on this is
    more than it needs.
    """
    is_dense = _is_dense(node)
    if not is_dense and not _is_tiled(node):
        return None
    q, bk = _operands(node)["q"].meta["val"], _operands(node)["boundary_k"]
    tokens = size_expression(q.shape[2])
    outside = sympy.Integer(0) if bk is None else size_expression(bk.meta["val"].shape[2])
    call = _Call(node.target, _describe(node.args), tokens, outside, is_dense, torch.get_num_threads())
    pair, key = _measure(call)
    rows = tokens if is_dense else _TILE_ROWS
    return sympy.expand((pair * rows + key) * (tokens + outside))


def _operands(node: fx.Node) -> dict[str, Any]:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict.fromkeys(names) | dict(zip(names, node.args, strict=False))


def _is_dense(node: fx.Node) -> bool:
    """Return whether the reference runs it."""
    operands = _operands(node)
    impl, dtype = operands["impl"], operands["q"].meta["val"].dtype
    return bool(impl == "reference" or (impl == "auto" and dtype == torch.float64))


def _is_tiled(node: fx.Node) -> bool:
    """Return whether eager tiles run it."""
    operands = _operands(node)
    linear = Score.from_json(operands["score"]).linear
    return linear is None or (any(operands.get("buffer_grads") or ()) and not bias_is_summable(*linear))


def _describe(item: Any) -> Any:
    """Describe tensors instead of nodes."""
    if isinstance(item, (list, tuple)):
        return tuple(map(_describe, item))
    if not isinstance(item, fx.Node):
        return item
    fake = item.meta["val"]
    return _Operand(tuple(map(size_expression, fake.shape)), fake.dtype)


@cache
def _measure(call: _Call) -> tuple[float, float]:
    """Bytes per pair, and per key on top of them."""
    sizes = _DENSE_SIZES if call.is_dense else _TILED_SIZES
    with torch.no_grad(), quick_collections():
        tokens, outside = sizes[-1] if call.is_dense else sizes[0]
        narrow = _peak(call, tokens, outside, _NARROW)
        rows = tokens if call.is_dense else _rows(call, tokens)
        # The tile before the longest is shorter by its rows.
        pair = narrow / (rows * (tokens + outside - (0 if call.is_dense else rows)))
        more = [_peak(call, *size) - pair * (size[0] if call.is_dense else rows) * sum(size) for size in sizes]
    key = max(0.0, *(bytes_ / sum(size) for bytes_, size in zip(more, sizes, strict=True)))
    return pair + (0 if call.is_dense else _MASK_BYTES), key


def _rows(call: _Call, tokens: int) -> int:
    """Queries of a tile, as :func:`treefx.kernels.cpu.rectangles.rows_per_tile` finds."""
    batch, heads = map(int, call.arguments[call.target is _BACKWARD].shape[:2])
    return max(16, min(_TILE_ROWS, TILE_ELEMENTS // (batch * heads * tokens)))


def _peak(call: _Call, tokens: int, outside: int, width: int | None = None) -> int:
    """Bytes that the operator holds on a chain at most, without its results."""
    sizes = {call.tokens: tokens, call.outside: outside}

    def make(item: Any) -> Any:
        if isinstance(item, tuple) and not isinstance(item, _Operand):
            return [make(one) for one in item]
        if not isinstance(item, _Operand):
            return item
        shape = [int(size.subs(sizes)) if size.subs(sizes).is_number else tokens + outside for size in item.shape]
        if width is not None and len(shape) == 4 and item in heads:
            shape[-1] = width
        return torch.zeros(shape, dtype=item.dtype)

    names = [argument.name for argument in call.target._schema.arguments]
    described = dict(zip(names, call.arguments, strict=False))
    heads = [described.get(name) for name in ("grad_out", "q", "k", "v", "out", "boundary_k", "boundary_v")]
    given = {name: make(item) for name, item in described.items()}
    given["subtree_end"] = torch.full_like(given["subtree_end"], tokens)
    if given.get("hi") is not None:
        given["hi"] = torch.full_like(given["hi"], tokens)
    if "lse" in given:
        given["lse"] = torch.zeros(given["q"].shape[:-1], dtype=accumulation_dtype(given["q"]))
    with track_peak() as peak:
        results = call.target(**given)
    return peak.bytes - sum(x.nbytes for x in _tensors(results))


def _tensors(items: Any) -> list[Tensor]:
    nested = [_tensors(item) if isinstance(item, (list, tuple)) else [item] for item in items]
    return [x for found in nested for x in found if isinstance(x, Tensor)]
