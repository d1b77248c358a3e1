"""One graph of Dynamo at run time: analyse per shape, build the trie per call, choose a variant, run, hand back rows."""

from __future__ import annotations

import math
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
from treefx.lazy import Deferred, LazyRows, lazy_rows
from treefx.ordinary import Ordinary
from treefx.passes.layout import expand_rows
from treefx.passes.padding import Padding
from treefx.passes.pipeline import Analysis, Rewritten, Variant, analyse, compile_variant, is_packed, rewrite
from treefx.report import GraphReport

__all__ = ["CompiledGraph"]


class _Executable:
    """A compiled variant, good for the token counts its guards admit."""

    def __init__(self, rewritten: Rewritten, run: Any) -> None:
        self.rewritten, self.run = rewritten, run
        self._admitted: dict[tuple[int, int], bool] = {}

    def admits(self, tokens: int) -> bool:
        """Whether every guard of the compilation (nobody else checks them) holds for this many tokens."""
        environment = self.rewritten.mode.shape_env
        assert environment is not None
        key = (tokens, len(environment.guards))
        if key not in self._admitted:
            symbol = self.rewritten.tokens.node.expr
            self._admitted[key] = all(bool(guard.expr.xreplace({symbol: tokens})) for guard in environment.guards)
        return self._admitted[key]


class _Shape:
    """Everything known for one shape of inputs."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.executables: dict[Variant, list[_Executable]] = {}
        self.padding = Padding(analysis)


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
        self._outputs = _OutputUse()
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
        """The transparent level: build the trie of the rows, then run packed if that pays."""
        self._outputs.settle(shape.analysis)
        seen, keep = self._keep(shape, args)
        hidden = None if seen is None or keep is None else keep & ~seen
        if hidden is not None and not shape.padding.is_defined(args, hidden):
            return self._run_ordinary(args, fallback="padding that sees nothing is read by the loss or the caller")
        keeps_padding = hidden is not None and bool(hidden.any())
        identity = shape.analysis.identity_with_padding if keeps_padding else shape.analysis.identity
        keys = [args[i] for i in identity]
        batch = build_batch(keys, keep)
        raw = keys[0].numel() if seen is None else int(seen.sum())
        self.report.raw_tokens, self.report.tokens = raw, batch.tokens
        if self.config.min_sharing > 1.0 and raw < self.config.min_sharing * batch.tokens:
            self.report.tokens = raw
            return self._run_ordinary(args, fallback=None)
        detached = self._outputs.detached(shape.analysis)
        results = self._run(shape, Variant(keep_padding=keeps_padding, detached=detached), args, batch)
        return self._hand_back(shape, args, results, batch, detached)

    def _keep(self, shape: _Shape, args: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
        """The positions that others see, and those that have to run; None where that is all of them."""
        seen = shape.padding.seen(args)
        if seen is None:
            return None, None
        if self.config.padding == "drop":
            return seen, seen
        return seen, torch.ones_like(seen) if self._outputs.read else seen | shape.padding.read(args)

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
        results = self._run(shape, Variant(native=True), [given[node] for node in placeholders], batch)
        return tuple(self._on_rows(shape, i, value, batch) for i, value in enumerate(results))

    def _run(self, shape: _Shape, variant: Variant, args: Sequence[Any], batch: Batch) -> Any:
        executable = self._executable(shape, variant, args, batch.size)
        self.report.fallback, self.report.ran = None, "packed"
        with torch._C._DisableAutocast():
            results: Sequence[Any] = executable.run(*args, *batch.metadata)
        return results

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

    # Outputs ----------------------------------------------------------------------------------------------------------

    def _on_rows(self, shape: _Shape, position: int, value: Any, batch: Batch) -> Any:
        """An output as the caller expects it."""
        dims = shape.analysis.packed_outputs.get(position)
        return value if dims is None else expand_rows(value, dims, batch.metadata[3])

    def _hand_back(
        self, shape: _Shape, args: Sequence[Any], results: Sequence[Any], batch: Batch, detached: frozenset[int]
    ) -> tuple[Any, ...]:
        return tuple(
            self._lazily(shape, args, i, value, batch) if i in detached else self._on_rows(shape, i, value, batch)
            for i, value in enumerate(results)
        )

    def _lazily(self, shape: _Shape, args: Sequence[Any], position: int, value: Tensor, batch: Batch) -> Tensor:
        """An output that nobody has read so far: expanded, or computed anew, when somebody does."""

        def compute() -> Tensor:
            self._outputs.read.add(position)
            complete = not bool((batch.metadata[3] < 0).any())
            if complete or self.config.padding == "drop":
                return self._on_rows(shape, position, value, batch)  # type: ignore[no-any-return]
            result: Tensor = self._run_rows(shape, args)[position]
            return result.rows if isinstance(result, LazyRows) else result

        def differentiate(grad: Tensor) -> Sequence[Tensor | None]:
            self._outputs.read.add(position)
            self._outputs.differentiated.add(position)
            leaves = [x.detach().requires_grad_() if _needs_grad(x) else x for x in args]
            with torch.enable_grad():
                result = self._run_rows(shape, leaves)[position]
            inputs = [x for x in leaves if _needs_grad(x)]
            return torch.autograd.grad(result, inputs, grad, allow_unused=True)

        dims = shape.analysis.packed_outputs[position]
        rows = [math.prod(factor.size for factor in dim) for dim in dims]
        return lazy_rows(Deferred(rows, value, compute, differentiate, [x for x in args if _needs_grad(x)]))


def _needs_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


class _OutputUse:
    """Which packed outputs of a graph its callers have read, and which they have differentiated."""

    def __init__(self) -> None:
        self.read: set[int] = set()
        self.differentiated: set[int] = set()
        self._settled = False

    def settle(self, analysis: Analysis) -> None:
        """Without a loss of its own, or where a second run would draw other random numbers, all outputs are in use."""
        if not self._settled and (not analysis.returns_loss or analysis.draws_random_numbers):
            self.read |= set(analysis.packed_outputs)
            self.differentiated |= set(analysis.packed_outputs)
        self._settled = True

    def detached(self, analysis: Analysis) -> frozenset[int]:
        """The outputs that leave lazily."""
        return frozenset(analysis.packed_outputs) - self.differentiated


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
