"""Layers of the labelled graph, each rewritten or, where an equal one was, copied.

The operators written for a layer follow from its operators and operands and from the proofs on them: that is its key.
It may read forms of its operands, of nodes that its key names, or forms made once for all. A layer that reads anything
else is no example for others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from treefx.passes.labels.facts import watching
from treefx.passes.layers.copies import LayerCopies
from treefx.passes.layers.find_layers import Layer, key_of, others_in

__all__ = ["Forms", "PackedLayers"]

_Key = tuple[str, Any]
_MADE = ("full", "packed")
"""Forms that any node has; the others are made by the emitters that read them."""


class Forms(dict[_Key, Any]):
    """Map names and nodes to forms, with the forms and the facts each was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[_Key, dict[_Key, None]] = {}
        self.looked: dict[_Key, set[fx.Node]] = {}
        self._read: dict[_Key, None] = {}

    def __getitem__(self, key: _Key) -> Any:
        self._read[key] = None
        return super().__getitem__(key)

    def make(self, key: _Key, make: Callable[[], Any]) -> Any:
        """A form, made if it is not there."""
        if key not in self:
            outer, self._read = self._read, {}
            try:
                with watching() as self.looked[key]:
                    self[key] = make()
            finally:
                self.reads[key], self._read = self._read, outer
        return self[key]


class PackedLayers:
    """Rewrites layers.

    Args:
        forms: Where the forms are.
        known: Further facts, outside of the graph, that decide about a node's form or its reads.
        visit: Makes the forms of a node that are surely wanted.
        form: A form of a node, made if need be.
        common: Other values that every layer may read.
    """

    def __init__(
        self,
        forms: Forms,
        known: Callable[[fx.Node], Any],
        visit: Callable[[fx.Node], None],
        form: Callable[[str, fx.Node], Any],
        common: Callable[[], list[Any]],
    ) -> None:
        self._forms, self._known, self._visit, self._form, self._common = forms, known, visit, form, common
        self._copies = LayerCopies()
        self._places: dict[Any, tuple[list[_Key], list[_Key]]] = {}
        """By key, the forms of operands and of results: their names, and places in the layer."""

    def run(self, layer: Layer) -> None:
        """Make the forms of a layer that others may read."""
        key = key_of(layer, self._known)
        if not self._copied(key, layer):
            before, mark = len(self._forms), self._copies.mark()
            shared = self._common()
            for node in layer.nodes:
                self._visit(node)
            made = list(itertools.islice(self._forms, before, None))
            if len(shared) == len(self._common()):
                self._remember(key, layer, mark, made)

    def _copied(self, key: Any, layer: Layer) -> bool:
        if key not in self._copies:
            return False
        operands, results = self._places[key]
        values = [self._form(name, layer.operands[place]) for name, place in operands]
        copied = self._copies.copy(key, layer, values)
        if copied is not None:
            keys = [(name, layer.nodes[place]) for name, place in results]
            self._forms.update(zip(keys, copied, strict=True))
        return copied is not None

    def _remember(self, key: Any, layer: Layer, mark: fx.Node, made: list[_Key]) -> None:
        own = {node: i for i, node in enumerate(layer.nodes)}
        given = {node: i for i, node in enumerate(layer.operands)}
        mine = [item for item in made if item[1] in own]
        read = dict.fromkeys(form for item in mine for form in self._forms.reads[item] if form[1] not in own)
        operands = [item for item in read if item[1] in given]
        others = [item for item in read if item[1] not in given]
        results = [item for item in mine if item[1] in layer.results]
        named = others_in(key)
        looked = set[fx.Node]().union(*(self._forms.looked[item] for item in mine))
        plain = looked <= {*own, *given, *named}  # nodes behind operands are in no key
        plain = plain and all(name in _MADE or node in own for name, node in (*operands, *made))
        if plain and all(not isinstance(node, fx.Node) or node in named for _, node in others):
            values = [[self._forms[item] for item in items] for items in (operands, others, results)]
            common = [*tree_leaves(values[1]), *self._common()]
            if self._copies.remember(key, layer, mark, values[0], common, values[2]):
                self._places[key] = (
                    [(name, given[node]) for name, node in operands],
                    [(name, own[node]) for name, node in results],
                )
