"""Lift a matched attention: query, key, value, and one expression for the score.

Causality is proved for the score's value, not for the shape of a mask: with the key in the query's future the score
must be masked, for any subgraph behind it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treefx.kernels.score import Expr, walk
from treefx.passes.labels.constants import MASKING, Constants, constants_of
from treefx.passes.labels.dims import NoLaw, extent
from treefx.passes.labels.facts import Axis, Dims, Factor, Kind, Lifted, as_number, fact_of, shape_of
from treefx.passes.scores.batch_numbers import reads_batch, without_shifts
from treefx.passes.scores.blocks import Blocks, find_blocks
from treefx.passes.scores.digits import Digit, Index, offset_of_keys
from treefx.passes.scores.hand_softmax import is_quotient, lift_quotient
from treefx.passes.scores.hidden import interval, is_hidden, reads_keys, residue, unknown, zero
from treefx.passes.scores.lift_mask import lift, step
from treefx.passes.scores.score_algebra import (
    Relation,
    Tables,
    canonical_window,
    conjuncts,
    const,
    decide,
    simplify,
    split_mask,
)
from treefx.passes.scores.segment_values import note_segments
from treefx.passes.trace.sink_factors import FACTOR

__all__ = [
    "Attention", "attentions", "digits_of", "index_of_scores", "lift_products", "lift_sdpa", "prove", "reads_key_alone",
    "tables_of", "unseen_relations",
]  # fmt: skip

aten = torch.ops.aten
_SOFTMAX = {aten._softmax.default, aten._safe_softmax.default, aten.softmax.int}

_OTHER_SINKS = "takes logits next to the keys for other than one attention sink per head"
_SEVERAL_PRODUCTS = "a score with several products of queries and keys"
_NUMBER_OF_BATCH = "reads a mask or bias that depends on the number of columns"
_WORDS: dict[Any, str] = {
    aten.sub.Tensor: "subtracts attention probabilities from others before the values (multiply each by the values)",
    aten.add.Tensor: "adds attention probabilities to others before the values (multiply each by the values)",
    aten.sigmoid.default: "attention weights that no softmax makes (sigmoid attention)",
}
"""Operator in place of a softmax -> its name in words."""


@dataclass(frozen=True)
class Attention(Lifted):
    """One attention of the model, ready to be written as ``treefx::tree_attention``.

    ``score`` and ``conditions`` speak in columns (see ``score_algebra``) and hold nothing of causality any more.
    ``padding`` are the conditions that read the key's token alone: no query of this attention sees keys that fail one.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    score: Expr
    conditions: tuple[Expr, ...]
    padding: tuple[Expr, ...]
    heads: int
    zero_if_blind: bool
    """Whether the model's own attention gives zero to a query that sees no key, as tree attention does."""
    sinks: Expr | None = None
    """The logit, per head, of an entry behind the keys that takes weight and has no value."""
    doubt: tuple[Expr, Expr] | None = None
    """A masked and a visible score with a distance that only the numbers of a call can prove
    (``treefx.passes.scores.hidden``)."""
    blocks: Blocks | None = None
    """Tokens that see those behind them in their block too."""

    def reads(self) -> list[fx.Node]:
        """Return query, key, value and the score's loads, without the masks it was made from."""
        of_blocks = () if self.blocks is None else self.blocks.expressions
        sinks = () if self.sinks is None else (self.sinks,)
        expressions = [self.score, *self.conditions, *self.padding, *sinks, *of_blocks]
        loads = [item[1] for expression in expressions for item in walk(expression) if item[0] == "load"]
        return [self.query, self.key, self.value, *loads]

    def tells_apart(self) -> list[Expr]:
        """Return the score and its conditions on pairs; tokens of blocks are told apart by these
        (``treefx.runtime.blocks``)."""
        return [self.score, *self.conditions]

    def hides(self) -> tuple[Expr, ...]:
        """The conditions of padding."""
        return self.padding


def attentions(gm: fx.GraphModule) -> list[Attention]:
    """The attentions that were lifted, in order."""
    laws = [fact_of(node).law for node in gm.graph.nodes if node.op == "call_function"]
    return [item for item in laws if isinstance(item, Attention)]


