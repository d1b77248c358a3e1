"""Check branches on the size of a batch: the packed row must take the branches of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext

__all__ = ["Branches"]


class Branches:
    """Hold Dynamo's guards on sizes from tracing a graph.

    Args:
        gm: Dynamo's graph; this is called where Dynamo calls a backend.
        roles: Role of each placeholder.
    """

    def __init__(self, gm: fx.GraphModule, roles: list[str]) -> None:
        context = TracingContext.try_get()
        environment: Any = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
        self._noted = [] if environment is None else [guard.expr for guard in environment.guards]
        examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        batches = [x for x, role in zip(examples, roles, strict=True) if role == "input" and _is_batch(x)]
        sizes = [size for x in batches for size in x.shape]
        self._fixed = next((size for size in sizes if isinstance(size, int) and size != 1), None)
        rows, columns = ([_symbol(x.shape[i]) for x in batches] for i in (0, 1))
        self._rows, self._columns = ({symbol for symbol in found if symbol is not None} for found in (rows, columns))

    def not_taken(self, tokens: int) -> str | None:
        """Return a guard that held for rows and fails for one row of so many tokens, or None."""
        if self._fixed is not None:
            return f"a size is {self._fixed}"
        sizes = dict.fromkeys(self._rows, 1) | dict.fromkeys(self._columns, tokens)
        for noted in self._noted:
            if noted.free_symbols and noted.free_symbols <= set(sizes) and not bool(noted.subs(sizes)):
                return str(noted)
        return None


def _is_batch(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()


def _symbol(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) and size.node.expr.is_symbol else None
