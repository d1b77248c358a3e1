"""Run a forest by levels, for recurrences whose kernel takes initial states.

A node is a run of tokens without a fork. All nodes of one depth form a level, and run as sequences of one call; each
starts from the final state of its parent, in the level before. A library's kernel is thus called once per level::

    forest                  levels, tokens in the order of the calls
    a b c ─┬─ d e           [a b c]
           └─ f ─┬─ g       [d e] [f]
                 └─ h       [g] [h]

Autograd through the calls restores the gradients: that of a node's final state is the sum over its children.

In a part of a cut forest (``Doors``) roots start from states that enter, nodes also end at exits, and the final states
of exits leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treefx.kernels.memory import on_host, send
from treefx.kernels.recurrence.tree_chunks import (
    Doors,
    IntArray,
    find_chunk_plan,
    find_part_plan,
    node_begins,
    nodes_above,
)
from treefx.kernels.tiles.tree_blocks import remembered

__all__ = [
    "Level", "Levels", "Step", "find_levels", "find_part_levels", "levels_cost_less", "run_levels", "run_part_levels",
]  # fmt: skip

_PER_LEVEL = 16
"""Kernels of one call of a library, its gathers included: fla's gated delta rule launches seven, and two norms."""
_PER_LENGTH, _PER_STEP = 45, 5
"""Kernels of ``tree_scan``: for all chunks of one padded length, and for one step of the states between chunks."""


@dataclass(frozen=True)
class Level:
    """The S nodes of one depth, M tokens in all.

    Attributes:
        tokens: packed tokens, node by node, int64 ``[M]``.
        bounds: first token of each node in ``tokens``, and M, int64 ``[S + 1]``.
        parents: number of each node's parent in the level before, int64 ``[S]``; None in the first level.
        returns_states: whether the final state of a node is read.
        longest: tokens of the longest node.
    """

    tokens: Tensor
    bounds: Tensor
    parents: Tensor | None
    returns_states: bool
    longest: int

    @property
    def padded(self) -> int:
        """Tokens, if every node were as long as the longest."""
        return (len(self.bounds) - 1) * self.longest


@dataclass(frozen=True)
class Levels:
    """A forest by depth.

    Attributes:
        levels: roots first.
        places: where each packed token stands in the concatenation of all levels, int64 ``[N]``.
        entry: in a part, number of the state that each node of the first level starts from, int64 ``[S]``.
        exits: in a part, where each state that leaves stands in the concatenation of the final states of all levels
            that return them, int64 ``[X]``; their number for a state of zero.
    """

    levels: tuple[Level, ...]
    places: Tensor
    entry: Tensor | None = None
    exits: Tensor | None = None


Step = Callable[[list[Tensor], Tensor | None, Level], tuple[Tensor, Tensor | None]]
"""Runs one level: values of its tokens ``[1, M, ...]``, states that its nodes start from ``[S, ...]`` or None for zeros
-> result ``[1, M, ...]``, final states ``[S, ...]`` where the level returns them."""


def find_levels(subtree_end: Tensor) -> Levels:
    """Return the levels of a forest; layers, forward and backward of one step share them.

    Args:
        subtree_end: exclusive end of each token's subtree in packed order, int ``[N]``.
    """
    found: Levels = remembered(("levels",), (subtree_end,), lambda: _cut(subtree_end))
    return found


def find_part_levels(subtree_end: Tensor, doors: Doors) -> Levels:
    """Return the levels of a part of a forest, shared likewise."""
    given = (subtree_end, *doors.vectors)
    found: Levels = remembered(("levels", doors.given), given, lambda: _cut(subtree_end, doors))
    return found


