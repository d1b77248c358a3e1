"""Read bytes and FLOPs of a part from its graphs, as polynomials in its size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from treefx.errors import UnsupportedError
from treefx.passes.analysis import Rewritten
from treefx.planning.cost.device import device_lists
from treefx.planning.cost.liveness import live_bytes, size_expression, storages
from treefx.planning.cost.model import MONOMIALS, sum_rows
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

    @classmethod
    def of(cls, rewritten: Rewritten) -> "Sizes":
        """Read symbols of the graph's inputs.

        N from the metadata, P from the boundary's K/V, Q from the outgoing tokens.
        """
        assert rewritten.cut is not None
        named = {node.name: node for node in rewritten.gm.graph.find_nodes(op="placeholder")}
        return cls(
            tokens=size_expression(rewritten.count.count),
            boundary=size_expression(named["lo"].meta["val"].shape[0]),
            outgoing=size_expression(named["outgoing"].meta["val"].shape[0]),
        )

    def row(self, expression: sympy.Expr) -> list[float]:
        """Return the coefficients of `cost.MONOMIALS`.

        Outgoing tokens are left out, the planner accounts for them itself.

        Raises:
            UnsupportedError: a size is no polynomial of second degree.
        """
        expression = sympy.expand(expression.subs(self.outgoing, 0))
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
        caches = len(self.rewritten.cut.caches)
        return _output_values(self.forward)[: len(_output_values(self.rewritten.gm)) - caches]

    @property
    def saved(self) -> list[Any]:
        """Fake values that the forward leaves for the backward."""
        return _output_values(self.forward)[len(_output_values(self.rewritten.gm)) :]


def held_row(graphs: TrainGraphs, sizes: Sizes, *, keeps_results: bool) -> list[float]:
    """Return bytes held between forward and backward.

    They are saved values, the boundary's K/V, and results that a loss saves.
    """
    placeholders = graphs.forward.graph.find_nodes(op="placeholder")
    inputs = [node.meta.get("val") for node in placeholders if not _is_static(node)]
    values = [*inputs, *graphs.saved, *(graphs.results if keeps_results else [])]
    parameters = {key for node in placeholders if _is_static(node) for key, _ in storages(node.meta.get("val"))}
    return sizes.row(sympy.Add(*{key: size for key, size in storages(values) if key not in parameters}.values()))


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

    def is_held(node: fx.Node) -> bool:
        if node.name.startswith("tangents"):
            return True
        return any(size.free_symbols == {sizes.boundary} for _, size in storages(node.meta.get("val")))

    bytes_by_call = live_bytes(graphs.backward, workspace, _is_static, is_held)
    calls = [node.target for node in graphs.backward.graph.nodes if node.op == "call_function"]
    around = [size for target, size in zip(calls, bytes_by_call[1:], strict=True) if target in _ATTENTIONS]
    both = graphs.forward, graphs.backward
    return _with_lists(bytes_by_call, sizes, *both), _with_lists(around, sizes, *both)


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
