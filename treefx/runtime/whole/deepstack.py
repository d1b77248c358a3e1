"""Trace an operator in place of the addition of vectors at the places of images.

Models with features of a vision tower in several layers (Qwen3-VL) add them to ``hidden[masks, :]``. How
many places these are is known on the device alone, so that Dynamo cuts the graph in each such layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["deepstack_instead"]

_LIBRARY, _NAME, _PARAMETERS = "transformers.models.", "_deepstack_process", 3


def deepstack_instead(function: Any, tx: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """A sum of fixed size in place of transformers' own; None for any other function or call."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", None)
    if name != _NAME or not str(module).startswith(_LIBRARY) or len(args) < _PARAMETERS or kwargs:
        return None
    return _add_at_places, list(args[-_PARAMETERS:]), {}  # the model itself stands in front


def _add_at_places(hidden: Tensor, mask: Tensor, vectors: Tensor) -> Tensor:
    """Add vectors [n, D] to hidden states [B, T, D] at the places [B, T], in order.

    The model has compared the numbers.
    """
    places = mask.to(hidden.device).unsqueeze(-1)
    placed = hidden.masked_scatter(places, vectors.to(hidden.device, hidden.dtype))
    return torch.where(places, hidden + placed, hidden)
