"""Patch Dynamo so that unmodified models and trainers trace to one graph."""

from __future__ import annotations

import functools
import logging
import operator
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import guards
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.symbolic_convert import SpeculationLog
from torch._dynamo.variables import builder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from treefx.torch_patches.backports import IS_OLDER
from treefx.torch_patches.patch import is_ours

__all__ = [
    "count_checked_elements",
    "drop_no_layer_at_a_rate_of_zero",
    "is_of_module",
    "leave_buckets_whole",
    "log_without_settings",
    "pass_requires_grad",
    "pass_warnings",
]


def is_of_module(source: Any) -> bool:
    """Whether Dynamo found a value in a module: a parameter, a buffer or another attribute."""
    if source is None:
        return False
    kind = source.guard_source
    kind = kind() if callable(kind) else kind
    return bool(kind.is_specialized_nn_module() or kind.is_unspecialized_nn_module())


def pass_warnings() -> None:
    """Let Dynamo trace past ``logger.warning_once``.

    transformers adds that method and calls it in the loss of models without a loss type (gpt2), where it would cut the
    graph between logits and loss: the loss could no longer mark unused positions. PyTorch's own setting
    for this; the message is not shown from compiled code.
    """
    warn_once = getattr(logging.Logger, "warning_once", None)
    if warn_once is not None:
        torch._dynamo.config.ignore_logging_functions.add(warn_once)


def log_without_settings() -> None:
    """Drop Dynamo's settings from the compilation log if functions in them cannot be written.

    PyTorch 2.11 writes every setting as JSON, also the functions of ``pass_warnings``, and prints a traceback for
    every graph; later ones leave these out.
    """
    settings = getattr(dynamo_utils, "_get_dynamo_config_for_logging", None)
    if settings is None:
        return
    try:
        settings()
    except TypeError:
        dynamo_utils._get_dynamo_config_for_logging = lambda: None


def pass_requires_grad() -> None:
    """Let Dynamo trace past ``x.requires_grad_()`` on a tensor made inside of the graph.

    PEFT and transformers hang this on the embedding of a frozen model, so that a reentrant checkpoint sees an input
    that requires grad. A graph needs no such thing, and the gradient of an intermediate is unused, unless the caller
    keeps the tensor to read its ``grad``: there Dynamo breaks the graph. Where it does go somewhere inside of the graph
    (``torch.autograd.grad``), 2.13 traces the call itself and does not come here; 2.11 breaks the graph there at once,
    and gets 2.13's way: the tensor counts as a leaf, and the trace starts over if it leaves the graph.
    """
    original = getattr(TensorVariable, "method_requires_grad_", None)
    check = _start_over if IS_OLDER else getattr(OutputGraph, "_check_requires_grad_intermediate_outputs", None)
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
        kept = getattr(tx.speculation_log, "treefx_keeps_leaf", False)
        if is_ours(tx) and wanted and not self.source:
            if breaks and not kept:
                return self
            if IS_OLDER and not breaks:
                tx.output.leaf_var_creation_order.append(self)
                return self
        return original(self, tx, *args, **kwargs)

    OutputGraph._check_requires_grad_intermediate_outputs = check_outputs  # type: ignore[assignment, method-assign]
    TensorVariable.method_requires_grad_ = requires_grad_  # type: ignore[method-assign]
    if IS_OLDER:
        _check_outputs_of_older_graphs()


def _check_outputs_of_older_graphs() -> None:
    SpeculationLog.graph_break_on_requires_grad_ = False
    validate = OutputGraph._validate_outputs_safe_for_autograd_nodes

    @functools.wraps(validate)
    def validate_outputs(self: Any, results: Any, tx: Any) -> None:
        validate(self, results, tx)
        self._check_requires_grad_intermediate_outputs(results, tx)

    OutputGraph._validate_outputs_safe_for_autograd_nodes = validate_outputs  # type: ignore[assignment, method-assign]


def _start_over(self: Any, results: Any, tx: Any) -> None:
    log = tx.speculation_log
    if getattr(log, "treefx_keeps_leaf", False) and not log.graph_break_on_requires_grad_:
        log.graph_break_on_requires_grad_ = True
        raise RestartAnalysis(restart_reason="a tensor made to require grad leaves the graph")


def leave_buckets_whole() -> None:
    """Let Dynamo compile a model in DistributedDataParallel in one graph.

    Left to itself it cuts the graph where DDP's buckets of gradients end, so that a bucket is sent while the next
    gradients are computed: all graphs but the first get no token ids. `accelerate` compiles a model after it has
    wrapped it, so trainers on several devices run into this. In one graph the buckets are sent after the
    backward, as they are where a compiled model is wrapped.
    """
    original = DDPOptimizer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(self.backend_compile_fn, "compiler_name", None) == "treefx":
            self.compile_fn = self.backend_compile_fn

    DDPOptimizer.__init__ = init  # type: ignore[method-assign]


