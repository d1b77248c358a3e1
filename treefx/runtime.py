"""One graph of Dynamo at run time: analyse per shape, build the trie per call, choose a variant, run, return rows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import CompileContext

from treefx.batch import Batch, build_batch, forest_batch
from treefx.config import Config
from treefx.context import current_forest
from treefx.errors import ForestError, TreefxError, UnsupportedError
from treefx.forest import Forest
from treefx.lazy import Deferred, LazyRows, lazy_rows
from treefx.ordinary import Ordinary
from treefx.passes.layout import expand_rows, rows_in_order
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

    def __init__(self, analysis: Analysis, args: Sequence[Any]) -> None:
        self.analysis = analysis
        self.executables: dict[Variant, list[_Executable]] = {}
        self.padding = Padding(analysis)
        read = analysis.constants.read if analysis.constants is not None else set()
        self._buffers = {i: (args[i].data_ptr(), args[i]._version) for i in read}

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the buffers whose values entered a proof are still the same."""
        return all((args[i].data_ptr(), args[i]._version) == seen for i, seen in self._buffers.items())


class CompiledGraph:
    """What the backend returns to Dynamo. Called with the graph's inputs, returns its outputs.

    Args:
        gm: Dynamo's graph, never changed.
        roles: "parameter", "buffer" or "input" per placeholder.
        config: The options.
    """

    def __init__(self, gm: fx.GraphModule, roles: list[str], config: Config) -> None:
        self.gm, self.roles, self.config = gm, roles, config
        compile_id = CompileContext.current_compile_id()
        self._frame = None if compile_id is None else compile_id.frame_id
        self._graphs: dict[str, fx.GraphModule] = {"captured": gm}
        self._reports: dict[int, GraphReport] = {}
        self.report = self._report_of(())
        self._outputs = _OutputUse()
        self._shapes: dict[tuple[Any, ...], list[_Shape] | str] = {}
        self._ordinary = Ordinary(gm, config.inner, self._count_ordinary)

    @property
    def reports(self) -> list[GraphReport]:
        """One report per model that ran the graph."""
        return list(self._reports.values())

    @property
    def rewrites(self) -> list[Rewritten]:
        """The rewritten graphs, one per variant of a shape."""
        shapes = [shape for known in self._shapes.values() if not isinstance(known, str) for shape in known]
        return [item.rewritten for shape in shapes for found in shape.executables.values() for item in found]

    def _report_of(self, parameters: tuple[Any, ...]) -> GraphReport:
        """The report of the model whose parameters these are."""
        key = id(parameters[0]) if parameters else 0
        if key not in self._reports:
            ids = {id(x) for x in parameters}
            self._reports[key] = GraphReport(frame=self._frame, graphs=self._graphs, parameters=ids)
        return self._reports[key]

    def _count_ordinary(self, seconds: float) -> None:
        self.report.compiles += 1
        self.report.seconds["ordinary"] = self.report.seconds.get("ordinary", 0.0) + seconds

    def __call__(self, *args: Any) -> Any:
        self.report = self._report_of(tuple(x for x, role in zip(args, self.roles, strict=True) if role == "parameter"))
        self.report.count_call()
        forest = current_forest()
        by_column = None if forest is None else self._by_column(args, forest)
        shape = self._shape(args if by_column is None else by_column)
        if isinstance(shape, str):
            return self._run_ordinary(args, fallback=shape or None, forest=forest)
        if forest is None:
            return self._run_rows(shape, args)
        if by_column is None:
            raise _wrong_row(
                forest,
                [x.shape for i, x in enumerate(args) if self.roles[i] == "input" and isinstance(x, Tensor)],
            )
        return self._run_native(shape, args, by_column, forest)

    def _shape(self, args: Sequence[Any]) -> _Shape | str:
        """The analysis for these shapes, or the reason why such a call runs ordinarily ("" for none)."""
        consecutive = frozenset(i for i, x in enumerate(args) if self.roles[i] == "input" and _counts_up(x))
        inputs = [x for x, role in zip(args, self.roles, strict=True) if role == "input"]
        key = (consecutive, *[tuple(x.shape) if isinstance(x, Tensor) else x for x in inputs])
        known = self._shapes.get(key)
        if isinstance(known, str):
            return known
        fitting = [shape for shape in known or () if shape.holds(args)]
        shape = fitting[0] if fitting else self._new_shape(key, args, consecutive)
        if isinstance(shape, _Shape):
            self.report.has_tokens = True
            self.report.attention_rewritten = len(shape.analysis.attentions)
            self.report.expansions = [asdict(item) for item in shape.analysis.expansions]
        return shape

    def _new_shape(self, key: tuple[Any, ...], args: Sequence[Any], consecutive: frozenset[int]) -> _Shape | str:
        known = self._shapes.get(key, [])
        assert not isinstance(known, str)
        count = sum(len(shapes) for shapes in self._shapes.values() if not isinstance(shapes, str))
        if count >= self.config.max_shapes:
            return f"more than {self.config.max_shapes} shapes of inputs (option max_shapes)"
        shape = self._analyse(args, consecutive)
        self._shapes[key] = shape if isinstance(shape, str) else [*known, shape]
        return shape

    def _analyse(self, args: Sequence[Any], consecutive: frozenset[int]) -> _Shape | str:
        try:
            analysis = analyse(self.gm, args, self.roles, consecutive)
        except TreefxError:
            raise
        except Exception as error:
            return f"the graph could not be traced: {type(error).__name__}: {error}"
        self.report.shapes += 1
        self.report.seconds.update(analysis.seconds)
        if analysis.tokens is None:
            return ""
        self.report.has_tokens = True
        self.report.expansions = [asdict(item) for item in analysis.expansions]
        return self._refusal(analysis) or _Shape(analysis, args)

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
        redundant = shape.padding.redundant(args, keep)
        variant = Variant(keep_padding=keeps_padding, detached=detached, redundant=redundant)
        results = self._run(shape, variant, args, batch)
        return self._hand_back(shape, args, results, batch, detached)

    def _keep(self, shape: _Shape, args: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
        """The positions that others see, and those that have to run; None where that is all of them."""
        seen = shape.padding.seen(args)
        if seen is None:
            return None, None
        if self.config.padding == "drop":
            return seen, seen
        return seen, torch.ones_like(seen) if self._outputs.read else seen | shape.padding.read(args)

    def _by_column(self, args: Sequence[Any], forest: Forest) -> list[Any] | None:
        """The inputs of a native call as functions of the column, or None for a graph without the packed row.

        Where Dynamo left the length symbolic, they are as long as the deepest path rounded up, not as the forest: one
        compilation then serves all forests of about that depth.
        """
        count = forest.num_tokens
        packed = [
            isinstance(x, Tensor) and x.shape == (1, count) and self.roles[i] == "input" for i, x in enumerate(args)
        ]
        if not any(packed):
            return None
        dynamic = any(isinstance(x, int) and x == count for x in args)
        columns = _capacity(forest) if dynamic else count
        result = [_columnar(x, forest, columns) if is_packed else x for x, is_packed in zip(args, packed, strict=True)]
        return [columns if isinstance(x, int) and not isinstance(x, bool) and x == count else x for x in result]

    def _run_native(self, shape: _Shape, args: Sequence[Any], by_column: list[Any], forest: Forest) -> Any:
        """The native level: the graph's row is the packed row of a forest."""
        tokens = shape.analysis.tokens
        assert tokens is not None
        position = shape.analysis.gm.graph.find_nodes(op="placeholder").index(tokens.ids)
        ids = args[position]
        if ids.shape != (1, forest.num_tokens) or not torch.equal(ids[0].cpu(), forest.tokens.cpu().to(ids.dtype)):
            raise _wrong_row(forest, [ids.shape])
        batch = forest_batch(forest, ids.device)
        redundant = shape.padding.redundant(by_column, None)
        self.report.raw_tokens, self.report.tokens = forest.raw_tokens, forest.num_tokens
        by_column[position] = torch.nn.functional.pad(ids, (0, batch.size - batch.tokens))
        results = self._run(shape, Variant(native=True, redundant=redundant), by_column, batch)
        packed = shape.analysis.packed_outputs
        return tuple(
            rows_in_order(value[None, : batch.tokens], packed[i]) if i in packed else value
            for i, value in enumerate(results)
        )

    def _run(self, shape: _Shape, variant: Variant, args: Sequence[Any], batch: Batch) -> Any:
        executable = self._executable(shape, variant, args, batch.size)
        self.report.fallback, self.report.ran = None, "packed"
        with torch._C._DisableAutocast():
            results: Sequence[Any] = executable.run(*[x for x in args if isinstance(x, Tensor)], *batch.metadata)
        return results

    def _executable(self, shape: _Shape, variant: Variant, args: Sequence[Any], tokens: int) -> _Executable:
        known = shape.executables.setdefault(variant, [])
        for executable in known:
            if executable.admits(tokens):
                return executable
        started = time.perf_counter()
        rewritten = rewrite(shape.analysis, variant, args)
        self.report.seconds["rewrite"] = time.perf_counter() - started
        self._graphs.pop("backward", None)  # of another variant; the cache of AOTAutograd may not show this one's
        self._graphs.pop("forward", None)
        self._graphs["rewritten"] = rewritten.gm
        run = compile_variant(rewritten, self.config.inner, self._graphs.__setitem__)
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
        self,
        shape: _Shape,
        args: Sequence[Any],
        results: Sequence[Any],
        batch: Batch,
        detached: frozenset[int],
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
        """Without a loss of its own, or where a second run would have other effects, all outputs are in use."""
        if not self._settled and (not analysis.returns_loss or analysis.has_side_effects):
            self.read |= set(analysis.packed_outputs)
            self.differentiated |= set(analysis.packed_outputs)
        self._settled = True

    def detached(self, analysis: Analysis) -> frozenset[int]:
        """The outputs that leave lazily."""
        return frozenset(analysis.packed_outputs) - self.differentiated


def _counts_up(x: Any) -> bool:
    """Whether an input [B, T] of integers counts up by one along each row."""
    if not isinstance(x, Tensor) or x.dim() != 2 or x.is_floating_point() or x.dtype is torch.bool or x.shape[1] < 2:
        return False
    return bool((x == x[:, :1] + torch.arange(x.shape[1], device=x.device)).all())


def _wrong_row(forest: Forest, shapes: Sequence[Sequence[int]]) -> ForestError:
    given = ", ".join(str(list(shape)) for shape in shapes)
    return ForestError(
        f"under treefx.use(forest) the model expects the forest's packed row, input_ids [1, {forest.num_tokens}] "
        f"of its tokens, got inputs of shape {given} with others; call it with **forest.model_inputs()"
    )


def _capacity(forest: Forest) -> int:
    """Columns to compile for: the longest path rounded up to a power of two."""
    return max(16, 1 << int(forest.depth.max()).bit_length())


def _columnar(value: Tensor, forest: Forest, columns: int) -> Tensor:
    """An input of the native level as a function of the column: positions or a mask of ones; token ids become zeros."""
    if torch.equal(value[0].cpu().long(), forest.depth.cpu().long()):
        return torch.arange(columns, device=value.device, dtype=value.dtype)[None]
    if bool((value == 1).all()):
        return value.new_ones(1, columns)
    if torch.equal(value[0].cpu().long(), forest.tokens.cpu().long()):
        return value.new_zeros(1, columns)
    raise ForestError(
        "under treefx.use(forest) the [1, N] inputs must be the forest's tokens (input_ids), its depth (position_ids) "
        "or all ones (attention_mask), got other values; pass **forest.model_inputs() of the forest in use"
    )
