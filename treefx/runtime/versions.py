"""Where supported versions of PyTorch and transformers differ: what newer ones do, had from the oldest as well.

GPU machines have older versions than a development machine. What differs between them is named here, with what the
older one does, and nowhere else.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.symbolic_convert import SpeculationLog
from torch._dynamo.variables import functions
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserMethodVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._inductor.codegen.cpp import CppVecKernel
from torch.torch_version import TorchVersion

__all__ = ["mend_dynamo", "mend_inductor", "parameter_groups"]


def mend_dynamo() -> None:
    """Let an older Dynamo trace what 2.13 traces, where treefx compiles it."""
    if TorchVersion(torch.__version__) < "2.13":
        _take_objects_for_constants()
        _apply_functions_kept_by_modules()
        _require_gradients_that_stay()
    _drop_no_layer_at_a_rate_of_zero()
    _keep_backward_of_experts_whole()


def mend_inductor() -> None:
    """Let an older inductor generate code that compiles where 2.13's does."""
    if TorchVersion(torch.__version__) < "2.13":
        _spread_conditions_of_indices()


def parameter_groups(state: Any) -> list[Any]:
    """What FSDP2 gathers at once, of one module's state: 2.11 has one such group of parameters or none."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def _is_ours(tx: Any) -> bool:
    """Whether treefx compiles what Dynamo is tracing."""
    return getattr(tx.output.compiler_fn, "compiler_name", None) == "treefx"


class _Itself:
    """An argument of a function that Dynamo runs instead of tracing it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def is_tensor(self) -> bool:
        return False

    def as_python_constant(self) -> Any:
        return self.value


def _take_objects_for_constants() -> None:
    """Let functions with ``assume_constant_result`` be handed modules, which 2.11 refuses with an internal error."""
    original = functions.invoke_and_store_as_constant

    def taken(x: Any) -> Any:
        x = x.realize()
        if not isinstance(x, UserDefinedObjectVariable):
            return x
        if x.source is not None:
            install_guard(x.source.make_guard(GuardBuilder.ID_MATCH))
        return _Itself(x.value)

    @functools.wraps(original)
    def invoke(tx: Any, fn: Any, name: str, args: Any, kwargs: Any) -> Any:
        if _is_ours(tx):
            args, kwargs = [taken(x) for x in args], {key: taken(x) for key, x in kwargs.items()}
        return original(tx, fn, name, args, kwargs)

    functions.invoke_and_store_as_constant = invoke


def _apply_functions_kept_by_modules() -> None:
    """Trace ``self.function(x)`` where a module keeps the ``apply`` of an ``autograd.Function``.

    2.11 takes that for an ordinary method, walks into PyTorch's own code and cuts the graph there.
    """
    original = UserMethodVariable.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours = _is_ours(tx)
        applied = self.fn is getattr(torch.autograd.Function.apply, "__func__", None)
        if ours and applied and isinstance(self.obj, AutogradFunctionVariable):
            return self.obj.call_method(tx, "apply", list(args), kwargs)
        return original(self, tx, args, kwargs)

    UserMethodVariable.call_function = call_function  # type: ignore[method-assign]


def _require_gradients_that_stay() -> None:
    """Trace ``x.requires_grad_()`` on a tensor made inside of the graph, and start over if that tensor leaves it.

    2.11 breaks the graph there at once. This is the part of 2.13 that ``dynamo.py`` builds upon; a tensor that only
    has to be differentiated within the graph needs no such mark.
    """
    original, validate = TensorVariable.method_requires_grad_, OutputGraph._validate_outputs_safe_for_autograd_nodes
    SpeculationLog.graph_break_on_requires_grad_ = False

    @functools.wraps(original)
    def requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        wanted = requires_grad is True or requires_grad.as_python_constant() is True
        breaks = tx.speculation_log.graph_break_on_requires_grad_
        if _is_ours(tx) and wanted and not self.source and not breaks:
            tx.output.leaf_var_creation_order.append(self)
            return self
        return original(self, tx, requires_grad)

    def check(self: Any, results: Any, tx: Any) -> None:
        log = tx.speculation_log
        if getattr(log, "treefx_keeps_leaf", False) and not log.graph_break_on_requires_grad_:
            log.graph_break_on_requires_grad_ = True
            raise RestartAnalysis(restart_reason="a tensor made to require grad leaves the graph")

    @functools.wraps(validate)
    def validate_outputs(self: Any, results: Any, tx: Any) -> None:
        validate(self, results, tx)
        self._check_requires_grad_intermediate_outputs(results, tx)

    TensorVariable.method_requires_grad_ = requires_grad_  # type: ignore[method-assign]
    OutputGraph._check_requires_grad_intermediate_outputs = check  # type: ignore[assignment, method-assign]
    OutputGraph._validate_outputs_safe_for_autograd_nodes = validate_outputs  # type: ignore[assignment, method-assign]


