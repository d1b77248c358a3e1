"""One variant of a graph at work: compiled when it is first needed, run on a trie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treefx.passes.analysis import Variant
from treefx.passes.runner import Pass
from treefx.runtime.batch import Batch
from treefx.runtime.cut import Cut, Exchange
from treefx.runtime.origins import guarded
from treefx.runtime.records import Records
from treefx.runtime.shapes import Shape

__all__ = ["PackedRun"]


class PackedRun:
    """Runs variants of the shapes of one graph.

    Args:
        passes: Makes and compiles variants.
        records: Where to report.
    """

    def __init__(self, passes: Sequence[Pass], records: Records) -> None:
        self._passes, self._records = passes, records

    def run(
        self, shape: Shape, variant: Variant, tensors: Sequence[Tensor], batch: Batch, cut: Cut | Exchange | None = None
    ) -> Any:
        """Run a variant; return None where its masks do not hide all they should."""
        count = batch.size
        sizes = [count, *([] if cut is None else cut.sizes)]
        sizes_of_batch = shape.analysis.values(tensors).values()
        # Not outside: grad mode is a guard of Dynamo's code.
        gradients = torch.is_grad_enabled() and (cut is None or cut.run not in ("infer", "kv"))
        with torch.set_grad_enabled(gradients):
            made = shape.analysis.made_inputs
            tensors = [guarded(x) if i in made else x for i, x in enumerate(tensors)] if made else tensors
            given = [*shape.analysis.laid_out(tensors), *batch.metadata, count, *sizes_of_batch]
            executable = shape.executable(variant, tensors, sizes, self._passes, self._records.count_compiled)
            self._records.show(executable)
            report = self._records.report
            report.reason, report.ran, report.way = None, "packed", "forest" if variant.native else "rows"
            with torch._C._DisableAutocast():
                graph = executable.rewritten.cut
                results: Sequence[Any] = (
                    executable.run(*given) if cut is None or graph is None else cut.call(executable.run, given, graph)
                )
        if not executable.rewritten.asks:
            return results
        *results, hidden = results
        return results if bool(hidden) else None
