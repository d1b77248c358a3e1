"""Choose which input sizes Dynamo takes as symbols, and retry where tracing fails on them.

Symbols are the dimensions that count rows and columns of ids [B, T]: those of other values of every token, and of
masks. Sizes of images, of features and of planes stay numbers until PyTorch itself makes symbols of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import exc
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import builder
from torch._guards import CompileContext
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext

from treefx.torch_patches.columns import COLUMNS_IN_USE
from treefx.torch_patches.dynamo import is_of_module
from treefx.torch_patches.patch import is_ours

__all__ = ["take_batches_as_symbols", "trace_again_without_symbols"]

_DEPTH, _LENGTH = 3, 64
"""Depth of the search for ids in a frame's arguments, and size limit of containers."""
_NEVER_OURS = (exc.RestartAnalysis, exc.SkipFrame, exc.BackendCompilerFailed)
"""Exceptions of Dynamo that say nothing against symbols."""


def take_batches_as_symbols() -> None:
    """Let Dynamo take all sizes of batches as symbols when it compiles a function again.

    As elsewhere, the first graph of a function is of the sizes it is called with; a trainer that pads to one length
    needs no other. Left to itself Dynamo then takes those sizes for symbols that it has seen change, so that other
    lengths cost one more graph, and other numbers of rows another one. ``dynamic=False`` and dimensions marked static
    stay numbers. The columns of a forest's row are a symbol in the first graph too, in all inputs, so that a graph
    shows the values computed from them.
    """
    original = getattr(builder, "_automatic_dynamic", None)
    if original is None:  # another version of Dynamo
        return

    @functools.wraps(original)
    def automatic_dynamic(e: Any, tx: Any, source: Any, static_shapes: bool, *args: Any, **kwargs: Any) -> Any:
        context = original(e, tx, source, static_shapes, *args, **kwargs)
        if not is_ours(tx) or static_shapes or not isinstance(context, StatefulSymbolicContext):
            return context
        if is_of_module(source):
            return context
        marked, log = getattr(e, "_dynamo_static_indices", ()), tx.speculation_log
        of_batch = not getattr(log, "treefx_leaves_sizes", False) and _is_compiled_again()
        for d in _dimensions_of_batches(e, _find_batch(tx, e)) if of_batch else ():
            if context.dynamic_sizes[d] is DimDynamic.STATIC and d not in marked:
                context.dynamic_sizes[d] = DimDynamic.DYNAMIC
                log.treefx_makes_symbols = True
        for d in _columns_in_use(e):
            if context.dynamic_sizes[d] is DimDynamic.STATIC and d not in marked:
                context.dynamic_sizes[d] = DimDynamic.DYNAMIC
        return context

    builder._automatic_dynamic = automatic_dynamic


def trace_again_without_symbols() -> None:
    """Retrace a frame where it fails on symbols, with PyTorch's own choice of symbols.

    A model that computes with sizes in floats (InternVL, ``height % 0.5``) is an internal error of Dynamo if they are
    symbols. An error that has another cause comes again.
    """
    original = InstructionTranslator.run

    @functools.wraps(original)
    def run(self: Any) -> None:
        try:
            original(self)
        except _NEVER_OURS:
            raise
        except Exception as error:
            log = self.speculation_log
            if not getattr(log, "treefx_makes_symbols", False) or getattr(log, "treefx_leaves_sizes", False):
                raise
            log.treefx_leaves_sizes = True
            reason = f"sizes of batches cannot be symbols: {error}"
            raise exc.UnspecializeRestartAnalysis(restart_reason=reason) from error

    InstructionTranslator.run = run  # type: ignore[method-assign]


def _is_compiled_again() -> bool:
    compile_id = CompileContext.current_compile_id()
    again = compile_id is not None and bool(compile_id.frame_compile_id)
    return again and torch._dynamo.config.automatic_dynamic_shapes


def _columns_in_use(x: Tensor) -> list[int]:
    return [1] if x.dim() == 2 and (x.shape[0], x.shape[1]) == (1, COLUMNS_IN_USE.get()) else []


def _find_batch(tx: Any, x: Tensor) -> tuple[int, int] | None:
    """Find rows and columns of a frame: the most frequent shape of integer inputs [B, T].

    Where ids are found in none of its arguments, ``x`` itself may be some.
    """
    found = Counter(tuple(item.shape) for item in _tensors(tx.output.root_tx.f_locals, _DEPTH) if _may_be_ids(item))
    if not found and _may_be_ids(x):
        found[tuple(x.shape)] += 1
    return next((shape for shape, _ in found.most_common(1)), None)  # type: ignore[return-value]


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors among arguments and in containers of them; modules are skipped."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, torch.nn.Module):
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = vars(value).values()
        for item in list(items) if len(items) <= _LENGTH else ():
            yield from _tensors(item, depth - 1)


def _may_be_ids(x: Tensor) -> bool:
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool)
    return whole and x.dim() == 2 and not x.is_nested


def _dimensions_of_batches(x: Tensor, batch: tuple[int, int] | None) -> list[int]:
    """Return the dimensions of an input that count rows or columns of [B, T], by its shape."""
    shape = tuple(x.shape)
    if x.dim() <= 1:
        return list(range(x.dim()))  # ends of segments, labels that were picked
    if batch is None:
        return []
    rows, columns = batch
    wide = [d for d, size in enumerate(shape) if isinstance(size, int) and size > 1 and abs(size - columns) <= 1]
    if x.dim() == 2:
        return _of_tables(shape, rows, wide, is_whole=not x.is_floating_point())
    if shape[-2:] == (columns, columns) or x.dim() == 4 and shape[1] == 1 and 3 in wide:  # masks
        return [d for d in (0, x.dim() - 2, x.dim() - 1) if d in wide or shape[d] == rows]
    if shape[0] == rows and 1 in wide:
        return [0, 1]
    return [1, 2] if x.dim() == 3 and shape[1] == rows and 2 in wide else []


def _of_tables(shape: tuple[int, ...], rows: int, wide: list[int], *, is_whole: bool) -> list[int]:
    """Return the dimensions that count rows in a two-dimensional input.

    Forms are one per row, [1, T], or tokens of all rows in a line [B * T, ...].
    """
    if shape[0] == rows and (is_whole or 1 in wide):
        return [0, 1]
    return [1] if 1 in wide and shape[0] == 1 else []
