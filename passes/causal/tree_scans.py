"""Find linear recurrences among contracted values, and run them on packed tokens.

Models write a recurrence as chunks of products, a hundred operators in varying order. It is recognised by value
(``scan_region`` states why that is a proof): a contracted value and its region on rows become one operator with its
state from the tree parent.

Values are tried from the last one up, and only live ones: where a whole mixer is one recurrence, its intermediate
values are skipped. Layers of one kind are proved once. Other values stay contracted.

Before (4 rows of 12 tokens)::

    pad, cumsum, exp, bmm, ... on [4, 12, 8, 16];  y: "f32[4, 12, 8, 16]" = slice(add, 1, 0, 12)

After::

    y: "f32[s0, 8, 16]" = treefx.tree_scan(q, k, v, g, None, subtree_end, 64)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.causal.contract import Contracted
from treefx.passes.causal.scan_region import ZERO_STAYS_ZERO, Region, find_mixed, find_region
from treefx.passes.causal.scan_roles import match
from treefx.passes.causal.tree_mixers import TreeScan, Vanishing
from treefx.passes.labels.facts import Kind, fact_of, set_fact
from treefx.passes.labels.liveness import live_nodes

__all__ = ["find_tree_scans"]

aten = torch.ops.aten
_LARGEST_VALUE = 1 << 28
"""Regions with a value of more entries are not run: in float64 it takes 2 GiB."""
_PRODUCTS = {aten.bmm.default, aten.baddbmm.default}


def find_tree_scans(gm: fx.GraphModule, rows: int, columns: int) -> None:
    """Give contracted linear recurrences the law ``TreeScan``, and zeros ``Vanishing``.

    Args:
        gm: A labelled graph; its facts are changed.
        rows: B.
        columns: T.
    """
    known: dict[Any, tuple[Region, TreeScan | Vanishing | None]] = {}
    mixed = find_mixed(gm)
    live = live_nodes(gm)
    for node in reversed(_products_of_tokens(gm, mixed)):
        if node not in live or not isinstance(fact_of(node).law, Contracted):
            continue
        region = find_region(node, mixed)
        if region is None or not _is_candidate(region, rows):
            continue
        found = _known_or_found(region, rows, columns, known)
        if found is not None:
            set_fact(node, replace(fact_of(node), law=found, reason=None, blame=None))
            if isinstance(found, Vanishing):
                _spread(node, found)
            live = live_nodes(gm)


def _spread(node: fx.Node, zero: Vanishing) -> None:
    """Mark products and layouts of a zero as zero, so that their other factors are dead."""
    for user in node.users:
        packet = getattr(user.target, "overloadpacket", None)
        fact = fact_of(user)
        if packet in ZERO_STAYS_ZERO and fact.kind is Kind.PACKED and fact.law is None:
            set_fact(user, replace(fact, law=zero))
            _spread(user, zero)


def _products_of_tokens(gm: fx.GraphModule, mixed: set[fx.Node]) -> list[fx.Node]:
    """List values, in order, computed through products of tokens.

    Most loops over columns have none.
    """
    found: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        if node in mixed and (node.target in _PRODUCTS or any(source in found for source in node.all_input_nodes)):
            found[node] = None
    return list(found)


def _is_candidate(region: Region, rows: int) -> bool:
    """Whether there is something to guess from, and the numbers fit into memory."""
    limit = _LARGEST_VALUE * (rows if region.has_rows else 1)
    values = [node.meta["val"] for node in region.nodes if isinstance(node.meta["val"], Tensor)]
    return bool(region.packed) and max(math.prod(x.shape) for x in values) <= limit


def _known_or_found(
    region: Region, rows: int, columns: int, known: dict[Any, tuple[Region, TreeScan | Vanishing | None]]
) -> TreeScan | Vanishing | None:
    """Return the law of a region, cached by computation: layers differ in inputs alone."""
    key = region.key()
    if key not in known:
        with torch.no_grad():
            known[key] = region, match(region, rows, columns)
    first, law = known[key]
    if not isinstance(law, TreeScan):
        return law
    same = dict(zip((*first.packed, *first.learned), (*region.packed, *region.learned), strict=True))
    roles = {role: replace(operand, source=same[operand.source]) for role, operand in law.roles.items()}
    return replace(law, roles=roles, weight=law.weight and same[law.weight], region=region.nodes)
