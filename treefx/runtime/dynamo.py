"""What treefx asks of Dynamo, so that models and trainers as they are leave it as one graph.

Positions that nobody reads and inputs that tell tokens apart are found in one graph; a break between the embedding and
the blocks leaves graphs without token ids, which run ordinarily.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from typing import Any

import torch
from torch import fx
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import builder
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import CompileContext
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext

from treefx.runtime.versions import mend_dynamo, mend_inductor
from treefx.runtime.whole.direct_flash import keep_direct_calls_whole
from treefx.runtime.whole.flash import keep_flash_whole
from treefx.runtime.whole.heads import keep_heads_whole
from treefx.runtime.whole.liger import write_liger_plainly

__all__ = ["keep_graphs_whole", "reads_cache", "role_of", "why_cut"]

_CACHES = re.compile(r"\b(past_key_values?|cache_params)\b")


@functools.cache
def keep_graphs_whole() -> None:
    """Apply all of it, once per process."""
    mend_dynamo()
    mend_inductor()
    _pass_warnings()
    _pass_requires_grad()
    _install_hooks_first()
    _take_batches_as_symbols()
    _leave_buckets_whole()
    keep_flash_whole()
    keep_direct_calls_whole()
    keep_heads_whole()
    write_liger_plainly()


def why_cut(gm: fx.GraphModule) -> str | None:
    """Why Dynamo ended a graph before the function it comes from did; None where it is the last of that function."""
    ending = getattr(gm, "compile_subgraph_reason", None)
    if ending is None or not ending.graph_break:
        return None
    return next(iter(str(ending.reason).splitlines()), "for a reason it does not name")


def reads_cache(gm: fx.GraphModule, roles: list[str]) -> bool:
    """True if a graph continues from keys and values, or states, that an earlier call left in a cache.

    Dynamo names each input after the argument that it comes from; transformers passes caches by few names. Learned
    prefixes come by the same names, but require gradients.
    """
    nodes = zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True)
    return any(role == "input" and _CACHES.search(_source_name(node)) is not None for node, role in nodes)


def _source_name(node: fx.Node) -> str:
    """The expression by which a call reaches an input, such as ``L['past_key_values'].layers[0].keys``."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)  # a method before PyTorch 2.12


def role_of(node: fx.Node, example: Any) -> str:
    """Whether an input is a parameter, a buffer of the model, or comes with the call, and is then to be learned."""
    if isinstance(example, torch.nn.Parameter):
        return "parameter"
    learned = isinstance(example, torch.Tensor) and example.requires_grad
    if isinstance(example, torch.Tensor) and _is_of_module(getattr(node, "_dynamo_source", None)):
        return "parameter" if learned else "buffer"
    return "variable" if learned else "input"


def _pass_warnings() -> None:
    """Let Dynamo trace past ``logger.warning_once``.

    transformers adds that method and calls it in the loss of models without a loss type (gpt2), where it would cut the
    graph between logits and loss: the loss could not say any more which positions nobody reads. PyTorch's own setting
    for this; the message is not shown from compiled code.
    """
    warn_once = getattr(logging.Logger, "warning_once", None)
    if warn_once is not None:
        torch._dynamo.config.ignore_logging_functions.add(warn_once)
        _log_without_settings()


def _log_without_settings() -> None:
    """Leave Dynamo's settings out of the log of compilations where it cannot write the functions among them.

    PyTorch 2.11 writes every setting as JSON, also the functions of ``_pass_warnings``, and prints a traceback for
    every graph; later ones leave these out.
    """
    settings = getattr(dynamo_utils, "_get_dynamo_config_for_logging", None)
    if settings is None:
        return
    try:
        settings()
    except TypeError:
        dynamo_utils._get_dynamo_config_for_logging = lambda: None


