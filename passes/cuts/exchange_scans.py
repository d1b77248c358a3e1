"""Run one forest on several ranks: each rank runs recurrences on all tokens, for its share of the heads.

Ranks run at once, so no state can come from a rank above (:mod:`treefx.passes.cuts.boundary_states`). The tokens do.

Before::

    out = treefx.tree_scan(q, k, v, g, w, subtree_end, 64)

After::

    q, k, v, g, w = treefx.tokens_to_heads([q, k, v, g, w], place, counts, heads, group)       # [M, heads / ranks, ...]
    found = treefx.tree_scan(q, k, v, g, w, whole_end, 64)
    (out,) = treefx.heads_to_tokens([found], [heads], N, place, counts, heads, group, True)    # [N, heads, ...]

Parameters in a library's call, one per head, are cut to the rank's heads, so their gradients sum over the ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from treefx.errors import UnsupportedError
from treefx.passes.cuts import exchange_heads as _exchange_heads  # noqa: F401  (registers the operators)
from treefx.passes.cuts.boundary_kv import Ranks
from treefx.passes.cuts.exchange import processes_of
from treefx.passes.cuts.exchange_heads import share_of
from treefx.passes.trace.library_calls import call_of
from treefx.passes.trace.library_tree import leveled, tokens_of

__all__ = ["HeadExchange"]

aten = torch.ops.aten
_LIBRARY = torch.ops.treefx.library_tree.default


@dataclass(frozen=True)
class HeadExchange:
    """Let recurrences of a packed graph run on several ranks, in place.

    Attributes:
        gm: the graph.
        ranks: that run the forest.
        tokens: N.
        end: subtree_end of all tokens of the forest.
        place: as ``treefx::tokens_to_heads`` has it.
        counts: likewise.
    """

    gm: fx.GraphModule
    ranks: Ranks
    tokens: fx.Node
    end: fx.Node
    place: fx.Node
    counts: fx.Node

    def extend(self, scan: fx.Node) -> None:
        """Run one recurrence so.

        Raises:
            UnsupportedError: a library's call has a parameter other than one per head.
        """
        with self.gm.graph.inserting_before(scan):
            new = self._library(scan) if scan.target is _LIBRARY else self._scan(scan)
        new.meta = dict(scan.meta)
        scan.replace_all_uses_with(new)
        self.gm.graph.erase_node(scan)

    def _scan(self, scan: fx.Node) -> fx.Node:
        *operands, _, chunk = scan.args
        heads = int(operands[2].meta["val"].shape[1])  # type: ignore[union-attr]
        moved = iter(self._to_heads([x for x in operands if isinstance(x, fx.Node)], heads))
        own = [None if x is None else next(moved) for x in operands]
        return self._to_tokens(self._call(scan.target, *own, self.end, chunk), heads)

    def _library(self, scan: fx.Node) -> fx.Node:
        tensors: Any
        tensors, _, key = scan.args
        call = call_of(key)  # type: ignore[arg-type]
        how = leveled(call)
        assert how is not None, "a call without states does not run along a tree"
        heads = int(call.arguments(tensors)[how.like].meta["val"].shape[2])
        numbers = tokens_of(call, how, len(tensors))
        moved = self._to_heads([self._call(aten.squeeze.dim, tensors[number], 0) for number in numbers], heads)
        own = [self._call(aten.unsqueeze.default, x, 0) for x in moved]
        given = dict(zip(numbers, own, strict=True))
        arguments = [given[i] if i in given else self._own(x, heads, call.name) for i, x in enumerate(tensors)]
        found = self._call(scan.target, arguments, self.end, key)
        return self._call(aten.unsqueeze.default, self._to_tokens(self._call(aten.squeeze.dim, found, 0), heads), 0)

    def _own(self, parameter: fx.Node, heads: int, name: str) -> fx.Node:
        """Cut a parameter [H, ...] to the rank's heads."""
        shape = parameter.meta["val"].shape
        if not shape or shape[0] != heads:
            raise UnsupportedError(
                f"over several ranks {name} can have parameters with one entry per head ({heads}), but one has the "
                f"shape {list(shape)}; run the uncut forest (treefx.use), or a plan of it (treefx.plan)"
            )
        share = share_of(heads, heads, self.ranks.size)
        there = share.range_of(dist.get_rank(processes_of(self.ranks.group)))
        cut = self._call(aten.slice.Tensor, parameter, 0, there.start, there.stop)
        more = share.width - (there.stop - there.start)
        return self._call(aten.constant_pad_nd.default, cut, [0, 0] * (len(shape) - 1) + [0, more]) if more else cut

    def _to_heads(self, values: Sequence[fx.Node], heads: int) -> list[fx.Node]:
        arguments = (list(values), self.place, self.counts, heads, self.ranks.group)
        came = self._call(torch.ops.treefx.tokens_to_heads.default, *arguments)
        return [self._call(operator.getitem, came, number) for number in range(len(values))]

    def _to_tokens(self, found: fx.Node, heads: int) -> fx.Node:
        arguments = ([found], [heads], self.tokens, self.place, self.counts, heads, self.ranks.group, True)
        came = self._call(torch.ops.treefx.heads_to_tokens.default, *arguments)
        return self._call(operator.getitem, came, 0)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self.gm.graph.call_function(target, args)
