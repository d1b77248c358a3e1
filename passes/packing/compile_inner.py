"""Compile a rewritten graph with the inner compiler; keep its graphs for the inspector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode

from treefx.inputs.sizes import autograd_key
from treefx.passes.regions.loadable import LoadableSizes, fill_freely
from treefx.passes.regions.make_regions import copy_without_regions, subgraphs
from treefx.passes.regions.own_results import own_results
from treefx.passes.trace.fingerprint import recompute_tags, source_fingerprint

__all__ = ["KERNELS", "Compiled", "Inner", "calls_subgraphs", "compile_inner"]

Compiled = Callable[..., Any]
Observer = Callable[[str, fx.GraphModule], None]
"""Called with "forward" or "backward" and the graph that the inner compiler gets."""
_UNTAGGED = ("transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward")
"""Operators of other libraries that wait for the device, without the tag that keeps them out of CUDA graphs."""


@dataclass(frozen=True)
class Inner:
    """Name the compiler of a graph: a ``torch.compile`` backend, and a mode of inductor.

    ``records`` False compiles a graph without CUDA graphs, in any mode: that of one part of a plan, because
    the graphs of the next part would write into memory that the backward of this part reads.
    """

    name: str = "inductor"
    mode: str = "default"
    records: bool = True

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the mode's settings in the configuration of inductor."""
        return {**list_mode_options(self.mode), **({} if self.records else {"triton.cudagraphs": False})}

    @property
    def records_graphs(self) -> bool:
        """Return whether inductor records CUDA graphs, by the mode or its configuration."""
        recording = self.options.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs)
        return self.name == "inductor" and bool(recording)

    def settings(self, gm: fx.GraphModule, inputs: Sequence[Any] = ()) -> dict[str, Any]:
        """Return inductor's settings for a graph: its mode, and values for its cache keys.

        ``inputs`` are the fake inputs that it is traced with, where treefx makes them.
        """
        if self.name != "inductor":
            return {}
        apart = _run_between_graphs() if self.records_graphs else {}
        return {**self.options, **apart, "post_grad_custom_pre_pass": _CacheKey(gm, inputs)}


def calls_subgraphs(inner: Inner) -> bool:
    """Return whether a compiler compiles a subgraph once for all its calls.

    Inductor does so in Python only.
    """
    plain = not inner.records_graphs and not torch._inductor.config.cpp_wrapper
    return inner.name == "inductor" and plain


def _run_between_graphs() -> dict[str, Any]:
    """Return the setting for operators to run between CUDA graphs; none in older PyTorch."""
    named = getattr(torch._inductor.config, "custom_should_partition_ops", None)
    return {} if named is None else {"custom_should_partition_ops": [*named, *_UNTAGGED]}


