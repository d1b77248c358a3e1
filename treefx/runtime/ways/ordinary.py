"""The ordinary compiled graph: what the inner compiler alone would have run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from treefx.kernels.lasting import lasting
from treefx.passes.packing.compile_inner import Inner
from treefx.passes.trace.fakes import fake_inputs
from treefx.runtime.compiling import compiling
from treefx.runtime.kept.process_state import process_state
from treefx.runtime.records import Records

__all__ = ["Ordinary"]


class Ordinary:
    """Compiles Dynamo's graph as it is with the inner compiler, when first needed.

    A graph of fixed shapes is compiled once per shape and state of the process. One with symbolic sizes goes through
    ``torch.compile(dynamic=True)``, which compiles once and checks its own guards.

    Args:
        gm: Dynamo's graph.
        inner: The inner compiler.
        records: Where to report.
    """

    def __init__(self, gm: fx.GraphModule, inner: Inner, records: Records) -> None:
        self._gm, self._inner, self._records = gm, inner, records
        self._symbolic = any(map(_is_symbolic, gm.graph.find_nodes(op="placeholder")))
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def instead(self, args: Sequence[Any], *, fallback: str | None) -> Any:
        """Run a call that does not run packed, for a reason or because that would not pay."""
        self._records.report.fallback, self._records.report.ran = fallback, "ordinary"
        return self(*args)

    def __call__(self, *args: Any) -> Any:
        shapes = tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in args)
        key = ("symbolic",) if self._symbolic else (process_state(), *shapes)
        if key not in self._compiled:
            with compiling, lasting():
                if key not in self._compiled:
                    self._compiled[key] = self._compile_symbolic() if self._symbolic else self._compile(args)
        return self._compiled[key](*args)

    def _compile_symbolic(self) -> Callable[..., Any]:
        self._records.count_ordinary(0.0)  # it compiles when it is called
        options = self._inner.settings(self._gm) or None
        return torch.compile(self._gm, backend=self._inner.name, options=options, dynamic=True)

    def _compile(self, args: Sequence[Any]) -> Callable[..., Any]:
        started = time.perf_counter()
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with tracing(TracingContext(mode)):
            patches = self._inner.settings(self._gm)
            settings = {"config_patches": patches} if patches else {}
            compiled: Callable[..., Any] = lookup_backend(self._inner.name)(
                self._gm, fake_inputs(args, mode), **settings
            )
        self._records.count_ordinary(time.perf_counter() - started)
        return compiled


def _is_symbolic(node: fx.Node) -> bool:
    """Whether an input is a number that changes, or a tensor with such a size."""
    example = node.meta.get("example_value")
    sizes = example.shape if isinstance(example, Tensor) else [example]
    return any(isinstance(size, SymInt) for size in sizes)
