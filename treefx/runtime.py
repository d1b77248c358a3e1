"""One graph of Dynamo at run time: analyse per shape, build the trie per call, choose a variant, run, hand back rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treefx.batch import Batch, build_batch, forest_batch
from treefx.config import Config
from treefx.context import current_forest
from treefx.errors import ForestError, TreefxError, UnsupportedError
from treefx.forest import Forest
from treefx.ordinary import Ordinary
from treefx.passes.padding import Padding
from treefx.passes.pipeline import Analysis, Rewritten, Variant, analyse, compile_variant, is_packed, rewrite
from treefx.report import GraphReport

__all__ = ["CompiledGraph"]


class _Executable:
    """A compiled variant, good for the token counts its guards admit."""

    def __init__(self, rewritten: Rewritten, run: Any) -> None:
        self.rewritten, self.run = rewritten, run
        self._admitted: set[tuple[int, int]] = set()

    def admits(self, tokens: int) -> bool:
        """Whether every guard of the compilation (nobody else checks them) holds for this many tokens."""
        environment = self.rewritten.mode.shape_env
        assert environment is not None
        key = (tokens, len(environment.guards))
        if key not in self._admitted:
            symbol = self.rewritten.inputs[-2].shape[0].node.expr
            if not all(guard.expr.xreplace({symbol: tokens}) in (True, torch.sym_not(False)) or bool(guard.expr.xreplace({symbol: tokens})) for guard in environment.guards):
                return False
            self._admitted.add(key)
        return True


class _Shape:
    """Everything known for one shape of inputs."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.executables: dict[Variant, list[_Executable]] = {}
        self.padding = Padding(analysis) if analysis.tokens is not None else None


