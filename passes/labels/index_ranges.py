"""Lookups of distinct tokens by functions of the inputs, and the range of their indices.

A lookup fails in eager mode for every index out of range, also at padding. Padding that is dropped is not looked up, so
the run time compares its indices with these ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treefx.passes.labels.facts import Kind, fact_of, shape_of
from treefx.passes.labels.label_tokens import user_line

__all__ = ["Lookup", "find_lookups"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Lookup:
    """Describe a lookup of tokens along a dimension by indices in [first, size)."""

    index: fx.Node
    first: int
    size: int
    dim: int
    error: type[Exception]
    """The operator's error for other values."""
    line: str | None


def find_lookups(gm: fx.GraphModule, live: Collection[fx.Node]) -> list[Lookup]:
    """Find lookups that run once per distinct token; ``live`` are the computed nodes."""
    found = []
    for node in gm.graph.nodes:
        read = _LOOKUPS.get(node.target) if node in live else None
        if read is None or fact_of(node).kind is not Kind.PACKED:
            continue
        table, index, dim = read(*node.args)
        if isinstance(table, fx.Node) and isinstance(index, fx.Node) and fact_of(index).kind is Kind.PREFIX:
            size = shape_of(table)[dim]
            first = -size if node.target is aten.index.Tensor else 0  # which counts from the end, too
            error = RuntimeError if node.target in _RAISE_RUNTIME_ERROR else IndexError
            found.append(Lookup(index, first, size, dim % len(shape_of(table)), error, user_line(node)))
    return found


_LOOKUPS: dict[Any, Callable[..., tuple[Any, Any, int]]] = {
    aten.embedding.default: lambda table, index, *_: (table, index, 0),
    aten.index_select.default: lambda table, dim, index: (table, index, dim),
    aten.gather.default: lambda table, dim, index: (table, index, dim),
    aten.scatter.src: lambda table, dim, index, _: (table, index, dim),
    aten.scatter.value: lambda table, dim, index, _: (table, index, dim),
    aten.scatter_add.default: lambda table, dim, index, _: (table, index, dim),
    aten.index.Tensor: lambda table, indices: (table, indices[0] if len(indices) == 1 else None, 0),
}
"""The table, index and dimension of an operator with these arguments."""
_RAISE_RUNTIME_ERROR = {
    aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default,
}  # fmt: skip
