"""Hand a rewritten graph to the inner compiler, and keep the graphs it makes of it for the inspector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["Compiled", "compile_inner"]

Compiled = Callable[..., Any]
Observer = Callable[[str, fx.GraphModule], None]
"""Called with "forward" or "backward" and the graph that the inner compiler gets."""


def compile_inner(
    gm: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, inner: str, observe: Observer
) -> Compiled:
    """Compile ``gm`` for inputs like ``inputs``.

    Args:
        gm: A graph of tensors in, flat tuple of tensors out.
        inputs: Fake tensors of ``mode`` (or numbers), one per placeholder, with their ``requires_grad``.
        mode: Their fake tensor mode; its shape environment collects the guards of the compilation.
        inner: "inductor", "aot_eager" or "eager".
        observe: Gets the forward and the backward graph as they are compiled.
    """
    if inner == "eager":
        observe("forward", gm)
        return gm.forward
    with tracing(TracingContext(mode)):
        if inner == "inductor":
            compiled = compile_fx(gm, list(inputs), inner_compile=_observed_inductor(observe))
            assert callable(compiled)
            return compiled
        backend = aot_autograd(
            fw_compiler=_observed_boxed("forward", observe),
            bw_compiler=_observed_boxed("backward", observe),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        return backend(gm, list(inputs))


def _observed_inductor(observe: Observer) -> Callable[..., Any]:
    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        observe("backward" if options.get("is_backward") else "forward", copy.deepcopy(gm))
        return compile_fx_inner(gm, example_inputs, **options)

    return inner_compile


def _observed_boxed(stage: str, observe: Observer) -> Callable[..., Any]:
    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        observe(stage, gm)
        return boxed_nop(gm, list(example_inputs))

    return compiler
