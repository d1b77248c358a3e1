"""Run a program over PyTorch's samples, and record all that a caller sees of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from treefx.tools.fuzz.samples.catalogue import find_module, find_operator, module_samples, operator_samples
from treefx.tools.fuzz.samples.inputs import Inputs
from treefx.tools.fuzz.samples.sample import Sample

__all__ = ["Seen", "play"]

Seen = dict[str, Any]
"""What one call showed: tensors and facts by name; ``error`` alone where it raised."""
Compiler = Callable[[Any], Any]


def play(sample: Sample, compile: Compiler) -> list[Seen]:
    """Call the operator or module of a program on each of its samples.

    Args:
        sample: The program.
        compile: Called with a function or a module once, or each module; returns its replacement.
    """
    steps = _operator_steps(sample, compile) if find_operator(sample.name) else _module_steps(sample, compile)
    return [_seen(sample, *step) for step in steps]


def _seen(sample: Sample, function: Any, inputs: Inputs, finish: Callable[[Any], Any]) -> Seen:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    torch.manual_seed(0)
    try:
        with modes.get(sample.inputs, nullcontext)():
            result = function(*inputs.given)
        return {**_values(result, inputs), **_gradients(finish(result), inputs)}
    except Exception as error:
        return {"error": error}


def _operator_steps(sample: Sample, compile: Compiler) -> Iterator[tuple[Any, Inputs, Any]]:
    operator = find_operator(sample.name)
    called = operator.get_inplace() if sample.form == "in place" else operator.op

    def call(x: Any, args: Any, kwargs: Any, out: Any) -> Any:
        return called(x, *args, **kwargs, **out)

    function = compile(call)
    torch.manual_seed(0)
    for item in operator_samples(operator, sample.dtype, in_place=sample.form == "in place"):
        given = (item.input, item.args, item.kwargs)
        out = _empty_results(operator.op, given) if sample.form == "out" else None
        inputs = Inputs((*given, {} if out is None else {"out": out}), sample.inputs)
        yield function, inputs, item.output_process_fn_grad


def _module_steps(sample: Sample, compile: Compiler) -> Iterator[tuple[Any, Inputs, Any]]:
    entry, training = find_module(sample.name), sample.form == "training"
    torch.manual_seed(0)
    for item in module_samples(entry, sample.dtype, training=training):
        made = item.constructor_input
        module = entry.module_cls(*made.args, **made.kwargs).to(getattr(torch, sample.dtype)).train(training)
        inputs = Inputs((item.forward_input.args, item.forward_input.kwargs), sample.inputs)
        inputs.leaves += [x for x in module.parameters() if x.requires_grad]
        inputs.tensors += list(module.buffers())
        yield _unpacking(compile(module)), inputs, lambda result: result


def _unpacking(module: Any) -> Callable[..., Any]:
    return lambda args, kwargs: module(*args, **kwargs)


def _empty_results(operator: Any, given: Any) -> Any:
    """Tensors like the results, for ``out=``."""
    x, args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), given)
    try:
        with torch.no_grad():
            return tree_map_only(Tensor, torch.zeros_like, operator(x, *args, **kwargs))
    except Exception:
        return None


def _values(result: Any, inputs: Inputs) -> Seen:
    seen: Seen = {}
    for i, x in enumerate(tree_leaves(result)):
        if not isinstance(x, Tensor):
            seen[f"output {i}"] = x
            continue
        seen[f"output {i}"] = _copied(x)
        seen[f"kind of output {i}"] = (x.dtype, tuple(x.shape), x.layout, x.requires_grad, x.is_leaf)
        seen[f"aliases of output {i}"] = [(x is t, _shares(x, t)) for t in inputs.tensors]
    for i, x in enumerate(inputs.tensors):
        seen[f"input {i} afterwards"] = _copied(x)
        seen[f"kind of input {i} afterwards"] = (tuple(x.shape), x.requires_grad, x.is_leaf)
    return seen


def _copied(x: Tensor) -> Tensor:
    x = x.detach()
    return (x if x.layout is torch.strided else x.to_dense()).resolve_conj().resolve_neg().clone()


def _shares(x: Tensor, other: Tensor) -> bool:
    if x.layout is not torch.strided or other.layout is not torch.strided or not x.numel():
        return False
    return x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _gradients(result: Any, inputs: Inputs) -> Seen:
    results = [x for x in tree_leaves((result, inputs.tensors)) if isinstance(x, Tensor) and x.requires_grad]
    results = [x for x in results if x.layout is torch.strided and x.grad_fn is not None]
    if not results or not inputs.leaves:
        return {}
    found = torch.autograd.grad(results, inputs.leaves, [_weights(x) for x in results], allow_unused=True)
    return {f"gradient {i}": None if x is None else _copied(x) for i, x in enumerate(found)}


def _weights(x: Tensor) -> Tensor:
    """Incoming gradients that differ from entry to entry."""
    numbers = torch.arange(x.numel(), dtype=torch.float64).add(1).cos().reshape(x.shape)
    return numbers.to(x.dtype)
