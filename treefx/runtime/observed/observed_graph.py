"""A graph of Dynamo that runs as it was captured, observed: ``options={"observe": True}``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from treefx.runtime.lazy import name_of_input
from treefx.runtime.lost_sharing.graph_breaks import object_of_entry
from treefx.runtime.observed.observer import observer_of

__all__ = ["ObservedGraph"]


class ObservedGraph:
    """Run the captured graph operator by operator, for Dynamo.

    Args:
        gm: Dynamo's graph, never changed.
        roles: "parameter", "buffer", "input" or "variable" per placeholder.
    """

    def __init__(self, gm: fx.GraphModule, roles: Sequence[str]) -> None:
        self._gm = gm
        nodes = gm.graph.find_nodes(op="placeholder")
        self._parameters = [i for i, role in enumerate(roles) if role == "parameter"]
        self._inputs = [
            (i, name_of_input(node)) for i, (node, role) in enumerate(zip(nodes, roles, strict=True)) if role == "input"
        ]
        owner = object_of_entry()
        self._name = getattr(owner, "__qualname__", type(owner).__name__)
        self._owner = weakref.ref(owner) if isinstance(owner, nn.Module) else None

    def __call__(self, *args: Any) -> Any:
        parameters = [args[i] for i in self._parameters]
        if parameters:
            owner = None if self._owner is None else self._owner()
            observer = observer_of(parameters[0], self._name, owner)
            observer.note({name: args[i] for i, name in self._inputs}, parameters)
        return self._gm(*args)
