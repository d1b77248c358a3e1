"""Define the law of a module that computes token by token, kept whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Dims, Fact, plain_dims
from treefx.passes.labels.laws.base import Call, law
from treefx.passes.trace.token_modules import ModuleResult, token_module_of

__all__ = ["token_module"]


@law(torch.ops.treefx.token_module)
def token_module(call: Call) -> Fact:
    """y[n] = f(x[n]; w) for every token n."""
    tensors: Any = call.node.args[0]
    hidden, *held = tensors
    if any(call.labelled(node) for node in held):
        raise NoLaw("multiplies tokens with tokens")
    dims = call.dims(hidden)
    if algebra.has_tokens(dims[-1]):
        raise NoLaw("contracts over the tokens")
    results = token_module_of(str(call.node.args[1])).results
    parts = tuple(call.result(_dims_of(result, dims, call.node)) for result in results)
    return Fact(parts[0].kind, parts=parts, learned=parts[0].learned)


def _dims_of(result: ModuleResult, dims: Dims, node: fx.Node) -> Dims:
    front = dims[:-1]
    in_line = (tuple(factor for dim in front for factor in dim),)
    return (*(in_line if result.in_line else front), *plain_dims(result.features))
