"""Explain a model and a batch before anything is compiled or run: ``treefx.explain``."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import Unsupported

from treefx.config import Config
from treefx.errors import InputError, UnsupportedError
from treefx.inputs.sizes import sizes_of_call
from treefx.inspection.graph_diff import restorations
from treefx.inspection.inner_graphs import trace_inner_graphs
from treefx.inspection.inspector import statistics
from treefx.inspection.node_times import time_nodes
from treefx.inspection.report.material import Material
from treefx.inspection.report.report import Report, made_of
from treefx.inspection.reported import material_of
from treefx.inspection.score_text import describe_attentions
from treefx.inspection.text import summarise
from treefx.kernels.memory import lasting
from treefx.passes.analysis import Analysis, Rewritten, Variant
from treefx.passes.pipeline import build_passes, rewrite
from treefx.passes.runner import Pass
from treefx.passes.trace.heads import tell_masks
from treefx.runtime.analyses import Analyses
from treefx.runtime.call_plan import Batch
from treefx.runtime.dynamo import keep_graphs_whole, reads_cache, role_of
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import Records
from treefx.runtime.shapes import Shape
from treefx.runtime.ways.rows import RowsRun
from treefx.runtime.whole.numbers import as_tensors, numbers_as_tensors
from treefx.torch_patches.compiling import compiling

__all__ = ["explain"]


def explain(model: Any, batch: Any, options: Mapping[str, Any] | None = None, *, timed: bool = False) -> Report:
    """Explain a model and a batch without running, compiling or changing either.

    Dynamo captures the model, the passes analyse and rewrite the graph on fake tensors, and the trie of the batch is
    built. Then the call ends: no operator of the model has run, and no code was made.

    Args:
        model: A module or a function, compiled or not.
        batch: The arguments of a call by name, or the token ids.
        options: Of the backend, as for ``torch.compile(backend="treefx", options=...)``.
        timed: Whether to run the forward of a batch that would be packed, on rows and on distinct tokens, one operator
            at a time without gradients, for ``seconds_before`` and ``seconds_after`` of operators and modules. Weights,
            buffers and the random state stay.

    Returns:
        A report as of ``treefx.inspect`` after that call. A model that Dynamo cannot capture as one graph is not
        analysed: its verdict names the line.

    Raises:
        InputError: The model or the batch is of another kind, or no graph was captured.
    """
    if not isinstance(model, nn.Module) and not callable(model):
        raise InputError(f"treefx.explain expects a model or a function, got {type(model).__name__}")
    if not isinstance(batch, Tensor | Mapping):
        raise InputError(
            f"treefx.explain expects a batch as a dict of the model's arguments or a tensor of token ids, got "
            f"{type(batch).__name__}"
        )
    keep_graphs_whole()
    plain = getattr(model, "_orig_mod", model)
    dry = _Dry(Config.from_options(dict(options or {})), getattr(plain, "__name__", type(plain).__name__), timed)
    call: Any = torch.compile(_with_own_code(plain), backend=dry.backend, fullgraph=True)
    try:
        call(*([batch] if isinstance(batch, Tensor) else []), **(batch if isinstance(batch, Mapping) else {}))
    except _Done:
        return dry.report()
    except Unsupported as error:
        return dry.cut(error)
    raise InputError("treefx.explain expects a model that computes with tensors, but Dynamo captured no graph of it")


def _with_own_code(model: Any) -> Any:
    """Wrap a function in fresh code, so that Dynamo's caches of the dry run die with it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "explain", None, call.__closure__)


class _Done(Exception):
    """Ends the call: all is known."""