class CompiledGraph:
    """What the backend returns to Dynamo. Called with the graph's inputs, returns its outputs.

    Args:
        gm: Dynamo's graph, never changed.
        roles: "parameter", "buffer" or "input" per placeholder.
        config: The options.
    """

    def __init__(self, gm: fx.GraphModule, roles: list[str], config: Config) -> None:
        self.gm, self.roles, self.config = gm, roles, config
        self.report = GraphReport(graphs={"captured": gm})
        self.seen_parameters: set[int] = set()
        self._shapes: dict[tuple[Any, ...], _Shape | str] = {}
        self._ordinary = Ordinary(gm, config.inner, self.report)

    def __call__(self, *args: Any) -> Any:
        self._remember_parameters(args)
        self.report.calls += 1
        forest = current_forest()
        shape = self._shape(args)
        if isinstance(shape, str):
            return self._run_ordinary(args, fallback=shape or None, forest=forest)
        if forest is not None:
            return self._run_native(shape, args, forest)
        return self._run_rows(shape, args)

    def _remember_parameters(self, args: Sequence[Any]) -> None:
        if not self.seen_parameters:
            self.seen_parameters = {id(x) for x, role in zip(args, self.roles, strict=True) if role == "parameter"}

    def _shape(self, args: Sequence[Any]) -> _Shape | str:
        """The analysis for these shapes, or the reason why such a call runs ordinarily ("" for none)."""
        key = tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x, role in zip(args, self.roles, strict=True) if role == "input")
        if key not in self._shapes:
            if len(self._shapes) >= self.config.max_shapes:
                return f"more than {self.config.max_shapes} shapes of inputs (option max_shapes)"
            self._shapes[key] = self._analyse(args)
        return self._shapes[key]

    def _analyse(self, args: Sequence[Any]) -> _Shape | str:
        try:
            analysis = analyse(self.gm, args, self.roles)
        except TreefxError:
            raise
        except Exception as error:
            return f"the graph could not be traced: {type(error).__name__}: {error}"
        report = self.report
        report.shapes += 1
        report.seconds.update(analysis.seconds)
        if analysis.tokens is None:
            return ""
        report.has_tokens = True
        report.attention_rewritten = len(analysis.attentions)
        report.expansions = [vars(item) | {} for item in analysis.expansions]
        return self._refusal(analysis) or _Shape(analysis)

    def _refusal(self, analysis: Analysis) -> str | None:
        unsupported = "; ".join(f"{item.op} {item.reason} ({item.line})" for item in analysis.expansions)
        if analysis.expansions and self.config.on_unsupported == "error":
            raise UnsupportedError(
                f"every operator should have a token-wise law (on_unsupported='error'), but {unsupported}; "
                "use on_unsupported='expand' to compute these on expanded rows"
            )
        if analysis.expansions and self.config.on_unsupported == "fallback":
            return f"without a token-wise law: {unsupported}"
        if not is_packed(analysis):
            return f"no attention could be rewritten: {unsupported or 'none found'}"
        return None

    # The three ways to run -------------------------------------------------------------------------------------------

    def _run_ordinary(self, args: Sequence[Any], *, fallback: str | None, forest: Forest | None = None) -> Any:
        if forest is not None and (fallback or self.report.has_tokens):
            raise UnsupportedError(f"under treefx.use(forest) the model must run packed, but {fallback}")
        self.report.fallback, self.report.ran = fallback, "ordinary"
        return self._ordinary(*args)

    def _run_rows(self, shape: _Shape, args: Sequence[Any]) -> Any:
        assert shape.padding is not None
        keep = shape.padding.keep(args)
        keys = [args[i] for i in shape.analysis.identity]
        variant, dropped = self._variant(shape, args, keep)
        if variant is None:
            return self._run_ordinary(args, fallback="padding that sees nothing is read by the loss or the caller")
        batch = build_batch(keys, keep if dropped else None)
        raw = keys[0].numel() if keep is None else int(keep.sum())
        self.report.raw_tokens, self.report.tokens = raw, batch.tokens
        if raw < self.config.min_sharing * batch.tokens and self.config.min_sharing > 1.0:
            self.report.tokens = raw
            return self._run_ordinary(args, fallback=None)
        return self._run(shape, variant, args, batch)

    def _variant(self, shape: _Shape, args: Sequence[Any], keep: Tensor | None) -> tuple[Variant | None, bool]:
        """The variant for a call, and whether padding is dropped; None where only the ordinary graph is exact."""
        if keep is None:
            return Variant(), False
        assert shape.padding is not None
        if self.config.padding == "drop" or shape.padding.may_drop(args, keep):
            return Variant(), True
        return (Variant(keep_padding=True) if shape.padding.all_see(args, keep) else None), False

    def _run_native(self, shape: _Shape, args: Sequence[Any], forest: Forest) -> Any:
        tokens = shape.analysis.tokens
        assert tokens is not None
        placeholders = shape.analysis.gm.graph.find_nodes(op="placeholder")
        given = dict(zip(placeholders, args, strict=True))
        ids = given[tokens.ids]
        if ids.shape != (1, forest.num_tokens) or not torch.equal(ids[0].cpu(), forest.tokens.cpu().to(ids.dtype)):
            raise ForestError(
                f"under treefx.use(forest) the model expects the forest's packed row, input_ids [1, {forest.num_tokens}], "
                f"got {list(ids.shape)} with other tokens; call it with **forest.model_inputs()"
            )
        batch = forest_batch(forest, ids.device)
        for node in tokens.inputs:
            if node is not tokens.ids:
                given[node] = _by_column(node.name, given[node], forest)
        self.report.raw_tokens, self.report.tokens = forest.raw_tokens, forest.num_tokens
        return self._run(shape, Variant(native=True), [given[node] for node in placeholders], batch)

    def _run(self, shape: _Shape, variant: Variant, args: Sequence[Any], batch: Batch) -> Any:
        executable = self._executable(shape, variant, args, batch.size)
        self.report.fallback, self.report.ran = None, "packed"
        with torch._C._DisableAutocast():
            results = executable.run(*args, *batch.metadata)
        return self._hand_back(executable.rewritten, results, batch)

    def _executable(self, shape: _Shape, variant: Variant, args: Sequence[Any], tokens: int) -> _Executable:
        known = shape.executables.setdefault(variant, [])
        for executable in known:
            if executable.admits(tokens):
                return executable
        started = time.perf_counter()
        rewritten = rewrite(shape.analysis, variant, args)
        self.report.seconds["rewrite"] = time.perf_counter() - started
        self.report.graphs["rewritten"] = rewritten.gm
        run = compile_variant(rewritten, self.config.inner, self.report.graphs.__setitem__)
        self.report.seconds["compile"] = time.perf_counter() - started - self.report.seconds["rewrite"]
        self.report.compiles += 1
        known.append(_Executable(rewritten, run))
        return known[-1]

    def _hand_back(self, rewritten: Rewritten, results: Sequence[Any], batch: Batch) -> Any:
        from treefx.passes.layout import expand_rows

        outputs = []
        for value, output in zip(results, rewritten.outputs, strict=True):
            outputs.append(value if output.dims is None else expand_rows(value, output.dims, batch.metadata[3]))
        return tuple(outputs)


def _by_column(name: str, value: Tensor, forest: Forest) -> Tensor:
    """An input of the native level as a function of the column: positions, or a mask of ones."""
    count = forest.num_tokens
    if value.shape == (1, count) and torch.equal(value[0].cpu().long(), forest.depth.cpu().long()):
        return torch.arange(count, device=value.device, dtype=value.dtype)[None]
    if bool((value == 1).all()):
        return value
    raise ForestError(
        f"under treefx.use(forest) {name} must be the forest's depth (position_ids) or all ones (attention_mask), got other "
        "values; pass **forest.model_inputs()"
    )
