"""Chunk a product with a result that is summed over ranks; send each chunk at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from treefx.passes.overlap.elements import same_elements, shape_of
from treefx.passes.overlap.emit import Emit, first_reader, put_in_place
from treefx.passes.overlap.producers import Sent, left_place

__all__ = ["send_chunks"]

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def send_chunks(site: Sent, chunks: int) -> bool:
    """Rewrite ``mm, all_reduce, wait`` to chunks, with all waits before the first reader.

    Of a reduce-scatter, chunk j is the j-th piece of every rank's share, so each chunk is a separate reduce-scatter and
    the results only have to be joined.

    Returns:
        Whether there were rows enough for more than one chunk; otherwise nothing was changed.
    """
    emit = Emit(site.collective)
    pieces = _pieces(site, emit, chunks)
    if pieces is None:
        return False
    options = site.collective.args[1:]
    issued = [emit(site.collective.target, _rows(_compute(site.root, piece, emit), emit), *options) for piece in pieces]
    reader = first_reader(site.wait)
    late = emit.at(reader)
    waited = [late(_c10d.wait_tensor.default, node) for node in issued]
    put_in_place(late.reshaped_as(late(aten.cat.default, waited), site.wait), site.wait, reader)
    for node in (site.wait, site.collective):
        node.graph.erase_node(node)
    return True


def _pieces(site: Sent, emit: Emit, chunks: int) -> list[dict[fx.Node, fx.Node]] | None:
    """Return, for every chunk, the rows of each product."""
    cut = {product: _cut(site, product, emit, chunks) for product in site.products}
    count = len(cut[site.products[0]])
    return [{product: rows[i] for product, rows in cut.items()} for i in range(count)] if count > 1 else None


def _cut(site: Sent, product: fx.Node, emit: Emit, chunks: int) -> list[fx.Node]:
    rows: Any = product.args[left_place(product)]
    if site.kind == "all_reduce":
        return emit.cut(rows, 0, chunks)
    width = shape_of(rows)[1]
    shares = emit(aten.reshape.default, rows, [site.collective.args[2], -1, width])
    parts = emit.cut(shares, 1, chunks)
    return parts if len(parts) == 1 else [emit(aten.reshape.default, part, [-1, width]) for part in parts]


def _compute(node: fx.Node, rows: dict[fx.Node, fx.Node], emit: Emit) -> fx.Node:
    """One chunk of a product or of a sum of products.

    Views before an addition stay: inductor would fuse the sum of two plain products, and round otherwise.
    """
    if node in rows:
        args = list(node.args)
        args[left_place(node)] = rows[node]
        return emit(node.target, *args)
    source = same_elements(node)
    if source is not None:
        part, leading = _compute(source, rows, emit), len(shape_of(node)) - 2
        changed = leading >= 0 and len(shape_of(node)) != len(shape_of(source))
        return emit(aten.reshape.default, part, [1] * leading + [-1, shape_of(part)[-1]]) if changed else part
    first, second = node.all_input_nodes
    return emit(node.target, _compute(first, rows, emit), _compute(second, rows, emit))


def _rows(part: fx.Node, emit: Emit) -> fx.Node:
    """A chunk as a matrix."""
    shape = shape_of(part)
    return part if len(shape) == 2 else emit(aten.reshape.default, part, [-1, shape[-1]])
