"""Recurrences and convolutions along the tree, on packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from treefx.kernels.recurrence.tree_conv import find_parents
from treefx.passes.causal.tree_mixers import LibraryTree, Operand, TreeConvolution, TreeScan, Vanishing, convolve, scan
from treefx.passes.labels.facts import Axis, Fact, Kind, fact_of, shape_of
from treefx.passes.labels.rows import rows_in_order
from treefx.passes.packing.emit_attention import depths
from treefx.passes.packing.emitters import Packer, emits
from treefx.passes.packing.layout import tokens_first
from treefx.passes.packing.repeats import Collapser

aten = torch.ops.aten


@emits(TreeConvolution)
def _convolution(packer: Packer, node: fx.Node, fact: Fact) -> Tensor:
    law, metadata = fact.law, packer.metadata
    assert isinstance(law, TreeConvolution)
    parents = packer.once("parents", None, lambda: find_parents(depths(packer), metadata.subtree_end))
    bias = None if law.bias is None else packer.full(law.bias)
    return convolve(law, packer.packed(law.source), packer.full(law.weight), bias, parents)


@emits(TreeScan, Vanishing)
def _scan(packer: Packer, node: fx.Node, fact: Fact) -> Tensor:
    assert fact.dims is not None
    example = node.meta["val"]
    if not isinstance(fact.law, TreeScan):
        return torch.zeros(packer.shape(fact.dims), dtype=example.dtype, device=example.device)
    values = {role: _of_groups(packer, operand) for role, operand in fact.law.roles.items()}
    out = scan(fact.law, values, packer.full(fact.law.weight), packer.metadata.subtree_end).to(example.dtype)
    plain = [factor.size for dim in fact.dims for factor in dim if factor.axis is Axis.PLAIN]
    return rows_in_order(out.reshape(1, -1, *plain), fact.dims)


@emits(LibraryTree)
def _library(packer: Packer, node: fx.Node, fact: Fact) -> Tensor:
    assert isinstance(fact.law, LibraryTree) and fact.dims is not None
    tensors = [_of_call(packer, item) for item in fact.law.tensors]
    out: Tensor = torch.ops.treefx.library_tree(tensors, packer.metadata.subtree_end, fact.law.key)
    plain = [factor.size for dim in fact.dims for factor in dim if factor.axis is Axis.PLAIN]
    return rows_in_order(out.reshape(1, -1, *plain), fact.dims)


def _of_call(packer: Packer, node: fx.Node) -> Tensor:
    """A tensor of a library's call: [1, N, ...] of tokens, others as they are."""
    dims = fact_of(node).dims
    if fact_of(node).kind is Kind.INVARIANT or dims is None:
        full: Tensor = packer.full(node)
        return full
    first = tokens_first(packer.packed(node), dims, packer.metadata.tokens)
    return first.reshape(1, -1, *shape_of(node)[2:])


def _of_groups(packer: Packer, operand: Operand) -> Tensor:
    """Return a packed value as [N, groups, features], without repeats for heads."""
    dims = fact_of(operand.source).dims
    assert dims is not None
    repeated = next((factor for dim in dims for factor in dim if factor.repeated), None)
    collapsed = Collapser(packer, repeated).make(operand.source) if repeated and operand.repeats > 1 else None
    if collapsed is not None:
        single = tuple(tuple(factor for factor in dim if not factor.repeated) for dim in dims)
        return tokens_first(collapsed, single, packer.metadata.tokens).reshape(-1, operand.groups, operand.features)
    first = tokens_first(packer.packed(operand.source), dims, packer.metadata.tokens)
    return first.reshape(-1, operand.groups, operand.repeats, operand.features)[:, :, 0]
