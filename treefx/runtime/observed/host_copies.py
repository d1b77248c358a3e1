"""Copy small tensors of a call to the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treefx.kernels import memory

__all__ = ["HostCopies", "copy_to_host", "is_recording"]


@dataclass(frozen=True)
class HostCopies:
    """Tensors on the host by name, some of which may still be on their way.

    Attributes:
        arrived: A CUDA event; None where nothing was copied from a CUDA device.
    """

    tensors: Mapping[str, Tensor]
    arrived: Any = None

    def wait(self) -> None:
        """Wait until all tensors have arrived; usually the copies have long finished."""
        if self.arrived is not None:
            self.arrived.synchronize()


def copy_to_host(tensors: Mapping[str, Tensor | None]) -> HostCopies:
    """Begin to copy tensors; later writes to them do not reach the copies.

    A copy that the host has anyhow (``treefx.integrations.moved_batches``) stands for its tensor. Only copies from CUDA
    devices are asynchronous.
    """
    copies: dict[str, Tensor] = {}
    arrived: Any = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        known = memory.host_copies([tensor]) if memory.is_on_device(tensor) else None
        if known is not None:
            copies[name] = known[0]
        elif tensor.device.type == "cuda":
            with torch.cuda.device(tensor.device):
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies[name] = pinned.copy_(tensor.detach(), non_blocking=True)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record()
        else:
            copies[name] = tensor.detach().cpu() if memory.is_on_device(tensor) else tensor.detach().clone()
    return HostCopies(copies, arrived)


def is_recording() -> bool:
    """Whether the caller records a CUDA graph, into which no copy must go."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
