"""What the inputs of a graph of Dynamo are."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["role_of"]


def role_of(node: fx.Node, example: Any) -> str:
    """Whether an input is a parameter, a buffer of the model, or comes with the call, and is then to be learned."""
    if isinstance(example, torch.nn.Parameter):
        return "parameter"
    learned = isinstance(example, torch.Tensor) and example.requires_grad
    if isinstance(example, torch.Tensor) and _is_of_module(node):
        return "parameter" if learned else "buffer"
    return "variable" if learned else "input"


def _is_of_module(node: fx.Node) -> bool:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return False
    kind = source.guard_source
    kind = kind() if callable(kind) else kind
    return bool(kind.is_specialized_nn_module() or kind.is_unspecialized_nn_module())
