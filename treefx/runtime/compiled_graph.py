"""Dispatch the calls of one Dynamo graph to a way of running."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treefx.config import Config
from treefx.errors import UnsupportedError
from treefx.forests.context import IN_USE, raised_on_forest
from treefx.forests.forest import Forest
from treefx.inputs.token_count import PackedSize
from treefx.kernels.memory import reading
from treefx.passes.analysis import Analysis, Rewritten
from treefx.passes.pipeline import build_passes
from treefx.passes.ranks.own_graph import OwnGraph, own_graph
from treefx.runtime.analyses import Analyses
from treefx.runtime.announce import announce
from treefx.runtime.dynamo import reads_cache, why_cut
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import GraphReport, Records
from treefx.runtime.shapes import Shape
from treefx.runtime.ways.between import RowsBetween, hand_on_changes, holed, taken, whole
from treefx.runtime.ways.column_counts import ColumnCounts
from treefx.runtime.ways.native import NativeRun, wrong_row
from treefx.runtime.ways.ordinary import Ordinary
from treefx.runtime.ways.rows import PackedRun, RowsRun
from treefx.runtime.ways.watch import SharingWatch
from treefx.runtime.whole.numbers import as_tensors, numbers_as_tensors
from treefx.runtime.whole.parameter_changes import changes_first
from treefx.runtime.whole.tower_first import towers_first
from treefx.runtime.whole.towers import is_in_tower

__all__ = ["CompiledGraph"]

_WHOLE = "under treefx.use(forest) the model must be one whole graph, as code outside of it cannot be checked, but "
_WHERE = "call it on a padded batch without treefx.use (TORCH_LOGS=graph_breaks shows the line)"

_ON_TREE = {torch.ops.treefx.tree_attention, torch.ops.treefx.tree_attention.default}


class CompiledGraph:
    """Run a graph for Dynamo: called with its inputs, return its outputs.

    Args:
        gm: Dynamo's graph, never changed.
        roles: "parameter", "buffer", "input" or "variable" (one that requires grad) per placeholder.
        config: The options.
    """

    def __init__(self, gm: fx.GraphModule, roles: list[str], config: Config) -> None:
        cached = reads_cache(gm, roles)
        gm, roles, self._towers = towers_first(gm, roles)
        gm, self._changes = changes_first(gm, roles)
        gm, self._numbers = numbers_as_tensors(gm, roles)
        self._records, self._given_roles = Records(gm), roles
        own = own_graph(gm, roles)
        self._own = own if isinstance(own, OwnGraph) else None
        if self._own is not None:
            gm, roles = self._own.gm, [roles[i] for i in self._own.kept]
        self.gm, self.roles, self.config = gm, roles, config
        passes = build_passes(config.compiler, config.disable_passes, regions=config.regions)
        unfollowed = own if isinstance(own, str) else None
        self._analyses = Analyses(gm, roles, passes, config, self._records, unfollowed, cached=cached)
        packed = PackedRun(passes, self._records)
        self._ordinary = Ordinary(gm, config.compiler, self._records)
        self._rows = RowsRun(gm, roles, self._analyses, packed, self._ordinary, config, self._records)
        size = PackedSize(config.compiler.records_graphs, 1 if self._own is None else self._own.ranks)
        self._native = NativeRun(gm, roles, packed, self._records, size)
        self._counts = ColumnCounts(gm, roles, self._analyses)
        self._watch = SharingWatch(gm, roles, config, cached=cached)
        self._attends = _attends_on_tree(gm)
        """Whether the graph is of a converted model, whole or a block, which gets distinct tokens and their tree."""

    @property
    def reports(self) -> list[GraphReport]:
        """One report per model that ran the graph."""
        return self._records.all()

    @property
    def rewrites(self) -> list[Rewritten]:
        """The rewritten graphs, one per variant of a shape."""
        return self._analyses.rewrites

    @property
    def analysis(self) -> Analysis | None:
        """Return the last analysis, for the inspector: of a packed shape, or of a refused one."""
        return self._analyses.latest

    def __call__(self, *given: Any) -> Any:
        started = time.perf_counter()
        try:
            results = self._run(given)
            report = self._records.report
            report.log.seconds = time.perf_counter() - started
            if report.compiles and report.has_tokens and not report.steps.is_announced:
                announce(self, report)
            return results
        except BaseException:
            raised_on_forest()
            raise

    def _run(self, given: Sequence[Any]) -> Any:
        if self._changes is not None:
            self._changes(given)
        given = given if self._towers is None else [*given, *self._towers(given)]
        args = as_tensors(given, self._numbers) if self._numbers else given
        self._records.begin([x for x, role in zip(args, self._given_roles, strict=True) if role == "parameter"])
        args = args if self._own is None else self._own.inputs(args)
        # Inputs are read on the host: each is copied once in a call, all with one wait.
        given, args = args, self._take(args)
        with reading(
            [x for x, role in zip(args, self.roles, strict=True) if role == "input" and isinstance(x, Tensor)]
        ):
            results = self._run_on(args)
        if args is not given:
            hand_on_changes(given, args)
        return results

    def _take(self, given: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs with plain tensors of what other graphs hand on.

        They have the tokens that ran, if nothing here but packed code reads them.
        """
        if not [x for x in given if isinstance(x, RowsBetween)]:  # one call in a steady step
            return given
        args = taken(given)
        if not holed(args):
            return args
        shape = None if self._attends or IN_USE.get() is not None else self._analyses.shape(args)
        if isinstance(shape, Shape):
            tensors = self._analyses.tensors(args)
            made = [tensors[i] for i in shape.analysis.made_inputs]
            if all(any(x is y for y in made) for x in holed(args)):
                return args
        return whole(args)

    def _run_on(self, args: Sequence[Any]) -> Any:
        use = IN_USE.get()
        forest = None if use is None else use.forest
        cut = why_cut(self.gm) if forest is not None and "parameter" in self.roles else None
        if cut is not None:
            raise UnsupportedError(f"{_WHOLE}Dynamo cut it: {cut}; {_WHERE}")
        if self._attends and forest is None:  # the model is converted: its hooks have found the tree
            return self._run_ordinary(args, None, None)
        by_column = None if forest is None else self._native.by_column(args, forest)
        shape = (
            self._analyses.shape(args)
            if by_column is None
            else self._analyses.shape(by_column.args, form=by_column.form)
        )
        if isinstance(shape, Reason):
            of_images = forest is None and shape.cause is Cause.TRACE and is_in_tower()  # it has no tokens to share
            return self._run_ordinary(args, shape if shape.text and not of_images else None, forest)
        if forest is None:
            results = self._rows.run(shape, args)
            if not self._records.report.is_settled:
                self._watch.look(self._records.report, args)
            return results
        if by_column is None:
            inputs = [x for x, role in zip(args, self.roles, strict=True) if role == "input"]
            raise wrong_row(forest, [x.shape for x in inputs if isinstance(x, Tensor)])
        # Sizes of shards derive from the number of columns, so a graph over ranks proves nothing about it.
        if self._own is None and not shape.analysis.expansions and not shape.analysis.picks:
            self._counts.check(args, by_column.args, forest, shape.analysis.known, by_column.form)
        tensors = self._analyses.tensors
        return self._native.run(shape, tensors(args), tensors(by_column.args), forest, by_column.form)

    def _run_ordinary(self, args: Sequence[Any], reason: Reason | None, forest: Forest | None) -> Any:
        if forest is not None and (reason or self._records.report.has_tokens):
            code = "" if reason is None else reason.code
            raise UnsupportedError(f"under treefx.use(forest) the model must run packed, but {reason}", code)
        if forest is not None and "parameter" in self.roles:
            raise UnsupportedError(_WHOLE + "one of its graphs gets no token ids; give the model input_ids")
        results = self._ordinary.instead(args, reason=reason)
        if self._attends:
            self._records.report.note_block()
        elif forest is None and reason is not None and reason.note is not None:
            reason.note(self._analyses.tensors(args), results)
            self._records.report.feeds_others = True
        self._watch.look(self._records.report, args)
        return results


def _attends_on_tree(gm: fx.GraphModule) -> bool:
    bodies = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return any(node.target in _ON_TREE for body in bodies for node in body.graph.nodes)
