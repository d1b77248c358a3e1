"""Vectors of a forest that the host has too: what follows from them is made there, and nothing waits for the device.

A trie is built on the host. Where it is sent to a device by :func:`send`, the host keeps a copy, from which the lists
of tiles are made and sent after it. For a forest that nobody sent they are made on the device, and the host waits for
their lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

__all__ = ["host_copies", "is_on_device", "remember", "send", "send_together", "unchanged"]

_ALIGNED = 32
"""Elements."""
_MOST = 16
"""Vectors whose copies are kept: those of the last forests, four bytes per token."""


@dataclass(frozen=True)
class _Sent:
    moved: Tensor
    """Held, so that no other tensor can take its place in memory."""
    host: Tensor
    versions: tuple[int, int]


_sent: list[_Sent] = []
_lock = Lock()


def is_on_device(tensor: Tensor) -> bool:
    """Whether reading the tensor makes the host wait."""
    return tensor.device.type != "cpu"


def send(host: Tensor, device: torch.device | str, *, keep: bool = False) -> Tensor:
    """Return a tensor on a device, without waiting until it is there.

    Args:
        host: on the CPU.
        device: where it is wanted; on the CPU it is used as it is, and only CUDA devices are waited for.
        keep: let the host's copy stand for it in what follows.
    """
    if torch.device(device).type != "cuda":
        return host.to(device)
    moved = _moved(host, device)
    if keep:
        remember(host, moved)
    return moved


def _moved(host: Tensor, device: torch.device | str) -> Tensor:
    return host.pin_memory().to(device, non_blocking=True)


def send_together(vectors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return vectors of one type on a device, sent in one piece and without waiting.

    Each of them starts aligned there, so that kernels which read several are the same for all lengths.
    """
    padding = [-len(vector) % _ALIGNED for vector in vectors]
    pieces = [torch.nn.functional.pad(vector, (0, more)) for vector, more in zip(vectors, padding, strict=True)]
    lengths = [len(piece) for piece in pieces]
    moved = _moved(torch.cat(pieces), device)
    return [piece[: len(vector)] for piece, vector in zip(torch.split(moved, lengths), vectors, strict=True)]


def remember(host: Tensor, moved: Tensor) -> None:
    """Let the host's copy stand for a tensor of the same contents, as long as nobody writes to that."""
    if moved.is_inference() or host.is_inference():  # they have no version that would tell
        return
    with _lock:
        _sent.insert(0, _Sent(moved, host, (moved._version, host._version)))
        del _sent[_MOST:]


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the host's copies of the tensors, or ``None`` if it has not all of them."""
    with _lock:
        found = [next((one.host for one in _sent if _stands_for(one, tensor)), None) for tensor in tensors]
    known = [host for host in found if host is not None]
    return known if len(known) == len(tensors) else None


def _stands_for(one: _Sent, tensor: Tensor) -> bool:
    moved, host = one.versions
    return not tensor.is_inference() and unchanged(one.moved, moved, tensor) and one.host._version == host


def unchanged(old: Tensor, version: int, new: Tensor) -> bool:
    """Whether a tensor lies where the old one does, and nobody has written to it through autograd's eyes."""
    alike = old.data_ptr() == new.data_ptr() and old.shape == new.shape and old.stride() == new.stride()
    return alike and old.dtype == new.dtype and old.device == new.device and new._version == version
