"""Vectors of a forest that the host has too: what follows from them is made there, and nothing waits for the device.

A trie is built on the host. Where it is sent to a device by :func:`send`, the host keeps a copy as long as it is there,
from which the lists of tiles are made and sent after it. For a forest that nobody sent they are made on the device, and
the host waits for their lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["ALIGNED", "Known", "forget", "host_copies", "is_on_device", "on_host", "remember", "send", "send_together"]

ALIGNED = 32
"""Elements."""


@dataclass(frozen=True)
class Known:
    """A tensor as it once was, without keeping it: memory that is used anew belongs to another storage.

    Attributes:
        storage: what it lies in.
        place: where, and its shape and type.
        version: how often it was written to; ``None`` for a tensor of inference mode, which does not tell.
    """

    storage: StorageWeakRef
    place: tuple[object, ...]
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> "Known":
        """Remember a tensor."""
        version = None if tensor.is_inference() else tensor._version
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(storage, _place(tensor), version)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether it is this one, and nobody has written to it through autograd's eyes."""
        if self.version is None or tensor.is_inference() or self.version != tensor._version:
            return False
        return self.storage.cdata == tensor.untyped_storage()._cdata and self.place == _place(tensor)

    def is_gone(self) -> bool:
        """Whether nobody has it any more."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@dataclass(frozen=True)
class _Sent:
    moved: Known
    host: Tensor
    version: int


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
    padding = [-len(vector) % ALIGNED for vector in vectors]
    pieces = [torch.nn.functional.pad(vector, (0, more)) for vector, more in zip(vectors, padding, strict=True)]
    lengths = [len(piece) for piece in pieces]
    moved = _moved(torch.cat(pieces), device)
    return [piece[: len(vector)] for piece, vector in zip(torch.split(moved, lengths), vectors, strict=True)]


def remember(host: Tensor, moved: Tensor) -> None:
    """Let the host's copy stand for a tensor of the same contents, as long as that is there and nobody writes to it."""
    if moved.is_inference() or host.is_inference():  # they have no version that would tell
        return
    one = _Sent(Known.of(moved), host, host._version)
    with _lock:
        _sent[:] = [one, *(old for old in _sent if not old.moved.is_gone())]


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the host's copies of the tensors, or ``None`` if it has not all of them."""
    with _lock:
        found = [next((one.host for one in _sent if _stands_for(one, tensor)), None) for tensor in tensors]
    known = [host for host in found if host is not None]
    return known if len(known) == len(tensors) else None


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor's content on the CPU: the host's copy where there is one, else what the host waits for now.

    The latter stands for nothing later: collectives and ``tensor.data`` write without a trace in the tensor.
    """
    if not is_on_device(tensor):
        return tensor
    known = host_copies([tensor])
    return _fetched(tensor) if known is None else known[0]


def _fetched(tensor: Tensor) -> Tensor:
    return tensor.cpu()


def forget(tensor: Tensor) -> None:
    """Let no copy of the host stand for a tensor any more: what is written to it leaves no trace in it."""
    with _lock:
        _sent[:] = [one for one in _sent if not one.moved.is_still(tensor)]


def _stands_for(one: _Sent, tensor: Tensor) -> bool:
    return one.moved.is_still(tensor) and one.host._version == one.version
