"""Predict when products and collectives of a graph run: a compute lane and a link."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from treefx.passes.overlap.gate import Rates
from treefx.passes.overlap.producers import KINDS, is_product

__all__ = ["COMPUTE", "LINK", "Span", "TimeLine", "spans"]

COMPUTE, LINK = "products", "link"


@dataclass(frozen=True)
class Span:
    """One node's time on one lane, in seconds from the start of the graph."""

    lane: str
    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class TimeLine:
    """A graph before and after its products and collectives were cut."""

    before: list[Span]
    after: list[Span]
    count: int
    """Collectives that were cut."""


def spans(graph: fx.Graph, rates: Rates, whole: Collection[str] | None = None) -> list[Span]:
    """Predict a graph node by node.

    A product starts when the one before it has ended, a collective when it is issued and the link is free; its readers
    wait. All other operators take no time here, and both lanes run at their full rates at once (``Rates.hidden`` does
    not enter).

    Args:
        graph: As for ``overlap_collectives``.
        rates: Of the machine.
        whole: Names of products that are in one piece; the others take ``Rates.product_seconds`` more. None: all.
    """
    now = free = 0.0
    arrival: dict[fx.Node, float] = {}
    found = []
    for node in graph.nodes:
        if node.target is torch.ops._c10d_functional.wait_tensor.default:
            now = max(now, arrival.get(node.args[0], now))
        elif node.op == "call_function" and node.target in KINDS:
            start = max(now, free)
            free = arrival[node] = start + rates.size_of(node) / rates.bytes_per_second + rates.latency_seconds
            found.append(Span(LINK, node.name, start, free))
        elif is_product(node):
            chunk = 0.0 if whole is None or node.name in whole else rates.product_seconds
            start, now = now, now + rates.flops_of(node) / rates.flops_per_second + chunk
            found.append(Span(COMPUTE, node.name, start, now))
    return found
