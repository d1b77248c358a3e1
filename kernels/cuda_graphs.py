"""What operators say about CUDA graphs."""

from typing import Any

import torch

__all__ = ["NOT_CAPTURED"]

_tags: Any = torch.Tag
NOT_CAPTURED: tuple[torch.Tag, ...] = tuple(
    tag for tag in (getattr(_tags, "cudagraph_unsafe", None),) if tag is not None
)
"""The tag of an operator that no CUDA graph may hold: it waits for the device, allocates by values, or reads values on
the host. Inductor runs such an operator between CUDA graphs. Empty in a PyTorch without the tag."""
