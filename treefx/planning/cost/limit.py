"""Resolve memory limits: check the caller's number, or measure free memory."""

import os

import torch

from treefx.arguments import check_number
from treefx.planning.cost.model import CostModel

__all__ = ["available_bytes", "check_limit"]

_RESERVE = 0.9


def check_limit(limit: object, device: torch.device, cost: CostModel) -> int:
    """The limit in bytes.

    Args:
        limit: a positive number of bytes, or "auto".
        device: device that "auto" measures.
        cost: its resident bytes are part of the limit, though they are in use already.

    Raises:
        InputError: neither a positive number nor "auto".
    """
    if isinstance(limit, str) and limit == "auto":
        return available_bytes(device, cost)
    return int(check_number(limit, "memory_limit_bytes", "a positive, finite number of bytes or 'auto'", above=0))


def available_bytes(device: torch.device, cost: CostModel) -> int:
    """Return nine tenths of the device's free memory, plus the model's memory there.

    The tenth is for memory that no tracker of tensors sees: the allocator's fragments, libraries' workspaces, the
    context.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_RESERVE * free + cost.resident_bytes)