# Long: all vectors of the levels, from one walk.
def _cut(subtree_end: Tensor, doors: Doors | None = None) -> Levels:
    ends = on_host(subtree_end).numpy().astype(np.int64)
    exits = np.zeros(0, dtype=np.int64) if doors is None else on_host(doors.exits).numpy()
    start = np.flatnonzero(node_begins(ends, exits))
    count = np.diff(start, append=len(ends))
    parent, depth = nodes_above(start.tolist(), ends[start].tolist(), [1] * len(start))
    levels, order, number = [], [], np.zeros(len(start), dtype=np.int64)
    deepest = int(depth.max()) if len(depth) else -1
    last = np.where(exits < 0, -1, np.searchsorted(start, exits, side="right") - 1)  # the node of each exit
    left = set(depth[last[last >= 0]].tolist())
    for at in range(deepest + 1):
        nodes = np.flatnonzero(depth == at)
        number[nodes] = np.arange(len(nodes))
        bounds = np.concatenate([[0], np.cumsum(count[nodes])])
        tokens = np.arange(bounds[-1]) + np.repeat(start[nodes] - bounds[:-1], count[nodes])
        above = number[parent[nodes]] if at else None
        levels.append((tokens, bounds, above, at < deepest or at in left, int(count[nodes].max())))
        order.append(tokens)
    places = np.empty(len(ends), dtype=np.int64)
    if order:
        places[np.concatenate(order)] = np.arange(len(ends))

    def sent(numbers: IntArray) -> Tensor:
        return send(torch.from_numpy(numbers), subtree_end.device)

    made = [
        Level(sent(tokens), sent(bounds), None if above is None else sent(above), returns, longest)
        for tokens, bounds, above, returns, longest in levels
    ]
    if doors is None:
        return Levels(tuple(made), sent(places))
    before = np.cumsum([0, *(np.count_nonzero(depth == at) for at in range(deepest + 1))])
    states = np.append(before[depth] + number, before[deepest + made[-1].returns_states])
    return Levels(tuple(made), sent(places), sent(on_host(doors.entry).numpy()[start[depth == 0]]), sent(states[last]))


def run_levels(step: Step, operands: Sequence[Tensor], levels: Levels) -> Tensor:
    """Run a recurrence along the paths of a forest.

    Args:
        step: runs one level.
        operands: values of all packed tokens ``[1, N, ...]``.
        levels: of the forest.

    Returns:
        ``[1, N, ...]``, differentiable in the operands where ``step`` is.
    """
    return _run(step, operands, levels, None)[0]


def run_part_levels(step: Step, operands: Sequence[Tensor], levels: Levels, given: Tensor) -> tuple[Tensor, Tensor]:
    """Run a recurrence along the paths of a part.

    Args:
        step: as in `run_levels`.
        operands: likewise.
        levels: of the part, from `find_part_levels`.
        given: states that enter ``[S, ...]``.

    Returns:
        ``[1, N, ...]`` and the states that leave ``[X, ...]``, differentiable in the states that enter too.
    """
    assert levels.entry is not None and levels.exits is not None
    zero = given.new_zeros(1, *given.shape[1:])
    first = torch.cat([given, zero]).index_select(0, levels.entry)
    out, finals = _run(step, operands, levels, first)
    return out, torch.cat([*(x.to(given.dtype) for x in finals), zero]).index_select(0, levels.exits)


def _run(step: Step, operands: Sequence[Tensor], levels: Levels, states: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Return results ``[1, N, ...]``, and in a part the final states of the levels that return them."""
    results, finals = [], []
    for level in levels.levels:
        taken = [x.index_select(1, level.tokens) for x in operands]
        if level.parents is not None:
            assert states is not None
            states = states.index_select(0, level.parents)
        out, states = step(taken, states, level)
        results.append(out)
        if level.returns_states and levels.exits is not None:
            assert states is not None
            finals.append(states)
    return torch.cat(results, 1).index_select(1, levels.places), finals


def levels_cost_less(
    levels: Levels, subtree_end: Tensor, chunk: int, *, padded: bool, doors: Doors | None = None
) -> bool:
    """Return whether library calls by level launch fewer kernels than ``tree_scan``.

    Args:
        levels: of the forest.
        subtree_end: of the forest, ``[N]``.
        chunk: tokens per chunk of ``tree_scan``.
        padded: whether all nodes of a level are padded to the longest: their share of all tokens counts as work.
        doors: of a part of a forest.
    """
    plan = find_chunk_plan(subtree_end, chunk) if doors is None else find_part_plan(subtree_end, chunk, doors)
    own = _PER_LENGTH * len(plan.chunks) + _PER_STEP * len(plan.segments)
    waste = sum(level.padded for level in levels.levels) / max(1, len(levels.places)) if padded else 1.0
    return _PER_LEVEL * len(levels.levels) * waste <= own
