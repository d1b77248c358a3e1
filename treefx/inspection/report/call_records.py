"""Records of the last calls: their forest, what their forward keeps, one line each. Frozen, plain data, as all."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Call", "ForestAccount", "ForestNode", "LayerMemory", "Memory"]


@dataclass(frozen=True)
class LayerMemory:
    """What the forward of one module keeps for the backward.

    Attributes:
        module: Path; equal layers have a line each.
        bytes: Of distinct storages; parameters and inputs are not counted.
        values: How many values.
    """

    module: str
    bytes: int
    values: int


@dataclass(frozen=True)
class Memory:
    """What the packed forward keeps for the backward.

    Attributes:
        bytes: All of it; 0 where there is no graph of a backward.
        layers: By module, the largest first.
        note: Why nothing is known, where that is so.
        bytes_on_rows: What the same graph keeps where no two rows share a token, padding among them; 0 where the
            size of the batch is unknown.
    """

    bytes: int = 0
    layers: tuple[LayerMemory, ...] = ()
    note: str = ""
    bytes_on_rows: int = 0


@dataclass(frozen=True)
class ForestNode:
    """A run of tokens with the same rows.

    Attributes:
        start: Packed index of its first token.
        tokens: How many tokens.
        depth: Of the first one on its path.
        parent: Number of the node above it; -1 for a root.
        rows: The rows through it.
        ids: The first of its token ids.
        weight: Of the edge into its first token, summed over its rows; None for a root and where the loss has them.
    """

    start: int
    tokens: int
    depth: int
    parent: int
    rows: tuple[int, ...]
    ids: tuple[int, ...] = ()
    weight: float | None = None


@dataclass(frozen=True)
class ForestAccount:
    """The forest of the last call.

    Attributes:
        raw_tokens: Of all rows.
        tokens: Distinct ones.
        rows: How many rows.
        nodes: In packed order.
        left_out: How many nodes there are beside these.
    """

    raw_tokens: int
    tokens: int
    rows: int
    nodes: tuple[ForestNode, ...] = ()
    left_out: int = 0


@dataclass(frozen=True)
class Call:
    """One call of one graph.

    Attributes:
        number: Among all calls of the process.
        graph: Number of the graph in this report.
        ran: "packed" or "ordinary".
        raw_tokens: Under the mask.
        tokens: That ran.
        distinct: None where nothing counted them.
        code: Of the reason for rows; "" of a packed call.
        reason: The same in words.
        seconds: Of the forward on the host; None where nothing measured it.
        compiles: How many compilations it waited for.
    """

    number: int
    graph: int
    ran: str
    raw_tokens: int
    tokens: int
    distinct: int | None = None
    code: str = ""
    reason: str = ""
    seconds: float | None = None
    compiles: int = 0