def lift_sdpa(node: fx.Node) -> Attention:
    """Lift an opaque ``treefx::attention``.

    Raises:
        NoLaw: It is not causal, or draws random numbers, or its mask cannot be read token by token.
    """
    query, key, value, mask, dropout, is_causal, scale, enable_gqa = node.args
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    if dropout:
        raise NoLaw("dropout in attention draws for every row")
    rows, heads, columns, features = shape_of(query)
    if not enable_gqa and any(shape_of(item)[1] not in (1, heads) for item in (key, value)):
        raise NoLaw("pairs several key heads with more query heads, without enable_gqa")
    factor = float(scale) if scale is not None else 1 / math.sqrt(features)  # type: ignore[arg-type]
    score: Expr = ("mul", ("dot", node, ()), const(factor))
    index = index_of_scores(rows, heads, columns)
    if is_causal:
        score = ("where", ("le", ("ck",), ("cq",)), score, const(-math.inf))
    if isinstance(mask, fx.Node):
        shape = shape_of(mask)
        aligned = tuple(() if size == 1 else index[d - len(shape)] for d, size in enumerate(shape))
        lifted = lift(mask, aligned)
        if any(item[0] == "dot" for item in walk(lifted)):
            raise NoLaw(_SEVERAL_PRODUCTS)
        boolean = mask.meta["val"].dtype is torch.bool
        score = ("where", lifted, score, const(-math.inf)) if boolean else ("add", score, lifted)
    return prove(node, (query, key, value), score, columns, heads, safe=True)


def index_of_scores(rows: int, heads: int, columns: int) -> Index:
    """The index of a score [row, head, query, key]."""
    digits: list[Digit] = [(("b",), rows), (("head",), heads), (("cq",), columns), (("ck",), columns)]
    return tuple((digit,) if digit[1] > 1 else () for digit in digits)


def lift_products(probabilities: fx.Node, value: fx.Node) -> Attention:
    """Lift bmm - softmax - bmm, given the operands of the second product.

    Raises:
        NoLaw: The operators between the products are no softmax of a causal score of single queries and keys.
    """
    dims = fact_of(probabilities).dims or ()
    index = digits_of(dims)
    batch = index[0] + tuple(digit for digit in index[1] if digit[0] != ("cq",))
    node = probabilities
    while (moved := step(node, index)) is not None or (moved := _uncast(node, index)) is not None:
        node, index = moved
    columns = extent(dims[1][-1:])
    score, sinks = _normalised(node, index, columns)
    products = [(item[1], item[2]) for item in walk(score) if item[0] == "dot"]
    if not products or any(item != products[0] for item in products):
        raise NoLaw(_SEVERAL_PRODUCTS)
    product, digits = products[0]
    if digits != batch:
        raise NoLaw("heads change places between the scores and the values")
    query, key = product.args[-2:]
    heads = as_number(math.prod(size for expr, size in batch if expr != ("b",)))
    safe = node.target is aten._safe_softmax.default or (sinks is not None and FACTOR not in node.meta)
    return prove(probabilities, (query, key, value), score, columns, heads, safe=safe, sinks=sinks)


def _normalised(node: fx.Node, index: Index, columns: int) -> tuple[Expr, Expr | None]:
    """Return the score under a softmax, and the logit of its sink, if it has one."""
    if is_quotient(node):
        score, sinks = lift_quotient(node, index)
        return score, None if sinks is None else _checked_sink(sinks)
    target: Any = node.target
    if target not in _SOFTMAX:
        raise NoLaw(_WORDS.get(target, f"attention probabilities pass through {node.target}"))
    source, dim = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    if offset_of_keys(index[dim]) is None:
        raise NoLaw("a softmax over another axis than the keys")
    source = _unshifted(source, dim)
    return lift(source, index), _sinks(source, index, dim, columns)


