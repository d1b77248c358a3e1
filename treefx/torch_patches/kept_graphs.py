"""Backwards that run more than once, such as ``loss.backward(retain_graph=True)``.

A compiled backward may write into tensors that the forward saved for it alone ("donated" ones). AOTAutograd decides
that with the first backward, and gives it up where that one keeps its graph; treefx compiles the backward with the
forward, before anybody can know. So it is always allowed, and a backward that keeps its graph gets copies to write to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import clone_preserve_strides

__all__ = ["keep_graphs", "keeping_graphs"]


def keeping_graphs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``compiled``, a function of AOTAutograd, so that graphs of results may be kept."""
    prepared = False

    def run(*args: Any) -> Any:
        nonlocal prepared
        results = compiled(*args)
        prepared = prepared or keep_graphs(results)
        return results

    return run


def keep_graphs(results: Sequence[Any]) -> bool:
    """Let graphs of results of a function of AOTAutograd be kept.

    Returns:
        Whether any was made by it, so that later results may be kept too.
    """
    functions = {_function_of(result) for result in results} - {None} if torch.is_grad_enabled() else set()
    for function in functions:
        _copy_donated(function)
    return bool(functions)


def _function_of(result: Any) -> Any:
    """The ``autograd.Function`` of AOTAutograd that made a tensor, if one did."""
    node = result.grad_fn if isinstance(result, Tensor) else None
    function = getattr(node, "_forward_cls", None)
    return function if hasattr(function, "_backward_impl") else None


def _copy_donated(function: Any) -> None:
    """Let the backward write into copies of its donated arguments where the graph is kept."""
    metadata, backward = function.metadata, function._backward_impl
    donated = metadata.bw_donated_idxs
    metadata.bw_donated_idxs = []  # AOTAutograd refuses to keep a graph with donated buffers
    if not donated:
        return

    def run(ctx: Any, args: Sequence[Any]) -> Any:
        if torch._C._autograd._get_current_graph_task_keep_graph():
            args = [_copied(x) if i in donated else x for i, x in enumerate(args)]
        return backward(ctx, args)

    function._backward_impl = staticmethod(run)


def _copied(x: Tensor) -> Tensor:
    copy: Tensor = clone_preserve_strides(x)  # type: ignore[no-untyped-call]
    return copy