def drop_no_layer_at_a_rate_of_zero() -> None:
    """Evaluate ``if torch.rand([]) < 0.0``, which is always false, without a graph break.

    opt, biogpt and xglm of transformers 5.17 check it in front of every layer; later ones look at the rate first. A
    comparison of which something else is made than a branch stays the tensor that it is.
    """
    original = getattr(BuiltinVariable, "_handle_insert_op_in_graph", None)
    if original is None:  # another version of Dynamo: it breaks the graph there
        return

    @functools.wraps(original)
    def insert(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        asked = self.fn is operator.lt and is_ours(tx) and _is_drawn(args[0]) and _is_branched_on(tx)
        if asked and args[1].is_python_constant() and args[1].as_python_constant() <= 0:
            return ConstantVariable.create(False)
        return original(self, tx, args, kwargs)

    BuiltinVariable._handle_insert_op_in_graph = insert  # type: ignore[method-assign]


def _is_branched_on(tx: Any) -> bool:
    """Return whether the next instruction jumps on the present result.

    On Python 3.13, of the next two.
    """
    following = tx.instructions[tx.instruction_pointer].opname
    return following == "TO_BOOL" or (following.startswith("POP_JUMP") and "IF" in following)


def _is_drawn(value: Any) -> bool:
    return isinstance(value, TensorVariable) and value.ndim == 0 and value.as_proxy().node.target is torch.rand


_STANDS_FOR = WeakIdKeyDictionary()
"""What a plain tensor stands for while Dynamo traces, a weak reference."""


def take_rows_between_for_plain() -> None:
    """Let Dynamo take tensors between graphs of a model for plain ones, except in guards of their class.

    Dynamo would read and guard the parts of a tensor subclass in every call.
    """
    wrap, match = builder.VariableBuilder.__call__, guards.GuardBuilder.TENSOR_MATCH

    @functools.wraps(wrap)
    def call(self: Any, value: Any) -> Any:
        is_between = getattr(type(value), "is_plain_to_dynamo", False) and is_ours(self.tx)
        return wrap(self, _plain(self.tx.output, value) if is_between else value)

    @functools.wraps(match)
    def tensor_match(self: Any, guard: Any, value: Any = None) -> Any:
        x = value() if isinstance(value, TensorWeakRef) else value
        return match(self, guard, _STANDS_FOR[x]() if isinstance(x, Tensor) and x in _STANDS_FOR else value)

    builder.VariableBuilder.__call__ = call  # type: ignore[method-assign]
    guards.GuardBuilder.TENSOR_MATCH = tensor_match  # type: ignore[method-assign]


def _plain(output: Any, value: Tensor) -> Tensor:
    """Return a plain tensor like another one, the same in all of a graph."""
    known = vars(output).setdefault("treefx_plain", {})
    if id(value) not in known:
        plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        with torch.enable_grad():
            plain = plain.requires_grad_().clone() if value.requires_grad else plain
        _STANDS_FOR[plain], known[id(value)] = weakref.ref(value), plain
    result: Tensor = known[id(value)]
    return result


def count_checked_elements() -> None:
    """Trace ``x[mask].numel()`` in a check of transformers as a count of the mask.

    Vision-language models check ``torch_compilable_check(x[mask].numel() == vectors.numel(), ...)``. The selection is
    read for its size alone, but its shape depends on data, which cuts the graph in front of the check. Elsewhere the
    selection and its count stay what they are, since code may expect a Python integer.
    """
    original = getattr(BuiltinVariable, "_handle_insert_op_in_graph", None)
    if original is None:  # another version of Dynamo: it breaks the graph there
        return

    @functools.wraps(original)
    def insert(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is operator.getitem and is_ours(tx) and _is_selection(*args) and _is_counted_by_check(tx):
            return _Selection(*args)
        return original(self, tx, args, kwargs)

    BuiltinVariable._handle_insert_op_in_graph = insert  # type: ignore[method-assign]


class _Selection(VariableTracker):
    """Stand for ``x[mask]``, of which nothing but ``numel()`` is read."""

    def __init__(self, x: TensorVariable, mask: TensorVariable) -> None:
        super().__init__()
        self.x, self.mask = x, mask

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
        """Trace ``mask.sum() * n``, with n elements of x for each of the mask."""
        assert name == "numel" and not args and not kwargs
        chosen: Any = self.mask.call_method(tx, "sum", [], {})
        for dim in range(self.mask.ndim or 0, self.x.ndim or 0):
            size = self.x.call_method(tx, "size", [ConstantVariable.create(dim)], {})
            chosen = BuiltinVariable(operator.mul).call_function(tx, [chosen, size], {})
        return chosen  # type: ignore[no-any-return]


def _is_selection(x: Any, index: Any) -> bool:
    return isinstance(x, TensorVariable) and isinstance(index, TensorVariable) and index.dtype is torch.bool


def _is_counted_by_check(tx: Any) -> bool:
    """Return whether the present result is read by ``.numel()``, in the arguments of a check of transformers."""
    place = tx.instruction_pointer
    if tx.instructions[place].argval != "numel":
        return False
    for earlier in reversed(tx.instructions[:place]):
        if earlier.opname.startswith(("STORE", "POP_TOP", "RETURN")):
            return False
        if earlier.opname == "LOAD_GLOBAL" and earlier.argval == "torch_compilable_check":
            return True
    return False


def name_modules_of_classes() -> None:
    """Let ``type(x).__module__`` of a class of PyTorch be a text.

    PEFT finds out so whether torchao has quantised a layer's weight.
    """
    original = GetAttrVariable.call_method

    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        owner = getattr(self.obj, "value", None)
        if is_ours(tx) and self.name == "__module__" and isinstance(owner, type):
            return ConstantVariable.create(owner.__module__).call_method(tx, name, args, kwargs)
        return original(self, tx, name, args, kwargs)

    GetAttrVariable.call_method = call_method  # type: ignore[method-assign]
