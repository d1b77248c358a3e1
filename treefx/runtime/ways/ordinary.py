"""The ordinary compiled graph: what the inner compiler alone would have run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import TracingContext, tracing

from treefx.kernels.lasting import lasting
from treefx.passes.packing.compile_inner import Inner
from treefx.passes.packing.kept_graphs import keeping_graphs
from treefx.passes.trace.heads import copy_graph
from treefx.runtime.compiling import compiling
from treefx.runtime.kept.process_state import process_state
from treefx.runtime.records import Records
from treefx.runtime.ways.free_sizes import FreeSizes, Sizes, Symbols, share_memory

__all__ = ["Ordinary"]


class Ordinary:
    """Compiles Dynamo's graph as it is with the inner compiler, when first needed.

    Once per state of the process, and again for sizes that no code so far serves: those that Dynamo left symbolic may
    be any for which holds what the compiler asked, others are as they were. Where a call's inputs do not say what all
    symbols are (nested tensors), inputs lie in one memory, or too many sizes need code of their own, Dynamo looks at
    them.

    Args:
        gm: Dynamo's graph.
        inner: The inner compiler.
        records: Where to report.
    """

    def __init__(self, gm: fx.GraphModule, inner: Inner, records: Records) -> None:
        self._gm, self._inner, self._records = gm, inner, records
        self._symbols = Symbols(gm)
        self._compiled: dict[tuple[Any, ...], list[tuple[FreeSizes, Callable[..., Any]]]] = {}

    def instead(self, args: Sequence[Any], *, fallback: str | None) -> Any:
        """Run a call that does not run packed, for a reason or because that would not pay."""
        self._records.report.fallback, self._records.report.ran = fallback, "ordinary"
        return self(*args)

    def __call__(self, *args: Any) -> Any:
        return self._executable(args)(*args)

    def _executable(self, args: Sequence[Any]) -> Callable[..., Any]:
        if not self._symbols.are_known or share_memory(args):
            return self._by_dynamo
        values = self._symbols.values(args)
        free = {symbol: size for symbol, size in values.items() if size > 1}  # code for one row is code of its own
        single = [(symbol.name, size) for symbol, size in values.items() if size <= 1]
        known = self._compiled.setdefault((*process_state(), *single, *self._symbols.fixed(args)), [])
        run = _serving(known, free)
        if run is None and len(known) >= torch._dynamo.config.recompile_limit:
            return self._by_dynamo
        if run is None:
            with compiling, lasting():
                run = _serving(known, free)
                if run is None:
                    sizes = FreeSizes(free)
                    run = self._compile(args, sizes)
                    known.append((sizes, run))
        return run

    @functools.cached_property
    def _by_dynamo(self) -> Callable[..., Any]:
        """Dynamo once more, on a graph of its own: it looks at all inputs, and compiles when it is called."""
        self._records.count_ordinary(0.0)
        options = self._inner.settings(self._gm) or None
        return torch.compile(self._gm, backend=self._inner.name, options=options, dynamic=True)

    def _compile(self, args: Sequence[Any], sizes: FreeSizes) -> Callable[..., Any]:
        started = time.perf_counter()
        gm = copy_graph(self._gm)  # compilers change what they get
        # The backward is compiled with the forward: what it demands of the sizes is known before anything runs.
        eagerly = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        with tracing(TracingContext(sizes.mode)), eagerly:
            patches = self._inner.settings(gm)
            settings = {"config_patches": patches} if patches else {}
            fakes = sizes.fakes(self._gm, args)
            compiled: Callable[..., Any] = lookup_backend(self._inner.name)(gm, fakes, **settings)
        self._records.count_ordinary(time.perf_counter() - started)
        return compiled if self._inner.name == "eager" else keeping_graphs(compiled)


def _serving(known: Sequence[tuple[FreeSizes, Callable[..., Any]]], free: Sizes) -> Callable[..., Any] | None:
    return next((run for sizes, run in known if sizes.serves(free)), None)
