"""Multiply by a weight of which each rank has a range; return the range of the result.

With features in last place, x [.., C] and a weight w [F, C] of ``linear``:

=========================  ==============  ===============================================================
rank's share of x          range of w      its share of x w^T
=========================  ==============  ===============================================================
whole                      of rows F       a piece of the features, by a separate read of x
a piece                    of columns C    a summand
whole                      none (whole)    whole
=========================  ==============  ===============================================================

An embedding table w [V, C] gives a piece where its columns are shared out, a summand where its rows are: tokens that
another rank has are zero there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from treefx.passes.ranks.held import Form, Held, Ranks, Unfollowed, example_of

_DEFAULTS = (None, None, 2.0, False, False)
"""Of ``embedding`` behind its two operands."""
__all__ = ["embedding", "linear", "read_by_each"]


def read_by_each(graph: fx.Graph, known: dict[fx.Node, fx.Node], value: fx.Node, ranks: Ranks) -> fx.Node:
    """Return a whole value for separate computation on ranks; one node for all readers.

    The summands of its gradient are then added up first and sent once.
    """
    if value not in known:
        known[value] = graph.call_function(torch.ops.treefx.same_on_ranks.default, (value, ranks.group))
    return known[value]


def linear(graph: fx.Graph, known: dict[fx.Node, fx.Node], given: list[Any], ranks: Ranks) -> Held:
    """Multiply: ``linear(x, w, b)``; ``given`` has the shares of each, None for no bias."""
    x, weight, bias = given
    if weight.form is not Form.WEIGHT:
        raise Unfollowed("linear by a weight that is not a parameter shared out over ranks")
    rows, columns = (x.form, weight.dim) == (Form.WHOLE, 0), (x.form, weight.dim) == (Form.PIECE, 1)
    if not rows and not columns:
        raise Unfollowed(f"linear of a {x.form.value} input by a weight shared out along dimension {weight.dim}")
    added = None if bias is None else bias.node
    if rows:
        if bias is not None and bias.form is not Form.WEIGHT:
            raise Unfollowed("linear with a bias that is not shared out as its weight is")
        own = read_by_each(graph, known, x.node, ranks)
        return Held(graph.call_function(F.linear, (own, weight.node, added)), Form.PIECE)
    if bias is not None:
        if bias.form is not Form.WHOLE:
            raise Unfollowed("linear with a bias of which a rank has a range, though its weight's rows are whole")
        added = graph.call_function(torch.div, (read_by_each(graph, known, bias.node, ranks), ranks.count))
    return Held(graph.call_function(F.linear, (x.node, weight.node, added)), Form.PARTIAL)


def embedding(graph: fx.Graph, ids: Held, weight: Held, node: fx.Node, ranks: Ranks) -> Held:
    """``embedding(ids, w, padding_idx, max_norm, ...)`` of a table that is shared out."""
    given: tuple[Any, ...] = (*node.args[2:], *_DEFAULTS[len(node.args) - 2 :])
    padding, max_norm, _, by_frequency, sparse = given
    if max_norm is not None or by_frequency or sparse or node.kwargs:
        raise Unfollowed("an embedding with max_norm, scale_grad_by_freq, sparse or keywords")
    if ids.form is not Form.WHOLE:
        raise Unfollowed("an embedding of ids of which a rank has a range")
    if weight.dim == 1:
        return Held(graph.call_function(F.embedding, (ids.node, weight.node, padding)), Form.PIECE)
    size = example_of(node.args[1]).shape[0]
    if size % ranks.count:
        raise Unfollowed(f"an embedding of {size} rows, no multiple of {ranks.count} ranks")
    size //= ranks.count
    first = size * ranks.rank
    local = graph.call_function(torch.sub, (ids.node, first))
    others = graph.call_function(
        torch.logical_or,
        (graph.call_function(torch.lt, (local, 0)), graph.call_function(torch.ge, (local, size))),
    )
    safe = graph.call_method("masked_fill", (local, others, 0))
    padding = padding + size * ranks.count if isinstance(padding, int) and padding < 0 else padding
    own = padding - first if isinstance(padding, int) and first <= padding < first + size else None
    rows = graph.call_function(F.embedding, (safe, weight.node, own))
    return Held(
        graph.call_method("masked_fill", (rows, graph.call_method("unsqueeze", (others, -1)), 0.0)), Form.PARTIAL
    )
