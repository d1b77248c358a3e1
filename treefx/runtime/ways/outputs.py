"""Expand outputs of a call to rows: at once, or when the caller reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treefx.config import Config
from treefx.passes.analysis import Variant
from treefx.passes.packing.layout import expand_rows
from treefx.passes.trace.batch_sizes import concrete
from treefx.runtime.analyses import Analyses
from treefx.runtime.batch import Batch
from treefx.runtime.call_plan import CallPlan
from treefx.runtime.kept.given import Given, name_of_input
from treefx.runtime.kept.marks import watched
from treefx.runtime.lazy import Deferred, LazyRows, lazy_rows
from treefx.runtime.origins import note_tokens, with_origin
from treefx.runtime.output_keys import is_per_token
from treefx.runtime.records import Records
from treefx.runtime.shapes import Shape

__all__ = ["Outputs"]


class Outputs:
    """Return the results of a variant to the caller.

    Args:
        gm: Dynamo's graph.
        roles: Role of each placeholder.
        analyses: Which outputs callers use.
        config: The options.
        records: Where to report.
        again: Runs a call once more, with the outputs that are then known to be read.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        roles: list[str],
        analyses: Analyses,
        config: Config,
        records: Records,
        again: Callable[[Shape, Sequence[Any]], Any],
    ) -> None:
        self._roles, self._analyses, self._config, self._records, self._again = roles, analyses, config, records, again
        self._watched: list[int] | None = None
        self._names = [name_of_input(node) for node in gm.graph.find_nodes(op="placeholder")]

    def _on_rows(self, shape: Shape, position: int, value: Any, batch: Batch) -> Any:
        """An output as the caller expects it."""
        dims = shape.analysis.packed_outputs.get(position)
        if dims is None:
            return value
        rows = expand_rows(value, dims, batch.metadata[3])
        if is_per_token(dims):
            note_tokens(rows, [batch.metadata[3]])
        return rows

    def hand_back(
        self,
        shape: Shape,
        args: Sequence[Any],
        results: Sequence[Any],
        found: CallPlan,
        variant: Variant,
    ) -> tuple[Any, ...]:
        """The outputs as the caller expects them."""
        given = self._given(args) if variant.detached else None
        handed = [
            self._lazily(shape, given, i, value, found, absent=i in variant.absent)
            if given is not None and i in variant.detached
            else self._on_rows(shape, i, value, found.batch)
            for i, value in enumerate(results)
        ]
        return tuple(handed)

    def _given(self, args: Sequence[Any]) -> Given:
        if self._watched is None:
            self._watched = watched(args, self._roles)
        return Given(args, self._roles, self._names, self._watched)

    def _lazily(
        self, shape: Shape, given: Given, position: int, value: Tensor, found: CallPlan, *, absent: bool
    ) -> Tensor:
        """Return a lazy output: expanded, or recomputed, when the caller reads it."""
        report = self._records.report  # the reader may be another thread, or another model may have run in between
        args, batch = given.args, found.batch

        def compute() -> Tensor:
            self._analyses.use.read.add(position)
            complete = not bool((batch.metadata[3] < 0).any())
            if not absent and (complete or self._config.padding == "drop"):
                return self._on_rows(shape, position, value, batch)  # type: ignore[no-any-return]
            given.check(f"reading an output {list(rows)}")
            with given.as_called(), self._records.reporting(report):
                result: Tensor = self._again(shape, args)[position]
            return result.rows if isinstance(result, LazyRows) else result

        def differentiate(grad: Tensor) -> Sequence[Tensor | None]:
            self._analyses.use.read.add(position)
            self._analyses.use.differentiated.add(position)
            given.check(f"differentiating an output {list(rows)}")
            needed = [isinstance(x, Tensor) and x.requires_grad for x in args]
            leaves = [x.detach().requires_grad_() if is_in else x for x, is_in in zip(args, needed, strict=True)]
            with torch.enable_grad(), given.as_called(), self._records.reporting(report):
                again = [with_origin(x, y) if is_in else y for x, y, is_in in zip(args, leaves, needed, strict=True)]
                result = self._again(shape, again)[position]
            inputs = [x for x, is_in in zip(leaves, needed, strict=True) if is_in]
            return torch.autograd.grad(result, inputs, grad, allow_unused=True)

        rows = concrete(shape.analysis.output_sizes[position], found.grid.sizes)
        learned = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        return lazy_rows(Deferred(rows, value, compute, differentiate, learned))
