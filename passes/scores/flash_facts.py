"""Express flash attention as one score: mask, segments, window, softcap and sinks.

Its window counts the kept tokens of a row, or the places of a segment: columns are these where rows keep one run.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import fx

from treefx.kernels.score import Expr
from treefx.passes.labels.constants import Constants, constants_of
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import as_number, shape_of
from treefx.passes.scores.attention_facts import Attention, index_of_scores, prove
from treefx.passes.scores.lift_mask import lift
from treefx.passes.scores.score_algebra import affine, const
from treefx.passes.trace.flash import FlashCall

__all__ = ["lift_flash"]

aten = torch.ops.aten
_CASTS = {aten._to_copy.default, aten.alias.default, aten.clone.default, aten.detach.default}


def lift_flash(node: fx.Node) -> Attention:
    """Lift a ``treefx::flash``.

    Raises:
        NoLaw: It is not causal, or its numbers do not determine mask, segments and window in advance.
    """
    call = FlashCall(*node.args)  # type: ignore[arg-type]
    rows, heads, columns, features = shape_of(call.query)
    index = index_of_scores(rows, heads, columns)
    score: Expr = ("mul", ("dot", node, ()), const(1 / math.sqrt(features) if call.scale is None else call.scale))
    if call.softcap:
        score = ("mul", ("tanh", ("div", score, const(call.softcap))), const(call.softcap))
    for condition in _conditions(call, constants_of(node)):
        score = ("where", condition, score, const(-math.inf))
    sinks = None if call.sinks is None else lift(call.sinks, (index[1],))
    operands = (call.query, call.key, call.value)
    return prove(node, operands, score, columns, as_number(heads), safe=True, sinks=sinks)


def _conditions(call: FlashCall, constants: Constants) -> list[Expr]:
    """Under which a query sees a key."""
    rows, _, columns, _ = shape_of(call.query)
    row, _, query, key = index_of_scores(rows, 1, columns)
    distance: Expr = ("sub", ("cq",), ("ck",))
    found: list[Expr] = [("le", ("ck",), ("cq",))] if call.is_causal else []
    if call.window is not None:
        found.append(("lt", distance, const(call.window)))
    if _tells_segments(call, constants):
        found.append(("eq", lift(call.segments, (row, query)), lift(call.segments, (row, key))))
    elif call.mask is not None:
        if call.window is not None and not _is_among(constants.runs, call.mask):
            raise NoLaw("a window over kept tokens, of which a row has more than one run (or its mask is no input)")
        found.append(lift(call.mask, (row, key)))
    return found


def _tells_segments(call: FlashCall, constants: Constants) -> bool:
    """Whether positions or ends cut the row; they do only where a mask hides nothing."""
    rows, _, columns, _ = shape_of(call.query)
    if call.query_ends is None and (call.positions is None or _counts_up(call.positions, constants, columns)):
        return False
    if rows != 1:
        raise NoLaw("cu_seq_lens of several rows, whose sequences may run on from one row into the next")
    if call.query_ends is not call.key_ends:
        raise NoLaw("cu_seq_lens of keys that are not those of the queries")
    if call.mask is None or _is_among(constants.full, call.mask):
        return True
    if _input_behind(call.mask) is None:
        raise NoLaw("a mask that is no input, in a row whose positions or cu_seq_lens count where it hides nothing")
    return False


def _counts_up(positions: fx.Node, constants: Constants, columns: int) -> bool:
    """Whether positions go up by one from column to column."""
    form = affine(lift(positions, ((), ((("cq",), columns),))), constants.consecutive)
    return form is not None and form.get("cq") == 1.0 and not form.get("b") and not form.get("ck")


def _is_among(inputs: Collection[fx.Node], mask: fx.Node) -> bool:
    return _input_behind(mask) in inputs


def _input_behind(node: fx.Node) -> fx.Node | None:
    """The input of which a value is a cast."""
    while node.op == "call_function" and node.target in _CASTS:
        node = node.all_input_nodes[0]
    return node if node.op == "placeholder" else None
