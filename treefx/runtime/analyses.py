"""Keep the analyses of a graph by shape, and reasons why calls run ordinarily."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from treefx.config import Config
from treefx.errors import TreefxError, UnsupportedError
from treefx.forests.context import IN_USE
from treefx.inputs.sizes import Pattern, Specialised, pattern_of
from treefx.inputs.values import InputValues, input_values
from treefx.kernels.memory import Bounded, lasting
from treefx.passes.analysis import Analysis, Expansion, Rewritten
from treefx.passes.labels.label_tokens import MEETS_ROWS
from treefx.passes.pipeline import analyse, is_packed
from treefx.passes.runner import Pass
from treefx.passes.trace.flash import has_flash
from treefx.passes.trace.pattern import is_number_input, sized_inputs
from treefx.reason_codes import code_of_cause, with_code
from treefx.runtime.origins import origin_of
from treefx.runtime.output_keys import note_of_outputs
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import NO_ATTENTION, Records
from treefx.runtime.shapes import (
    PASSING,
    KnownShapes,
    NotNow,
    OutputUse,
    Proof,
    Refusal,
    Retries,
    Shape,
    layout_of,
    proof_of,
    share_shape,
)
from treefx.torch_patches.compiling import compiling

__all__ = ["Analyses"]

_DYNAMO = "Dynamo traced them as numbers (dynamic=False, or a dimension marked static)"
_MANY_SHAPES = (
    "one graph of this model recompiles for every number of rows and columns ({why}); it keeps {limit} of "
    "them (option max_shapes), and runs others without sharing until they come again. Pad batches to a few lengths "
    "(pad_to_multiple_of), or keep more"
)
_NESTED = "{} is a nested or sparse tensor, which has no columns; give the model padded rows or one packed row"
_CACHED = (
    "the call continues from a cache of its rows, as generation does: nothing is analysed, and it runs unchanged; "
    "without the cache (use_cache=False) it would be packed"
)
_WRAPPED = (
    "{} is a {}, and {}: such a model runs on rows when it is compiled; as a model in tensor parallelism it runs on "
    "distinct tokens after treefx.convert(model)"
)
_NO_SEGMENTS = (
    "masks keep the sequences of a packed row apart, but not in this call: each should be one run of a number that "
    "comes nowhere else in its row, with positions that count up by one"
)

_OF_CALL = ("input", "variable")
_KEPT = 64
_NO_TOKENS = Reason(Cause.NO_TOKENS, "")


class Analyses:
    """The analyses of one graph, made when a call of another shape comes.

    Args:
        gm: Dynamo's graph.
        roles: Role of each placeholder.
        passes: The passes.
        config: The options.
        records: Where to report.
        unfollowed: Why one rank's computation is unknown, of a graph that ranks share.
        cached: Whether the graph continues from the cache of an earlier call.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        roles: list[str],
        passes: Sequence[Pass],
        config: Config,
        records: Records,
        unfollowed: str | None = None,
        *,
        cached: bool = False,
    ) -> None:
        self._gm, self._roles, self._passes, self._config, self._records = gm, roles, passes, config, records
        self._numbers = {i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if is_number_input(node)}
        self.sized = sized_inputs(gm)
        """What the graph says of the sizes of its inputs."""
        self._has_flash, self._vectors = has_flash(gm), _inputs_of_vectors(gm, roles)
        self._shapes = KnownShapes(config.max_shapes)
        self._batches = KnownShapes(config.max_shapes)
        self._keys: Bounded[Hashable, tuple[Any, ...]] = Bounded(_KEPT)
        self._has_no_tokens, self._strange, self._is_cached = False, _find_strange(gm, unfollowed), cached
        self._why_numbers, self._has_warned = _DYNAMO, False
        self._retries = Retries()
        self._refused: Analysis | None = None
        self.use = OutputUse(lazy=config.lazy_outputs)
        """Which outputs callers use."""

    @property
    def rewrites(self) -> list[Rewritten]:
        """The rewritten graphs, one per variant of a shape."""
        return [item for shape in self._batches.shapes + self._shapes.shapes for item in shape.rewrites]

    @property
    def latest(self) -> Analysis | None:
        """Return the analysis of the newest shape that may run packed, or of the last refusal."""
        found = self._batches.shapes or self._shapes.shapes
        return found[-1].analysis if found else self._refused

    def shape(self, args: Sequence[Any], sizes: Sequence[int] = (), form: Hashable | None = None) -> Shape | Reason:
        """The analysis for these shapes, or the reason why such a call runs ordinarily.

        ``sizes`` are the number of tokens (and sizes of a cut) that the first one found for these inputs did not serve.
        ``form`` is equal for calls on forests that differ in parameters and buffers alone.
        """
        if self._has_no_tokens and not self._origins(args):  # for any shape: no input distinguishes tokens
            return _NO_TOKENS
        if self._is_cached:
            self._records.report.has_tokens = True
            return Reason(Cause.CACHE, _CACHED)
        if self._strange is not None:
            return self._strange
        tensors = self.tensors(args)
        key = None if form is None else self._keys.get(form)
        shape = None if key is None else self._shapes.find(key, tensors)
        if isinstance(shape, Shape):
            self._records.report.note_analysis(shape.analysis)
            return shape
        values = self._values(args, tensors)
        try:
            shape = self._of_batches(args, tensors, values, sizes) or self._of_sizes(args, tensors, values, form)
        except NotNow as error:
            return Reason(Cause.LATER, str(error))
        if isinstance(shape, Refusal):
            return shape.reason
        self._records.report.note_analysis(shape.analysis)
        return shape

    def _values(self, args: Sequence[Any], tensors: Sequence[Tensor]) -> InputValues:
        values = input_values(tensors, self._tensor_roles(args), masks=IN_USE.get() is None, flash=self._has_flash)
        origins = self._origins(args)
        if not origins:
            return values
        places = [i for i, x in enumerate(args) if isinstance(x, Tensor) and i not in self._numbers]
        known = {places.index(i): per_token for i, per_token in origins.items()}
        tokens = frozenset(i for i, per_token in known.items() if per_token)
        return values._replace(tokens=tokens, vectors=frozenset(known) - tokens)

    def _origins(self, args: Sequence[Any]) -> dict[int, bool]:
        """Return inputs of a call on rows made by another graph: tokens, or vectors of a tower."""
        if not self._vectors or IN_USE.get() is not None:
            return {}
        found = {i: origin_of(args[i]) for i in self._vectors}
        return {i: origin.per_token for i, origin in found.items() if origin is not None}

    def _of_sizes(
        self, args: Sequence[Any], tensors: Sequence[Tensor], values: InputValues, form: Hashable | None = None
    ) -> Shape | Refusal:
        """Return the shape or refusal for calls of exactly these sizes."""
        filled = zip(self.filled(args), self._roles, strict=True)
        inputs = [x for x, role in filled if role in ("input", "variable") or not isinstance(x, Tensor)]
        key = (values, *[layout_of(x) if isinstance(x, Tensor) else x for x in inputs])
        if form is not None:
            self._keys[form] = key
        shape = self._shapes.find(key, tensors)
        if shape is None:
            with compiling, lasting():
                shape = self._shapes.find(key, tensors)
                if shape is None:
                    find, on_forest = functools.partial(self._analyse, args, values), IN_USE.get() is not None
                    shape = self._shapes.add(key, tensors, find, always=on_forest)
        if isinstance(shape, Refusal) and shape.reason.cause is Cause.MANY_SHAPES:
            self._warn_of_shapes()
        return shape

    def _warn_of_shapes(self) -> None:
        """Warn once that more shapes come than are kept, with the way out."""
        if not self._has_warned:
            self._has_warned = True
            text = _MANY_SHAPES.format(limit=self._config.max_shapes, why=self._why_numbers)
            warnings.warn(with_code(text, code_of_cause(Cause.MANY_SHAPES.name)), stacklevel=2)

    def with_numbers(self, shape: Shape, args: Sequence[Any], reason: str) -> Shape | Reason:
        """The analysis for these sizes where one for all sizes could not be compiled, or why not."""
        self._batches.refuse(shape, Reason(Cause.TRACE, reason))
        return self.shape(args)

    def _of_batches(
        self, args: Sequence[Any], tensors: Sequence[Tensor], values: InputValues, sizes: Sequence[int] = ()
    ) -> Shape | None:
        """Return the shape for any number of rows and columns; None if sizes must be known."""
        pattern = pattern_of(self.sized, self._roles, self.filled(args)) if IN_USE.get() is None else None
        if pattern is None:
            return None
        key = (values, pattern)
        found = self._batches.find(key, tensors, sizes)
        if found is None:
            with compiling, lasting():
                found = self._batches.find(key, tensors, sizes)
                if found is None:
                    found = self._batches.add(key, tensors, lambda: self._analyse(args, values, pattern, sizes))
        if isinstance(found, Refusal):
            self._why_numbers = found.reason.text
        return found if isinstance(found, Shape) else None

    def filled(self, args: Sequence[Any]) -> list[Any]:
        """The inputs with the values of the numbers that Dynamo passes as tensors."""
        if not self._numbers:
            return list(args)
        return [x.item() if i in self._numbers else x for i, x in enumerate(args)]

    def tensors(self, args: Sequence[Any]) -> list[Any]:
        """The inputs that are no numbers: positions in an analysis count these."""
        return [x for i, x in enumerate(args) if isinstance(x, Tensor) and i not in self._numbers]

    def _tensor_roles(self, args: Sequence[Any]) -> list[str]:
        return [
            role
            for i, (x, role) in enumerate(zip(args, self._roles, strict=True))
            if isinstance(x, Tensor) and i not in self._numbers
        ]

    def _analyse(
        self, args: Sequence[Any], values: InputValues, batch: Pattern | None = None, sizes: Sequence[int] = ()
    ) -> list[Shape | Refusal]:
        """Return candidates for a call: packed rows with segments first, then plain rows."""
        with self._retries.attempt("the graph could not be traced"):
            return self._find_shapes(args, values, batch, sizes)

    def _find_shapes(
        self, args: Sequence[Any], values: InputValues, batch: Pattern | None, sizes: Sequence[int]
    ) -> list[Shape | Refusal]:
        rows = self.attempt(args, values, batch)
        if isinstance(rows, Refusal):
            return [rows]
        segmented = self._segmented(rows, args, values, batch, sizes)
        refusal = self._sizes_asked(rows, args)
        if refusal is None or segmented is not None:
            self._records.report.shapes += 1
        if segmented is None:
            return [refusal or self._shape(rows, args, sizes)]
        if segmented.admits(self.tensors(args)) and rows.expansions and self._config.on_unsupported == "error":
            return [segmented]  # rows as they are would be an error
        found = refusal or self._shape(rows, args, sizes)
        if isinstance(found, Refusal):  # of sizes that the packed one does not serve nothing is known
            found = replace(found, reason=Reason(Cause.SEGMENTS, _NO_SEGMENTS), within=segmented.analysis.batch)
        return [segmented, found]

    def attempt(
        self, args: Sequence[Any], values: InputValues, batch: Pattern | None, *, segmented: bool = False
    ) -> Analysis | Refusal:
        """Trace and label the graph, or return a refusal; known shapes stay unchanged."""
        tensors, roles = self.tensors(args), self._tensor_roles(args)
        try:
            analysis = analyse(self._gm, self.filled(args), roles, values, self._passes, batch, segmented=segmented)
        except TreefxError:
            raise
        except PASSING:
            raise
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            buffers = [i for i, role in enumerate(roles) if role == "buffer"]  # any may have been read
            reason = f"the graph could not be traced: {type(error).__name__}: {first_line}"
            unless = error.sizes if isinstance(error, Specialised) else None
            return Refusal(Reason(Cause.TRACE, reason), Proof(tensors, buffers), unless=unless)
        self._records.report.seconds.update(analysis.seconds)
        if analysis.tokens is None:
            self._has_no_tokens = True
            return Refusal(_NO_TOKENS)
        return analysis

    def _segmented(
        self, rows: Analysis, args: Sequence[Any], values: InputValues, batch: Pattern | None, sizes: Sequence[int]
    ) -> Shape | None:
        """Return the analysis that takes rows to be packed sequences.

        Masks must separate segments, and every attention must stay inside one.
        """
        if not rows.segments.speak or IN_USE.get() is not None:
            return None
        found = self.attempt(args, values, batch, segmented=True)
        if isinstance(found, Refusal) or not found.segments.hold:
            return None
        if (
            not found.tokens
            or found.tokens.made
            or found.find_own_positions() is None
            or found.expansions
            and (self._config.on_unsupported != "expand" or self._sizes_asked(found, args) is not None)
        ):
            return None
        shape = self._shape(found, args, sizes)
        return shape if isinstance(shape, Shape) else None

    def _shape(self, analysis: Analysis, args: Sequence[Any], sizes: Sequence[int]) -> Shape | Refusal:
        tensors = self.tensors(args)
        self._records.report.note_analysis(analysis)
        refusal = self._refusal(analysis)
        if refusal is not None:
            self._refused = analysis
            note = note_of_outputs(analysis) if refusal.cause is Cause.NO_ATTENTION else None
            return Refusal(replace(refusal, note=note), proof_of(analysis, tensors))
        shape = share_shape(analysis, tensors, sizes, self.use, analysis.known, self._config)
        if not self.use.settled:
            self.use = shape.outputs
        return shape

    def _sizes_asked(self, analysis: Analysis, args: Sequence[Any]) -> Refusal | None:
        """Return why rows and columns must be numbers, if that saves work on rows.

        Recurrences are read only with known sizes.
        """
        if analysis.batch is None or not analysis.expansions or not self._gains_by_sizes(analysis, args):
            return None
        reason = f"sizes have to be known: {_listed(analysis.expansions)}"
        return Refusal(Reason(Cause.SIZES, reason), proof_of(analysis, self.tensors(args)))

    def _gains_by_sizes(self, analysis: Analysis, args: Sequence[Any]) -> bool:
        if analysis.segments.speak and not analysis.segmented:
            packed = self.attempt(args, analysis.known, None, segmented=True)
            if isinstance(packed, Analysis) and packed.segments.hold:
                return True
        other = self.attempt(args, analysis.known, None, segmented=analysis.segmented)
        return isinstance(other, Analysis) and _gains(other) != _gains(analysis)

    def _refusal(self, analysis: Analysis) -> Reason | None:
        items = analysis.expansions or analysis.obstacles
        code = _first_code(items) if items else ""
        causes = _listed(items, code)
        if analysis.expansions and self._config.on_unsupported == "error":
            raise UnsupportedError(
                f"every operator should have a token-wise law (on_unsupported='error'), but {causes}; "
                "use on_unsupported='expand' to compute these on expanded rows",
                code,
            )
        if analysis.expansions and self._config.on_unsupported == "fallback":
            return Reason(Cause.OPERATOR, f"without a token-wise law: {causes}", code)
        if analysis.changed_parameter is not None:
            text = f"the model changes a parameter in its forward: {analysis.changed_parameter}"
            return Reason(Cause.OPERATOR, text)
        if not is_packed(analysis):
            if not items:
                return Reason(Cause.NO_ATTENTION, NO_ATTENTION)
            return Reason(Cause.OPERATOR, f"nothing runs on distinct tokens, because {causes}", code)
        return None


