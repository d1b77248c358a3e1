"""The transparent level: rows as a trainer hands them over."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from treefx.config import Config
from treefx.errors import UnsupportedError
from treefx.inputs.sizes import concrete, sizes_of_call
from treefx.inputs.token_count import PackedSize
from treefx.kernels.memory import on_host
from treefx.passes.analysis import Analysis, Variant
from treefx.passes.packing.layout import expand_rows
from treefx.passes.runner import Pass
from treefx.runtime.analyses import Analyses
from treefx.runtime.call_plan import Batch, CallPlan, Policy, Unshared, plan_call
from treefx.runtime.cut import Cut, Exchange
from treefx.runtime.lazy import Deferred, Given, LazyRows, lazy_rows, name_of_input, watched
from treefx.runtime.origins import guarded, note_tokens, with_origin
from treefx.runtime.output_keys import is_per_token
from treefx.runtime.padding import Grid
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import Records
from treefx.runtime.shapes import NotNow, Outgrown, Shape, Unfit
from treefx.runtime.ways.between import SOURCES, MissingTokens, Packed, hands_on, ran, rows_between, whole
from treefx.runtime.ways.ordinary import Ordinary

__all__ = ["Outputs", "PackedRun", "RowsRun", "most_logits"]


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
        keep = functools.partial(self._keep, None)
        self._policy = Policy(config.min_sharing, "tokens", keep, size, on_host=True)
        self._outputs = Outputs(gm, roles, analyses, config, records, self.run)

    def run(self, shape: Shape, args: Sequence[Any]) -> Any:
        """Run on rows: build the trie of rows (or segments), then run packed if that pays."""
        try:
            return self._run(shape, args)
        except Outgrown as call:
            other = self._analyses.shape(args, call.sizes)
        except MissingTokens:
            args = whole(args)
            other = self._analyses.shape(args)
        except Unfit as error:
            other = self._analyses.with_numbers(shape, args, str(error))
        except NotNow as error:
            other = Reason(Cause.LATER, str(error))
        if isinstance(other, Shape):
            return self.run(other, args)
        return self._ordinary.instead(args, reason=other if other.text else None)

    def _run(self, shape: Shape, args: Sequence[Any]) -> Any:
        use = self._analyses.use
        use.settle(shape.analysis, hands_on=not use.settled and hands_on(shape.analysis))
        tensors, there = shape.analysis.known.with_parts(self._analyses.tensors(args)), ran(args) if SOURCES else None
        policy = self._policy if there is None else replace(self._policy, keep=functools.partial(self._keep, there))
        found = plan_call(shape, tensors, policy)
        if isinstance(found, Reason):
            return self._ordinary.instead(args, reason=found)
        self._count(found, tensors[shape.analysis.position_of_ids])
        if isinstance(found, Unshared) or not found.shares:
            return self._ordinary.instead(args, reason=None)
        detached = self._analyses.use.detached(shape.analysis)
        absent = self._absent(shape.analysis, found.batch.size, detached)
        own = found.batch.own_positions and bool(shape.analysis.attentions)  # all else reads no column
        variant = Variant(detached, found.redundant, absent=absent, own_positions=own)
        results = self._packed.run(shape, variant, found.tensors, found.batch)
        if isinstance(results, Reason):
            return self._run_again(shape, args, results)
        return self._outputs.hand_back(shape, args, results, found, variant)

    def _count(self, found: CallPlan | Unshared, ids: Tensor) -> None:
        raw = found.raw_tokens
        if isinstance(found, Unshared):
            self._records.count_rows(raw, raw, found.prefixes, ids)
        else:
            tokens = found.batch.tokens if found.shares else raw
            report = self._records.count_rows(raw, tokens, found.batch.prefixes, ids)
            report.trie = weakref.ref(found.batch), found.redundant

    def _run_again(self, shape: Shape, args: Sequence[Any], reason: Reason) -> Any:
        """Run the model's own graph where the numbers of a packed run show that it is wrong."""
        if shape.analysis.has_side_effects:  # which the packed run has had
            raise UnsupportedError(reason.text, reason.code)
        return self._ordinary.instead(args, reason=reason)

    def _absent(self, analysis: Analysis, tokens: int, detached: frozenset[int]) -> frozenset[int]:
        """Return the outputs of large logits, used only by losses until now, to leave out."""
        found = analysis.loss_logits
        if found is None or not found.outputs:
            return frozenset()
        if tokens * found.width <= most_logits(self._config.max_logits, found.dtype, found.device):
            return frozenset()
        return found.outputs if found.outputs <= detached - self._analyses.use.read else frozenset()

    def _keep(
        self, there: Tensor | None, shape: Shape, grid: Grid, starts: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return positions that others see, and positions that run; None for all of them.

        Raises:
            MissingTokens: One of these is not ``there``, bool [B, T], in a value of another graph.
        """
        seen = shape.padding.seen(grid)
        if seen is None and there is not None and not shape.analysis.attentions:
            seen = there
        if seen is None:
            keep = None
        elif self._config.padding == "drop":
            keep = shape.padding.reached(grid, seen)
        else:
            keep = torch.ones_like(seen) if self._analyses.use.read else shape.padding.needed(grid, seen)
        if there is not None and (keep is None or bool((on_host(keep) & ~there).any())):
            raise MissingTokens
        return seen, keep


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
            note_tokens(rows, [batch.metadata[3]], own=True)
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
        packed = shape.analysis.packed_outputs
        lazy = variant.detached | (packed.keys() - self._analyses.use.read)
        given = self._given(args) if lazy else None
        handed = [
            self._on_rows(shape, i, value, found.batch)
            if given is None or i not in lazy
            else lazy_rows(self._deferred(shape, given, i, value, found, absent=i in variant.absent))
            if i in variant.detached
            else rows_between(
                self._deferred(shape, given, i, value, found), Packed(value, packed[i], found.batch.metadata[3])
            )
            for i, value in enumerate(results)
        ]
        return tuple(handed)

    def _given(self, args: Sequence[Any]) -> Given:
        if self._watched is None:
            self._watched = watched(args, self._roles)
        return Given(args, self._roles, self._names, self._watched)

    def _deferred(
        self, shape: Shape, given: Given, position: int, value: Tensor, found: CallPlan, *, absent: bool = False
    ) -> Deferred:
        """Return how to make a lazy output: expanded, or recomputed, when the caller reads it."""
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
            needed, wholes = [isinstance(x, Tensor) and x.requires_grad for x in args], whole(args)
            leaves = [x.detach().requires_grad_() if is_in else x for x, is_in in zip(wholes, needed, strict=True)]
            with torch.enable_grad(), given.as_called(), self._records.reporting(report):
                again = [with_origin(x, y) if is_in else y for x, y, is_in in zip(wholes, leaves, needed, strict=True)]
                result = self._again(shape, again)[position]
            inputs = [x for x, is_in in zip(leaves, needed, strict=True) if is_in]
            return torch.autograd.grad(result, inputs, grad, allow_unused=True)

        rows = concrete(shape.analysis.output_sizes[position], found.grid.sizes)
        learned = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        return Deferred(rows, value, compute, differentiate, learned)


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
        """Run a variant; return a reason where its own numbers show that its results are wrong."""
        count = batch.size
        sizes = [count, *([] if cut is None else cut.sizes)]
        # Not outside: grad mode is a guard of Dynamo's code.
        gradients = torch.is_grad_enabled() and (cut is None or cut.run not in ("infer", "kv"))
        with torch.set_grad_enabled(gradients):
            made = shape.analysis.made_inputs
            tensors = [guarded(x) if i in made else x for i, x in enumerate(tensors)] if made else tensors
            values, laid_out = sizes_of_call(shape.analysis.batch, tensors)
            given = [*laid_out, *batch.metadata, count, *values.values()]
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
        *results, proofs = results
        if bool(proofs.all()):
            return results
        return Reason(Cause.VALUES, executable.rewritten.asks[int(proofs.to(torch.int8).argmin())])


_ON_CPU = 2**26
_PART = 8
"""Logits take at most one part in so many of the free memory of a device."""


def most_logits(setting: int | Literal["auto"], dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of logits (tokens times vocabulary) that are computed as a whole.

    Args:
        setting: The option ``max_logits``.
        dtype: Of the logits.
        device: Of the logits.
    """
    if setting != "auto":
        return setting
    return _free_bytes(device) // _PART // dtype.itemsize if device.type == "cuda" else _ON_CPU


@functools.lru_cache(maxsize=16)
def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a device at the first step.

    A later change of the answer would compile the other form.
    """
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
