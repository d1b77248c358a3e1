"""Write nodes into a graph of ATen, with the fake values that inductor reads."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode

from treefx.passes.overlap.cut_rows import ALIGNED, cut_lengths
from treefx.passes.overlap.elements import followers, shape_of

__all__ = ["Emit", "first_reader", "put_in_place"]

aten = torch.ops.aten


class Emit:
    """Calls of operators at one place of a graph."""

    def __init__(self, before: fx.Node) -> None:
        """Args: before: New nodes stand in front of it, in the order in which they are written."""
        self._before = before
        known = [node.meta.get("val") for node in before.graph.nodes]
        self._mode = detect_fake_mode([value for value in known if isinstance(value, Tensor)])

    def at(self, before: fx.Node) -> Emit:
        """The same at another place."""
        other = object.__new__(Emit)
        other._before, other._mode = before, self._mode
        return other

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.call_function(target, args)
        values = fx.map_arg(args, lambda item: item.meta["val"])
        with self._mode or torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            node.meta["val"] = target(*values)
        return node

    def cut(self, node: fx.Node, dim: int, chunks: int) -> list[fx.Node]:
        """The pieces of a tensor along a dimension; itself alone where it is too short for two."""
        rows = shape_of(node)[dim]
        lengths = cut_lengths(rows, chunks) if isinstance(rows, int) else self._lengths(node, dim, chunks)
        if len(lengths) == 1:
            return [node]
        parts = self(aten.split_with_sizes.default, node, lengths, dim)
        return [self(operator.getitem, parts, i) for i in range(len(lengths))]

    def _lengths(self, node: fx.Node, dim: int, chunks: int) -> list[Any]:
        """Return lengths of ``chunks`` pieces of a symbolic number of rows, the last the longest.

        One piece where the rows are too few.

        The comparison becomes a guard: the graph is used for sizes that have as many pieces, on all ranks alike.
        """
        if shape_of(node)[dim] // (chunks * ALIGNED) == 0:
            return [shape_of(node)[dim]]
        rows = self(aten.sym_size.int, node, dim)
        step = self(operator.mul, self(operator.floordiv, rows, chunks * ALIGNED), ALIGNED)
        return [step] * (chunks - 1) + [self(operator.sub, rows, self(operator.mul, step, chunks - 1))]

    def reshaped_as(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """``node`` in the shape of another with as many elements."""
        return self(aten.reshape.default, node, [size if isinstance(size, int) else -1 for size in shape_of(like)])


def first_reader(node: fx.Node) -> fx.Node:
    """The first node that reads the elements of ``node`` and does not only rename them."""
    same = followers(node)
    readers = {user for item in same for user in item.users} - {*same}
    first: fx.Node = next(item for item in node.graph.nodes if item in readers or item.op == "output")
    return first


def put_in_place(result: fx.Node, wait: fx.Node, reader: fx.Node) -> None:
    """Replace reads of ``wait`` by ``result``, which stands before ``reader``.

    Earlier views of it follow.
    """
    early = set(itertools.takewhile(lambda node: node is not reader, reader.graph.nodes))
    views = [node for node in followers(wait)[1:] if node in early]
    for node in views:
        reader.prepend(node)
    wait.replace_all_uses_with(result)
