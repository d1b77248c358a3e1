"""The transparent level: rows as a trainer hands them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treefx.config import Config
from treefx.errors import UnsupportedError
from treefx.forests.paths import Prefixes
from treefx.kernels.score import Expr
from treefx.passes.analysis import Analysis, Variant
from treefx.passes.pipeline import UNHIDDEN
from treefx.passes.trace.token_count import PackedSize
from treefx.runtime.analyses import Analyses
from treefx.runtime.batch import Batch, build_batch, find_unshared
from treefx.runtime.kept.retries import NotNow
from treefx.runtime.padding import Grid
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import Records
from treefx.runtime.segments import find_starts, has_gaps
from treefx.runtime.shapes import Outgrown, Shape, Unfit
from treefx.runtime.ways.most_logits import most_logits
from treefx.runtime.ways.ordinary import Ordinary
from treefx.runtime.ways.outputs import Outputs
from treefx.runtime.ways.packed import PackedRun

__all__ = ["Rows", "RowsRun"]

_BLIND = "a position that sees no key is read by the loss or the caller"


class RowsRun:
    """Builds the trie of a call's rows and runs packed if that pays.

    Args:
        gm: Dynamo's graph.
        roles: What each placeholder is.
        analyses: The analyses of the graph.
        packed: What runs a variant.
        ordinary: What runs the graph as it is.
        config: The options.
        records: Where to report.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        roles: list[str],
        analyses: Analyses,
        packed: PackedRun,
        ordinary: Ordinary,
        config: Config,
        records: Records,
    ) -> None:
        self._analyses, self._packed, self._ordinary = analyses, packed, ordinary
        self._config, self._records = config, records
        self._size = PackedSize(few=config.compiler.records_graphs)
        self._outputs = Outputs(gm, roles, analyses, config, records, self.run)

    def run(self, shape: Shape, args: Sequence[Any]) -> Any:
        """The transparent level: build the trie of the rows (or segments), then run packed if that pays."""
        try:
            return self._run(shape, args)
        except Outgrown as call:
            other = self._analyses.shape(args, call.sizes)
        except Unfit as error:
            other = self._analyses.with_numbers(shape, args, str(error))
        except NotNow as error:
            other = Reason(Cause.LATER, str(error))
        if isinstance(other, Shape):
            return self.run(other, args)
        return self._ordinary.instead(args, reason=other if other.text else None)

    def _run(self, shape: Shape, args: Sequence[Any]) -> Any:
        self._analyses.use.settle(shape.analysis)
        tensors = shape.analysis.known.with_parts(self._analyses.tensors(args))
        grid = shape.grid(tensors)
        starts = find_starts(shape.analysis, grid) if shape.analysis.segmented else None
        seen, keep = self._keep(shape, grid)
        if starts is not None and keep is not None and has_gaps(starts, keep):
            keep = None
        if not shape.padding.is_defined(grid, keep, starts):
            return self._ordinary.instead(args, reason=Reason(Cause.VALUES, _BLIND))
        raw = grid.rows * grid.columns if seen is None or keep is None else int((seen & keep).sum())
        ids = tensors[shape.analysis.position_of_ids]
        found = self._shared(Rows.of(shape, tensors, grid, keep, starts), raw, ids)
        if found is None:
            return self._ordinary.instead(args, reason=None)
        batch, redundant = found
        if keep is not None:
            shape.padding.check_lookups(grid)
        detached = self._analyses.use.detached(shape.analysis)
        absent = self._absent(shape.analysis, batch.size, detached)
        variant = Variant(detached, redundant, absent=absent, own_positions=batch.own_positions)
        results = self._packed.run(shape, variant, tensors, batch)
        if results is None:
            return self._run_unhidden(shape, args)
        return self._outputs.hand_back(shape, args, results, batch, variant)

    def _shared(self, rows: Rows, raw: int, ids: Tensor) -> tuple[Batch, frozenset[Expr]] | None:
        """The trie of rows of ``raw`` tokens, if they share enough."""
        limit = self._config.min_sharing
        prefixes = rows.unshared() if limit > 1.0 else None
        if prefixes is not None:
            self._records.count_rows(raw, raw, prefixes, ids)
            return None
        batch = rows.batch(self._size)
        shared = limit <= 1.0 or raw >= limit * batch.tokens
        self._records.count_rows(raw, batch.tokens if shared else raw, batch.prefixes, ids)
        return (batch, rows.redundant) if shared else None

    def _run_unhidden(self, shape: Shape, args: Sequence[Any]) -> Any:
        """Scores so large that a mask does not hide what is below it: only the model's own graph weighs that."""
        if shape.analysis.has_side_effects:  # which the packed run has had
            raise UnsupportedError(UNHIDDEN)
        return self._ordinary.instead(args, reason=Reason(Cause.VALUES, UNHIDDEN))

    def _absent(self, analysis: Analysis, tokens: int, detached: frozenset[int]) -> frozenset[int]:
        """The outputs of logits to do without: large ones that only losses have read so far."""
        found = analysis.loss_logits
        if found is None or not found.outputs:
            return frozenset()
        if tokens * found.width <= most_logits(self._config.max_logits, found.dtype, found.device):
            return frozenset()
        return found.outputs if found.outputs <= detached - self._analyses.use.read else frozenset()

    def _keep(self, shape: Shape, grid: Grid) -> tuple[Tensor | None, Tensor | None]:
        """The positions that others see, and those that have to run; None where that is all of them."""
        seen = shape.padding.seen(grid)
        if seen is None:
            return None, None
        if self._config.padding == "drop":
            return seen, shape.padding.reached(seen)
        return seen, torch.ones_like(seen) if self._analyses.use.read else shape.padding.needed(grid, seen)


@dataclass(frozen=True)
class Rows:
    """What tells the tokens of a call's rows (or segments) apart, see `build_batch`.

    ``redundant`` are the conditions of attentions that all tokens meet that run.
    """

    keys: list[Tensor]
    keep: Tensor | None
    places: list[Tensor] | None
    starts: Tensor | None
    redundant: frozenset[Expr]

    @classmethod
    def of(
        cls, shape: Shape, tensors: Sequence[Tensor], grid: Grid, keep: Tensor | None, starts: Tensor | None
    ) -> Rows:
        """Those of a call.

        Args:
            shape: What is known of calls like it.
            tensors: Its tensors, with the parts of masks.
            grid: The same, as padding is asked of them.
            keep: bool [B, T], the positions that run; None keeps all.
            starts: bool [B, T], where segments start; None where there are none.
        """
        redundant = shape.padding.redundant(grid, keep)
        identity = shape.analysis.identity_without(redundant)
        keys = [tensors[i] for i in identity] + shape.padding.numbers_of_rows(grid)
        places = None if keep is None and starts is None else shape.padding.own_positions(grid, redundant)
        return cls(keys, keep, places, starts, redundant)

    def batch(self, size: PackedSize | None = None) -> Batch:
        """Their trie, filled up to a ``size``."""
        return build_batch(self.keys, self.keep, self.places, self.starts, size)

    def unshared(self) -> Prefixes | None:
        """Their prefixes if they obviously share none."""
        return find_unshared(self.keys, self.keep, self.places) if self.starts is None else None
