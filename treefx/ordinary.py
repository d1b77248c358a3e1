"""The ordinary compiled graph: what the inner compiler alone would have run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from treefx.passes.pipeline import fake_inputs
from treefx.report import GraphReport

__all__ = ["Ordinary"]


class Ordinary:
    """Compiles Dynamo's graph as it is with the inner compiler, when first needed and once per shape.

    Args:
        gm: Dynamo's graph.
        inner: Name of the inner compiler.
        report: Counts the compilations.
    """

    def __init__(self, gm: fx.GraphModule, inner: str, report: GraphReport) -> None:
        self._gm, self._inner, self._report = gm, inner, report
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in args)
        if key not in self._compiled:
            self._compiled[key] = self._compile(args)
        return self._compiled[key](*args)

    def _compile(self, args: Sequence[Any]) -> Callable[..., Any]:
        started = time.perf_counter()
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with tracing(TracingContext(mode)), torch._dynamo.config.patch():
            compiled = lookup_backend(self._inner)(self._gm, fake_inputs(args, mode))
        self._report.compiles += 1
        self._report.seconds["ordinary"] = time.perf_counter() - started
        return compiled
