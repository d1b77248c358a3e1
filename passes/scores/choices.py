"""Lift choices of keys: top-k over the keys of a query's row by separate scores.

For instance, an indexer's sparse attention.

A choice is a function of the query's prefix if every key that tree attention does not see has a *constant* for a score:
keys of the future, and padding that is left out. Rows that share a query then choose alike, among the same numbers in
the same columns, ties included. So the scores of a choice are made once per distinct token, against the columns of its
representative row (``treefx.passes.packing.emit_choices``), and the choice itself is the model's own operator.

Before (4 rows of 12 tokens, 3 keys a query)::

    bmm: "f32[48, 2, 12]" = bmm(q, k);  scores: "f32[4, 12, 12]" = masked_fill(..., -inf);  topk: "i64[4, 12, 3]"

After (s0 distinct tokens)::

    bmm: "f32[s0, 2, 12]" = bmm(q, k[own_keys]);  scores: "f32[1, s0, 12]";  topk: "i64[1, s0, 3]"
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treefx.kernels.score import Expr, walk
from treefx.passes.labels import dims as algebra
from treefx.passes.labels.constants import MASKING, constants_of
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Axis, Dims, Fact, Kind, Lifted, fact_of, shape_of, token_axes
from treefx.passes.labels.laws import shape as shape_laws
from treefx.passes.labels.laws.base import Call, find_law, law
from treefx.passes.labels.laws.matmul import OwnKeys, WeighsKeys
from treefx.passes.labels.laws.pointwise import pointwise
from treefx.passes.labels.purity import impurity
from treefx.passes.scores.attention_facts import digits_of, reads_key_alone, tables_of, unseen_relations
from treefx.passes.scores.digits import Index, align
from treefx.passes.scores.hidden import interval, residue, unknown, zero
from treefx.passes.scores.lift_mask import lift, step
from treefx.passes.scores.score_algebra import conjuncts, const, decide, fold, simplify, split_mask

__all__ = ["Choice", "choices", "scores_behind"]

aten = torch.ops.aten
_MOVES = (shape_laws.view, shape_laws.permute, shape_laws.unsqueeze, shape_laws.squeeze, shape_laws.expand)
_AXES = {Axis.ROW: ("b",), Axis.TOKEN: ("cq",), Axis.KEY: ("ck",)}
_BY_COLUMN = "a choice of keys names columns of the row, which segments of one row do not share"


@dataclass(frozen=True)
class Choice(Lifted):
    """Describe each query's choice among its row's keys, by scores without hidden keys.

    ``conditions`` and ``padding`` say which keys take part, as those of an attention do.
    """

    scores: fx.Node
    value: Expr
    conditions: tuple[Expr, ...]
    padding: tuple[Expr, ...]

    def reads(self) -> list[fx.Node]:
        """The scores: they are made once per token."""
        return [self.scores]

    def tells_apart(self) -> list[Expr]:
        """The score and the conditions on pairs."""
        return [self.value, *self.conditions]

    def hides(self) -> tuple[Expr, ...]:
        """The conditions of padding."""
        return self.padding


def choices(gm: fx.GraphModule) -> list[Choice]:
    """The choices among keys, in order."""
    laws = [fact_of(node).law for node in gm.graph.nodes if node.op == "call_function"]
    return [item for item in laws if isinstance(item, Choice)]


@law(aten.topk, of=Kind.SCORE)
def choose(call: Call) -> Fact:
    """The k largest scores of each query among the keys of its row, and their columns."""
    scores = call.node_arg(0)
    constants_of(call.node).segments.leak = _BY_COLUMN
    dims = fact_of(scores).dims or ()
    dim = int(call.arg(2, "dim", -1)) % len(dims)
    if token_axes(dims) != {Axis.ROW, Axis.TOKEN, Axis.KEY} or dim != len(dims) - 1:
        raise NoLaw("chooses among scores that are not those of a query and the keys of its row")
    found = _prove(scores, dims)
    part = Fact(
        Kind.PACKED, (*dims[:-1], algebra.plain(shape_of_part(call.node)[dim])), learned=fact_of(scores).learned
    )
    return Fact(Kind.PACKED, parts=(part, part), law=found, learned=part.learned)


def shape_of_part(node: fx.Node) -> torch.Size:
    """The shape of the values of a choice."""
    first: Tensor = node.meta["val"][0]
    return first.shape


def _prove(scores: fx.Node, dims: Dims) -> Choice:
    for node in scores_behind(scores):
        _check_runs(node)
    constants, columns = constants_of(scores), algebra.extent(dims[-1])
    heads = algebra.extent([f for dim in dims for f in dim if f.axis is Axis.PLAIN])
    score = _lift(scores, digits_of(dims))
    tables = tables_of(score, constants, columns, heads)
    unseen = [residue(score, relation, tables) for relation in unseen_relations(constants, columns)]
    if any(interval(item, zero)[1] > MASKING for item in unseen):
        raise NoLaw("chooses among keys that are not proved to be of the past")
    value, found = split_mask(simplify(score, tables), tables)
    for masked in (*unseen, *(residue(item, "past", tables) for _, item in found)):
        _check_constant(masked)
    asked = dict.fromkeys(
        item for one, _ in found for item in conjuncts(one) if decide(item, "past", tables) is not True
    )
    if any(item == ("b",) for expr in (value, *asked) for item in walk(expr)):
        raise NoLaw("chooses keys by what differs from row to row by more than its inputs")
    padding = tuple(filter(reads_key_alone, asked))
    return Choice(scores, value, tuple(item for item in asked if item not in padding), padding)


def _check_constant(masked: Expr) -> None:
    """Check that masked scores are one number in all calls.

    Raises:
        NoLaw: They are several, such as scores to which a weak fill is added: the order of keys that a query may not
            see would depend on them.
    """
    low, high = interval(masked, unknown)
    if low != high:
        raise NoLaw("chooses among keys whose masked scores are not all the same number")


# The score, down to the values that are made of packed ones alone -----------------------------------------------------


def _lift(node: Any, index: Index) -> Expr:
    """Lift the score of a choice: masks, and ("dot", node, ()) for the values they hide."""
    if not isinstance(node, fx.Node):
        return const(node)
    if fact_of(node).kind is not Kind.SCORE:
        return lift(node, index)
    if node.target is aten.detach.default:
        return _lift(node.args[0], index)
    moved = step(node, index)
    if moved is not None:
        return _lift(*moved)
    masks = any(fact_of(item).kind not in (Kind.PACKED, Kind.SCORE) for item in _tensors(node))
    if masks and node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        source, mask, fill = (_operand(item, index) for item in node.args)
        return ("where", mask, fill, source)
    if masks and node.target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
        return ("where", *(_operand(item, index) for item in node.args))
    if masks and node.target is aten.add.Tensor and not node.kwargs:
        return fold(("add", *(_operand(item, index) for item in node.args)))
    return _unmasked(node, index)


def _operand(item: Any, index: Index) -> Expr:
    return _lift(item, align(shape_of(item), index)) if isinstance(item, fx.Node) else const(item)


def _unmasked(node: fx.Node, index: Index) -> Expr:
    """Return unmasked values at query and key: functions of packed values and constants."""
    behind = [item for one in scores_behind(node) for item in _tensors(one)]
    if any(fact_of(item).kind in (Kind.PREFIX, Kind.ROW) for item in behind):
        raise NoLaw(f"chooses keys by scores that pass through {node.target}")
    dims = fact_of(node).dims or ()
    wanted = [[_AXES[factor.axis] for factor in dim if factor.axis in _AXES and factor.size != 1] for dim in dims]
    given = [[digit[0] for digit in digits if digit[0] in _AXES.values()] for digits in index]
    if wanted != given:
        raise NoLaw("query and key axes change places between the scores and the choice")
    return ("dot", node, ())


# Operators per token
# ---------------------------------------------------------------------------------------------------


def scores_behind(scores: fx.Node) -> Iterator[fx.Node]:
    """The scores that a value is made of, and that value."""
    stack, seen = [scores], {scores}
    while stack:
        node = stack.pop()
        yield node
        sources = [item for item in _tensors(node) if fact_of(item).kind is Kind.SCORE and item not in seen]
        seen.update(sources)
        stack += sources


def _check_runs(node: fx.Node) -> None:
    """Check that an operator on scores runs on [N, .., T]: each token against its row."""
    fact = fact_of(node)
    if isinstance(fact.law, OwnKeys | WeighsKeys):
        return
    rule = find_law(node.target)
    if rule is not pointwise and rule not in _MOVES:
        raise NoLaw(f"chooses keys by scores that pass through {node.target}")
    assert fact.dims is not None
    for item in _tensors(node):
        of = fact_of(item)
        if of.kind is Kind.ROW and (of.learned or impurity(item) is not None):
            raise NoLaw("chooses keys by scores that meet a value computed per row")
        if of.kind is Kind.PACKED and not _is_of_query(of.dims or (), fact.dims):
            raise NoLaw("chooses keys by scores that meet values of the keys")


def _is_of_query(dims: Dims, target: Dims) -> bool:
    """Whether a value is the query's own next to scores: their tokens run together."""
    pairs = zip(dims, target[len(target) - len(dims) :], strict=True)
    return all(algebra.same_tokens(dim, other) for dim, other in pairs if algebra.has_tokens(dim))


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [item for item in node.all_input_nodes if isinstance(item.meta.get("val"), Tensor)]
