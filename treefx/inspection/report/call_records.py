"""Define records of the last calls: forest, memory, decision. They are frozen, plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Call", "ForestAccount", "ForestNode", "LayerMemory", "Memory"]


@dataclass(frozen=True)
class LayerMemory:
    """Account for the values that the forward of one module keeps for the backward.

    Attributes:
        module: Path; equal layers have a line each.
        bytes: Bytes of distinct storages; parameters and inputs are not counted.
        values: Number of values.
    """

    module: str
    bytes: int
    values: int


@dataclass(frozen=True)
class Memory:
    """Account for the values that the packed forward keeps for the backward.

    Attributes:
        bytes: Their bytes; 0 where there is no graph of a backward.
        layers: The same by module, the largest first.
        note: The reason why the bytes are unknown, if they are.
        bytes_on_rows: Bytes that the same graph keeps where no two rows share a token, with padding; 0 where the
            size of the batch is unknown.
    """

    bytes: int = 0
    layers: tuple[LayerMemory, ...] = ()
    note: str = ""
    bytes_on_rows: int = 0


@dataclass(frozen=True)
class ForestNode:
    """Describe a run of tokens with the same rows.

    Attributes:
        start: Packed index of its first token.
        tokens: Number of tokens.
        depth: Depth of the first token on its path.
        parent: Number of the node above it; -1 for a root.
        rows: The rows through it.
        ids: The first of its token ids.
        weight: Weight of the edge into its first token, summed over its rows; None for a root and where the loss has
            the weights.
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
    """Describe the forest of the last call.

    Attributes:
        raw_tokens: Tokens of all rows.
        tokens: Distinct tokens.
        rows: Number of rows.
        nodes: Nodes in packed order.
        left_out: Number of further nodes.
    """

    raw_tokens: int
    tokens: int
    rows: int
    nodes: tuple[ForestNode, ...] = ()
    left_out: int = 0


@dataclass(frozen=True)
class Call:
    """Describe one call of one graph.

    Attributes:
        number: Place among all calls of the process.
        graph: Number of the graph in this report.
        ran: "packed" or "ordinary".
        raw_tokens: Tokens under the mask.
        tokens: Tokens that ran.
        distinct: Distinct tokens; None if not counted.
        code: Code of the reason for rows; "" of a packed call.
        reason: The same in words.
        seconds: Seconds of the forward on the host; None if not measured.
        compiles: Number of compilations that it waited for.
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
