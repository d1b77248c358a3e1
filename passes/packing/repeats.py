"""Undo repeats of packed values (``repeat_kv``), so that nothing is repeated."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from treefx.passes.labels.facts import Dims, Factor, fact_of
from treefx.passes.labels.laws import shape as shape_laws
from treefx.passes.labels.laws.base import find_law
from treefx.passes.packing.emitters import Packer

__all__ = ["Collapser"]

aten = torch.ops.aten


class Collapser:
    """Remake movement operators behind a repeated factor with that factor left at one."""

    def __init__(self, packer: Packer, factor: Factor) -> None:
        self.packer, self.factor = packer, factor

    def make(self, node: fx.Node) -> Tensor | None:
        """Return the packed value without the factor; None if not made by movement alone."""
        dims = fact_of(node).dims
        assert dims is not None
        if not any(f.repeated and f.size == self.factor.size for dim in dims for f in dim):
            return self.packer.packed(node) if all(not f.repeated for dim in dims for f in dim) else None
        # A form of this node: its ancestors are read, and may belong to another layer.
        return self.packer.once(f"without {self.factor}", node, lambda: self._remade(node, dims))

    def _remade(self, node: fx.Node, dims: Dims) -> Tensor | None:
        source = node.args[0] if node.args else None
        rule = find_law(node.target)
        if not isinstance(source, fx.Node) or len(node.all_input_nodes) != 1:
            return None
        inner = self.make(source)
        if inner is None:
            return None
        shape = self.packer.shape(tuple(tuple(f for f in dim if not f.repeated) for dim in dims))
        if rule in (shape_laws.view, shape_laws.expand):
            return inner.reshape(shape)
        moves = (shape_laws.permute, shape_laws.unsqueeze, shape_laws.squeeze)
        if rule in moves or node.target in (aten.clone.default, aten.alias.default, aten._to_copy.default):
            result: Tensor = node.target(inner, *node.args[1:], **node.kwargs)  # type: ignore[operator]
            return result
        return None