@dataclass
class _Dry:
    """Collect the findings of a dry run, in place of the packed and ordinary graphs.

    It serves ``RowsRun``.
    """

    config: Config
    name: str = ""
    timed: bool = False
    records: Records | None = None
    passes: Sequence[Pass] = ()
    analyses: Analyses | None = None
    rewritten: Rewritten | None = None
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def backend(self) -> Any:
        """The backend of ``torch.compile``: its graph plans its first call and ends it."""

        def treefx(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
            nodes = gm.graph.find_nodes(op="placeholder")
            roles = [role_of(node, example) for node, example in zip(nodes, examples, strict=True)]
            cached, gm = reads_cache(gm, roles), tell_masks(gm)
            return lambda *args: self.plan(gm, roles, args, cached=cached)

        setattr(treefx, "compiler_name", "treefx")  # Dynamo traces here as for the backend
        return treefx

    def plan(self, gm: fx.GraphModule, roles: list[str], given: Sequence[Any], *, cached: bool) -> None:
        """Plan a call as the transparent level does.

        Raises:
            _Done: Always.
        """
        gm, numbers = numbers_as_tensors(gm, roles)
        self.records, self.graphs = Records(gm), {"captured": gm}
        self.records.begin(())  # the steps of the model do not count this call
        self.passes = build_passes(self.config.compiler, self.config.disable_passes)
        analyses = Analyses(gm, roles, self.passes, self.config, self.records, cached=cached)
        self.analyses, args = analyses, as_tensors(given, numbers)
        try:
            shape = analyses.shape(args)
            if isinstance(shape, Reason):
                self.instead(args, reason=shape if shape.text else None)
            stand_in: Any = self
            RowsRun(gm, roles, analyses, stand_in, stand_in, self.config, self.records).run(shape, args)  # type: ignore[arg-type]
        except UnsupportedError as error:  # on_unsupported="error"
            self.instead(args, reason=Reason(Cause.OPERATOR, error.text, error.code))

    def run(self, shape: Shape, variant: Variant, tensors: Sequence[Tensor], batch: Batch, cut: Any = None) -> None:
        """In place of ``PackedRun.run``: rewrite, and partition the graph of a training step.

        Raises:
            _Done: Always.
        """
        assert self.records is not None
        report = self.records.report
        report.ran, report.way, report.reason = "packed", "rows", None
        with compiling, lasting():
            self.rewritten = rewrite(shape.analysis, variant, tensors, self.passes)
            self.graphs["rewritten"] = self.rewritten.gm
            if torch.is_grad_enabled():
                self.graphs |= trace_inner_graphs(self.rewritten)
        self._batch = batch  # the report reads it weakly
        if self.timed:
            values, laid_out = sizes_of_call(shape.analysis.batch, tensors)
            sizes = values.values()
            packed = [*laid_out, *batch.metadata, batch.size, *sizes]
            self.seconds["captured"] = time_nodes(shape.analysis.gm, laid_out)
            self.seconds["rewritten"] = time_nodes(self.rewritten.gm, packed)
        raise _Done

    def instead(self, args: Sequence[Any], *, reason: Reason | None) -> None:
        """In place of ``Ordinary.instead``.

        Raises:
            _Done: Always.
        """
        assert self.records is not None
        self.records.report.note_rows(reason)
        raise _Done

    def report(self) -> Report:
        """Return the report of the dry run."""
        assert self.records is not None and self.analyses is not None
        first = self.records.report
        first.seconds.update(self._analysis.seconds if self._analysis is not None else {})
        stats = statistics([first], [first], first, self.config, self.name)
        graphs = self.graphs if first.ran == "packed" else {"captured": self.graphs["captured"]}
        kernels = {} if self.rewritten is None else describe_attentions(graphs["captured"], graphs["rewritten"])
        restored = restorations(graphs["backward"]) if "backward" in graphs else []
        text = summarise(stats, graphs, restored)
        shown = graphs if first.ran == "packed" else {}
        material = material_of(first, [first], self._analysis, self.rewritten, shown, stats, text, ())
        material.is_dry, material.seconds = True, self.seconds
        return made_of(material, kernels)

    @property
    def _analysis(self) -> Analysis | None:
        if self.rewritten is not None:
            return self.rewritten.analysis
        return None if self.analyses is None else self.analyses.latest

    def cut(self, error: Unsupported) -> Report:
        """A model that Dynamo cannot capture as one graph."""
        gm = fx.GraphModule(nn.Module(), fx.Graph())
        first = Records(gm).report
        line = getattr(error, "real_stack", None) or ()
        place = f" at {line[-1].filename}:{line[-1].lineno} `{line[-1].line}`" if line else ""
        first_line = next(iter(str(error).splitlines()), "")
        first.note_rows(Reason(Cause.GRAPH_BREAK, f"Dynamo cannot capture the model as one graph{place}: {first_line}"))
        stats = statistics([first], [first], first, self.config, self.name)
        text = summarise(stats, {"captured": gm}, [])
        material = Material(stats, text, gm, code=first.reason.code, reason=first.reason.text, is_dry=True)  # type: ignore[union-attr]
        return made_of(material, {})
