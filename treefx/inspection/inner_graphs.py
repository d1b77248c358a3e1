"""Record inductor's graphs when its cache had the compiled code and it skipped them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.debugging import boxed_nop
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx

from treefx.passes.analysis import Rewritten
from treefx.passes.regions.make_regions import copy_without_regions

__all__ = ["trace_inner_graphs"]


def trace_inner_graphs(rewritten: Rewritten) -> dict[str, fx.GraphModule]:
    """Partition a rewritten graph as for inductor, and compile nothing.

    Returns:
        "forward", and where gradients are needed "backward".
    """
    graphs: dict[str, fx.GraphModule] = {}

    def keep(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        graphs["backward" if options.get("is_backward") else "forward"] = copy_without_regions(gm)
        return boxed_nop(gm, list(inputs))

    environment = rewritten.mode.shape_env
    assert environment is not None
    settings = torch._functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True)
    # The compiled code goes by the guards of this environment; looking at it must not add any.
    with (
        torch._C._DisableAutocast(),
        tracing(TracingContext(rewritten.mode)),
        environment.suppress_guards(),
        settings,
    ):
        compile_fx(rewritten.inner or rewritten.gm, list(rewritten.inputs), inner_compile=keep)
    return graphs
