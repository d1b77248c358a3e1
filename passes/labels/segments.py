"""Find segments: sequences that a trainer packs into one row, each a row to the model.

A mask with ``x[query] == x[key]`` for a value x [B, T] keeps attention inside the runs of x. Where no run comes
twice in a row, and positions count up by one inside each of them, the runs are rows: virtual ones. Which values the
masks of a graph compare and count by is found here; that those of a call are such is looked at in every call.

One row of three segments::

    ids        a b c d a b e a b c        x          0 0 0 0 1 1 1 2 2 2
    positions  0 1 2 3 0 1 2 0 1 2        the tokens a b are one in all segments, c in the first and the last
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from treefx.passes.labels.facts import Axis, Kind, fact_of

__all__ = ["Segments", "is_of_tokens"]


@dataclass
class Segments:
    """Hold the masks' facts on segments.

    Attributes:
        assumed: Whether proofs count on segments; else it is only noted which values are compared.
        compared: Integers [B, T] that keep a query from the keys of another segment.
        counting: Integers [B, T] that count up by one inside of each segment.
        begins: Those of ``compared`` that are the column where the segment begins: parts of the caller's masks.
        positive: Those of ``compared`` that say so by numbers from 0 on; others mean padding to libraries.
        leak: Why an attention is not proved to stay inside; one such, and there are no segments.
    """

    assumed: bool = False
    compared: dict[fx.Node, None] = field(default_factory=dict)
    counting: dict[fx.Node, None] = field(default_factory=dict)
    begins: dict[fx.Node, None] = field(default_factory=dict)
    positive: dict[fx.Node, None] = field(default_factory=dict)
    leak: str | None = None

    @property
    def speak(self) -> bool:
        """Whether masks say anything of segments."""
        return bool(self.compared or self.begins or self.leak)

    @property
    def hold(self) -> bool:
        """Whether every attention is proved to stay inside of segments."""
        return bool(self.compared) and self.leak is None


def is_of_tokens(node: fx.Node) -> bool:
    """Return whether a value is an integer per token, made of inputs alone."""
    value = node.meta["val"]
    whole = not value.is_floating_point() and not value.is_complex() and value.dtype is not torch.bool
    axes = [[factor.axis for factor in dim] for dim in fact_of(node).dims or ()]
    return whole and fact_of(node).kind is Kind.PREFIX and axes == [[Axis.ROW], [Axis.TOKEN]]
