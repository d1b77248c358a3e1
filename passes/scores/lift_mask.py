"""Lift mask, bias and score subgraphs into an expression of one score.

Like inductor's ``inner_fn``, on demand: the element of a node at a given index follows from the elements of its
operands. Views and indexing are maps of indices, comparisons and arithmetic are themselves, and anything else is a load
at that index. An index is kept as *digits*, one per factor of a dimension, so that views regroup and never divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from treefx.kernels.score import Expr
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Kind, fact_of, shape_of
from treefx.passes.scores.batch_numbers import number_of_batch
from treefx.passes.scores.digits import (
    Digit,
    Index,
    align,
    combined,
    from_the_front,
    of_head,
    offset_of_keys,
    split_digit,
)
from treefx.passes.scores.loads import load, load_maybe
from treefx.passes.scores.narrow import compares_rounded, may_wrap_around
from treefx.passes.scores.score_algebra import const, fold

__all__ = ["element_operands", "lift", "step"]

aten = torch.ops.aten


def lift(node: Any, index: Index) -> Expr:
    """The element of ``node`` at ``index``.

    Raises:
        NoLaw: It depends on the row in a way that cannot be read at one token.
    """
    if not isinstance(node, fx.Node):
        return const(node)
    if may_wrap_around(node):
        return load(node, index)
    moved = step(node, index)
    if moved is not None:
        return lift(*moved)
    fact = fact_of(node)
    if fact.kind is Kind.SCORE and fact.law is None and node.target in (aten.bmm.default, aten.baddbmm.default):
        return _product(node, index)
    if fact.kind is Kind.PACKED and (loaded := load_maybe(node, index)) is not None:
        return loaded
    rule = _ELEMENTS.get(node.target)
    if rule is not None:
        return rule(node, index)
    name = _POINTWISE.get(node.target)
    if name is not None:
        operands = [_operand(item, node, index) for item in node.args]
        return load(node, index) if compares_rounded(node, operands) else fold((name, *operands))
    return load(node, index)


def _operand(item: Any, node: fx.Node, index: Index) -> Expr:
    """The element of a broadcast operand that meets ``node`` at ``index``."""
    if not isinstance(item, fx.Node):
        return const(item)
    return lift(item, align(shape_of(item), index))


# Movement: the same element under another index -----------------------------------------------------------------------


def step(node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
    """One movement operator back, or None if ``node`` is not one (or splits a digit)."""
    rule = _MOVES.get(node.target)
    if rule is None:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    moved = rule(node, source, index)
    return None if moved is None else (source, moved)


def _same(node: fx.Node, source: fx.Node, index: Index) -> Index:
    return index


def _move_detach(node: fx.Node, source: fx.Node, index: Index) -> Index | None:
    """Pass detach only on values without gradient."""
    return None if fact_of(source).learned else index


def _move_cast(node: fx.Node, source: fx.Node, index: Index) -> Index | None:
    old, new = source.meta["val"].dtype, node.meta["val"].dtype
    return (
        index if old.is_floating_point == new.is_floating_point and (old is torch.bool) == (new is torch.bool) else None
    )


def _move_view(node: fx.Node, source: fx.Node, index: Index) -> Index | None:
    queue = [digit for dim in index for digit in dim]
    result = []
    for size in shape_of(source):
        taken: list[Digit] = []
        product = 1
        while product < size and queue:
            digit = queue.pop(0)
            missing = size // product
            if digit[1] > missing and digit[1] % missing == 0 and digit[0][0] not in ("b", "cq", "ck"):
                digit, rest = split_digit(digit, digit[1] // missing)
                queue.insert(0, rest)
            taken.append(digit)
            product *= digit[1]
        if product != size:
            return None
        result.append(tuple(taken))
    return tuple(result)


def _move_expand(node: fx.Node, source: fx.Node, index: Index) -> Index:
    return align(shape_of(source), index)


def _move_permute(node: fx.Node, source: fx.Node, index: Index) -> Index:
    rank = len(shape_of(source))
    labels = torch.empty([2 + i for i in range(rank)], device="meta")
    order = [size - 2 for size in node.target(labels, *node.args[1:]).shape]  # type: ignore[operator]
    return tuple(index[order.index(d)] for d in range(rank))


def _move_unsqueeze(node: fx.Node, source: fx.Node, index: Index) -> Index:
    new = int(node.args[1]) % len(index)  # type: ignore[arg-type]
    return index[:new] + index[new + 1 :]


def _move_squeeze(node: fx.Node, source: fx.Node, index: Index) -> Index:
    kept = iter(index)
    gone = len(shape_of(source)) - len(index)
    given: Any = node.args[1] if len(node.args) > 1 else None
    rank = len(shape_of(source))
    where = None if given is None else {d % rank for d in ([given] if isinstance(given, int) else given)}
    result: list[tuple[Digit, ...]] = []
    for d, size in enumerate(shape_of(source)):
        removed = size == 1 and gone > 0 and (where is None or d in where)
        result.append(() if removed else next(kept))
        gone -= removed
    return tuple(result)


def _move_slice(node: fx.Node, source: fx.Node, index: Index) -> Index:
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    dim %= len(index)
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    stride = node.args[4] if len(node.args) > 4 else 1
    if (start == 0 and stride == 1) or shape_of(node)[dim] == shape_of(source)[dim]:
        return index
    size = shape_of(source)[dim]
    if not isinstance(stride, int) or not (isinstance(start, int) or 0 <= start <= size):  # type: ignore[operator]
        raise NoLaw("reads a mask from a column that depends on the number of columns")
    if isinstance(start, int):
        start = max(0, min(start + size if start < 0 else start, size))
    moved = _add(_multiply(combined(index[dim]), stride), start)
    return index[:dim] + (((moved, size),),) + index[dim + 1 :]


def _move_select(node: fx.Node, source: fx.Node, index: Index) -> Index:
    dim, chosen = node.args[1], node.args[2]
    shape = shape_of(source)
    assert isinstance(dim, int) and isinstance(chosen, int)
    dim %= len(shape)
    digit = ((const(chosen % shape[dim]), shape[dim]),) if shape[dim] > 1 else ()
    return index[:dim] + (digit,) + index[dim:]


_MOVES: dict[Any, Callable[[fx.Node, fx.Node, Index], Index | None]] = {
    aten.view.default: _move_view, aten.reshape.default: _move_view, aten._unsafe_view.default: _move_view,
    aten.expand.default: _move_expand, aten.permute.default: _move_permute, aten.transpose.int: _move_permute,
    aten.t.default: _move_permute, aten.unsqueeze.default: _move_unsqueeze, aten.squeeze.dim: _move_squeeze,
    aten.squeeze.dims: _move_squeeze, aten.squeeze.default: _move_squeeze, aten.slice.Tensor: _move_slice,
    aten.select.int: _move_select, aten._to_copy.default: _move_cast, aten.clone.default: _same,
    aten.alias.default: _same, aten.detach.default: _move_detach, aten.lift_fresh_copy.default: _same,
}  # fmt: skip


def _add(expr: Expr, number: Any) -> Expr:
    if isinstance(number, torch.SymInt):
        return ("add", expr, number_of_batch(number))
    return expr if number == 0 else ("add", expr, const(number))


def _multiply(expr: Expr, number: int) -> Expr:
    return expr if number == 1 else ("mul", expr, const(number))


# Elements: operators with a formula of their own ----------------------------------------------------------------------


def _arange(node: fx.Node, index: Index) -> Expr:
    args = list(node.args)
    start, step_ = 0, 1
    if node.target is not aten.arange.default:
        start = args[0]  # type: ignore[assignment]
        step_ = args[2] if len(args) > 2 else 1  # type: ignore[assignment]
    return _add(_multiply(combined(index[0]), step_), start)


def _fill(position: int | None, value: Any = None) -> Callable[[fx.Node, Index], Expr]:
    def rule(node: fx.Node, index: Index) -> Expr:
        number = value if position is None else node.args[position]
        dtype = node.meta["val"].dtype
        kind: Callable[[Any], Any] = bool if dtype is torch.bool else float if dtype.is_floating_point else int
        return const(kind(number))

    return rule


def _cast(node: fx.Node, index: Index) -> Expr:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    inner = lift(source, index)
    old, new = source.meta["val"].dtype, node.meta["val"].dtype
    if new is torch.bool:
        return ("ne", inner, const(0))
    if old is torch.bool:
        one: Any = 1.0 if new.is_floating_point else 1
        return ("where", inner, const(one), const(type(one)(0)))
    return ("float" if new.is_floating_point else "int", inner)


def _where(node: fx.Node, index: Index) -> Expr:
    return ("where", *[_operand(item, node, index) for item in node.args])


def _masked_fill(node: fx.Node, index: Index) -> Expr:
    source, mask, value = node.args
    return ("where", _operand(mask, node, index), _operand(value, node, index), _operand(source, node, index))


def _triangle(lower: bool) -> Callable[[fx.Node, Index], Expr]:
    def rule(node: fx.Node, index: Index) -> Expr:
        source = node.args[0]
        diagonal = node.args[1] if len(node.args) > 1 else 0
        assert isinstance(source, fx.Node) and isinstance(diagonal, int)
        row, column = combined(index[-2]), combined(index[-1])
        condition = ("le" if lower else "ge", ("sub", column, row), const(diagonal))
        zero = False if node.meta["val"].dtype is torch.bool else 0
        return ("where", condition, lift(source, index), const(zero))

    return rule


def _scaled_sum(name: str) -> Callable[[fx.Node, Index], Expr]:
    def rule(node: fx.Node, index: Index) -> Expr:
        left, right = (_operand(item, node, index) for item in node.args[:2])
        alpha = _alpha(node)
        return fold((name, left, right if alpha == 1 else ("mul", right, const(alpha))))

    return rule


def _reversed_difference(node: fx.Node, index: Index) -> Expr:
    left, right = (_operand(item, node, index) for item in node.args[:2])
    alpha = _alpha(node)
    return ("sub", right, left if alpha == 1 else ("mul", left, const(alpha)))


def _alpha(node: fx.Node) -> Any:
    """Return the factor of an addition or subtraction, behind the operands if one is a number."""
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)


def _logic(name: str) -> Callable[[fx.Node, Index], Expr]:
    def rule(node: fx.Node, index: Index) -> Expr:
        if node.meta["val"].dtype is not torch.bool:
            return load(node, index)
        return (name, *[_operand(item, node, index) for item in node.args])

    return rule


def _index(node: fx.Node, index: Index) -> Expr:
    """x[i, j, ...] with every leading dimension indexed by an integer tensor."""
    source, indices = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(indices, list | tuple)
    chosen = [item for item in indices if isinstance(item, fx.Node)]
    if len(chosen) != len(indices) or any(item.meta["val"].dtype is torch.bool for item in chosen):
        return load(node, index)
    shape = shape_of(source)
    front = len(index) - (len(shape) - len(chosen))
    digits: Index = ()
    for item, size in zip(chosen, shape, strict=False):
        place = lift(item, align(shape_of(item), index[:front]))
        if source.op == "call_function":  # its element is a formula of the index, which knows no end
            place = from_the_front(place, size)
        digits += (((place, size),) if size > 1 else (),)
    return lift(source, digits + index[front:])


def _pow(node: fx.Node, index: Index) -> Expr:
    return ("pow", *[_operand(item, node, index) for item in node.args])


def _clamp(node: fx.Node, index: Index) -> Expr:
    lowest, highest = (node.args[i] if len(node.args) > i else None for i in (1, 2))
    inner = _operand(node.args[0], node, index)
    if lowest is not None:
        inner = ("max", inner, const(lowest))
    return inner if highest is None else ("min", inner, const(highest))


def _gather(node: fx.Node, index: Index) -> Expr:
    """x[.., q, index[.., q, k]]: a feature of the query that the key chooses."""
    source, dim, chosen = node.args[:3]
    assert isinstance(source, fx.Node) and isinstance(dim, int) and isinstance(chosen, fx.Node)
    if fact_of(node).kind is not Kind.SCORE:
        return load(node, index)
    size = shape_of(source)[dim]
    digits = ((lift(chosen, index), size),) if size > 1 else ()
    return load(source, (*index[:-1], digits))


def _scalar(node: fx.Node, index: Index) -> Expr:
    return const(node.args[0])


def _joined_keys(node: fx.Node, index: Index) -> Expr:
    """Lift scores joined with more logits (attention sinks), read at a key or at a sink."""
    pieces: Any = node.args[0]
    dim = (int(node.args[1]) if len(node.args) > 1 else 0) % len(index)  # type: ignore[arg-type]
    if fact_of(node).kind is not Kind.SCORE or dim != len(index) - 1 or not index[dim]:
        return load(node, index)
    position, start = index[dim][0][0], 0
    for piece in pieces:
        size = shape_of(piece)[dim]
        if fact_of(piece).kind is Kind.SCORE and offset_of_keys(index[dim]) == start:
            return lift(piece, (*index[:dim], ((("ck",), size),) if size > 1 else ()))
        if position[0] == "const" and start <= position[1] < start + size:
            digit = ((const(position[1] - start), size),) if size > 1 else ()
            return lift(piece, (*index[:dim], digit))
        start += size
    return load(node, index)


_ELEMENTS: dict[Any, Callable[[fx.Node, Index], Expr]] = {
    aten.arange.default: _arange, aten.arange.start: _arange, aten.arange.start_step: _arange,
    aten.full.default: _fill(1), aten.full_like.default: _fill(1), aten.new_full.default: _fill(2),
    aten.zeros.default: _fill(None, 0), aten.zeros_like.default: _fill(None, 0), aten.new_zeros.default: _fill(None, 0),
    aten.ones.default: _fill(None, 1), aten.ones_like.default: _fill(None, 1), aten.new_ones.default: _fill(None, 1),
    aten.scalar_tensor.default: _scalar, aten._to_copy.default: _cast, aten.where.self: _where,
    aten.where.ScalarSelf: _where, aten.where.ScalarOther: _where, aten.where.Scalar: _where,
    aten.masked_fill.Scalar: _masked_fill, aten.masked_fill.Tensor: _masked_fill, aten.tril.default: _triangle(True),
    aten.triu.default: _triangle(False), aten.add.Tensor: _scaled_sum("add"), aten.sub.Tensor: _scaled_sum("sub"),
    aten.add.Scalar: _scaled_sum("add"), aten.sub.Scalar: _scaled_sum("sub"), aten.rsub.Scalar: _reversed_difference,
    aten.rsub.Tensor: _reversed_difference, aten.bitwise_and.Tensor: _logic("and"),
    aten.bitwise_and.Scalar: _logic("and"), aten.bitwise_or.Tensor: _logic("or"),
    aten.bitwise_not.default: _logic("not"), aten.clamp.default: _clamp, aten.clamp_min.default: _clamp,
    aten.index.Tensor: _index, aten.pow.Tensor_Scalar: _pow, aten.cat.default: _joined_keys,
    aten.gather.default: _gather,
}  # fmt: skip
_POINTWISE: dict[Any, str] = {
    aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.div.Tensor: "div", aten.div.Scalar: "div",
    aten.neg.default: "neg", aten.tanh.default: "tanh", aten.sigmoid.default: "sigmoid", aten.exp.default: "exp",
    aten.log.default: "log", aten.abs.default: "abs", aten.sqrt.default: "sqrt", aten.maximum.default: "max",
    aten.minimum.default: "min",
    aten.eq.Tensor: "eq", aten.eq.Scalar: "eq", aten.ne.Tensor: "ne", aten.ne.Scalar: "ne", aten.lt.Tensor: "lt",
    aten.lt.Scalar: "lt", aten.le.Tensor: "le", aten.le.Scalar: "le", aten.gt.Tensor: "gt", aten.gt.Scalar: "gt",
    aten.ge.Tensor: "ge", aten.ge.Scalar: "ge", aten.logical_and.default: "and", aten.logical_or.default: "or",
    aten.logical_not.default: "not", aten.floor_divide.default: "floordiv", aten.remainder.Tensor: "mod",
    aten.remainder.Scalar: "mod",
}  # fmt: skip


def element_operands(node: fx.Node) -> list[Any]:
    """Return the operands that an element of a node reads element by element; else nothing."""
    known = node.op == "call_function" and (
        node.target in _MOVES or node.target in _ELEMENTS or node.target in _POINTWISE
    )
    return [*node.args, *node.kwargs.values()] if known else []


def _product(node: fx.Node, index: Index) -> Expr:
    """Lift q.k, or beta * input + alpha * q.k; heads may lead the query axis."""
    groups = tuple(digit for digit in index[1] if digit[0] != ("cq",))
    in_order = index[1] in (groups, (*groups, *index[1][-1:])) and all(of_head(digit) for digit in groups)
    if not in_order or [d[0] for d in index[2]] not in ([("ck",)], []):
        raise NoLaw("query and key axes change places between the scores and the probabilities")
    dot: Expr = ("dot", node, index[0] + groups)
    if node.target is aten.bmm.default:
        return dot
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    product: Expr = dot if alpha == 1 else ("mul", dot, const(alpha))
    if beta == 0:
        return product
    added = _operand(node.args[0], node, index)
    return ("add", added if beta == 1 else ("mul", added, const(beta)), product)