def _spread_conditions_of_indices() -> None:
    """Write a condition that is the same for all lanes of a checked index as a mask of lanes, as 2.13 does.

    2.11 calls a constructor that there is not: angles that are looked up behind a ``cat``, on the CPU, do not compile.
    """
    original: Any = CppVecKernel.indirect_assert

    @functools.wraps(original)
    def indirect_assert(self: Any, var: Any, lower: Any, upper: Any, mask: Any = None) -> Any:
        line = original(self, var, lower, upper, mask)
        if mask is None or mask.is_vec or not var.is_vec:
            return line
        lanes = self._get_mask_type(var.dtype)
        return line.replace(f"~({lanes}({mask}))", f"~({lanes}::from({mask}))")

    CppVecKernel.indirect_assert = indirect_assert  # type: ignore[method-assign]


def _drop_no_layer_at_a_rate_of_zero() -> None:
    """Decide ``if torch.rand([]) < 0.0``, which is false whatever is drawn, without a break of the graph.

    opt, biogpt and xglm of transformers 5.17 ask that in front of every layer; later ones look at the rate first. A
    comparison of which something else is made than a branch stays the tensor that it is.
    """
    original = getattr(BuiltinVariable, "_handle_insert_op_in_graph", None)
    if original is None:  # another version of Dynamo: it breaks the graph there
        return

    @functools.wraps(original)
    def insert(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        asked = self.fn is operator.lt and _is_ours(tx) and _is_drawn(args[0]) and _is_branched_on(tx)
        if asked and args[1].is_python_constant() and args[1].as_python_constant() <= 0:
            return ConstantVariable.create(False)
        return original(self, tx, args, kwargs)

    BuiltinVariable._handle_insert_op_in_graph = insert  # type: ignore[method-assign]


def _is_branched_on(tx: Any) -> bool:
    """Whether the next instruction (Python 3.13: of the next two) jumps by what the present one leaves."""
    following = tx.instructions[tx.instruction_pointer].opname
    return following == "TO_BOOL" or (following.startswith("POP_JUMP") and "IF" in following)


def _is_drawn(value: Any) -> bool:
    return isinstance(value, TensorVariable) and value.ndim == 0 and value.as_proxy().node.target is torch.rand


def _keep_backward_of_experts_whole() -> None:
    """Make one operator of the backward of transformers' grouped product, as later versions than 5.17 do themselves.

    5.17 loops over the values of the offsets there, which no graph of a backward knows.
    """
    module = sys.modules.get("transformers.integrations.moe")
    backward = getattr(module, "_grouped_mm_fallback_backward", None)
    if module is None or backward is None or hasattr(module, "_grouped_mm_fallback_backward_fake"):
        return
    schema = "(Tensor x, Tensor weight, Tensor offsets, Tensor g) -> (Tensor, Tensor)"
    name, loop = "transformers::grouped_mm_fallback_backward", _eager_of(backward)
    operator = torch.library.custom_op(name, loop, mutates_args=(), schema=schema)
    operator.register_fake(lambda x, weight, offsets, g: (torch.empty_like(x), torch.empty_like(weight)))

    def whole(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return *operator(*ctx.saved_tensors, ctx.offs, g), None

    setup = module._grouped_mm_fallback_setup_context
    torch.library.register_autograd("transformers::grouped_mm_fallback", whole, setup_context=setup)


def _eager_of(backward: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """transformers' own loop, as a function of tensors."""

    def loop(x: Tensor, weight: Tensor, offsets: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return backward(SimpleNamespace(saved_tensors=(x, weight), offs=offsets), g)[:2]  # type: ignore[no-any-return]

    return loop
