"""Compile the ordinary graph with the inner compiler alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import TracingContext, tracing
from torch._inductor.exc import InductorError
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from treefx.kernels.memory import lasting
from treefx.passes.packing.compile_inner import Inner
from treefx.runtime.reason import Reason
from treefx.runtime.records import Records
from treefx.runtime.shapes import process_state
from treefx.runtime.ways.between import whole
from treefx.runtime.ways.free_sizes import FreeSizes, Sizes, Symbols, share_memory
from treefx.runtime.ways.known_numbers import number_inputs, with_numbers
from treefx.runtime.ways.second_derivatives import has_custom_functions, refuse_second_derivatives
from treefx.torch_patches.compiling import compiling
from treefx.torch_patches.kept_graphs import keeping_graphs

__all__ = ["Ordinary"]

_OF_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""Errors of compiling sizes that depend on values (``tensor_split`` by a tensor): Dynamo breaks there."""


class Ordinary:
    """Compile Dynamo's unchanged graph with the inner compiler, when first needed.

    Once per state of the process, and again for other numbers of the model (too many of them run uncompiled) and for
    sizes that no compiled code accepts: symbolic ones may have any value under the compiler's guards, others are
    constant. Where inductor fails on symbols, each size is compiled as numbers, and more than ``recompile_limit`` run
    uncompiled. Where a call's inputs do not determine all symbols (nested tensors), inputs share memory, or too
    many sizes need separate code, Dynamo compiles the call.

    Args:
        gm: Dynamo's graph.
        inner: The inner compiler.
        records: Where to report.
    """

    def __init__(self, gm: fx.GraphModule, inner: Inner, records: Records) -> None:
        self._gm, self._inner, self._records = gm, inner, records
        self._symbols, self._numbers = Symbols(gm), number_inputs(gm)
        self._compiled: dict[tuple[Any, ...], list[tuple[FreeSizes, Callable[..., Any]]]] = {}
        self._by_dynamo: dict[tuple[float, ...], Callable[..., Any]] = {}
        self._served: set[tuple[float, ...]] = set()
        self._takes_numbers = False
        """Whether inductor fails on symbols of this graph."""
        self._sizes: set[tuple[Any, ...]] = set()
        """Those that were compiled as numbers."""

    def instead(self, args: Sequence[Any], *, reason: Reason | None) -> Any:
        """Run a call that does not run packed, for a reason or because that would not pay."""
        self._records.report.note_rows(reason)
        return self(*whole(args))

    def __call__(self, *args: Any) -> Any:
        return self._executable(args)(*args)

    def _executable(self, args: Sequence[Any]) -> Callable[..., Any]:
        limit = torch._dynamo.config.recompile_limit
        numbers = tuple(args[i].item() for i in self._numbers)
        if numbers not in self._served and len(self._served) >= limit:
            return self._guarded(self._gm)  # uncompiled, as torch.compile would leave it
        self._served.add(numbers)
        if not self._symbols.are_known or share_memory(args):
            return self._left_to_dynamo(numbers)
        values = self._symbols.values(args)
        of_symbols = {} if self._takes_numbers else values
        free = {symbol: size for symbol, size in of_symbols.items() if size > 1}  # code for one row is specialized
        single = [(symbol.name, size) for symbol, size in values.items() if symbol not in free]
        if self._takes_numbers:
            if len(self._sizes) >= limit and tuple(single) not in self._sizes:
                return self._guarded(self._gm)
            self._sizes.add(tuple(single))
        known = self._compiled.setdefault((*process_state(), *numbers, *single, *self._symbols.fixed(args)), [])
        run = _serving(known, free)
        if run is None and len(known) >= limit:
            return self._left_to_dynamo(numbers)
        if run is None:
            with compiling, lasting():
                run = _serving(known, free)
                if run is None:
                    sizes = FreeSizes(free)
                    try:
                        run = self._compile(args, sizes, numbers)
                    except _OF_VALUES:
                        run = self._left_to_dynamo(numbers)
                    except InductorError:
                        if not free:
                            raise
                        self._takes_numbers = True
                    if run is not None:
                        known.append((sizes, run))
        return self._executable(args) if run is None else run

    def _left_to_dynamo(self, numbers: tuple[float, ...]) -> Callable[..., Any]:
        """Return Dynamo on a separate graph: it guards all inputs, and compiles when called."""
        if numbers not in self._by_dynamo:
            self._records.count_ordinary(0.0)
            gm, options = self._with_numbers(numbers), self._inner.settings(self._gm) or None
            run = torch.compile(gm, backend=self._inner.name, options=options, dynamic=True)
            self._by_dynamo[numbers] = self._guarded(run)
        return self._by_dynamo[numbers]

    def _with_numbers(self, numbers: tuple[float, ...]) -> fx.GraphModule:
        """A graph for the inner compiler, which may change it."""
        return with_numbers(self._gm, dict(zip(self._numbers, numbers, strict=True)))

    def _guarded(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The graph itself is differentiated where the inner compiler leaves it to autograd."""
        differentiated = self._inner.name == "eager" and has_custom_functions(self._gm)
        return refuse_second_derivatives(run) if differentiated else run

    def _compile(self, args: Sequence[Any], sizes: FreeSizes, numbers: tuple[float, ...]) -> Callable[..., Any]:
        started, gm = time.perf_counter(), self._with_numbers(numbers)
        _forget_read_numbers(gm)
        # The backward is compiled with the forward: its guards on sizes are known before anything runs.
        eagerly = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        with tracing(TracingContext(sizes.mode)), eagerly:
            fakes = sizes.fakes(self._gm, args)
            patches = self._inner.settings(gm, fakes)
            settings = {"config_patches": patches} if patches else {}
            compiled: Callable[..., Any] = lookup_backend(self._inner.name)(gm, fakes, **settings)
        self._records.count_ordinary(time.perf_counter() - started)
        return self._guarded(compiled) if self._inner.name == "eager" else keeping_graphs(compiled)


def _forget_read_numbers(gm: fx.GraphModule) -> None:
    """Remove Dynamo's symbols of numbers that the graph reads (``x.item()``): a separate trace has new ones."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta.pop("unbacked_bindings", None)


def _serving(known: Sequence[tuple[FreeSizes, Callable[..., Any]]], free: Sizes) -> Callable[..., Any] | None:
    return next((run for sizes, run in known if sizes.serves(free)), None)
