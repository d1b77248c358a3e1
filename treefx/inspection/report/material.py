"""Hold the source data of a report: graphs, facts, counters and sizes of the last call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from treefx.inspection.images import images_of
from treefx.inspection.report.sizes import Sizes
from treefx.passes.analysis import Analysis, Rewritten
from treefx.runtime.call_log import LoggedCall

__all__ = ["Material", "Rows"]


@dataclass(frozen=True)
class Rows:
    """The trie of a call as arrays of the host.

    Attributes:
        token_of: int [B, T], the packed index of every position; -1 for none.
        subtree_end: int [N].
        ids: int [N], the token ids; None where they are gone.
        weights: float [N], of predicting each token, summed over rows; NaN for roots, None where the loss has them.
    """

    token_of: Any
    subtree_end: Any
    ids: Any = None
    weights: Any = None

    @classmethod
    def of_tensors(cls, token_of: Tensor, subtree_end: Tensor, ids: Tensor | None) -> Rows:
        """Copy from the device."""
        host = [None if x is None else x.detach().cpu().numpy() for x in (token_of, subtree_end, ids)]
        return cls(*host)

    @cached_property
    def depth(self) -> Any:
        """int [N]: how many tokens stand above each one."""
        count = len(self.subtree_end)
        opened = np.arange(count)
        closing = np.bincount(np.minimum(self.subtree_end, count), minlength=count + 1)[:count]
        return opened - np.cumsum(closing)

    @cached_property
    def row_and_column(self) -> tuple[Any, Any]:
        """int [N] each: the first row through a token, and its column there."""
        flat = self.token_of.reshape(-1)
        kept, first = np.unique(flat, return_index=True)
        found = np.zeros(len(self.subtree_end), dtype=np.int64)
        found[kept[kept >= 0]] = first[kept >= 0]
        return np.divmod(found, self.token_of.shape[1])

    @cached_property
    def multiplicity(self) -> Any:
        """int [N]: rows through each token."""
        kept = self.token_of[self.token_of >= 0]
        return np.bincount(kept.reshape(-1), minlength=len(self.subtree_end))


@dataclass
class Material:
    """Everything of one graph that a report is drawn from.

    Attributes:
        stats: Figures, as ``Inspection.stats``.
        summary: The text of ``Inspection.summary``.
        captured: Dynamo's graph.
        analysis: Findings of the passes, of the variant that ran or would run.
        rewritten: The packed graph; None of a call on rows.
        graphs: By stage.
        code: Of the reason why the last call ran on rows; "" of a packed call.
        reason: The same in words.
        calls: Logged calls, by graph.
        rows: The trie of the last call.
        extra_losses: Further reasons, as code, text: pieces of the model that get no token ids.
        is_dry: Whether nothing has run: the report is of a call to come.
        seconds: Of nodes by name, by stage ("captured", "rewritten"), where they were timed.
    """

    stats: Mapping[str, Any]
    summary: str
    captured: fx.GraphModule
    analysis: Analysis | None = None
    rewritten: Rewritten | None = None
    graphs: Mapping[str, fx.GraphModule] = field(default_factory=dict)
    code: str = ""
    reason: str = ""
    calls: Sequence[Sequence[LoggedCall]] = ()
    rows: Rows | None = None
    extent: tuple[int, int] | None = None
    extra_losses: Sequence[tuple[str, str]] = ()
    is_dry: bool = False
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        """Whether the last call ran packed."""
        return bool(self.stats["ran"] == "packed")

    @property
    def runs_converted(self) -> bool:
        """Return whether the module ran on distinct tokens behind hooks, without a packed graph."""
        return self.packed and self.stats["way"] == "converted" and not self.stats["expansions"]

    @cached_property
    def positions(self) -> int:
        """Rows times columns of the first integer input [B, T] of Dynamo's graph; 0 without one."""
        values = [node.meta.get("example_value") for node in self.captured.graph.find_nodes(op="placeholder")]
        tensors = [x for x in values if isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()]
        return math.prod(self.sizes.shape(tensors[0])) if tensors else 0

    @cached_property
    def traced(self) -> fx.GraphModule:
        """The captured graph in ATen; Dynamo's own where it was never traced."""
        return self.captured if self.analysis is None else self.analysis.gm

    @cached_property
    def is_labelled(self) -> bool:
        """Whether the nodes of ``traced`` have facts."""
        return self.analysis is not None and self.analysis.tokens is not None

    @cached_property
    def images(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Images of the nodes of ``traced`` in the graphs behind it."""
        return images_of(self.traced, self.graphs)

    @cached_property
    def sizes(self) -> Sizes:
        """Numbers for the symbols of rows, columns and distinct tokens."""
        numbers: dict[Any, int] = {}
        tokens = None if self.analysis is None else self.analysis.tokens
        if tokens is not None and self.extent is not None:
            for size, number in zip((tokens.rows, tokens.columns), self.extent, strict=True):
                numbers |= _symbol(size, number)
        if self.rewritten is not None and self.stats["tokens"]:
            numbers |= _symbol(self.rewritten.count.count, self.stats["tokens"])
        return Sizes(numbers)

    @cached_property
    def sizes_unshared(self) -> Sizes | None:
        """Return the sizes with as many distinct tokens as the padded batch has.

        None where its size is unknown.
        """
        if self.rewritten is None or self.extent is None:
            return None
        rows, columns = self.extent
        return Sizes({**self.sizes.numbers, **_symbol(self.rewritten.count.count, rows * columns)})

    @cached_property
    def columns(self) -> int:
        """Columns of the last call, as far as they are known."""
        tokens = None if self.analysis is None else self.analysis.tokens
        return 0 if tokens is None else self.sizes.number(tokens.columns)


def _symbol(size: Any, number: int) -> dict[Any, int]:
    if not isinstance(size, torch.SymInt):
        return {}
    expression = size.node.expr
    return {expression: number} if expression.is_Symbol else {}