def _gains(analysis: Analysis) -> tuple[Any, ...]:
    """Return the packed or contracted operators, by which two analyses of a graph can differ."""
    expansions = {(item.op, item.line, item.contracted) for item in analysis.expansions}
    return expansions, len(analysis.attentions), analysis.recurrences


def _first_code(items: Sequence[Expansion]) -> str:
    """Return the code of the first operator that does not only read another's rows."""
    first = next((item for item in items if item.reason != MEETS_ROWS), items[0])
    return first.code


def _listed(items: Sequence[Expansion], code: str = "") -> str:
    """List operators, reasons, codes and lines, without operators that only read others' rows.

    Args:
        items: The operators.
        code: That the message ends in; it is left out of the list where all operators have it.
    """
    first = next((i for i, item in enumerate(items) if item.reason != MEETS_ROWS), len(items))
    causes = [item for i, item in enumerate(items) if i <= first or item.reason != MEETS_ROWS]
    named = {item.code for item in causes} != {code}
    parts = [(item, f" [{item.code}]" if named else "", f" ({item.line})" if item.line else "") for item in causes]
    return "; ".join(f"{item.op}: {item.reason}{own}{line}" for item, own, line in parts)


def _inputs_of_vectors(gm: fx.GraphModule, roles: Sequence[str]) -> list[int]:
    """Return the positions of inputs that may be vectors.

    These are floats of two dimensions or more that come with the call.
    """
    nodes = zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True)
    given = [(i, node.meta.get("example_value")) for i, (node, role) in enumerate(nodes) if role in _OF_CALL]
    return [i for i, x in given if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1]


def _find_strange(gm: fx.GraphModule, unfollowed: str | None) -> Reason | None:
    """Why no call of a graph can be analysed: an input is no plain tensor."""
    for node in gm.graph.find_nodes(op="placeholder"):
        x = node.meta.get("example_value")
        if isinstance(x, Tensor) and x.layout is not torch.strided:
            return Reason(Cause.INPUT, _NESTED.format(node.name))
        if is_traceable_wrapper_subclass(x):
            unknown = unfollowed or "the roles of its parts are unknown here"
            return Reason(Cause.INPUT, _WRAPPED.format(node.name, type(x).__name__, unknown))
    return None