def _unshifted(node: fx.Node, dim: int) -> fx.Node:
    """Return the score before a shift per query (its maximum, say), which softmax ignores."""
    while node.target is aten.sub.Tensor and not node.kwargs:
        source, shift = node.args
        assert isinstance(source, fx.Node)
        shape = shape_of(node)
        per_query = isinstance(shift, fx.Node) and len(shape_of(shift)) == len(shape) and shape_of(shift)[dim] == 1
        if not per_query or shape_of(source) != shape:
            break
        node = source
    return node


def _sinks(source: fx.Node, index: Index, dim: int, columns: int) -> Expr | None:
    """The logit of the one entry before the first or behind the last key, if there is one.

    Raises:
        NoLaw: There are more, or it is no function of the head alone.
    """
    size = shape_of(source)[dim]
    if size == columns:
        return None
    dim %= len(index)
    place = ((const(0 if offset_of_keys(index[dim]) else columns), size),)
    logit = lift(source, index[:dim] + (place,) + index[dim + 1 :])
    if size != columns + 1:
        raise NoLaw(_OTHER_SINKS)
    return _checked_sink(logit)


def _checked_sink(logit: Expr) -> Expr:
    if any(item[0] in ("b", "cq", "ck", "dot") for item in walk(logit)):
        raise NoLaw(_OTHER_SINKS)
    return logit


