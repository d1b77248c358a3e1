"""Some of a forest: the edges a loss over one part of a plan sees, or some of its rows."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treefx.forests.edges import Edges
from treefx.forests.forest import Forest
from treefx.forests.input import RowBatch
from treefx.kernels.memory import lasting_property

__all__ = ["EdgeSubset", "select_edges", "select_rows", "split_tokens"]


@dataclass(frozen=True, eq=False, repr=False)
class EdgeSubset(Forest):
    """An uncut forest of which only some edges count, as a loss sees a part.

    Everything about rows is the uncut forest's, so that means over tokens or rows add up over the parts.

    Attributes:
        uncut: the forest itself.
        edge_index: int64 [E_p], the edges that count, as indices into those of the uncut forest.
        part_tokens: number of tokens of the running part, in rows and distinct; None where no part runs.
    """

    uncut: Forest
    edge_index: Tensor
    part_tokens: tuple[int, int] | None = dataclasses.field(default=None, kw_only=True)

    @lasting_property
    def edges(self) -> Edges:
        """The edges that count, ordered by target."""
        return select_edges(self.uncut.edges, self.edge_index)


def select_edges(edges: Edges, chosen: Tensor, **changes: Tensor) -> Edges:
    """Some edges, in order, with some of their columns changed."""
    along = ("source", "target", "token", "weight", "depth", "multiplicity", "first_rank")
    selected = {name: getattr(edges, name)[chosen] for name in along}
    return dataclasses.replace(edges, **{**selected, **changes})


def select_rows(forest: Forest, rows: Sequence[int]) -> Forest:
    """The forest of some rows, in the order given, with the weights they have."""
    offsets = forest.row_offsets.tolist()
    spans = [slice(offsets[row], offsets[row + 1]) for row in rows]
    return Forest.from_sequences(
        [forest.tokens[forest.flat_token_of[span]] for span in spans],
        weights=[forest.raw_weight[span] for span in spans],
    )


def split_tokens(forest: Forest, nodes: Collection[int], group_of: Sequence[int]) -> Forest:
    """The same rows and weights, where some nodes have a copy per group of what follows them.

    Args:
        forest: any forest.
        nodes: numbers of the nodes that are split, in `forest.nodes`.
        group_of: per node of the forest, the group it has in a copy of the node above. What follows in one group shares
            a copy, and so do rows that end in the node.
    """
    split = set(nodes)
    start = forest.nodes.start.cpu()
    labels: dict[tuple[int, int], int] = {}
    rows, keys = [], []
    for path in forest.token_of:
        own = path.cpu()
        node_of = torch.searchsorted(start, own, right=True) - 1
        order, counts = (found.tolist() for found in torch.unique_consecutive(node_of, return_counts=True))
        label, group, found = 0, -1, []
        for node in reversed(order):
            label = labels.setdefault((group, label), len(labels) + 1) if node in split else 0
            group = group_of[node]
            found.append(label)
        label_of = torch.repeat_interleave(torch.tensor(found[::-1]), torch.tensor(counts))
        rows.append(forest.tokens.cpu()[own].numpy())
        keys.append((label_of * forest.num_tokens + own).numpy())
    batch = RowBatch(
        rows, forest.raw_weight.cpu().numpy(), forest.row_start.cpu().numpy(), forest.padded_width, forest.device
    )
    return Forest._from_rows(batch, keys)
