"""One graph of Dynamo at run time: analyse per shape, build the trie per call, choose a variant, run, return rows."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import CompileContext

from treefx.batch import Batch, build_batch, forest_batch
from treefx.compiling import compiling
from treefx.config import Config
from treefx.context import current_forest, current_tree
from treefx.cut import Cut, PartRow
from treefx.errors import ForestError, TreefxError, UnsupportedError
from treefx.forest import Forest
from treefx.given import Given, name_of_input
from treefx.kernels.lasting import lasting
from treefx.lazy import Deferred, LazyRows, lazy_rows
from treefx.ordinary import Ordinary
from treefx.output_use import OutputUse
from treefx.passes.constants import InputValues, input_values
from treefx.passes.layout import expand_rows
from treefx.passes.pipeline import UNHIDDEN, Analysis, Expansion, Rewritten, Variant, analyse, build_passes, is_packed
from treefx.passes.rows import rows_in_order
from treefx.passes.vocab_tail import logits_of_losses
from treefx.proof import Proof
from treefx.report import GraphReport, Reports
from treefx.shapes import Executable, KnownShapes, Refusal, Shape, layout_of, proof_of, share_shape

__all__ = ["CompiledGraph"]

_OFF_TREE = (
    "under treefx.distribute every compiled graph must start from the hidden states of a block, got one that does not: "
    "it knows no tree, so an attention in it would let rows see each other; compile the blocks, each as one graph, and "
    "nothing else (TORCH_LOGS=graph_breaks shows where Dynamo cuts one in two)"
)


class CompiledGraph:
    """What the backend returns to Dynamo. Called with the graph's inputs, returns its outputs.

    Args:
        gm: Dynamo's graph, never changed.
        roles: "parameter", "buffer", "input" or "variable" (one that requires grad) per placeholder.
        config: The options.
    """

    def __init__(self, gm: fx.GraphModule, roles: list[str], config: Config) -> None:
        self.gm, self.roles, self.config = gm, roles, config
        self._numbers = _positions_of_numbers(gm)
        self._names = [name_of_input(node) for node in gm.graph.find_nodes(op="placeholder")]
        self._passes = build_passes(config.compiler, config.disable_passes)
        compile_id = CompileContext.current_compile_id()
        self._graphs: dict[str, fx.GraphModule] = {"captured": gm}
        self._reports = Reports(None if compile_id is None else compile_id.frame_id, self._graphs)
        self._current = threading.local()
        self._outputs = OutputUse(lazy=config.lazy_outputs)
        self._shapes = KnownShapes(config.max_shapes)
        self._has_no_tokens = False
        self._ordinary = Ordinary(gm, config.compiler, self._count_ordinary)

    @property
    def reports(self) -> list[GraphReport]:
        """One report per model that ran the graph."""
        return self._reports.all()

    @property
    def rewrites(self) -> list[Rewritten]:
        """The rewritten graphs, one per variant of a shape."""
        return [item for shape in self._shapes.shapes for item in shape.rewrites]

    @property
    def report(self) -> GraphReport:
        """The report of the model that this thread runs, or ran last."""
        return getattr(self._current, "report", None) or self._reports.of(())

    @contextmanager
    def _reporting(self, report: GraphReport) -> Iterator[None]:
        """Let this thread report there, from now on or (a backward in between) for a while."""
        before, self._current.report = self.report, report
        try:
            yield
        finally:
            self._current.report = before

    def _count_ordinary(self, seconds: float) -> None:
        self.report.compiles += 1
        self.report.seconds["ordinary"] = self.report.seconds.get("ordinary", 0.0) + seconds

    def __call__(self, *args: Any) -> Any:
        parameters = tuple(x for x, role in zip(args, self.roles, strict=True) if role == "parameter")
        self._current.report = self._reports.of(parameters)
        self.report.count_call()
        if current_tree() is not None:
            raise UnsupportedError(_OFF_TREE)
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
        return self._run_native(shape, self._tensors(args), self._tensors(by_column), forest)

    def _shape(self, args: Sequence[Any]) -> Shape | str:
        """The analysis for these shapes, or the reason why such a call runs ordinarily ("" for none)."""
        if self._has_no_tokens:  # of whatever shape: no input is looked up in an embedding
            return ""
        tensors = self._tensors(args)
        values = input_values(tensors, self._tensor_roles(args), masks=current_forest() is None)
        filled = zip(self._filled(args), self.roles, strict=True)
        inputs = [x for x, role in filled if role in ("input", "variable") or not isinstance(x, Tensor)]
        key = (values, *[layout_of(x) if isinstance(x, Tensor) else x for x in inputs])
        shape = self._shapes.find(key, tensors)
        if shape is None:
            with compiling, lasting():
                shape = self._shapes.find(key, tensors)
                shape = self._shapes.add(key, lambda: self._analyse(args, values)) if shape is None else shape
        if isinstance(shape, Refusal):
            return shape.reason
        self.report.has_tokens = True
        self.report.attention_rewritten = len(shape.analysis.attentions)
        self.report.recurrences_rewritten = shape.analysis.recurrences
        self.report.expansions = [asdict(item) for item in shape.analysis.expansions]
        return shape

    def _filled(self, args: Sequence[Any]) -> list[Any]:
        """The inputs with the values of the numbers that Dynamo passes as tensors."""
        return [x.item() if i in self._numbers else x for i, x in enumerate(args)]

    def _tensors(self, args: Sequence[Any]) -> list[Any]:
        """The inputs that are no numbers: positions in an analysis count these."""
        return [x for i, x in enumerate(args) if isinstance(x, Tensor) and i not in self._numbers]

    def _tensor_roles(self, args: Sequence[Any]) -> list[str]:
        return [role for x, role in zip(self._filled(args), self.roles, strict=True) if isinstance(x, Tensor)]

    def _analyse(self, args: Sequence[Any], values: InputValues) -> Shape | Refusal:
        tensors, roles = self._tensors(args), self._tensor_roles(args)
        try:
            analysis = analyse(self.gm, self._filled(args), roles, values, self._passes)
        except TreefxError:
            raise
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            buffers = [i for i, role in enumerate(roles) if role == "buffer"]  # any may have been read
            reason = f"the graph could not be traced: {type(error).__name__}: {first_line}"
            return Refusal(reason, Proof(tensors, buffers))
        self.report.shapes += 1
        self.report.seconds.update(analysis.seconds)
        if analysis.tokens is None:
            self._has_no_tokens = True
            return Refusal("")
        self.report.has_tokens = True
        self.report.expansions = [asdict(item) for item in analysis.expansions]
        refusal = self._refusal(analysis)
        if refusal is not None:
            return Refusal(refusal, proof_of(analysis, tensors))
        shape = share_shape(analysis, tensors, self._outputs, values, self.config)
        if not self._outputs.settled:
            self._outputs = shape.outputs
        return shape

    def _refusal(self, analysis: Analysis) -> str | None:
        unsupported = _listed(analysis.expansions)
        if analysis.expansions and self.config.on_unsupported == "error":
            raise UnsupportedError(
                f"every operator should have a token-wise law (on_unsupported='error'), but {unsupported}; "
                "use on_unsupported='expand' to compute these on expanded rows"
            )
        if analysis.expansions and self.config.on_unsupported == "fallback":
            return f"without a token-wise law: {unsupported}"
        if analysis.changed_parameter is not None:
            return f"the model changes a parameter in its forward: {analysis.changed_parameter}"
        if not is_packed(analysis):
            return f"no attention could be rewritten: {unsupported or _listed(analysis.obstacles) or 'none found'}"
        return None

    # The three ways to run -------------------------------------------------------------------------------------------

    def _run_ordinary(self, args: Sequence[Any], *, fallback: str | None, forest: Forest | None = None) -> Any:
        if forest is not None and (fallback or self.report.has_tokens):
            raise UnsupportedError(f"under treefx.use(forest) the model must run packed, but {fallback}")
        self.report.fallback, self.report.ran = fallback, "ordinary"
        return self._ordinary(*args)

    def _run_rows(self, shape: Shape, args: Sequence[Any]) -> Any:
        """The transparent level: build the trie of the rows, then run packed if that pays."""
        self._outputs.settle(shape.analysis)
        tensors = shape.analysis.known.with_parts(self._tensors(args))
        seen, keep = self._keep(shape, tensors)
        if not shape.padding.is_defined(tensors, keep):
            return self._run_ordinary(args, fallback="a position that sees no key is read by the loss or the caller")
        redundant = shape.padding.redundant(tensors, keep)
        identity = shape.analysis.identity_without(redundant)
        keys = [tensors[i] for i in identity] + shape.padding.numbers_of_rows(tensors)
        places = None if keep is None else shape.padding.own_positions(tensors)
        batch = build_batch(keys, keep, places)
        raw = keys[0].numel() if seen is None or keep is None else int((seen & keep).sum())
        self.report.raw_tokens, self.report.tokens = raw, batch.tokens
        if self.config.min_sharing > 1.0 and raw < self.config.min_sharing * batch.tokens:
            self.report.tokens = raw
            return self._run_ordinary(args, fallback=None)
        detached = self._outputs.detached(shape.analysis)
        absent = self._absent(shape.analysis, batch.size, detached)
        variant = Variant(
            detached=detached, redundant=redundant, absent=absent, own_positions=batch.own_positions
        )  # fmt: skip
        results = self._run(shape, variant, tensors, batch)
        if results is None:
            return self._run_unhidden(shape, args)
        return self._hand_back(shape, args, results, batch, variant)

    def _run_unhidden(self, shape: Shape, args: Sequence[Any]) -> Any:
        """Scores so large that a mask does not hide what is below it: only the model's own graph weighs that."""
        if shape.analysis.has_side_effects:  # which the packed run has had
            raise UnsupportedError(UNHIDDEN)
        return self._run_ordinary(args, fallback=UNHIDDEN)

    def _absent(self, analysis: Analysis, tokens: int, detached: frozenset[int]) -> frozenset[int]:
        """The outputs of logits to do without: large ones that only losses have read so far."""
        found = logits_of_losses(analysis.picks)
        if found is None or tokens * found.width <= self.config.max_logits or not found.outputs:
            return frozenset()
        return found.outputs if found.outputs <= detached - self._outputs.read else frozenset()

    def _keep(self, shape: Shape, args: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
        """The positions that others see, and those that have to run; None where that is all of them."""
        seen = shape.padding.seen(args)
        if seen is None:
            return None, None
        if self.config.padding == "drop":
            return seen, shape.padding.reached(seen)
        return seen, torch.ones_like(seen) if self._outputs.read else shape.padding.needed(args, seen)

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

    def _run_native(self, shape: Shape, args: Sequence[Any], by_column: list[Any], forest: Forest) -> Any:
        """The native level: the graph's row is the packed row of a forest."""
        tokens = shape.analysis.tokens
        assert tokens is not None
        position = shape.analysis.gm.graph.find_nodes(op="placeholder").index(tokens.ids)
        ids = args[position]
        if ids.shape != (1, forest.num_tokens) or not torch.equal(ids[0].cpu(), forest.tokens.cpu().to(ids.dtype)):
            raise _wrong_row(forest, [ids.shape])
        batch = forest_batch(forest, ids.device)
        redundant = shape.padding.redundant(by_column, None, native=True)
        self.report.raw_tokens, self.report.tokens = forest.raw_tokens, forest.num_tokens
        by_column[position] = torch.nn.functional.pad(ids, (0, batch.size - batch.tokens))
        cut = forest.cut if isinstance(forest, PartRow) else None
        variant = Variant(native=True, redundant=redundant, part=None if cut is None else cut.run)
        results = self._run(shape, variant, by_column, batch, cut)
        if results is None:
            raise UnsupportedError(UNHIDDEN)
        packed = shape.analysis.packed_outputs
        return tuple(
            rows_in_order(value[None, : batch.tokens], packed[i]) if i in packed else value
            for i, value in enumerate(results)
        )

    def _run(
        self, shape: Shape, variant: Variant, tensors: Sequence[Tensor], batch: Batch, cut: Cut | None = None
    ) -> Any:
        """The results of a variant; None where its masks do not hide what they are to hide."""
        sizes = [batch.size, *([] if cut is None else cut.sizes)]
        given = [*tensors, *batch.metadata, batch.size]
        # Not outside: whether gradients are on is a condition of what Dynamo compiles.
        gradients = torch.is_grad_enabled() and (cut is None or cut.run == "train")
        with torch.set_grad_enabled(gradients):
            executable = shape.executable(variant, tensors, sizes, self._passes, self._count_compiled)
            self._show(executable)
            self.report.fallback, self.report.ran = None, "packed"
            with torch._C._DisableAutocast():
                graph = executable.rewritten.cut
                results: Sequence[Any] = (
                    executable.run(*given) if cut is None or graph is None else cut.call(executable.run, given, graph)
                )
        if not executable.rewritten.asks:
            return results
        *results, hidden = results
        return results if bool(hidden) else None

    def _count_compiled(self, executable: Executable) -> None:
        self.report.compiles += 1
        self.report.seconds.update(executable.seconds)

    def _show(self, executable: Executable) -> None:
        """Let the inspector see what runs."""
        for stage in ("rewritten", "forward", "backward"):
            self._graphs.pop(stage, None)
        self._graphs.update(executable.graphs)

    # Outputs ----------------------------------------------------------------------------------------------------------

    def _on_rows(self, shape: Shape, position: int, value: Any, batch: Batch) -> Any:
        """An output as the caller expects it."""
        dims = shape.analysis.packed_outputs.get(position)
        return value if dims is None else expand_rows(value, dims, batch.metadata[3])

    def _hand_back(
        self,
        shape: Shape,
        args: Sequence[Any],
        results: Sequence[Any],
        batch: Batch,
        variant: Variant,
    ) -> tuple[Any, ...]:
        given = Given(args, self.roles, self._names) if variant.detached else None
        return tuple(
            self._lazily(shape, given, i, value, batch, absent=i in variant.absent)
            if given is not None and i in variant.detached
            else self._on_rows(shape, i, value, batch)
            for i, value in enumerate(results)
        )

    def _lazily(
        self, shape: Shape, given: Given, position: int, value: Tensor, batch: Batch, *, absent: bool
    ) -> Tensor:
        """An output that nobody has read so far: expanded, or computed anew, when somebody does."""
        report = self.report  # the reader may be another thread, or another model may have run in between
        args = given.args

        def compute() -> Tensor:
            self._outputs.read.add(position)
            complete = not bool((batch.metadata[3] < 0).any())
            if not absent and (complete or self.config.padding == "drop"):
                return self._on_rows(shape, position, value, batch)  # type: ignore[no-any-return]
            given.check(f"reading an output {list(rows)}")
            with given.as_called(), self._reporting(report):
                result: Tensor = self._run_rows(shape, args)[position]
            return result.rows if isinstance(result, LazyRows) else result

        def differentiate(grad: Tensor) -> Sequence[Tensor | None]:
            self._outputs.read.add(position)
            self._outputs.differentiated.add(position)
            given.check(f"differentiating an output {list(rows)}")
            leaves = [x.detach().requires_grad_() if _needs_grad(x) else x for x in args]
            with torch.enable_grad(), given.as_called(), self._reporting(report):
                result = self._run_rows(shape, leaves)[position]
            inputs = [x for x in leaves if _needs_grad(x)]
            return torch.autograd.grad(result, inputs, grad, allow_unused=True)

        dims = shape.analysis.packed_outputs[position]
        rows = [math.prod(factor.size for factor in dim) for dim in dims]
        return lazy_rows(Deferred(rows, value, compute, differentiate, [x for x in args if _needs_grad(x)]))


def _listed(items: Sequence[Expansion]) -> str:
    lines = ["" if item.line is None else f" ({item.line})" for item in items]
    return "; ".join(f"{item.op} {item.reason}{line}" for item, line in zip(items, lines, strict=True))


def _positions_of_numbers(gm: fx.GraphModule) -> frozenset[int]:
    """The inputs that the graph only asks for their number: with dynamic=True, Dynamo passes the model's floats so."""

    def is_number(node: fx.Node) -> bool:
        return bool(node.users) and all((user.op, user.target) == ("call_method", "item") for user in node.users)

    return frozenset(i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if is_number(node))


def _needs_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _wrong_row(forest: Forest, shapes: Sequence[Sequence[int]]) -> ForestError:
    given = ", ".join(str(list(shape)) for shape in shapes)
    return ForestError(
        f"under treefx.use(forest) the model expects the forest's packed row, input_ids [1, {forest.num_tokens}] "
        f"of its tokens, got inputs of shape {given} with others; call it with **forest.model_inputs()"
    )


def _capacity(forest: Forest) -> int:
    """Columns to compile for: the longest path rounded up to a power of two."""
    return max(16, 1 << forest.deepest.bit_length())


def _columnar(value: Tensor, forest: Forest, columns: int) -> Tensor:
    """An input of the native level as a function of the column: positions, a mask of ones, or token ids, which are none
    and become a number that proves nothing of them."""
    if torch.equal(value[0].cpu().long(), forest.depth.cpu().long()):
        return torch.arange(columns, device=value.device, dtype=value.dtype)[None]
    if bool((value == 1).all()):
        return value.new_ones(1, columns)
    if torch.equal(value[0].cpu().long(), forest.tokens.cpu().long()):
        return value.new_full((1, columns), -1)
    raise ForestError(
        "under treefx.use(forest) the [1, N] inputs must be the forest's tokens (input_ids), its depth (position_ids) "
        "or all ones (attention_mask), got other values; pass **forest.model_inputs() of the forest in use"
    )
