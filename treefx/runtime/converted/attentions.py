"""Hold the attentions of a traced model: checked once, stated for each call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from treefx.errors import UnsupportedError
from treefx.kernels.score import Expr
from treefx.passes.labels.facts import fact_of
from treefx.passes.scores.attention_facts import Attention
from treefx.runtime.converted.own_function import check_function
from treefx.runtime.converted.seam import Stated
from treefx.runtime.converted.sizes import module_of
from treefx.runtime.converted.written import Layout, Written, reads_of, window_of, write
from treefx.runtime.padding import Grid
from treefx.runtime.shapes import Shape

__all__ = ["COMPILE_INSTEAD", "Attentions", "Found"]

COMPILE_INSTEAD = "torch.compile(model, backend='treefx') may share such calls"
"""The way out where a converted model runs on rows that a compiled one would share."""


@dataclass(frozen=True)
class Found:
    """The attentions of a model by name, and the planes that they read."""

    layout: Layout
    written: Mapping[str, Written]
    _stated: Mapping[str, Stated] | None = field(default=None, repr=False)

    def stated(self, grid: Grid) -> Mapping[str, Stated]:
        """Return the scores of all attentions for a call: the same each time, unless they read its tables."""
        found = self._stated
        if found is None:
            found = {
                name: Stated(x.score, reads_of(x, grid), x.scale, x.softcap, x.heads, x.has_sinks)
                for name, x in self.written.items()
            }
            if not any(read.table is not None for stated in found.values() for read in stated.reads):
                object.__setattr__(self, "_stated", found)
        return found


class Attentions:
    """Reads the attentions of the shapes of one graph.

    Args:
        modules: The attention modules of the traced copy, by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._known: weakref.WeakKeyDictionary[Shape, dict[frozenset[Expr], Found]] = weakref.WeakKeyDictionary()

    def of(self, shape: Shape, redundant: frozenset[Expr] = frozenset()) -> Found:
        """Return the score of each attention module, without redundant conditions.

        Raises:
            UnsupportedError: A score is none that can be stated.
        """
        known = self._known.setdefault(shape, {})
        if redundant not in known:
            nodes = [node for node in shape.analysis.gm.graph.nodes if node.op == "call_function"]
            laws = [(module_of(node), fact_of(node).law) for node in nodes]
            found = [(name, law) for name, law in laws if isinstance(law, Attention)]
            if sorted(name for name, _ in found) != sorted(self._modules):
                raise UnsupportedError(_unmatched(self._modules, [name for name, _ in found]))
            layout = Layout()
            known[redundant] = Found(layout, {name: write(law, redundant, layout) for name, law in found})
        return known[redundant]

    def check(self, shape: Shape, grid: Grid) -> None:
        """Check that the function of each module computes its score and nothing else.

        Raises:
            UnsupportedError: One computes something else.
        """
        found = self.of(shape)
        planes = [_made_up(plane) for plane in found.layout.planes]
        for name, stated in found.stated(grid).items():
            check_function(self._modules[name], stated, planes, name)

    def see_keys(self, shape: Shape, grid: Grid, seen: Tensor) -> Tensor:
        """bool [B, T], whether a position sees a key in every attention; ``seen`` are the keys."""
        asked = dict.fromkeys((item.of_pairs, item.heads) for item in self.of(shape).written.values())
        conditions = [item for group, _ in asked for item in group]
        windows = [window for window in map(window_of, conditions) if window is not None]
        before = seen.to(torch.int64).cumsum(1)
        width = min(windows, default=seen.shape[1])
        found = before > torch.nn.functional.pad(before, (width, 0))[:, : seen.shape[1]]
        if len(windows) == len(conditions):
            return found
        for row, column in torch.nonzero(found & ~seen).tolist():
            query = torch.tensor([[row * grid.columns + column]])
            for group, heads in asked:
                pairs = [grid.past(query), seen[row], *(grid.pairs(item, query, heads) for item in group)]
                if not bool(functools.reduce(torch.logical_and, pairs).any(-1).all()):
                    found[row, column] = False
        return found


def _unmatched(modules: Collection[str], found: Sequence[str | None]) -> str:
    """Say which attentions a call runs otherwise than each of the model's once, and the way out."""
    other = next((name for name in modules if found.count(name) != 1), None)
    what = "runs one without a module" if other is None else f"runs {other} {found.count(other)} times"
    return (
        "a call must run every attention of the model once, with its function from transformers; this one "
        f"{what}; {COMPILE_INSTEAD}"
    )


def _made_up(plane: tuple[str, Any]) -> Tensor:
    """Make numbers of five tokens of one sequence, by the kind of plane.

    Truths are true, places count, others come in runs.
    """
    kind, source = plane
    place = torch.arange(5, dtype=torch.int32)
    if kind == "place":
        return place
    dtype = torch.bool if kind == "seen" else source.meta["val"].dtype
    if dtype is torch.bool:
        return torch.ones_like(place)
    return (place // 2).float().view(torch.int32) if dtype.is_floating_point else place // 2
