"""Run one forest on several ranks: fetch attended keys and values within the graph.

As a part's (:mod:`treefx.passes.cuts.boundary_kv`), but the boundary's keys and values are no inputs, and none are
returned: all ranks run at once, and one operator sends them each other's ancestors.

Before::

    out = treefx.tree_attention(q, k, v, subtree_end, buffers, None, score, "auto")

After::

    bk, bv = treefx.exchange([k, v], outgoing, order, counts, group)        # [1, P, heads, width] each
    out = treefx.tree_attention(q, k, v, subtree_end, buffers, None, score, "auto", bk, bv, lo, hi)

Recurrences run on all tokens, each rank with its share of the heads (:mod:`treefx.passes.cuts.exchange_scans`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from treefx.inputs.token_count import TokenCount
from treefx.passes.cuts import exchange as _exchange  # noqa: F401  (registers it)
from treefx.passes.cuts.boundary_kv import CutGraph, Cutter, Ranks, Run, add_boundary, check_operators
from treefx.passes.cuts.boundary_states import find_scans
from treefx.passes.cuts.boundary_windows import Window, find_windows
from treefx.passes.cuts.exchange_scans import HeadExchange

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
        int64, order [P] and counts [2, ranks] as `treefx::exchange` has them, with recurrences subtree_end of the whole
        forest [M], place [M] and counts [ranks] as `treefx::tokens_to_heads` has them, the parents where convolutions
        read them, P and Q, with recurrences M; its inputs; what they are.

    Raises:
        UnsupportedError: as `add_boundary` does.
    """
    cutter = _Exchanger(gm, list(inputs), mode, ranks)
    check_operators(gm)
    windows, scans = find_windows(gm, cutter.end), find_scans(gm)
    cutter.cut(windows, scans)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*cutter.inputs)
    return gm, cutter.inputs, CutGraph(ranks, [], [], [], bool(windows), reads_whole=bool(scans))


class _Exchanger(Cutter):
    """Rewrites one graph."""

    def __init__(self, gm: fx.GraphModule, inputs: list[Any], mode: FakeTensorMode, ranks: Ranks) -> None:
        super().__init__(gm, inputs, mode)
        self.ranks, self.group = ranks, ranks.group
        with mode:
            order = torch.empty(self.sizes["boundary_count"], dtype=torch.int64, device=self.lo.meta["val"].device)
            counts = torch.empty(2, ranks.size, dtype=torch.int64, device="cpu")
        self.order, self.counts = self.add_input("order", order), self.add_input("counts", counts)

    def cut(self, windows: list[Window], scans: Sequence[fx.Node] = ()) -> None:
        """Give every attention and every window its boundary, and every recurrence its heads."""
        whole = self._take_whole() if scans else None
        super().cut(windows)
        if whole is not None:
            for scan in scans:
                whole.extend(scan)

    def _take_whole(self) -> HeadExchange:
        device, count = self.column.meta["val"].device, self.mode.shape_env
        assert isinstance(count, TokenCount)
        end, place = count.further([torch.int32, torch.int64], device, self.mode)
        self.sizes["whole_count"] = end.shape[0]
        with self.mode:
            held = torch.empty(self.ranks.size, dtype=torch.int64, device="cpu")
        given = [("whole_end", end), ("place", place), ("held", held)]
        return HeadExchange(self.gm, self.ranks, self.tokens, *(self.add_input(name, fake) for name, fake in given))

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
