"""Read bytes and FLOPs of a part from its graphs, as polynomials in its size."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from treefx.errors import UnsupportedError
from treefx.kernels.common import accumulation_dtype
from treefx.passes.analysis import Rewritten
from treefx.planning.cost.device import device_lists
from treefx.planning.cost.liveness import live_bytes, size_expression, storages
from treefx.planning.cost.model import MONOMIALS, sum_rows
from treefx.planning.cost.state_workspace import chain_bytes
from treefx.planning.cost.states import PerRun, StateCost
from treefx.planning.cost.workspace import FLASH_BLOCK, workspace

__all__ = [
    "Flops",
    "Sizes",
    "TrainGraphs",
    "backward_rows",
    "count_flops",
    "forward_rows",
    "held_row",
    "kv_rows",
    "lists_row",
    "state_cost",
]

_ATTENTIONS = {
    torch.ops.treefx.tree_attention.default: 1.0,
    # Five products of matrices instead of two: the scores again, dV, dP, dQ and dK.
    torch.ops.treefx.tree_attention_backward.default: 2.5,
}


_POWERS = {(0, 0, 0): "1", (1, 0, 0): "N", (0, 1, 0): "P", (2, 0, 0): "N*N", (1, 1, 0): "N*P", (0, 0, 1): MONOMIALS[-1]}
"""Powers of tokens, boundary and block, and the monomials that they make."""


@dataclass(frozen=True)
class Sizes:
    """The symbols of a graph with a boundary."""

    tokens: sympy.Symbol
    boundary: sympy.Symbol
    outgoing: sympy.Symbol
    entering: sympy.Symbol | None = None
    leaving: sympy.Symbol | None = None

    @classmethod
    def of(cls, rewritten: Rewritten) -> "Sizes":
        """Read symbols of the graph's inputs.

        N from the metadata, P from the boundary's K/V, Q from the outgoing tokens, S and X from states.
        """
        assert rewritten.cut is not None
        named = {node.name: node for node in rewritten.gm.graph.find_nodes(op="placeholder")}
        states = rewritten.cut.states
        return cls(
            tokens=size_expression(rewritten.count.count),
            boundary=size_expression(named["lo"].meta["val"].shape[0]),
            outgoing=size_expression(named["outgoing"].meta["val"].shape[0]),
            entering=size_expression(states[0].shape[1]) if states else None,
            leaving=size_expression(named["exits"].meta["val"].shape[0]) if states else None,
        )

    def row(self, expression: sympy.Expr) -> list[float]:
        """Return the coefficients of `cost.MONOMIALS`.

        Outgoing tokens and states are left out, the planner accounts for them itself.

        Raises:
            UnsupportedError: a size is no polynomial of second degree.
        """
        expression = sympy.expand(expression.subs(dict.fromkeys(self._counted_apart, 0)))
        others = expression.free_symbols - {self.tokens, self.boundary, FLASH_BLOCK}
        try:
            terms = dict(sympy.Poly(expression, self.tokens, self.boundary, FLASH_BLOCK).terms())
        except sympy.PolynomialError:
            terms = {(9, 9, 9): expression}
        if others or set(terms) - set(_POWERS):
            raise UnsupportedError(
                f"bytes of a graph should be polynomials in {', '.join(MONOMIALS)}, but a value takes {expression}; "
                "give treefx.plan a CostModel of your own"
            )
        row = [0.0] * len(MONOMIALS)
        for powers, value in terms.items():
            row[MONOMIALS.index(_POWERS[powers])] = max(float(value), 0.0)
        return row

    @property
    def _counted_apart(self) -> list[sympy.Symbol]:
        return [size for size in (self.outgoing, self.entering, self.leaving) if size is not None]

    def per_state(self, expressions: Iterable[sympy.Expr]) -> tuple[float, float]:
        """Return the most bytes of any expression per state that enters, and per state that leaves.

        Raises:
            UnsupportedError: a size depends on the number of states and on another size.
        """
        entering, leaving = [0.0], [0.0]
        for expression in map(sympy.expand, dict.fromkeys(expressions)):
            for size, most in ((self.entering, entering), (self.leaving, leaving)):
                slope = expression.diff(size)
                if not slope.is_number:
                    raise UnsupportedError(
                        f"bytes of a graph should grow with the number of states of recurrences alone, but a value "
                        f"takes {expression}; give treefx.plan a CostModel of your own"
                    )
                most.append(float(slope))
        return max(entering), max(leaving)

    def rows(self, expressions: Iterable[sympy.Expr]) -> list[list[float]]:
        """`row` of every different expression."""
        return [self.row(expression) for expression in dict.fromkeys(expressions)]


@dataclass(frozen=True)
class TrainGraphs:
    """The forward and backward of a part, and the graph they were made from.

    Attributes:
        rewritten: the graph with its boundary.
        forward: the inner compiler's input: outputs of the graph, then saved values.
        backward: the same.
    """

    rewritten: Rewritten
    forward: fx.GraphModule
    backward: fx.GraphModule

    @property
    def results(self) -> list[Any]:
        """Fake values that the model returns, K/V not among them."""
        assert self.rewritten.cut is not None
        caches = len(self.rewritten.cut.caches) + len(self.rewritten.cut.states)
        return _output_values(self.forward)[: len(_output_values(self.rewritten.gm)) - caches]

    @property
    def saved(self) -> list[Any]:
        """Fake values that the forward leaves for the backward."""
        return _output_values(self.forward)[len(_output_values(self.rewritten.gm)) :]


def held_row(graphs: TrainGraphs, sizes: Sizes, *, keeps_results: bool) -> list[float]:
    """Return bytes held between forward and backward.

    They are saved values, the boundary's K/V, and results that a loss saves.
    """
    return sizes.row(_held(graphs, keeps_results=keeps_results))


def _held(graphs: TrainGraphs, *, keeps_results: bool) -> sympy.Expr:
    placeholders = graphs.forward.graph.find_nodes(op="placeholder")
    inputs = [node.meta.get("val") for node in placeholders if not _is_static(node)]
    values = [*inputs, *graphs.saved, *(graphs.results if keeps_results else [])]
    parameters = {key for node in placeholders if _is_static(node) for key, _ in storages(node.meta.get("val"))}
    return sympy.Add(*{key: size for key, size in storages(values) if key not in parameters}.values())


def forward_rows(graphs: TrainGraphs, sizes: Sizes) -> list[list[float]]:
    """Live bytes during the forward."""
    return _with_lists(live_bytes(graphs.forward, workspace, _is_static), sizes, graphs.forward)


def lists_row(graphs: TrainGraphs, sizes: Sizes, *, backward: bool) -> list[float]:
    """Lists of tiles that are on the device when the forward, or the backward too, has run."""
    return sizes.row(device_lists(graphs.forward, *([graphs.backward] if backward else [])))


def _with_lists(live: Iterable[sympy.Expr], sizes: Sizes, *graphs: fx.GraphModule) -> list[list[float]]:
    """Rows of live bytes and of the lists of tiles that these graphs have made."""
    lists = sizes.row(device_lists(*graphs))
    return [sum_rows(row, lists) for row in sizes.rows(live)]


def backward_rows(graphs: TrainGraphs, sizes: Sizes) -> tuple[list[list[float]], list[list[float]]]:
    """Compute live bytes during the backward.

    The executor holds the boundary's K/V, and autograd the incoming gradients.

    Other inputs are freed after their last use.

    Returns:
        All of them, and those around attention.
    """

    bytes_by_call = _backward_bytes(graphs, sizes)
    calls = [node.target for node in graphs.backward.graph.nodes if node.op == "call_function"]
    around = [size for target, size in zip(calls, bytes_by_call[1:], strict=True) if target in _ATTENTIONS]
    both = graphs.forward, graphs.backward
    return _with_lists(bytes_by_call, sizes, *both), _with_lists(around, sizes, *both)


def _backward_bytes(graphs: TrainGraphs, sizes: Sizes) -> list[sympy.Expr]:
    def is_held(node: fx.Node) -> bool:
        if node.name.startswith("tangents"):
            return True
        given = ({sizes.boundary}, {sizes.entering})
        return any(size.free_symbols in given for _, size in storages(node.meta.get("val")))

    return live_bytes(graphs.backward, workspace, _is_static, is_held)


def state_cost(graphs: TrainGraphs, kv_only: Rewritten) -> StateCost | None:
    """Read what states of recurrences take; None where there are none."""
    assert graphs.rewritten.cut is not None
    states = graphs.rewritten.cut.states
    if not states:
        return None
    sizes = Sizes.of(graphs.rewritten)
    each = [math.prod(map(int, x.shape[2:])) for x in states]
    handed = sum(count * x.element_size() for count, x in zip(each, states, strict=True))
    summed = sum(count * accumulation_dtype(x).itemsize for count, x in zip(each, states, strict=True))
    runs = {
        "saved": [_held(graphs, keeps_results=True)],
        "forward": live_bytes(graphs.forward, workspace, _is_static),
        "backward": _backward_bytes(graphs, sizes),
    }
    slopes = {name: sizes.per_state(expressions) for name, expressions in runs.items()}
    slopes["kv"] = Sizes.of(kv_only).per_state(live_bytes(kv_only.gm, workspace, _is_static))
    entering, leaving = ({name: slope[side] for name, slope in slopes.items()} for side in (0, 1))
    # While gradients are added up, one recurrence's at a time is copied and converted.
    entering["backward"] += (handed + summed) / len(states)
    for run in ("forward", "kv"):
        leaving[run] = max(leaving[run] - handed, 0.0)  # the states themselves are counted where they go
    forward, backward = chain_bytes(graphs.rewritten.gm)
    return StateCost(
        state_bytes=handed,
        gradient_bytes=summed,
        entering=PerRun(**entering),
        leaving=PerRun(**leaving),
        chain=PerRun(0.0, forward, backward, forward),
    )


def kv_rows(rewritten: Rewritten, sizes: Sizes) -> list[list[float]]:
    """Live bytes while only K/V are made."""
    return _with_lists(live_bytes(rewritten.gm, workspace, _is_static), sizes, rewritten.gm)


def _is_static(node: fx.Node) -> bool:
    """Whether an input's size does not depend on the part: parameters and buffers."""
    return not any(size.free_symbols for _, size in storages(node.meta.get("val")))


