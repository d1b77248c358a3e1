"""The prefix trees over the rows of one training step.

Each distinct prefix token stands once, in packed order: depth-first, pre-order. The subtree of token k is
then the interval [k, subtree_end[k]), and q sees k iff `k <= q < subtree_end[k]`: one int32 per token is the
whole mask.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from treefx.forests.branches import read_nodes
from treefx.forests.edges import Edges
from treefx.forests.input import RowBatch, Weighting, read_padded, read_sequences, weigh
from treefx.forests.share import Share
from treefx.forests.trie import build_trie
from treefx.kernels.memory import lasting, lasting_property, send
from treefx.views import find_view

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Forest", "Nodes"]


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """Maximal runs of tokens with the same set of rows, in packed order.

    Attributes:
        start: int64 [M], packed index of the first token.
        stop: int64 [M], one past the last token.
        parent: int64 [M], the node above; -1 at roots.
    """

    start: torch.Tensor
    stop: torch.Tensor
    parent: torch.Tensor

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, eq=False, repr=False)
class Forest:
    """Hold an immutable forest; build it with `from_sequences` or `from_padded`.

    N: distinct tokens. R: rows. raw: tokens of all rows together.

    Attributes:
        tokens: int64 [N], token ids in packed order.
        depth: int32 [N], position of the token on its path: its position id.
        subtree_end: int32 [N], exclusive end of the token's subtree.
        parent: int64 [N], packed index of the previous token on the path; -1 at roots.
        multiplicity: int64 [N], number of rows through the token.
        token_weight: float64 [N], sum over those rows of their weights of predicting the token; 0 at roots.
        first_rank: int64 [N], rank in `row_order` of the first row through the token.
        row_order: int64 [R], rows in lexicographic order; the rows through one token are contiguous in it.
        flat_token_of: int64 [raw], `token_of` of all rows end to end.
        row_offsets: int64 [R + 1], row r owns `flat_token_of[row_offsets[r]:row_offsets[r + 1]]`.
        raw_weight: float64 [raw], weight of predicting each raw token; 0 at every row's first.
        row_start: int64 [R], column of the row's first token in the padded batch; 0 without one.
        padded_width: columns of the padded batch the forest came from; None for `from_sequences`.
        share: reference to the whole step, if the forest is one rank's share (`treefx.scale.shard_rows`).
    """

    tokens: torch.Tensor
    depth: torch.Tensor
    subtree_end: torch.Tensor
    parent: torch.Tensor
    multiplicity: torch.Tensor
    token_weight: torch.Tensor
    first_rank: torch.Tensor
    row_order: torch.Tensor
    flat_token_of: torch.Tensor
    row_offsets: torch.Tensor
    raw_weight: torch.Tensor
    row_start: torch.Tensor
    padded_width: int | None
    share: Share | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def from_sequences(
        cls, sequences: Iterable[Any], weights: Iterable[Any] | None = None, *, weighting: Weighting = "rows"
    ) -> "Forest":
        """Build the forest of rows, in any order.

        Duplicates and rows that are prefixes of others are allowed.

        Args:
            sequences: one row per entry: a list, 1-D tensor or 1-D array of token ids >= 0, at least one
                each.
            weights: per row a number, or a vector as long as the row. Entry t weighs the prediction of token
                t; entry 0 is never used, since nothing predicts the first token. All 1 when None.
            weighting: which rows train a token that several share. "rows": all of them, as training on separate rows
                does. It is the estimator where rows were sampled independently: each row is an independent sample, even
                if two rows begin alike. "once": the first row, in the order given, that has a weight for it that is not
                0; with that row's weight and advantage, and as if the other rows masked the token. It is the estimator
                where one sampled token is emitted in several rows: turns of one conversation, compacted histories,
                sub-agents. Losses over whole rows (DPO and others, ``level="sequence"``) then read masked rows too.

        Raises:
            ForestError: the input is empty, of the wrong type or size, or lives on several devices.
            InputError: there is no such weighting.

        Example:
            >>> Forest.from_sequences([[5, 6, 7], [5, 6, 8]]).tokens
            tensor([5, 6, 7, 8])
            >>> Forest.from_sequences([[5, 6, 7], [5, 6, 8]], weighting="once").edges.weight
            tensor([1., 1., 1.], dtype=torch.float64)
        """
        return cls._from_rows(read_sequences(sequences, weights), weighting=weighting)

    @classmethod
    def from_padded(
        cls, input_ids: Any, attention_mask: Any = None, weights: Any = None, *, weighting: Weighting = "rows"
    ) -> "Forest":
        """Build the forest of a padded batch, each row padded on the left or on the right.

        Args:
            input_ids: integers [B, T]. Ids under the padding are not read.
            attention_mask: [B, T] of 0 and 1, one run of ones per row; no padding when None.
            weights: [B, T], weight of predicting the token of that column, or [B], one number per row.
            weighting: as in `from_sequences`.

        Raises:
            ForestError: shapes differ, the mask has holes or a row without tokens, or ids are unfit.
            InputError: there is no such weighting.
        """
        return cls._from_rows(read_padded(input_ids, attention_mask, weights), weighting=weighting)

    @classmethod
    def from_nodes(
        cls,
        nodes: Iterable[Any],
        parents: Iterable[int],
        weights: Iterable[Any] | None = None,
        ends: Iterable[int] | None = None,
        *,
        weighting: Weighting = "rows",
    ) -> "Forest":
        """Build the forest of a tree that comes as nodes, as rollout servers hold it.

        A token is known by its node, not by its id: equal tokens in two nodes below one parent are computed twice.

        Args:
            nodes: per node the token ids that it adds below its parent, at least one.
            parents: per node the number of the node above, -1 at a root; in any order.
            weights: per node a number, or a vector as long as the node: the weight of predicting that token in each
                row through it. All 1 when None. The first token of a row is never predicted.
            ends: the nodes at which a row ends, one entry per row; the leaves in ascending order when None.
            weighting: as in `from_sequences`.

        Raises:
            ForestError: a node is empty or of the wrong type, a parent or an end is no node, parents form a cycle, no
                row passes a node, or weights do not fit.
            InputError: there is no such weighting.

        Example:
            >>> Forest.from_nodes([[5, 6], [7], [8]], [-1, 0, 0]).sequences()
            [tensor([5, 6, 7]), tensor([5, 6, 8])]
        """
        return cls._from_rows(*read_nodes(nodes, parents, weights, ends), weighting=weighting)

    @classmethod
    def _from_rows(
        cls,
        batch: RowBatch,
        keys: "Sequence[npt.NDArray[np.int64]] | None" = None,
        *,
        weighting: Weighting = "rows",
    ) -> "Forest":
        """Build the forest; ``keys`` tell the tokens of each row apart, the token ids when None."""
        trie = build_trie(batch.rows if keys is None else keys)
        raw_weight = weigh(batch.raw_weight, trie.flat_token_of, weighting)
        raw_tokens = np.concatenate(batch.rows)
        rank = np.empty_like(trie.row_order)
        rank[trie.row_order] = np.arange(len(rank))
        weight = np.bincount(trie.flat_token_of, weights=raw_weight, minlength=trie.num_tokens)
        arrays = {
            "tokens": raw_tokens[trie.row_offsets[trie.row] + trie.index],
            "depth": trie.index.astype(np.int32),
            "subtree_end": trie.subtree_end,
            "parent": trie.parent,
            "multiplicity": trie.multiplicity,
            "token_weight": weight,
            "first_rank": rank[trie.row],
            "row_order": trie.row_order,
            "flat_token_of": trie.flat_token_of,
            "row_offsets": trie.row_offsets,
            "raw_weight": raw_weight,
            "row_start": batch.row_start,
        }
        with lasting():
            tensors: dict[str, Any] = {name: torch.from_numpy(array).to(batch.device) for name, array in arrays.items()}
        return cls(**tensors, padded_width=batch.padded_width)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.row_offsets) - 1

    def __repr__(self) -> str:
        return (
            f"Forest({len(self)} rows, {self.raw_tokens} raw tokens -> {self.num_tokens} distinct, "
            f"sharing ratio {self.sharing_ratio:.2f}, {len(self.nodes)} nodes in "
            f"{int((self.parent < 0).sum())} trees, depth {int(self.depth.max()) + 1}, device {self.device})"
        )

    @property
    def device(self) -> torch.device:
        """Return the device of the forest's tensors."""
        return self.tokens.device

    @property
    def num_tokens(self) -> int:
        """Number N of distinct tokens."""
        return len(self.tokens)

    @property
    def raw_tokens(self) -> int:
        """Number of tokens of all rows together."""
        return len(self.flat_token_of)

    @property
    def sharing_ratio(self) -> float:
        """Raw tokens per distinct token, at least 1."""
        return self.raw_tokens / self.num_tokens

    @property
    def overlap_ratio(self) -> float:
        """Return the potential overlap ratio (POR): the share of saved tokens, 1 - N / raw."""
        return 1.0 - self.num_tokens / self.raw_tokens

    @property
    def deepest(self) -> int:
        """Depth of the deepest token: the longest path has one token more."""
        return int(self.depth.max())

    @lasting_property
    def row_lengths(self) -> torch.Tensor:
        """Return int64 [R]: tokens of every row."""
        return self.row_offsets.diff()

    @lasting_property
    def row_weight(self) -> torch.Tensor:
        """Return float64 [R]: sum of every row's weights, the denominator of its mean."""
        return torch.segment_reduce(self.raw_weight, "sum", offsets=self.row_offsets)

    @lasting_property
    def row_has_weight(self) -> torch.Tensor:
        """Return bool [R]: whether the row has any weight that is not 0."""
        weighted = (self.raw_weight != 0).to(self.raw_weight.dtype)
        return torch.segment_reduce(weighted, "max", offsets=self.row_offsets) > 0

    @lasting_property
    def token_of(self) -> list[torch.Tensor]:
        """Per row, in the caller's order, int64 [length]: the packed index of each of its tokens."""
        return list(torch.split(self.flat_token_of, self.row_lengths.tolist()))

    @lasting_property
    def edges(self) -> Edges:
        """Return the predictions, each (source, target) once, ordered by target."""
        target = (self.parent >= 0).nonzero().squeeze(1)
        return Edges(
            source=self.parent[target],
            target=target,
            token=self.tokens[target],
            weight=self.token_weight[target],
            depth=self.depth[target],
            multiplicity=self.multiplicity[target],
            first_rank=self.first_rank[target],
            row_order=self.row_order,
            raw_offsets=self.row_offsets,
            raw_weight=self.raw_weight,
        )

    @lasting_property
    def max_edge_token(self) -> int:
        """Largest token id that is predicted, 0 without edges; a vocabulary must be larger."""
        return int(self.edges.token.max()) if len(self.edges) else 0

    @lasting_property
    def nodes(self) -> Nodes:
        """Maximal runs of tokens with the same set of rows."""
        above = self.parent.clamp(min=0)
        # A child with its parent's multiplicity carries all of its rows, so it is the only child and stands
        # next.
        is_first = (self.parent < 0) | (self.multiplicity != self.multiplicity[above])
        start = is_first.nonzero().squeeze(1)
        stop = torch.cat([start[1:], start.new_tensor([self.num_tokens])])
        node_of = is_first.cumsum(0) - 1
        parent = torch.where(self.parent[start] < 0, -1, node_of[above[start]])
        return Nodes(start, stop, parent)

    def sequences(self) -> list[torch.Tensor]:
        """Return the rows again in the caller's order, int64 [length] each."""
        return list(torch.split(self.tokens[self.flat_token_of], self.row_lengths.tolist()))

    def padded_token_of(self) -> torch.Tensor:
        """Map the padded batch the forest came from to packed order, to move results back.

        Returns:
            int64 [B, T]: packed index of each column's token, -1 at padding. Without a padded batch, rows are
            aligned on the left and T is the longest row.
        """
        width = int(self.row_lengths.max()) if self.padded_width is None else self.padded_width
        column = torch.arange(width, device=self.device) - self.row_start[:, None]
        padded = torch.full((len(self), width), -1, device=self.device)
        padded[(column >= 0) & (column < self.row_lengths[:, None])] = self.flat_token_of
        return padded

    def model_inputs(self) -> dict[str, torch.Tensor]:
        """Inputs of a causal LM for the packed row: `input_ids` and `position_ids`, int64 [1, N].

        N is marked dynamic, so that a forest of another size compiles nothing.
        """
        inputs = {"input_ids": self.tokens[None].clone(), "position_ids": self.depth[None].to(torch.int64)}
        for tensor in inputs.values():
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        return inputs

    def to(self, device: torch.device | str) -> "Forest":
        """Return the same forest on another device."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        with lasting():
            moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor)}
            if self.subtree_end.device.type == "cpu":
                moved["subtree_end"] = send(self.subtree_end, device, keep=True)
        return dataclasses.replace(self, **moved)

    def to_networkx(self) -> "nx.DiGraph[int]":
        """Export the nodes as a directed graph, parents to children.

        Returns:
            Nodes numbered in packed order with attributes `start`, `stop` (packed indices), `depth` (of the
            first token), `tokens` (how many), `multiplicity` and `rows` (the caller's row numbers,
            ascending).
        """
        import networkx as nx

        nodes = self.nodes
        start, depth = nodes.start.tolist(), self.depth[nodes.start].tolist()
        rank, count = self.first_rank[nodes.start].tolist(), self.multiplicity[nodes.start].tolist()
        order = self.row_order.tolist()
        graph: nx.DiGraph[int] = nx.DiGraph()
        for node, (a, b, above) in enumerate(zip(start, nodes.stop.tolist(), nodes.parent.tolist(), strict=True)):
            rows = sorted(order[rank[node] : rank[node] + count[node]])
            graph.add_node(node, start=a, stop=b, depth=depth[node], tokens=b - a, rows=rows, multiplicity=count[node])
            if above >= 0:
                graph.add_edge(above, node)
        return graph

    def draw(self, path: "str | PathLike[str]") -> None:
        """Draw nodes as bars over depth, coloured by multiplicity, into an image file."""
        find_view("draw_forest")(self, path)

    def validate(self) -> "Forest":
        """Check every invariant of the packed order and return the forest.

        Raises:
            ForestError: names the first invariant that does not hold and where.
        """
        find_view("validate_forest")(self)
        return self
