"""Make a function without in-place operations; changes of inputs come last, as copies.

``torch.func.functionalize`` does the same, but specialises sizes on its way through C++ code such as ``linear``
with a bias, so that a symbolic size becomes the hint without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun, was_tensor_updated
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils._pytree import tree_map_only

__all__ = ["functionalised"]


def functionalised(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the functional form; changed inputs get their new values at the end.

    Raises:
        NotImplementedError: An input became another tensor (``x.data = y``, ``x.set_()``, ``x.t_()``).
    """

    def run(*args: Any) -> Any:
        above = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
        with above, FunctionalTensorMode():
            given = tree_map_only(Tensor, to_fun, args)
            results = tree_map_only(Tensor, from_fun, function(*given))
            changed = [(x, wrapped) for x, wrapped in zip(args, given, strict=True) if _is_changed(x, wrapped)]
            news = [from_fun(wrapped) for _, wrapped in changed]
        for (x, _), new in zip(changed, news, strict=True):
            x.copy_(new)
        return results

    return run


def _is_changed(x: Any, wrapped: Any) -> bool:
    if not isinstance(x, Tensor):
        return False
    if has_data_mutation(wrapped):
        return True
    new: Any = from_fun(wrapped)
    if was_tensor_updated(x, new):
        raise NotImplementedError(
            "the graph gives one of its inputs another memory or shape (x.data = y, x.set_(y), x.t_()); write a new "
            "tensor, or change the values in place (x.copy_(y))"
        )
    return False
