"""Keep the user's ``autograd.Function`` whole: two bodies become one operator.

Dynamo hands over two graphs, or the function itself, where it runs inside of code that Dynamo does not read
(``allow_in_graph``, ``nonstrict_trace``). Both bodies are traced to functional ATen for the shapes of the call. Sizes
among their inputs and saved values are numbers then, in-place operators are gone, and the bodies' computation can be
read off (``gradient_laws``).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import disable_functional_mode
from torch.autograd.function import FunctionCtx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from treefx.passes.trace import opaque_ops

__all__ = ["call_applied", "call_custom_function"]

aten = torch.ops.aten
Trace = Callable[[Callable[..., Any], Sequence[Tensor], FakeTensorMode], fx.GraphModule]


def call_custom_function(
    trace: Trace,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *inputs: Any,
    non_differentiable_idx: Sequence[int] = (),
    dirty_idx: Sequence[int] = (),
    **_: Any,
) -> Any:
    """Call an ``autograd.Function`` as one operator.

    Args:
        trace: Traces a Python function over fake tensors to functional ATen.
        forward: Maps the inputs to ``(outputs, saved)``.
        backward: Maps gradients of the outputs and the saved values to gradients of the inputs.
        inputs: Tensors and numbers.
        non_differentiable_idx: The outputs that the user says have no gradient.
        dirty_idx: The outputs that are inputs changed in place.

    Raises:
        NotImplementedError: It changes an input.
    """
    if dirty_idx:
        raise NotImplementedError(_DIRTY)
    bodies = _bodies(trace, fx.Interpreter(forward).run, fx.Interpreter(backward).run, inputs)
    return _call(bodies, inputs, non_differentiable_idx)


def call_applied(trace: Trace, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an ``autograd.Function`` that is given as a class, as one operator.

    Args:
        trace: As above.
        function: The class.
        args, kwargs: The arguments of its ``apply``: tensors, and anything else.

    Raises:
        NotImplementedError: It changes an input, returns or saves a tensor subclass, or leaves a tensor to its backward
            where that cannot be found.
    """
    applied = _Applied(function)
    inputs = applied.bind(args, kwargs)
    bodies = _bodies(trace, applied.forward, applied.backward, inputs)
    for body in (bodies.function.forward, bodies.function.backward):
        constants = (getattr(body, str(node.target)) for node in body.graph.find_nodes(op="get_attr"))
        if any(isinstance(value, FakeTensor) for value in constants):
            raise NotImplementedError(
                f"{function.__name__} (autograd.Function) leaves a tensor to its backward inside of an object; give it "
                "to ctx.save_for_backward"
            )
    return _call(bodies, inputs, applied.non_differentiable)


_DIRTY = "an autograd.Function marks an input dirty; return a new tensor instead"


