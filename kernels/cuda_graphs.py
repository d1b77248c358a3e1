"""The tag of operators that CUDA graphs must not capture."""

from typing import Any

import torch

__all__ = ["NOT_CAPTURED"]

_tags: Any = torch.Tag
NOT_CAPTURED: tuple[torch.Tag, ...] = tuple(
    tag for tag in (getattr(_tags, "cudagraph_unsafe", None),) if tag is not None
)
"""For an operator that waits for the device, allocates by values, or reads values on the host. Inductor runs such an
operator between CUDA graphs. Empty in a PyTorch without the tag."""
