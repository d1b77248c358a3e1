"""Pass states of recurrences along the tree across the cuts of a forest.

A recurrence reads one state of its path, that of the parent token. So each topmost token of a part gets the state of
its parent, and each token with a child in another part returns its own: one state per path that a cut crosses.

Before::

    out = treefx.tree_scan(q, k, v, g, w, subtree_end, 64)

After::

    out, left = treefx.part_scan(q, k, v, g, w, subtree_end, 64, state, entry, exits)   # state [S, H, D, E]
    return [..., left[None]]                                                            # [1, X, H, D, E]

The gradient of a state that left is the sum over the parts below, which the executor adds up as it does for keys.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from treefx.kernels.recurrence import part_scan as _part_scan  # noqa: F401  (registers it)
from treefx.passes.trace import library_part

__all__ = ["PARTS", "SCANS", "extend_scan", "find_scans", "state_of"]

_SCAN, _LIBRARY = torch.ops.treefx.tree_scan.default, torch.ops.treefx.library_tree.default
_IN_PART: dict[Any, Any] = {_SCAN: torch.ops.treefx.part_scan.default, _LIBRARY: torch.ops.treefx.library_part.default}
SCANS: frozenset[Any] = frozenset(_IN_PART)
"""Recurrences of a packed graph with states that cross cuts."""
PARTS: frozenset[Any] = frozenset(_IN_PART.values())
"""The same in the graph of a part; their last arguments are the states that enter, `entry` and `exits`."""


def find_scans(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the recurrences of a packed graph, in order."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target in SCANS]


def state_of(scan: fx.Node) -> tuple[tuple[int, int, int], torch.dtype]:
    """Return the shape [H, D, E] of a state of a recurrence, and its dtype."""
    if scan.target is _LIBRARY:
        tensors, _, key = scan.args
        return library_part.state_of([x.meta["val"] for x in tensors], key)  # type: ignore[union-attr, arg-type]
    q, v = (scan.args[place].meta["val"] for place in (0, 2))  # type: ignore[union-attr]
    return (int(v.shape[1]), int(q.shape[2]), int(v.shape[2])), v.dtype


def extend_scan(gm: fx.GraphModule, scan: fx.Node, given: fx.Node, doors: tuple[fx.Node, fx.Node]) -> fx.Node:
    """Let a recurrence start from given states, in place.

    Args:
        gm: the graph.
        scan: the recurrence.
        given: states that enter, [1, S, H, D, E].
        doors: where they enter [N], and the tokens whose states leave [X].

    Returns:
        The states that leave, [X, H, D, E].
    """
    with gm.graph.inserting_before(scan):
        states = gm.graph.call_function(torch.ops.aten.squeeze.dim, (given, 0))
        both = gm.graph.call_function(_IN_PART[scan.target], (*scan.args, states, *doors))
        out, left = (gm.graph.call_function(operator.getitem, (both, number)) for number in (0, 1))
    out.meta = dict(scan.meta)
    scan.replace_all_uses_with(out)
    gm.graph.erase_node(scan)
    return left
