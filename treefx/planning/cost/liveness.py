"""Live bytes of a graph, operator by operator, as expressions in its symbolic sizes.

A storage is there from the operator that makes it to the last one that reads it or a view of it: exactly so where FX's
interpreter runs the graph; where inductor fuses operators it is a bound, as fused results never exist.
"""

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

__all__ = ["live_bytes", "size_expression", "storage_bytes", "storages"]

Storage = int


def storages(value: Any) -> Iterator[tuple[Storage, sympy.Expr]]:
    """Every storage in a (nested) fake value, with its bytes."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        yield storage._cdata, size_expression(storage.nbytes())
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from storages(item)


def storage_bytes(values: Any) -> sympy.Expr:
    """Bytes of the distinct storages in a (nested) fake value."""
    return sympy.Add(*dict(storages(values)).values())


def size_expression(value: Any) -> sympy.Expr:
    """A size as an expression: symbolic or a number."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def live_bytes(
    gm: fx.GraphModule,
    workspace: Callable[[fx.Node], sympy.Expr],
    is_resident: Callable[[fx.Node], bool],
    is_held: Callable[[fx.Node], bool] = lambda node: True,
) -> list[sympy.Expr]:
    """Bytes that are there while each operator runs, its results included.

    The first of them is before any operator runs; the others are in the order of the graph's calls of functions.

    Args:
        gm: a graph whose nodes have fake values.
        workspace: bytes that an operator holds while it runs, besides its results.
        is_resident: whether an input counts as there anyhow (parameters), so that it is left out.
        is_held: whether the caller holds an input throughout; others, such as saved tensors in a backward, go after
            their last use.
    """
    nodes = list(gm.graph.nodes)
    values = {node: dict(storages(node.meta.get("val"))) for node in nodes}
    placeholders = [node for node in nodes if node.op == "placeholder"]
    resident = {key for node in placeholders if is_resident(node) for key in values[node]}
    live = {key: size for node in placeholders for key, size in values[node].items() if key not in resident}
    pinned = {key for node in placeholders if is_held(node) for key in values[node]}
    last: dict[Storage, int] = {}
    for place, node in enumerate(nodes):
        for source in (node, *node.all_input_nodes):
            last |= dict.fromkeys(values[source], place)
    total = sympy.Add(*live.values())
    result = [total]
    for place, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        made = {key: size for key, size in values[node].items() if key not in live and key not in resident}
        live |= made
        total += sympy.Add(*made.values())
        result.append(total + workspace(node))
        read = {key for source in (node, *node.all_input_nodes) for key in values[source]}
        gone = [key for key in read - pinned if key in live and last[key] <= place]
        total -= sympy.Add(*(live.pop(key) for key in gone))
    return result
