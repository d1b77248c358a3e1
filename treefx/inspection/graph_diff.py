"""Count operators of a graph by name, and compare the counts of two graphs."""

from __future__ import annotations

import operator
from collections import Counter
from typing import NamedTuple

import torch
from torch import fx

__all__ = ["OperatorChange", "count_operators", "diff_operators", "operator_name", "order_changes", "restorations"]


_MOVES = {
    "view", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "clone", "detach",
    "slice", "select", "sym_size",
}  # fmt: skip
"""Operators that compute nothing."""


class OperatorChange(NamedTuple):
    """How often one operator occurs in two graphs. Prints as ``mm: 12 -> 10 (-2)``."""

    name: str
    before: int
    after: int

    @property
    def difference(self) -> int:
        """Occurrences gained; negative where they were lost."""
        return self.after - self.before

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after} ({self.difference:+d})"


def operator_name(node: fx.Node) -> str:
    """Return the operator of a call without overload and ``aten``: ``mm``, ``treefx.expand``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket).removeprefix("aten.")
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def count_operators(gm: fx.GraphModule) -> Counter[str]:
    """Operators of a graph by name; taking a result out of a tuple is not one."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    return Counter(operator_name(node) for node in calls if node.target is not operator.getitem)


def diff_operators(before: fx.GraphModule, after: fx.GraphModule) -> list[OperatorChange]:
    """List operators with different counts, the largest differences first.

    Operators that compute nothing come last.
    """
    return order_changes(count_operators(before), count_operators(after))


def order_changes(old: Counter[str], new: Counter[str]) -> list[OperatorChange]:
    """Sort operators with different counts, the largest differences first.

    Operators that compute nothing come last.
    """
    changes = [OperatorChange(name, old[name], new[name]) for name in old.keys() | new.keys()]
    changed = [change for change in changes if change.difference]
    return sorted(changed, key=lambda change: (change.name in _MOVES, -abs(change.difference), change.name))


def restorations(gm: fx.GraphModule) -> list[fx.Node]:
    """The restoration nodes of a backward graph, for the inspector."""
    targets = (torch.ops.treefx.restore.default, torch.ops.treefx.restore_pick.default)
    return [node for node in gm.graph.nodes if node.target in targets]
