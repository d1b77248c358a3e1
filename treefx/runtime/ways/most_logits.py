"""Decide how many logits a step holds at once before LM head and loss run in chunks."""

from __future__ import annotations

import functools
from typing import Literal

import torch

__all__ = ["most_logits"]

_ON_CPU = 2**26
_PART = 8
"""Logits take at most one part in so many of the free memory of a device."""


def most_logits(setting: int | Literal["auto"], dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of logits (tokens times vocabulary) that are computed as a whole.

    Args:
        setting: The option ``max_logits``.
        dtype: Of the logits.
        device: Of the logits.
    """
    if setting != "auto":
        return setting
    return _free_bytes(device) // _PART // dtype.itemsize if device.type == "cuda" else _ON_CPU


@functools.lru_cache(maxsize=16)
def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a device at the first step.

    A later change of the answer would compile the other form.
    """
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
