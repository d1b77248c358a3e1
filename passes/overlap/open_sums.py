"""Split sums over ranks of packed models into a collective and its wait."""

from __future__ import annotations

import torch
from torch import fx

from treefx.passes.overlap.emit import Emit
from treefx.passes.ranks import collectives  # noqa: F401  (defines the operator)

__all__ = ["open_sums"]

_c10d = torch.ops._c10d_functional


def open_sums(graph: fx.Graph) -> None:
    """Write every ``treefx::sum_over_ranks`` of a graph as ``all_reduce, wait_tensor``.

    Derivatives are known here.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.treefx.sum_over_ranks.default):
        given, group = node.args
        if not given.meta["val"].is_contiguous():
            continue  # the operator sends a copy then
        emit = Emit(node)
        node.replace_all_uses_with(emit(_c10d.wait_tensor.default, emit(_c10d.all_reduce.default, given, "sum", group)))
        graph.erase_node(node)
