"""Judge float32 results by a step in float64 throughout, and by the size of sums."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from treefx.backend import treefx as backend
from treefx.data import IGNORED, Batch

__all__ = ["Step", "compiled_in_float64", "in_float64", "sizes_of_sums", "take_step"]

_T = TypeVar("_T")
Step = tuple[Tensor, dict[str, Tensor]]
"""A loss, and gradients by parameter name."""


def take_step(model: nn.Module, call: Callable[..., Any], batch: Batch) -> Step:
    """Run forward and backward of a model on one batch, plain or compiled.

    Args:
        model: Its gradients are set to None first.
        call: Returns a loss, or something with one.
        batch: Rows with labels.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)  # the same random draws for every call
    result = call(**batch.model_inputs())
    loss: Tensor = result if isinstance(result, Tensor) else result.loss
    loss.backward()  # type: ignore[no-untyped-call]
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), named


class _Wider(TorchFunctionMode):
    """Replace float32 by float64 where a model names it, as norms, softmax and losses do."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.float:
            return args[0].double()
        return func(*map(_wide, args), **{name: _wide(item) for name, item in (kwargs or {}).items()})


def in_float64(model: nn.Module, step: Callable[[nn.Module], _T]) -> _T:
    """Run a step on a float64 copy of a model, its casts to float32 lifted.

    Raises:
        RuntimeError: An operator of the model has no float64 form.
    """
    with _double(model, experts="eager") as twin, _Wider():
        return step(twin)


def compiled_in_float64(model: nn.Module, inner: str, step: Callable[[nn.Module, Callable[..., Any]], _T]) -> _T:
    """Run a step through treefx on a float64 copy of a model, casts to float32 lifted in Dynamo's graphs.

    Args:
        model: Not changed.
        inner: Inner compiler of treefx.
        step: Given the copy, and the copy compiled.

    Raises:
        RuntimeError: An operator of the model has no float64 form.
    """

    def widened(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return backend(_widen(gm), inputs, options={"inner": inner, "min_sharing": 1.0})

    with _double(model, experts="batched_mm") as twin:  # a loop over experts has no graph
        return step(twin, torch.compile(twin, backend=widened))


@contextlib.contextmanager
def _double(model: nn.Module, *, experts: str) -> Iterator[nn.Module]:
    """A float64 copy of a model, while numbers that it makes are float64, such as the least one of its dtype."""
    twin = copy.deepcopy(model).double()
    choose_experts: Any = getattr(twin, "set_experts_implementation", None)
    if choose_experts is not None:
        choose_experts(experts)  # the grouped product of experts has no float64
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield twin
    finally:
        torch.set_default_dtype(before)


def _wide(item: Any) -> Any:
    return torch.float64 if item is torch.float32 else item


def _widen(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace float32 by float64 in Dynamo's graph, as `_Wider` does in eager execution."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = tree_map(_wide, tuple(node.args)), tree_map(_wide, dict(node.kwargs))
                if node.op == "call_method" and node.target == "float":
                    node.target = "double"
            module.recompile()
    return gm


def sizes_of_sums(
    model: nn.Module, gradients_of: Callable[[Batch], Mapping[str, Tensor]], batch: Batch
) -> dict[str, float]:
    """Return, per parameter, the largest summed size of what the rows contribute to an element.

    Contributions may all but cancel: in one number, or in a vector times one number, such as the lambdas of
    differential attention. Rounding is then that of the summands, not of the sum.

    Args:
        model: Its loss is the mean over labels.
        gradients_of: Gradients of the loss on a batch, by parameter name.
        batch: Its rows contribute by their shares of the labels.
    """
    sums = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in model.named_parameters()}
    counted = (batch.labels != IGNORED).sum(dim=1)
    for row in counted.nonzero().flatten().tolist():
        labels = torch.full_like(batch.labels, IGNORED)
        labels[row] = batch.labels[row]
        share = float(counted[row] / counted.sum())
        for name, gradient in gradients_of(replace(batch, labels=labels)).items():
            sums[name] += share * gradient.abs()
    return {name: float(sizes.max()) for name, sizes in sums.items() if sizes.numel()}