def _output_values(gm: fx.GraphModule) -> list[Any]:
    output = next(iter(gm.graph.find_nodes(op="output")))
    return [item.meta.get("val") if isinstance(item, fx.Node) else item for item in output.args[0]]


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one run: `token * N + pair * A`."""

    token: float
    pair: float

    def expression(self, tokens: sympy.Symbol, pairs: sympy.Symbol) -> sympy.Expr:
        """The same in symbols."""
        return self.token * tokens + self.pair * pairs


def count_flops(gm: fx.GraphModule, sizes: Sizes) -> Flops:
    """Count FLOPs of matrix products and of attention's visible pairs.

    A multiplication counts as two operations.
    """
    token, pair = sympy.Integer(0), 0.0
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _ATTENTIONS:
            pair += _ATTENTIONS[node.target] * _attention_flops(node)
        else:
            token += _matmul_flops(node)
    return Flops(float(sympy.Poly(sympy.expand(token), sizes.tokens).coeff_monomial(sizes.tokens)), pair)


def _attention_flops(node: fx.Node) -> float:
    """Per visible pair: the score and the weighted value, all query heads."""
    place = 1 if "backward" in str(node.target) else 0
    q, _, v = (source.meta["val"].shape for source in node.args[place : place + 3])  # type: ignore[union-attr]
    return 2.0 * int(q[1]) * (int(q[3]) + int(v[3]))


def _matmul_flops(node: fx.Node) -> sympy.Expr:
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name not in ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm"):
        return sympy.Integer(0)
    left = node.args[1 if name in ("addmm", "baddbmm") else 0]
    assert isinstance(left, fx.Node)
    sizes = [*_result_shape(node), left.meta["val"].shape[-1]]
    return 2 * sympy.Mul(*(size_expression(size) for size in sizes))


def _result_shape(node: fx.Node) -> Sequence[Any]:
    shape: Sequence[Any] = node.meta["val"].shape
    return shape