def compile_inner(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    inner: Inner,
    observe: Observer,
    roles: Sequence[str] = (),
) -> Compiled:
    """Compile ``gm`` for inputs like ``inputs``.

    Args:
        gm: A graph of tensors in, flat tuple of tensors out.
        inputs: Fake tensors of ``mode`` (or numbers), one per placeholder, with their ``requires_grad``.
        mode: Their fake tensor mode; its shape environment collects the guards of the compilation.
        inner: By name "inductor", "aot_eager" or "eager".
        observe: Gets the forward and the backward graph as they are compiled.
        roles: "parameter", "buffer", "input" or "variable" of the first inputs. CUDA graphs read parameters and buffers
            where they lie; other inputs are copied before every replay.
    """
    if inner.name == "eager":
        observe("forward", gm)
        return gm.forward
    # The backward is compiled with the forward: its guards on sizes are known before anything runs.
    eagerly = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with tracing(TracingContext(mode)), eagerly:
        if inner.name == "inductor":
            patches = {**inner.settings(gm, inputs), **_for_regions(gm)}
            # Results of a subgraph may alias others' memory: a backward must not write into its inputs.
            donated = torch._functorch.config.donated_buffer and not subgraphs(gm)
            with torch._functorch.config.patch(donated_buffer=donated):
                compiled = compile_fx(gm, list(inputs), _observed_inductor(observe, inputs, roles), patches)
            assert callable(compiled)
            return compiled
        backend = aot_autograd(
            fw_compiler=_observed_boxed("forward", observe),
            bw_compiler=_observed_boxed("backward", observe),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        run: Compiled = backend(gm, list(inputs))
        return run


def _for_regions(gm: fx.GraphModule) -> dict[str, Any]:
    """Return settings for a graph with subgraphs.

    A pass of the user's in that place stays, and costs cache hits.

    Calls of one subgraph need operands of equal strides, which padding (done for GPUs only) gives some of them and not
    others; and inductor looks for padded results before it, where ``own_results`` has left None.
    """
    if not subgraphs(gm):
        return {}
    free = torch._inductor.config.joint_custom_post_pass is None
    return {"comprehensive_padding": False, **({"joint_custom_post_pass": LoadableSizes()} if free else {})}


class _CacheKey(CustomGraphPass):
    """Extend the key of inductor's caches by facts that they do not see of a graph.

    They look graphs up by their code, before the backward is derived: the rules of treefx's operators, the tags of
    checkpointing and the place of inputs in the autograd graph decide later. A pass of the user's in the same place is
    called.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any] = ()) -> None:
        others: Any = torch._inductor.config.post_grad_custom_pre_pass
        self._others = list(others) if isinstance(others, list | tuple) else [others] if others is not None else []
        self._tags, self._inputs = recompute_tags(gm), [autograd_key(x) for x in inputs if isinstance(x, Tensor)]

    def __call__(self, graph: fx.Graph) -> None:
        for other in self._others:
            other(graph)

    def uuid(self) -> Any:
        """Return sources, tags, inputs, and the user's passes' ids; None disables caching."""
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self._others]
        return None if None in others else (source_fingerprint(), self._tags, self._inputs, others)


def _observed_inductor(observe: Observer, inputs: Sequence[Any] = (), roles: Sequence[str] = ()) -> Callable[..., Any]:
    in_place = {i for i, role in enumerate(roles) if role in ("parameter", "buffer")}

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_backward") and _are_in_order(example_inputs, inputs, in_place):
            options["static_input_idxs"] = sorted({*(options.get("static_input_idxs") or ()), *in_place})
        fill_freely(gm)
        own_results(gm)
        shown = copy_without_regions(gm)
        observe("backward" if options.get("is_backward") else "forward", shown)
        known = set(_kernel_nodes())
        compiled = compile_fx_inner(gm, example_inputs, **options)
        shown.meta[KERNELS] = {name: nodes for name, nodes in _kernel_nodes().items() if name not in known}
        return compiled

    return inner_compile


KERNELS = "treefx_kernels"
"""Of a graph that inductor compiled, in ``meta``: names of kernels, each with the nodes that it computes."""


def _kernel_nodes() -> dict[str, list[str]]:
    """What inductor says of its kernels; nothing unless ``config.trace.provenance_tracking_level`` of it is set."""
    found: dict[str, list[str]] = getattr(torch._inductor.debug, "_inductor_triton_kernel_to_post_grad_node_info", {})
    return {name: list(nodes) for name, nodes in found.items()}


def _are_in_order(found: Sequence[Any], inputs: Sequence[Any], positions: Collection[int]) -> bool:
    """Return whether AOTAutograd kept inputs in place: it drops equal ones and adds others."""
    return len(found) == len(inputs) and all(
        isinstance(found[i], Tensor) and (str(found[i].shape), found[i].dtype) == (str(x.shape), x.dtype)
        for i, x in enumerate(inputs)
        if i in positions
    )


def _observed_boxed(stage: str, observe: Observer) -> Callable[..., Any]:
    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        observe(stage, gm)
        return boxed_nop(gm, list(example_inputs))

    return compiler
