"""Find operators that keep the order of a tensor's elements, so rows stay together."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

__all__ = ["followers", "is_view", "read_through", "same_elements", "shape_of"]

aten = torch.ops.aten
_KEEPING = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default, aten.alias.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
}  # fmt: skip
_VIEWS = _KEEPING - {aten.clone.default} | {aten.t.default, aten.permute.default, aten.transpose.int}


def is_view(node: fx.Node) -> bool:
    """Whether a node only names the elements of its one argument."""
    return node.target in _VIEWS


def shape_of(node: Any) -> Any:
    """The shape of a node's tensor."""
    return node.meta["val"].shape


def same_elements(node: fx.Node) -> fx.Node | None:
    """Return the node with the same elements as ``node``, all and in order; else None.

    A slice that takes everything is one: DTensor writes it behind a gather at some sizes. So is the concatenation of
    the parts of a split along the first dimension that is longer than 1: this is how the rows of ``[1, N, H]`` come to
    stand in front for a reduce-scatter.
    """
    if node.op != "call_function" or not node.args:
        return None
    if node.target in _KEEPING:
        return _node(node.args[0])
    if node.target is aten.slice.Tensor:
        source = _node(node.args[0])
        whole = source is not None and statically_known_true(sym_eq(shape_of(node), shape_of(source)))
        return source if whole else None
    return _split_again(node) if node.target is aten.cat.default else None


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _split_again(cat: fx.Node) -> fx.Node | None:
    parts: Any = cat.args[0]
    if (len(cat.args) > 1 and cat.args[1] != 0) or not all(part.target is operator.getitem for part in parts):
        return None
    split = parts[0].args[0]
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default) or not isinstance(dim, int):
        return None
    source: fx.Node = split.args[0]
    in_order = [(part.args[0], part.args[1]) for part in parts] == [(split, i) for i in range(len(split.meta["val"]))]
    leading = shape_of(source)[: dim % len(shape_of(source))]
    return source if in_order and all(statically_known_true(size == 1) for size in leading) else None


def read_through(node: fx.Node, stop: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return the first node that ``stop`` accepts, upwards through element-keeping nodes.

    None where another value is met first, or something on the way is read by others too: that would have to be
    computed in one piece all the same.
    """
    while not stop(node):
        source = same_elements(node)
        if source is None or not _read_once(node, source):
            return None
        node = source
    return node


def _read_once(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``source`` is read by ``node`` alone, directly or by way of a split's parts."""
    readers = {*source.users}
    if node.target is aten.cat.default:
        readers = {user for split in source.users for part in split.users for user in part.users}
        return len(source.users) == 1 and readers == {node}
    return readers == {node}


def followers(node: fx.Node) -> list[fx.Node]:
    """Return ``node`` and all nodes with the same elements derived from it, in order."""
    found = [node]
    for item in found:
        found += [user for user in item.users if same_elements(user) is item and user.target is not aten.cat.default]
    return found
