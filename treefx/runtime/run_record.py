"""Keep graphs and reports of all models of a process: ``treefx run --report``.

Elsewhere reports are freed with their models, and graphs with Dynamo's caches. Nothing here holds a parameter or a
model.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, MutableMapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from treefx.runtime.lost_sharing.graph_breaks import object_of_entry

__all__ = ["RECORD", "ModelKey", "RunRecord"]

_MOST_GRAPHS = 1024


class ModelKey(NamedTuple):
    """A model of the process: its number, and the name of its class."""

    number: int
    name: str


class RunRecord:
    """Which reports are of one model.

    Attributes:
        is_on: Whether anything is kept.
        graphs: In the order they were compiled.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.graphs: deque[Any] = deque(maxlen=_MOST_GRAPHS)
        self._keys: MutableMapping[Tensor, ModelKey] = WeakIdKeyDictionary()
        self._count = itertools.count()

    def key_of(self, parameters: Iterable[Tensor], name: str = "") -> ModelKey | None:
        """Return the key of a model by parameters or compiled object; None if this is off.

        Args:
            parameters: Of one graph.
            name: Of the model's class; that of the compiled object where it is empty.
        """
        if not self.is_on:
            return None
        owner: Any = None if name else object_of_entry()
        owner = getattr(owner, "_orig_mod", owner)
        given = [*parameters, *(owner.parameters() if isinstance(owner, nn.Module) else ())]
        known = next((self._keys[x] for x in given if x in self._keys), None)
        if known is None:
            known = ModelKey(next(self._count), name or getattr(owner, "__qualname__", type(owner).__name__))
        self._keys.update(dict.fromkeys(given, known))
        return known


RECORD = RunRecord()
"""Of this process."""
