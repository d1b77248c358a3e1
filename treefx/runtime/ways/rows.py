"""The transparent level: rows as a trainer hands them over."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treefx.config import Config
from treefx.errors import UnsupportedError
from treefx.passes.analysis import Analysis, Variant
from treefx.passes.pipeline import UNHIDDEN
from treefx.passes.trace.token_count import PackedSize
from treefx.runtime.analyses import Analyses
from treefx.runtime.call_plan import CallPlan, Policy, Unshared, plan_call
from treefx.runtime.kept.retries import NotNow
from treefx.runtime.padding import Grid
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import Records
from treefx.runtime.shapes import Outgrown, Shape, Unfit
from treefx.runtime.ways.most_logits import most_logits
from treefx.runtime.ways.ordinary import Ordinary
from treefx.runtime.ways.outputs import Outputs
from treefx.runtime.ways.packed import PackedRun

__all__ = ["RowsRun"]

_UNSEEN = Reason(Cause.VALUES, UNHIDDEN)


class RowsRun:
    """Builds the trie of a call's rows and runs packed if that pays.

    Args:
        gm: Dynamo's graph.
        roles: Role of each placeholder.
        analyses: The analyses of the graph.
        packed: Runs a variant.
        ordinary: Runs the graph unchanged.
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
        size = PackedSize(few=config.compiler.records_graphs)
        self._policy = Policy(config.min_sharing, "tokens", self._keep, size, on_host=True)
        self._outputs = Outputs(gm, roles, analyses, config, records, self.run)

    def run(self, shape: Shape, args: Sequence[Any]) -> Any:
        """Run on rows: build the trie of rows (or segments), then run packed if that pays."""
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
        found = plan_call(shape, tensors, self._policy)
        if isinstance(found, Reason):
            return self._ordinary.instead(args, reason=found)
        self._count(found, tensors[shape.analysis.position_of_ids])
        if isinstance(found, Unshared) or not found.shares:
            return self._ordinary.instead(args, reason=None)
        detached = self._analyses.use.detached(shape.analysis)
        absent = self._absent(shape.analysis, found.batch.size, detached)
        variant = Variant(detached, found.redundant, absent=absent, own_positions=found.batch.own_positions)
        results = self._packed.run(shape, variant, found.tensors, found.batch)
        if results is None:
            return self._run_unhidden(shape, args)
        return self._outputs.hand_back(shape, args, results, found, variant)

    def _count(self, found: CallPlan | Unshared, ids: Tensor) -> None:
        raw = found.raw_tokens
        if isinstance(found, Unshared):
            self._records.count_rows(raw, raw, found.prefixes, ids)
        else:
            tokens = found.batch.tokens if found.shares else raw
            report = self._records.count_rows(raw, tokens, found.batch.prefixes, ids)
            report.trie = weakref.ref(found.batch), found.redundant

    def _run_unhidden(self, shape: Shape, args: Sequence[Any]) -> Any:
        """Run the model's own graph for scores so large that a mask does not hide others."""
        if shape.analysis.has_side_effects:  # which the packed run has had
            raise UnsupportedError(UNHIDDEN, _UNSEEN.code)
        return self._ordinary.instead(args, reason=_UNSEEN)

    def _absent(self, analysis: Analysis, tokens: int, detached: frozenset[int]) -> frozenset[int]:
        """Return the outputs of large logits, used only by losses until now, to leave out."""
        found = analysis.loss_logits
        if found is None or not found.outputs:
            return frozenset()
        if tokens * found.width <= most_logits(self._config.max_logits, found.dtype, found.device):
            return frozenset()
        return found.outputs if found.outputs <= detached - self._analyses.use.read else frozenset()

    def _keep(self, shape: Shape, grid: Grid, starts: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return positions that others see, and positions that run; None for all of them."""
        seen = shape.padding.seen(grid)
        if seen is None:
            return None, None
        if self._config.padding == "drop":
            return seen, shape.padding.reached(seen)
        return seen, torch.ones_like(seen) if self._analyses.use.read else shape.padding.needed(grid, seen)