def _pass_requires_grad() -> None:
    """Let Dynamo trace past ``x.requires_grad_()`` on a tensor made inside of the graph, where treefx compiles it.

    PEFT and transformers hang this on the embedding of a frozen model, so that a reentrant checkpoint sees an input
    that requires grad. A graph needs no such thing, and the gradient of an intermediate goes nowhere, unless somebody
    keeps the tensor to read its ``grad``: there Dynamo breaks the graph. Where it does go somewhere inside of the graph
    (``torch.autograd.grad``), Dynamo traces the call itself and does not come here.
    """
    original = getattr(TensorVariable, "method_requires_grad_", None)
    check = getattr(OutputGraph, "_check_requires_grad_intermediate_outputs", None)
    if original is None or check is None:  # another version of Dynamo: it breaks the graph there
        return

    @functools.wraps(check)
    def check_outputs(self: Any, results: Any, tx: Any) -> Any:
        leaves = {leaf.as_proxy().node for leaf in self.leaf_var_creation_order if isinstance(leaf, TensorVariable)}
        if any(isinstance(x, TensorVariable) and not x.source and x.as_proxy().node in leaves for x in results):
            tx.speculation_log.treefx_keeps_leaf = True
        return check(self, results, tx)

    @functools.wraps(original)
    def requires_grad_(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        wanted = not given or given[0] is True or given[0].as_python_constant() is True
        breaks = getattr(tx.speculation_log, "graph_break_on_requires_grad_", True)
        ours = getattr(tx.output.compiler_fn, "compiler_name", None) == "treefx"
        kept = getattr(tx.speculation_log, "treefx_keeps_leaf", False)
        if ours and breaks and wanted and not kept and not self.source:
            return self
        return original(self, tx, *args, **kwargs)

    OutputGraph._check_requires_grad_intermediate_outputs = check_outputs  # type: ignore[assignment, method-assign]
    TensorVariable.method_requires_grad_ = requires_grad_  # type: ignore[method-assign]


def _install_hooks_first() -> None:
    """Let transformers hang its hooks for router logits and hidden states on a model before Dynamo traces it.

    It does so in the first call that asks for them, under a lock that would cut the graph there for good, head and loss
    on the far side. Here the hooks are hung for real, and Dynamo starts the trace of the model over.
    """
    module = sys.modules.get("transformers.utils.output_capturing")
    original = getattr(module, "maybe_install_capturing_hooks", None)
    if original is None or hasattr(original, "_dynamo_marked_constant"):
        return

    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
    @functools.wraps(original)
    def install(model: Any) -> None:
        hung = getattr(model, "_output_capturing_hooks_installed", False)
        original(model)
        if not hung and torch._guards.TracingContext.try_get() is not None:
            raise RestartAnalysis(restart_reason="hooks were hung on the model")

    setattr(module, "maybe_install_capturing_hooks", install)


def _take_batches_as_symbols() -> None:
    """Let Dynamo take all sizes of batches as symbols when it compiles a function again, where treefx compiles it.

    As elsewhere, the first graph of a function is of the sizes it is called with; a trainer that pads to one length
    needs no other. Left to itself Dynamo then takes those sizes for symbols that it has seen change, so that other
    lengths cost one more graph, and other numbers of rows another one. ``dynamic=False`` and dimensions marked static
    stay numbers.
    """
    original = getattr(builder, "_automatic_dynamic", None)
    if original is None:  # another version of Dynamo
        return

    @functools.wraps(original)
    def automatic_dynamic(e: Any, tx: Any, source: Any, static_shapes: bool, *args: Any, **kwargs: Any) -> Any:
        context = original(e, tx, source, static_shapes, *args, **kwargs)
        ours = getattr(tx.output.compiler_fn, "compiler_name", None) == "treefx"
        if not ours or static_shapes or not torch._dynamo.config.automatic_dynamic_shapes:
            return context
        if not isinstance(context, StatefulSymbolicContext) or _is_of_module(source) or not _is_compiled_again():
            return context
        marked = getattr(e, "_dynamo_static_indices", ())
        for d in _dimensions_of_batches(e):
            if context.dynamic_sizes[d] is DimDynamic.STATIC and d not in marked:
                context.dynamic_sizes[d] = DimDynamic.DYNAMIC
        return context

    builder._automatic_dynamic = automatic_dynamic


def _leave_buckets_whole() -> None:
    """Let Dynamo compile a model in DistributedDataParallel in one graph, where treefx compiles it.

    Left to itself it cuts the graph where DDP's buckets of gradients end, so that a bucket is sent while the next
    gradients are computed: all graphs but the first get no token ids. `accelerate` compiles a model after it has
    wrapped it, so that this is what a trainer meets on several devices. In one graph the buckets are sent after the
    backward, as they are where a compiled model is wrapped.
    """
    original = DDPOptimizer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(self.backend_compile_fn, "compiler_name", None) == "treefx":
            self.compile_fn = self.backend_compile_fn

    DDPOptimizer.__init__ = init  # type: ignore[method-assign]


def _is_compiled_again() -> bool:
    compile_id = CompileContext.current_compile_id()
    return compile_id is not None and bool(compile_id.frame_compile_id)


def _dimensions_of_batches(x: torch.Tensor) -> range | list[int]:
    """The dimensions of an input that may count rows or columns: not the features of hidden states."""
    if not x.is_floating_point() or x.dim() <= 2:
        return range(x.dim())
    if x.dim() == 4 and (x.shape[-1] == x.shape[-2] or x.shape[1] == 1):  # a mask
        return [0, 2, 3]
    return [0, 1] if x.dim() == 3 else []


def _is_of_module(source: Any) -> bool:
    if source is None:
        return False
    kind = source.guard_source
    kind = kind() if callable(kind) else kind
    return bool(kind.is_specialized_nn_module() or kind.is_unspecialized_nn_module())
