"""Define laws of library recurrences: along the tree by ``tree_scan``, else on rows.

``treefx::row_scan(q, k, v, g, step)`` of token-wise operands becomes ``TreeScan``: the state of a token comes from its
tree parent. ``treefx::library`` becomes ``LibraryTree`` where the library takes states: its own kernel runs along the
tree. Else it runs on rows, and the causal law below proves that column t of its result reads columns up to t, so that
the result is contracted to one value per distinct token.

Sequences that are packed into rows are rows of the tree, where every mixer of the graph starts over at each; their
convolutions are ``treefx::row_convolution``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from treefx.passes.causal.domain import Step
from treefx.passes.causal.state import State, Unknown
from treefx.passes.causal.step import law as causal_law
from treefx.passes.causal.tree_mixers import (
    LibraryTree,
    Operand,
    TreeConvolution,
    TreeScan,
    has_channels_by_tokens,
)
from treefx.passes.labels import dims as algebra
from treefx.passes.labels.constants import constants_of
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Axis, Dims, Fact, Kind, fact_of, shape_of
from treefx.passes.labels.label_tokens import MEETS_ROWS
from treefx.passes.labels.laws.base import Call, law
from treefx.passes.labels.segments import is_of_tokens
from treefx.passes.trace.library_calls import call_of
from treefx.passes.trace.library_tree import leveled

__all__: list[str] = []

_CROSSES = "a recurrence hands its state on from one sequence of a row to the next"


@law(torch.ops.treefx.row_scan)
def row_scan(call: Call) -> Fact:
    """A recurrence of token-wise operands takes its state from the tree parent: one tree scan."""
    given = dict(zip(("q", "k", "v", "g", "step", "segments"), call.node.args, strict=False))
    _stay_inside(call, given.pop("segments", None))
    operands = {role: node for role, node in given.items() if isinstance(node, fx.Node)}
    if not all(call.labelled(node) for node in operands.values()):
        raise NoLaw("a recurrence of values that are not token-wise")
    for node in operands.values():
        _check(call.dims(node))
    shapes = {role: shape_of(node) for role, node in operands.items()}
    roles = {role: _operand(operands[role], shape) for role, shape in shapes.items()}
    heads, features = (int(size) for size in shapes["v"][2:])
    v = call.dims(operands["v"])
    learned = any(fact_of(node).learned for node in call.operands)
    scan = TreeScan(roles, heads, features, call.node.meta["val"].dtype)
    dims = (v[0], v[1], algebra.coalesce(v[2]), algebra.coalesce(v[3]))
    return Fact(Kind.PACKED, dims, law=scan, learned=learned)


@law(torch.ops.treefx.library)
def library(call: Call) -> Fact:
    """Take a recurrence's state from the tree parent, where the library takes states."""
    known = call_of(str(call.node.args[1]))
    _stay_inside(call, call.node.args[2])
    how = leveled(known)
    if how is None:
        raise NoLaw("is a library's recurrence that has no form along a tree, so the library's function runs on rows")
    tensors: tuple[fx.Node, ...] = tuple(call.node.args[0])  # type: ignore[arg-type]
    operands = tensors if known.packing is None else tensors[:-1]
    if any(fact_of(node).kind is Kind.ROW for node in operands):
        raise NoLaw(MEETS_ROWS)
    named = known.arguments(tensors)
    for name, node in named.items():
        if not isinstance(node, fx.Node):
            continue
        if call.labelled(node) != (name in how.of_tokens):
            raise NoLaw("a recurrence of values that are not token-wise")
        dims = call.dims(node)
        if name in how.of_tokens:
            _check(dims)
    like = call.dims(named[how.like])
    learned = any(fact_of(node).learned for node in call.operands)
    dims = (like[0], like[1], *map(algebra.coalesce, like[2:]))
    return Fact(Kind.PACKED, dims, law=LibraryTree(operands, known.key), learned=learned)


@law(torch.ops.treefx.row_convolution)
def row_convolution(call: Call) -> Fact:
    """A convolution of packed sequences reads its window through tree parents."""
    source, weight, bias, segments = call.node.args
    _stay_inside(call, segments)
    assert isinstance(source, fx.Node) and isinstance(weight, fx.Node) and (bias is None or isinstance(bias, fx.Node))
    if not call.labelled(source) or not has_channels_by_tokens(call.dims(source)):
        raise NoLaw("a convolution of values that are not token-wise")
    if any(fact_of(node).kind is not Kind.INVARIANT for node in (weight, bias) if node is not None):
        raise NoLaw("a convolution with a filter that is not the same for all tokens")
    channels, _, taps = (int(size) for size in shape_of(weight))
    found = TreeConvolution(source, weight, bias, tuple(range(taps - 1, -1, -1)), channels)
    return Fact(Kind.PACKED, call.dims(source), law=found, learned=True)


def _stay_inside(call: Call, segments: Any) -> None:
    """Note the numbers of packed sequences that a mixer keeps apart; where it keeps none apart, it leaks."""
    found = constants_of(call.node).segments
    if not isinstance(segments, fx.Node):
        found.leak = _CROSSES
        return
    if not is_of_tokens(segments):
        found.leak = "packed sequences whose numbers are not made of the inputs alone"
        raise NoLaw(found.leak)
    found.compared[segments] = None
    if segments.target is not torch.ops.treefx.segments.default:  # a library skips tokens of negative numbers
        found.positive[segments] = None
    if not found.assumed:
        raise NoLaw("starts over at each packed sequence of a row, which not all of the graph does at the same tokens")


def _check(dims: Dims) -> None:
    axes = [[factor.axis for factor in dim] for dim in dims]
    if axes[0] != [Axis.ROW] or axes[1] != [Axis.TOKEN] or any(algebra.has_tokens(dim) for dim in dims[2:]):
        raise NoLaw(f"a recurrence expects [rows, tokens, heads, features], got {dims}")


def _operand(node: fx.Node, shape: torch.Size) -> Operand:
    """Describe an operand as [N, groups, features].

    g is a number per head, and the step one that scales the features of its head.
    """
    return Operand(node, int(shape[2]), int(shape[3]) if len(shape) == 4 else 1)


@causal_law(torch.ops.treefx.library, torch.ops.treefx.row_scan)
def _recurrence(step: Step) -> State:
    """Column t of the result reads all operands up to column t."""
    kind = call_of(str(step.node.args[1])).kind if step.node.target is torch.ops.treefx.library.default else None
    dim, result_dim = (1, 1) if kind is None else (kind.tokens_of_operands, kind.tokens)
    columns = shape_of(step.node)[result_dim]
    read = torch.zeros(columns, dtype=torch.int32)
    row = None
    for node in step.node.all_input_nodes:
        state = step.state(node)
        if state.row is None:
            if bool((state.column > 0).any()):
                raise Unknown
            continue
        if state.row.dim != 0 or state.row.inner != 1 or (row is not None and row != state.row):
            raise Unknown
        row = state.row
        if dim >= state.rank or state.shape[dim] != columns:
            raise Unknown
        others = [d for d in range(state.rank) if d != dim]
        read = torch.maximum(read, state.spread(dim).column.amax(others))
    value = step.node.meta["val"]
    shape = step.result_shape(row)
    column = read.cummax(0).values.reshape([-1 if d == result_dim else 1 for d in range(len(shape))])
    return replace(State.of(shape, value.dtype), column=column, row=row)
