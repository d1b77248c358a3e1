"""Find products with a result that is sent, and products that read gathered rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from treefx.passes.overlap.elements import followers, is_view, read_through, shape_of

__all__ = ["KINDS", "Gathered", "Sent", "Site", "find_sites", "is_product", "left_place", "right_of"]

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
KINDS: dict[Any, str] = {
    _c10d.all_reduce.default: "all_reduce",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_gather_into_tensor.default: "all_gather",
}
"""The collectives that can be cut."""


@dataclass(frozen=True)
class Sent:
    """Hold a product, or a sum of products, that only a collective reads."""

    kind: str
    """``all_reduce`` or ``reduce_scatter``."""
    collective: fx.Node
    wait: fx.Node
    root: fx.Node
    """The product, or the addition at the top of the sum."""
    products: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Gathered:
    """Hold products of gathered rows."""

    kind: str
    collective: fx.Node
    wait: fx.Node
    products: tuple[fx.Node, ...]
    hoisted: tuple[fx.Node, ...]
    """Views that the products read and that have to stand before ``first``."""
    first: fx.Node
    """The first node that reads the gathered rows."""


Site = Sent | Gathered


def left_place(product: fx.Node) -> int:
    """Which argument holds the rows."""
    return 1 if product.target is aten.addmm.default else 0


def right_of(product: fx.Node) -> list[Any]:
    """Return the operands shared by every row of a product."""
    return [item for place, item in enumerate(product.args) if place != left_place(product)]


def find_sites(graph: fx.Graph) -> Iterator[Site]:
    """Yield collectives that can be chunked with their products, in order, lazily."""
    for node in list(graph.nodes):
        kind = KINDS.get(node.target) if node.op == "call_function" else None
        waits = list(node.users)
        if kind is None or len(waits) != 1 or waits[0].target is not _c10d.wait_tensor.default:
            continue
        site = _gathered(node, waits[0]) if kind == "all_gather" else _sent(kind, node, waits[0])
        if site is not None:
            yield site


def is_product(node: fx.Node) -> bool:
    """Return whether a node is a product of matrices of known widths, row by row.

    The bias of ``addmm`` is one for all rows.
    """
    if node.target is aten.addmm.default:
        plain = not node.kwargs and len(shape_of(node.args[0])) == 1
    else:
        plain = node.target is aten.mm.default
    return plain and all(isinstance(shape_of(item)[1], int) for item in (node, node.args[left_place(node)]))


def _is_sum(node: fx.Node) -> bool:
    operands = node.all_input_nodes
    plain = node.target is aten.add.Tensor and not node.kwargs and len(operands) == len(node.args) == 2
    return plain and all(statically_known_true(sym_eq(shape_of(node), shape_of(item))) for item in operands)


def _sent(kind: str, collective: fx.Node, wait: fx.Node) -> Sent | None:
    given: Any = collective.args[0]
    root = _term(given) if _is_writable(given) else None
    products = () if root is None else _products(root)
    if root is None or not products:
        return None
    width = shape_of(products[0])[1]
    alike = all(statically_known_true(sym_eq(shape_of(item), shape_of(products[0]))) for item in products)
    whole_rows = kind == "all_reduce" or statically_known_true(shape_of(given)[-1] == width)
    return Sent(kind, collective, wait, root, products) if alike and whole_rows else None


def _is_writable(node: fx.Node) -> bool:
    """Whether a shape has rows, and can be written with one unknown size at most."""
    return len(shape_of(node)) >= 2 and sum(not isinstance(size, int) for size in shape_of(node)) <= 1


def _term(node: fx.Node) -> fx.Node | None:
    """Return the product or sum that is all of ``node``, if no other node reads any of it."""
    found = read_through(node, lambda node: is_product(node) or _is_sum(node))
    return found if found is not None and len(found.users) == len(node.users) == 1 else None


def _products(node: fx.Node) -> tuple[fx.Node, ...]:
    """The products of a sum; none if anything else is added."""
    if is_product(node):
        return (node,)
    found: list[tuple[fx.Node, ...]] = []
    for operand in node.args:
        assert isinstance(operand, fx.Node)
        term = _term(operand)
        found.append(() if term is None else _products(term))
    return sum(found, ()) if all(found) else ()


def _gathered(collective: fx.Node, wait: fx.Node) -> Gathered | None:
    given: Any = collective.args[0]
    same = followers(wait)
    readers = {user for node in same for user in node.users} - {*same}
    place = {node: i for i, node in enumerate(collective.graph.nodes)}
    first = min(readers, key=lambda node: place[node], default=None)
    if first is None or not _is_writable(wait) or not _is_writable(given):
        return None
    products, hoisted = [], dict[fx.Node, None]()
    for node in sorted(readers, key=lambda node: place[node]):
        if not is_product(node) or not _reads_rows(node, given, same):
            continue
        others = [_movable(item, first, place, same) for item in right_of(node) if isinstance(item, fx.Node)]
        if all(item is not None for item in others):
            products.append(node)
            hoisted.update(dict.fromkeys(node for item in others for node in item or ()))
    order = sorted(hoisted, key=lambda node: place[node])
    return Gathered("all_gather", collective, wait, tuple(products), tuple(order), first) if products else None


def _reads_rows(product: fx.Node, given: fx.Node, same: list[fx.Node]) -> bool:
    """Return whether a product reads gathered rows on the left, and only there."""
    left: Any = product.args[left_place(product)]
    whole = left in same and statically_known_true(shape_of(left)[1] == shape_of(given)[-1])
    # Inductor fuses a product with an immediate addition, and then rounds differently.
    added = any(user.target is aten.add.Tensor for user in product.users)
    return whole and not added and not any(item in same for item in right_of(product))


def _movable(
    node: fx.Node, first: fx.Node, place: dict[fx.Node, int], same: list[fx.Node]
) -> tuple[fx.Node, ...] | None:
    """Return the nodes to move so that ``node`` stands before ``first``; None if impossible."""
    if node in same:
        return None
    if place[node] < place[first]:
        return ()
    above = [_movable(item, first, place, same) for item in node.all_input_nodes] if is_view(node) else [None]
    return None if None in above else (*(item for part in above for item in part or ()), node)
