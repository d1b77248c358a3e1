"""Trees of rollouts that attention is timed on."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Tree", "agent_nodes", "repeated_nodes", "thought_nodes", "uneven_nodes"]


@dataclass(frozen=True)
class Tree:
    """A forest as nodes in packed order: the parent node (-1: a root) and the length of each."""

    name: str
    nodes: tuple[tuple[int, int], ...]

    def spans(self) -> list[tuple[int, int]]:
        """Return the token range of each node."""
        stops = np.cumsum([length for _, length in self.nodes]).tolist()
        return [(stop - length, stop) for stop, (_, length) in zip(stops, self.nodes, strict=True)]

    def subtree_end(self) -> Tensor:
        """Return the exclusive end of each token's subtree, int32 ``[N]``."""
        spans = self.spans()
        ends = [stop for _, stop in spans]
        for node in reversed(range(len(ends))):
            parent = self.nodes[node][0]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[node])
        lengths = torch.tensor([length for _, length in self.nodes])
        return torch.tensor(ends, dtype=torch.int32).repeat_interleave(lengths)

    def rows(self) -> list[Tensor]:
        """Return the packed indices of every root-to-leaf row."""
        spans, parents = self.spans(), [parent for parent, _ in self.nodes]
        rows = []
        for leaf in sorted(set(range(len(parents))) - set(parents)):
            path: list[Tensor] = []
            node = leaf
            while node >= 0:
                path.insert(0, torch.arange(*spans[node]))
                node = parents[node]
            rows.append(torch.cat(path))
        return rows


def repeated_nodes(count: int, prefix: int, leaves: int, length: int) -> tuple[tuple[int, int], ...]:
    """Return ``count`` prefixes with ``leaves`` continuations each."""
    trees = ([(-1, prefix), *[(tree * (leaves + 1), length)] * leaves] for tree in range(count))
    return tuple(node for tree in trees for node in tree)


def uneven_nodes(nodes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return the nodes with lengths between half and one and a half times theirs."""
    random = np.random.default_rng(0)
    return tuple((parent, int(random.integers(length // 2, length + length // 2 + 1))) for parent, length in nodes)


def agent_nodes(count: int = 102, lengths: tuple[int, int] = (30, 70)) -> tuple[tuple[int, int], ...]:
    """Return a conversation that forks at times: a long system prompt, then turns."""
    random = np.random.default_rng(0)
    shortest, longest = lengths
    nodes, path = [(-1, 1000)], [0]
    for node in range(1, count):
        if random.random() < 0.3:
            path = path[: int(random.integers(1, len(path) + 1))]
        nodes.append((path[-1], int(random.integers(shortest, longest + 1))))
        path.append(node)
    return tuple(nodes)


def thought_nodes(depth: int = 4, width: int = 4) -> tuple[tuple[int, int], ...]:
    """Return a full tree of short thoughts, 15 to 45 tokens each."""
    random = np.random.default_rng(0)
    nodes: list[tuple[int, int]] = []

    def grow(parent: int, level: int) -> None:
        nodes.append((parent, int(random.integers(15, 46))))
        node = len(nodes) - 1
        for _ in range(width if level < depth else 0):
            grow(node, level + 1)

    grow(-1, 0)
    return tuple(nodes)
