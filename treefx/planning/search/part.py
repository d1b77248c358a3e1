"""Define parts of a forest and the order in which they run.

A part is any set of tokens that runs as one forward and one backward. Parts form a tree: every
ancestor token of a part's tokens lies in the part itself or in one of its ancestor parts. Siblings may share a
part, so a part may have several topmost tokens, and their parents may be different tokens of the parent part.

=========  ==================================  ==============================================================
keep       steps                               while its children run
=========  ==================================  ==============================================================
keep       forward, (children), backward       saved activations, K/V and K/V gradients of `outgoing` stay
recompute  kv, (children), forward, backward   only K/V and K/V gradients of `outgoing` stay
offload    kv, offload, (children), fetch,     K/V and K/V gradients of `outgoing` are in host memory;
           forward, backward                   children gather their boundary from there
=========  ==================================  ==============================================================

A part without children always has `keep == "keep"`: its backward follows its forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from treefx.forests.forest import Forest

__all__ = ["Keep", "Part", "Schedule", "Step", "StepKind", "boundary", "edge_ids", "outgoing", "spans"]

Keep = Literal["keep", "recompute", "offload"]
StepKind = Literal["forward", "kv", "backward", "offload", "fetch"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Hold one part of a forest.

    Attributes:
        index: its place in `Schedule.parts`; larger than its parent's.
        tokens: int64 [n] on the CPU, packed indices, strictly ascending, at least one.
        parent: index of the part above; None where no token has an ancestor outside the part.
        ancestors: indices of all parts above, root first, so it ends with `parent`. The part reads their K/V.
        children: indices of the parts directly below, ascending.
        keep: values that stay while the children run; see the module's table.
    """

    index: int
    tokens: torch.Tensor
    parent: int | None
    ancestors: tuple[int, ...]
    children: tuple[int, ...]
    keep: Keep

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)


class Step(NamedTuple):
    """Name one step of one part."""

    kind: StepKind
    part: int


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Hold the parts and the steps in execution order.

    The parts partition the forest's tokens.
    Every part has exactly one "forward" and one "backward" step. A part's "forward" (or "kv") comes after those of
    its ancestors, and its "backward" after those of all its descendants.
    """

    parts: tuple[Part, ...]
    steps: tuple[Step, ...]


def spans(part: Part) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the part's tokens as maximal intervals [start, stop), int64 [K] each.

    Packed indices, ascending.
    """
    tokens = part.tokens.numpy()
    breaks = np.flatnonzero(np.diff(tokens) != 1)
    return tokens[np.append(0, breaks + 1)], tokens[np.append(breaks, len(tokens) - 1)] + 1


def boundary(forest: Forest, parts: Sequence[Part], part: Part) -> torch.Tensor:
    """Return the ancestors of the part's tokens outside of it, in packed order.

    The part receives their K/V.

    Returns:
        int64 [P], ascending packed indices on the CPU; P may be 0.
    """
    if not part.ancestors:
        return part.tokens.new_empty(0)
    above = torch.cat([parts[index].tokens for index in part.ancestors]).sort().values
    return above[_own_tokens_below(forest, part.tokens, above) > 0]


def outgoing(forest: Forest, part: Part) -> torch.Tensor:
    """Return tokens of the part with a descendant outside it.

    Their K/V and K/V gradients cross the cut.

    Returns:
        int64 [Q], ascending packed indices on the CPU; empty for parts without children.
    """
    below = forest.subtree_end.cpu()[part.tokens] - part.tokens
    return part.tokens[_own_tokens_below(forest, part.tokens, part.tokens) < below]


def edge_ids(forest: Forest, part: Part) -> torch.Tensor:
    """Find the edges whose source runs in the part.

    Returns:
        int64 [E_p], ascending indices into `forest.edges`.
    """
    inside = torch.zeros(forest.num_tokens, dtype=torch.bool)
    inside[part.tokens] = True
    return inside[forest.edges.source.cpu()].nonzero().squeeze(1)


def _own_tokens_below(forest: Forest, own: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Count tokens of ascending `own` in the subtree of each of `tokens`, itself included."""
    end = forest.subtree_end.cpu()[tokens].to(torch.int64)
    return torch.searchsorted(own, end) - torch.searchsorted(own, tokens)
