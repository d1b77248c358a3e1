"""Run one forest on several ranks: fetch attended keys and values within the graph.

As a part's (:mod:`treefx.passes.cuts.boundary_kv`), but the boundary's keys and values are no inputs, and none are
returned: all ranks run at once, and one operator sends them each other's ancestors.

Before::

    out = treefx.tree_attention(q, k, v, subtree_end, buffers, None, score, "auto")

After::

    bk, bv = treefx.exchange([k, v], outgoing, order, counts, group)        # [1, P, heads, width] each
    out = treefx.tree_attention(q, k, v, subtree_end, buffers, None, score, "auto", bk, bv, lo, hi)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from treefx.passes.cuts import exchange as _exchange  # noqa: F401  (registers it)
from treefx.passes.cuts.boundary_kv import CutGraph, Cutter, Ranks, Run, add_boundary, check_operators
from treefx.passes.cuts.boundary_windows import find_windows

__all__ = ["add_exchange", "cut_graph"]


def cut_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, part: Run | Ranks
) -> tuple[fx.GraphModule, list[Any], CutGraph]:
    """Cut a packed graph, in place, for parts in sequence (`add_boundary`) or in parallel."""
    return (add_exchange if isinstance(part, Ranks) else add_boundary)(gm, inputs, mode, part)  # type: ignore[arg-type]


def add_exchange(
    gm: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, ranks: Ranks
) -> tuple[fx.GraphModule, list[Any], CutGraph]:
    """Let a packed graph get its boundary from other ranks, in place.

    Args:
        gm: Graph of the native level; its placeholders end with row, column, subtree_end, token_of and N.
        inputs: Its fake inputs.
        mode: Their mode, with a ``TokenCount`` as shape environment.
        ranks: Ranks that run the others.

    Returns:
        The graph, whose further inputs are now lo, hi [P] int32, the boundary's columns [P] and the sent tokens [Q]
        int64, order [P] and counts [2, ranks] as `treefx::exchange` has them, the parents where convolutions read them,
        P and Q; its inputs; what they are.

    Raises:
        UnsupportedError: as `add_boundary` does.
    """
    cutter = _Exchanger(gm, list(inputs), mode, ranks)
    check_operators(gm, on_ranks=True)
    windows = find_windows(gm, cutter.end)
    cutter.cut(windows)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*cutter.inputs)
    return gm, cutter.inputs, CutGraph(ranks, [], [], [], bool(windows))


class _Exchanger(Cutter):
    """Rewrites one graph."""

    def __init__(self, gm: fx.GraphModule, inputs: list[Any], mode: FakeTensorMode, ranks: Ranks) -> None:
        super().__init__(gm, inputs, mode)
        self.group = ranks.group
        with mode:
            order = torch.empty(self.sizes["boundary_count"], dtype=torch.int64, device=self.lo.meta["val"].device)
            counts = torch.empty(2, ranks.size, dtype=torch.int64, device="cpu")
        self.order, self.counts = self.add_input("order", order), self.add_input("counts", counts)

    def _bring(self, sources: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Bring all values of one dtype in one message."""
        found: dict[fx.Node, fx.Node] = {}
        for dtype in dict.fromkeys(source.meta["val"].dtype for source in sources):
            alike = [source for source in sources if source.meta["val"].dtype == dtype]
            found |= self._exchange(alike)
        return found

    def _exchange(self, sources: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        graph = self.gm.graph
        with graph.inserting_after(max(sources)):
            arguments = (sources, self.outgoing, self.order, self.counts, self.group)
            came = graph.call_function(torch.ops.treefx.exchange.default, arguments)
        found = {}
        for number, source in enumerate(sources):
            with graph.inserting_after(came):
                found[source] = graph.call_function(operator.getitem, (came, number))
        return found
