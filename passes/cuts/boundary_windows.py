"""Pass windows of convolutions along the tree across the cuts of a forest.

In a packed graph a window is read through parents: ``up`` maps every token to its parent and roots to a row of zeros,
and applying it d times finds the ancestor d tokens back. A part maps its own tokens, the P tokens of its boundary and
the zeros, so that the same steps lead out of the part and up along the boundary.

Before::

    up = cat([where(parent < 0, N, parent), N]);  rows = cat([x, zeros]);  up1 = up[arange(N)];  rows[up1]

After::

    up = cat([own_up, outside_up, nothing]);  rows = cat([x, outside_x, zeros]);  up1 = up[arange(N)];  rows[up1]

``outside_x`` comes and goes like keys and values. A gather's backward sums the gradients of all windows that read a
token, so those of the boundary's tokens are returned to their owners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treefx.errors import UnsupportedError
from treefx.kernels import ops as _ops  # noqa: F401  (registers tree_attention)
from treefx.passes.cuts.boundary_states import SCANS

__all__ = ["Window", "extend_windows", "find_windows"]

aten = torch.ops.aten
_ATTENTION = torch.ops.treefx.tree_attention.default


@dataclass(frozen=True)
class Window:
    """One gather of ancestors.

    Attributes:
        rows: ``[N + 1, C]``, the tokens' values and a row of zeros.
        up: int64 ``[N + 1]``, each token's parent, N at roots.
    """

    rows: fx.Node
    up: fx.Node

    @property
    def source(self) -> fx.Node:
        """The tokens' values ``[N, C]``."""
        joined: Any = self.rows.args[0]
        source: fx.Node = joined[0]
        return source


def find_windows(gm: fx.GraphModule, end: fx.Node) -> list[Window]:
    """Every place where a packed graph reads values of ancestors, attention and recurrences aside.

    Args:
        gm: Graph of the native level.
        end: Its subtree_end.

    Raises:
        UnsupportedError: A value depends on the tree in another way.
    """
    from_tree: set[Any] = {end}
    found: list[Window] = []
    for node in gm.graph.nodes:
        if (
            node.target is _ATTENTION
            or node.target in SCANS
            or not any(source in from_tree for source in node.all_input_nodes)
        ):
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            from_tree.add(node)
            continue
        window = _window(node, from_tree)
        if window is None:
            raise UnsupportedError(
                "a forest can be cut where tokens meet in attention, a convolution or a known recurrence, but "
                f"the model reads the tree in another way ({node.target}); run the uncut forest (treefx.use), or a "
                "smaller one"
            )
        found.append(window)
    return found


def _window(node: fx.Node, from_tree: set[Any]) -> Window | None:
    """The window that a gather ``rows[up[up[...]]]`` reads."""
    if node.target is not aten.index_select.default or node.args[1] != 0:
        return None
    given: Any = node.args
    rows, _, index = given
    up = None
    while index.target is aten.index.Tensor and up in (None, index.args[0]):
        up, (index,) = index.args
    is_padded = rows not in from_tree and rows.target is aten.cat.default and len(rows.args[0]) == 2
    if up is None or index.target is not aten.arange.default or not is_padded:
        return None
    return Window(rows, up) if rows.args[0][1].target is aten.new_zeros.default else None


def extend_windows(
    gm: fx.GraphModule, windows: list[Window], up: tuple[fx.Node, ...], outside: dict[fx.Node, fx.Node]
) -> None:
    """Let windows reach into the boundary, in place.

    Args:
        gm: The graph.
        windows: The result of `find_windows`.
        up: Parents of the own tokens, of the boundary's, and of the zeros, as inputs.
        outside: For the source of each window, the boundary's values ``[1, P, 1, C]``.
    """
    for rows in dict.fromkeys(window.rows for window in windows):
        joined: Any = rows.args[0]
        source, zeros = joined
        with gm.graph.inserting_before(rows):
            given = gm.graph.call_function(aten.squeeze.dims, (outside[source], [0, 2]))
            longer = gm.graph.call_function(aten.cat.default, ([source, given, zeros],))
        rows.replace_all_uses_with(longer)
    for old in dict.fromkeys(window.up for window in windows):
        with gm.graph.inserting_before(old):
            parents = gm.graph.call_function(aten.cat.default, (list(up),))
        old.replace_all_uses_with(parents)