class _Applied:
    """The bodies of an ``autograd.Function``, with what its forward leaves to its backward between them."""

    def __init__(self, function: Any) -> None:
        self._function, self._left = function, _Context(())
        self._is_split = function.setup_context is not torch.autograd.Function.setup_context
        self.non_differentiable: list[int] = []

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        """The arguments by position, as PyTorch binds them."""
        if not self._is_split:
            return args
        bound = inspect.signature(self._function.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args

    def forward(self, *inputs: Any) -> Any:
        """Return the outputs and the saved values."""
        ctx = _Context(tuple(isinstance(x, Tensor) and x.is_floating_point() for x in inputs))
        if self._is_split:
            outputs = self._function.forward(*inputs)
            self._function.setup_context(ctx, inputs, outputs)
        else:
            outputs = self._function.forward(ctx, *inputs)
        if ctx.dirty_tensors:
            raise NotImplementedError(_DIRTY)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        constant = ctx.non_differentiable
        self.non_differentiable = [i for i, x in enumerate(several) if any(x is other for other in constant)]
        self._left = ctx
        saved = [*ctx.to_save, *ctx.tensors()]
        if any(map(is_traceable_wrapper_subclass, (*several, *saved))):
            raise NotImplementedError(
                f"{self._function.__name__} (autograd.Function) returns or saves a tensor subclass"
            )
        return outputs, saved

    def backward(self, *given: Any) -> Any:
        """Gradients of the outputs and saved values -> gradients of the inputs."""
        ctx = copy.copy(self._left)
        gradients = len(given) - len(ctx.to_save) - len(ctx.tensors())
        saved = given[gradients:]
        ctx.replace_tensors(saved[len(ctx.to_save) :])
        ctx.saved_tensors = tuple(saved[: len(ctx.to_save)])
        return self._function.backward(ctx, *given[:gradients])


class _Context(FunctionCtx):
    """What a forward is given to leave values for its backward."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.saved_tensors: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()

    def tensors(self) -> list[Tensor]:
        """The tensors among its attributes, in lists and dictionaries too."""
        return [x for x in tree_leaves(self._attributes()) if isinstance(x, Tensor)]

    def replace_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Put others in the places of `tensors`."""
        given = iter(tensors)
        vars(self).update(tree_map_only(Tensor, lambda _: next(given), self._attributes()))

    def _attributes(self) -> dict[str, Any]:
        own = ("needs_input_grad", "to_save", "saved_tensors", "dirty_tensors", "non_differentiable")
        return {name: value for name, value in vars(self).items() if name not in own}


def _bodies(trace: Trace, forward: Callable[..., Any], backward: Callable[..., Any], inputs: Sequence[Any]) -> _Bodies:
    with temporarily_clear_interpreter_stack(), disable_functional_mode(), disable_proxy_modes_tracing():
        return _Bodies(trace, forward, backward, [_example(x) if isinstance(x, Tensor) else x for x in inputs])


def _call(bodies: _Bodies, inputs: Sequence[Any], non_differentiable_idx: Sequence[int]) -> Any:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    results = opaque_ops.custom_function(tensors, opaque_ops.register_function(bodies.function))
    made = iter(results[: bodies.function.outputs])
    outputs = [next(made) if isinstance(x, Tensor) else x for x in bodies.outputs]
    outputs = [x.detach() if i in non_differentiable_idx else x for i, x in enumerate(outputs)]
    return tuple(outputs) if bodies.several else outputs[0]


def _example(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


@dataclass
class _Traced:
    """Hold a body as a graph, and the structure of its results."""

    gm: fx.GraphModule
    result: Any


class _Bodies:
    """Trace both bodies; ``outputs`` are examples of the user's results."""

    def __init__(
        self, trace: Trace, forward: Callable[..., Any], backward: Callable[..., Any], inputs: list[Any]
    ) -> None:
        mode = active_fake_mode()
        assert mode is not None
        self._trace, self._mode = trace, mode
        first = self._traced(forward, inputs)
        outputs, saved = first.result
        self.several = isinstance(outputs, list | tuple)
        self.outputs: list[Any] = list(outputs) if self.several else [outputs]
        if first.gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
            raise NotImplementedError("an autograd.Function changes an input in place; return a new tensor instead")
        second = self._traced(backward, [*self.outputs, *saved])
        gradients = second.result if isinstance(second.result, list | tuple) else [second.result]
        self.function = self._link(first.gm, second.gm, inputs, saved, gradients)

    def _traced(self, body: Callable[..., Any], inputs: Sequence[Any]) -> _Traced:
        results: list[Any] = []

        def run(*tensors: Tensor) -> list[Tensor]:
            given = iter(tensors)
            result = body(*[next(given) if isinstance(x, Tensor) else x for x in inputs])
            results.append(result)
            return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]

        gm = self._trace(run, [x for x in inputs if isinstance(x, Tensor)], self._mode)
        _drop_empty_views(gm)
        values = iter([item.meta["val"] for item in _returned(gm)])
        result = torch.utils._pytree.tree_map_only(Tensor, lambda _: next(values), results[-1])
        return _Traced(gm, result)

    def _link(
        self, forward: fx.GraphModule, backward: fx.GraphModule, inputs: list[Any], saved: Any, gradients: Sequence[Any]
    ) -> opaque_ops.Function:
        """Return each saved value once, unless it is an input or an output."""
        count = sum(isinstance(x, Tensor) for x in self.outputs)
        returned = _returned(forward)
        placeholders = forward.graph.find_nodes(op="placeholder")
        results, sources = returned[:count], []
        for node in returned[count:]:
            if node in placeholders:
                sources.append(("input", placeholders.index(node)))
                continue
            if node not in results:
                results.append(node)
            sources.append(("result", results.index(node)))
        _return(forward, results)
        _erase_changes(backward, count)
        given = list(gradients) if len(gradients) == len(inputs) else _spread(gradients, inputs)
        there = tuple(isinstance(g, Tensor) for x, g in zip(inputs, given, strict=True) if isinstance(x, Tensor))
        return opaque_ops.Function(forward, backward, count, tuple(sources), there)


def _erase_changes(backward: fx.GraphModule, gradients: int) -> None:
    """Drop a backward's writes into its incoming gradients, which are not seen outside."""
    unseen = backward.graph.find_nodes(op="placeholder")[:gradients]
    for change in backward.graph.find_nodes(op="call_function", target=aten.copy_.default):
        if change.args[0] not in unseen:
            raise NotImplementedError(
                "the backward of an autograd.Function changes a saved tensor in place; make a new one instead"
            )
        backward.graph.erase_node(change)
    backward.recompile()


def _drop_empty_views(gm: fx.GraphModule) -> None:
    """Drop views of a value's own shape, such as ``x.view_as(x)`` for a returned input."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.view.default):
        source: Any = node.args[0]
        if source.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
    gm.recompile()


def _spread(gradients: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Gradients of the tensors alone, with None at the numbers."""
    left = iter(gradients)
    return [next(left) if isinstance(x, Tensor) else None for x in inputs]


def _returned(gm: fx.GraphModule) -> list[fx.Node]:
    output: Any = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    return list(output)


def _return(gm: fx.GraphModule, results: list[fx.Node]) -> None:
    next(iter(gm.graph.find_nodes(op="output"))).args = (results,)
    gm.recompile()
