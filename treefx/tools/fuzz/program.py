"""Represent a program as a tree of names and numbers: model, batches, calls.

The names stand for pieces of text in the catalogues of this folder; ``script`` joins them. A program is immutable and
compares by value; programs are recorded, redrawn from their seed and shrunk.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Attention", "Batch", "Call", "Piece", "Program", "Sizes", "from_dict", "to_dict"]


@dataclass(frozen=True)
class Sizes:
    """Width of the model, heads of queries and of keys, size of the vocabulary."""

    width: int = 8
    heads: int = 2
    key_heads: int = 2
    vocabulary: int = 24


@dataclass(frozen=True)
class Piece:
    """A layer that is no attention, by its name in the catalogue of layers."""

    name: str


@dataclass(frozen=True)
class Attention:
    """Describe a self-attention: visible keys, score terms, and spelling."""

    conditions: tuple[str, ...] = ("causal",)
    """What must hold for a query to see a key, by their names in the catalogue of masks."""
    terms: tuple[str, ...] = ()
    """What happens to scores before the mask, by their names in the catalogue of scores."""
    spelling: str = "sdpa"
    written: str = "bool"
    """How the conditions reach the scores: "bool", "additive", "each", "each from the right"."""
    fill: str = "-inf"
    """What hidden scores get, by its name in the catalogue of masks."""


@dataclass(frozen=True)
class Batch:
    """A padded batch: token ids and mask [B, T], and a seed for all other inputs."""

    ids: tuple[tuple[int, ...], ...]
    mask: tuple[tuple[int, ...], ...]
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """Name one action of the caller; ``batch`` counts the program's batches."""

    name: str
    batch: int = 0


@dataclass(frozen=True)
class Program:
    """What runs twice, eagerly and compiled."""

    seed: int
    family: str
    inner: str
    sizes: Sizes
    embeddings: tuple[str, ...]
    layers: tuple[Piece | Attention, ...]
    head: str
    loss: str
    output: str
    labels: str
    inputs: int
    """Which of the ways an input is made, counted around."""
    modes: tuple[str, ...]
    batches: tuple[Batch, ...]
    calls: tuple[Call, ...]


def to_dict(program: Program) -> dict[str, Any]:
    """A program as JSON writes it."""
    return asdict(program)


def from_dict(data: dict[str, Any]) -> Program:
    """The program again."""
    layers = [Piece(**item) if "name" in item else Attention(**_tuples(item)) for item in data["layers"]]
    batches = [Batch(_rows(item["ids"]), _rows(item["mask"]), item["seed"]) for item in data["batches"]]
    rest = {
        "sizes": Sizes(**data["sizes"]),
        "layers": tuple(layers),
        "batches": tuple(batches),
        "calls": tuple(Call(**item) for item in data["calls"]),
    }
    return Program(**{**_tuples(data), **rest})


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def _rows(rows: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in rows)
