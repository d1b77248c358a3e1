"""Chunk products of gathered rows: each chunk computes while the next one arrives."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from treefx.passes.overlap.elements import shape_of
from treefx.passes.overlap.emit import Emit, put_in_place
from treefx.passes.overlap.producers import Gathered, left_place

__all__ = ["gather_chunks"]

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def gather_chunks(site: Gathered, chunks: int) -> bool:
    """Rewrite ``all_gather, wait, mm`` to chunked gathers, each with its wait and products.

    A chunk holds a piece of every rank's rows; results are put back into the order of ranks. Readers that are no
    chunked product, such as a weight's gradient, get all rows, joined when the last chunk is there.

    Returns:
        Whether there were rows enough for more than one chunk; otherwise nothing was changed.
    """
    given: Any = site.collective.args[0]
    width = shape_of(given)[-1]
    early = Emit(site.collective)
    pieces = early.cut(early(aten.reshape.default, given, [-1, width]), 0, chunks)
    if len(pieces) == 1:
        return False
    options = site.collective.args[1:]
    issued = [early(site.collective.target, piece, *options) for piece in pieces]
    for node in site.hoisted:
        site.first.prepend(node)
    _compute(site, issued, early.at(site.first))
    for node in (site.wait, site.collective):
        node.graph.erase_node(node)
    return True


def _compute(site: Gathered, issued: list[fx.Node], emit: Emit) -> None:
    results: dict[fx.Node, list[fx.Node]] = {product: [] for product in site.products}
    arrived = []
    for gathered in issued:
        arrived.append(emit(_c10d.wait_tensor.default, gathered))
        for product in site.products:
            args = list(product.args)
            args[left_place(product)] = arrived[-1]
            results[product].append(emit(product.target, *args))
    ranks = site.collective.args[1]
    whole = {product: emit.reshaped_as(_by_rank(parts, ranks, emit), product) for product, parts in results.items()}
    put_in_place(emit.reshaped_as(_by_rank(arrived, ranks, emit), site.wait), site.wait, site.first)
    for product, result in whole.items():
        product.replace_all_uses_with(result)


def _by_rank(parts: list[fx.Node], ranks: Any, emit: Emit) -> fx.Node:
    """Chunks side by side within each rank's share: [ranks, rows of a share, width]."""
    return emit(
        aten.cat.default, [emit(aten.reshape.default, part, [ranks, -1, shape_of(part)[1]]) for part in parts], 1
    )