def _uncast(node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
    """Look through a change of floating type behind the softmax."""
    source: Any = node.args[0] if node.args else None
    if node.target is aten._to_copy.default and source.meta["val"].is_floating_point():
        return source, index
    return None


def digits_of(dims: Dims) -> Index:
    """Return the digits of a value's dimensions: row, columns, and head over its factors."""
    heads = [factor for dim in dims for factor in dim if factor.axis is Axis.PLAIN]
    return tuple(
        tuple(_digit(factor, heads) for factor in dim if factor.size > 1 or factor.axis is Axis.PLAIN) for dim in dims
    )


def _digit(factor: Factor, heads: list[Factor]) -> Digit:
    names = {Axis.ROW: "b", Axis.TOKEN: "cq", Axis.KEY: "ck"}
    if factor.axis in names:
        return (names[factor.axis],), factor.size
    if len(heads) == 1:
        return ("head",), factor.size
    position = next(i for i, other in enumerate(heads) if other is factor)
    stride = math.prod(other.size for other in heads[position + 1 :])
    return ("mod", ("floordiv", ("head",), const(stride)), const(factor.size)), factor.size


def prove(
    node: fx.Node,
    operands: tuple[fx.Node, fx.Node, fx.Node],
    score: Expr,
    columns: int,
    heads: int,
    *,
    safe: bool,
    sinks: Expr | None = None,
) -> Attention:
    """Prove the score causal and take it apart.

    ``safe`` marks a softmax that gives zero where all scores are -inf.
    """
    constants = constants_of(node)
    score, shifted = _without_numbers_of_batch(score, sinks)
    tables = tables_of(score, constants, columns, heads)
    value, found = split_mask(simplify(score, tables), tables)
    unseen = [residue(score, relation, tables) for relation in unseen_relations(constants, columns)]
    blocks = None
    if any(interval(item, zero)[1] > MASKING for item in unseen):
        blocks, unseen = _blocks(score, value, [item for item, _ in found], tables, constants)
    masked = unseen + [residue(item, "past", tables) for _, item in found]
    visible = residue(value, "past", tables) if sinks is None else ("either", residue(value, "past", tables), sinks)
    doubted = [item for item in masked if not is_hidden(item, visible, unknown)]
    if doubted and shifted:
        raise NoLaw(_NUMBER_OF_BATCH)
    split = [item for one, _ in found for item in conjuncts(one)]
    conditions = [_window_of_table(canonical_window(item, tables), tables) for item in split]
    conditions = [item for item in conditions if decide(item, "past", tables) is not True]
    droppable = not any(map(reads_keys, doubted))
    padding = [item for item in conditions if droppable and reads_key_alone(item)]
    rest = [item for item in conditions if item not in padding]
    if any(item == ("b",) for expr in [value, *conditions] for item in walk(expr)):
        raise NoLaw("attention that differs from row to row by more than its inputs")
    loads = [item[1] for item in walk(sinks) if item[0] == "load"] if sinks is not None else []
    if any(fact_of(source).kind is not Kind.INVARIANT for source in loads):
        raise NoLaw("an attention sink that differs from token to token")
    hard = all(bool(torch.isneginf(interval(item, unknown)[1])) for item in masked)
    zero_if_blind = safe and hard if sinks is None else safe or not hard
    return Attention(
        *operands, value, tuple(dict.fromkeys(rest)), tuple(dict.fromkeys(padding)), heads, zero_if_blind, sinks,
        (functools.reduce(lambda x, y: ("max", x, y), doubted), visible) if doubted else None, blocks,
    )  # fmt: skip


def _blocks(
    score: Expr, value: Expr, conditions: list[Expr], tables: Tables, constants: Constants
) -> tuple[Blocks, list[Expr]]:
    """The blocks whose tokens see each other, and the scores of later keys outside of them.

    Raises:
        NoLaw: A query sees later keys for another reason.
    """
    found = None if constants.segments.assumed else find_blocks(score, value, conditions, tables)
    if found is None:
        raise NoLaw(_not_causal(score, constants))
    blocks, masks = found
    return blocks, [residue(item, "future", tables) for _, item in masks]


def _without_numbers_of_batch(score: Expr, sinks: Expr | None) -> tuple[Expr, bool]:
    """The score without numbers that no softmax notices, and whether it had any.

    Raises:
        NoLaw: A number of the batch matters. A sink is one more logit, which a shift does not reach.
    """
    if not reads_batch(score):
        return score, False
    found = score if sinks is not None else without_shifts(score)
    if reads_batch(found):
        raise NoLaw(_NUMBER_OF_BATCH)
    return found, True


def tables_of(score: Expr, constants: Constants, columns: int, heads: int) -> Tables:
    """Return facts on values that a score loads; segments where rows may be packed."""
    segments = constants.segments
    note_segments(score, segments)
    counting, compared = (
        frozenset(item if segments.assumed else ()) for item in (segments.counting, segments.compared)
    )
    return Tables(lambda expr: constants.table(expr, columns, heads), constants.consecutive | counting, compared)


def unseen_relations(constants: Constants, columns: int) -> list[Relation]:
    """The relations of query and key in which no model may see the key."""
    return [*(["future"] if columns > 1 else []), *(["other"] if constants.segments.assumed else [])]


def _not_causal(score: Expr, constants: Constants) -> str:
    if constants.segments.assumed:
        return "attention that is not proved to stay inside a segment"
    given = [item[1] for item in walk(score) if item[0] == "load" and constants.changes(item[1])]
    tables = [node for node in given if fact_of(node).kind is Kind.INVARIANT]
    inputs = f" (it reads {list(shape_of(tables[0]))} given by the caller)" if tables else ""
    return f"attention that is not proved causal{inputs}"


def reads_key_alone(condition: Expr) -> bool:
    """Whether a condition is one on the key's token, a function of the inputs."""
    symbols = {item[0] for item in walk(condition)}
    return "ck" in symbols and not symbols & {"cq", "b", "head", "dot"} and _reads_rows(condition)


def _reads_rows(condition: Expr) -> bool:
    loads = [item[1] for item in walk(condition) if item[0] == "load"]
    return bool(loads) and all(fact_of(source).kind is Kind.PREFIX for source in loads)


def _window_of_table(condition: Expr, tables: Tables) -> Expr:
    """A constant table that equals a sliding window, as that window."""
    if condition[0] != "load":
        return condition
    table = tables(condition)
    if table is None:
        return condition
    columns = table.shape[-1]
    distance = torch.arange(columns)[:, None] - torch.arange(columns)
    seen = table.to(torch.bool) & (distance >= 0)
    window = int(distance[seen.any(0)].max()) + 1 if bool(seen.any()) else 0
    if bool((seen == ((distance >= 0) & (distance < window))).all()):
        return ("lt", ("sub", ("cq",), ("ck",)), const(window))
    return condition
