"""Keep things across calls: host copies of small tensors, tensors for any mode, stores with a bound.

A trie is built on the host. Where it is sent to a device by :func:`send`, the host keeps a copy while it is alive, from
which the lists of tiles are made and sent after it. For a forest that was not sent, they are made on the device, and
the host waits for their lengths.

Under ``torch.inference_mode`` every new tensor is one that autograd cannot save. Old log-probabilities come first, the
training step on the same batch second: caches of the first for the second (tries, tiles, edges, compiled code) are made
in :func:`lasting`. A :class:`Bounded` store holds answers that a process can find again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "ALIGNED",
    "Bounded",
    "Known",
    "forget",
    "host_copies",
    "is_on_device",
    "is_small",
    "lasting",
    "lasting_property",
    "on_host",
    "reading",
    "remember",
    "send",
    "send_together",
    "together",
]

ALIGNED = 32
"""Elements."""
_MOST_NUMBERS, _MOST_OTHERS = 1 << 22, 1 << 12
"""Elements of a small tensor: of whole numbers or booleans of at most two dimensions, and of others."""


@dataclass(frozen=True)
class Known:
    """Identify a tensor without keeping it: reused memory belongs to another storage.

    Attributes:
        storage: its storage.
        place: where, and its shape and type.
        version: how often it was written to; ``None`` for a tensor of inference mode, which does not tell.
    """

    storage: StorageWeakRef
    place: tuple[object, ...]
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> Known:
        """Remember a tensor."""
        version = None if tensor.is_inference() else tensor._version
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(storage, _place(tensor), version)

    def is_still(self, tensor: Tensor) -> bool:
        """Return whether it is this tensor, unchanged as far as autograd counts."""
        if self.version is None or tensor.is_inference() or self.version != tensor._version:
            return False
        return self.storage.cdata == tensor.untyped_storage()._cdata and self.place == _place(tensor)

    def is_gone(self) -> bool:
        """True if the tensor has been freed."""
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
        device: where it is wanted; on the CPU it is used unchanged, and only CUDA devices are waited for.
        keep: let the host's copy replace it later.
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
    """Let the host's copy replace a tensor of equal contents while it is alive and unchanged."""
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
    """Return a tensor's content on the CPU: the host's copy, or a synchronizing copy.

    The latter stands for nothing later, but within :func:`reading`: collectives and ``tensor.data`` write without a
    trace in the tensor.
    """
    if not is_on_device(tensor):
        return tensor
    known = host_copies([tensor])
    return _read(tensor) if known is None else known[0]


def is_small(tensor: Tensor) -> bool:
    """Return whether a tensor has so few elements that a copy of it costs the host little."""
    numbers = tensor.dim() <= 2 and not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.numel() <= (_MOST_NUMBERS if numbers else _MOST_OTHERS)


class _Scope(threading.local):
    tensors: tuple[Tensor, ...] = ()
    """Those that are read in this thread's call."""
    copies: dict[int, tuple[int, Tensor]] | None = None
    """By the ``id`` of a tensor: its version when it was copied, and the copy."""


_scope = _Scope()


@contextmanager
def reading(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let :func:`on_host` copy each of the tensors once at most while a call is planned, all with one wait.

    Args:
        tensors: Inputs of the call; those that are large, or on the CPU, are left out.
    """
    far = [x for x in tensors if is_on_device(x)]
    if _scope.copies is not None or not far:
        yield
        return
    _scope.tensors = tuple(x for x in far if is_small(x) and not x.is_inference())
    _scope.copies = {}
    try:
        yield
    finally:
        _scope.tensors, _scope.copies = (), None


def _read(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor; the first of a call that is read takes the others of the call along."""
    if not any(tensor is x for x in _scope.tensors):
        return _fetched([tensor])[0]
    assert _scope.copies is not None
    version, copy = _scope.copies.get(id(tensor), (-1, tensor))
    if version == tensor._version:
        return copy
    missing = [x for x in _scope.tensors if host_copies([x]) is None]
    _scope.copies = {id(x): (x._version, found) for x, found in zip(missing, _fetched(missing), strict=True)}
    return _scope.copies[id(tensor)][1]


def _fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU; the host waits once for all that lie on one CUDA device."""
    (device, *others) = dict.fromkeys(x.device for x in tensors)
    if others or device.type != "cuda":
        return [x.cpu() for x in tensors]
    with torch.cuda.device(device):
        copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
        for copy, x in zip(copies, tensors, strict=True):
            copy.copy_(x.detach(), non_blocking=True)
        torch.cuda.current_stream().synchronize()
    return copies


def forget(tensor: Tensor) -> None:
    """Drop the host's copy of a tensor: later writes leave no trace in it."""
    with _lock:
        _sent[:] = [one for one in _sent if not one.moved.is_still(tensor)]


def _stands_for(one: _Sent, tensor: Tensor) -> bool:
    return one.moved.is_still(tensor) and one.host._version == one.version


def together(operands: Any) -> Any:
    """Return nested operands in one place: on the host, or where a large one is; devices among them likewise."""
    tensors = [x for x in tree_leaves(operands) if isinstance(x, Tensor) and x.dim()]
    device = next((x.device for x in tensors if is_on_device(x)), torch.device("cpu"))

    def moved(x: Any) -> Any:
        if isinstance(x, torch.device):
            return device
        # A number on the host goes with tensors of any device, one on a device with none of the host.
        return x.to(device) if isinstance(x, Tensor) and (x.dim() or is_on_device(x)) and x.device != device else x

    return tree_map(moved, operands)


_T = TypeVar("_T")


@contextmanager
def lasting() -> Iterator[None]:
    """Make ordinary tensors inside of inference mode too; grad mode stays unchanged."""
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):  # the first alone would turn gradients on
        yield


def lasting_property(function: Callable[[Any], _T]) -> cached_property[_T]:
    """Cache a property whose tensors may be read in any mode later."""

    @wraps(function)
    def compute(self: Any) -> _T:
        with lasting():
            return function(self)

    return cached_property(compute)


_K = TypeVar("_K")
_V = TypeVar("_V")


class Bounded(dict[_K, _V]):
    """Keeps the entries that were set last, at most ``limit`` of them.

    Args:
        limit: How many entries there may be.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: _K, value: _V) -> None:
        self.pop(key, None)  # it becomes the newest
        super().__setitem__(key, value)
        while len(self) > self.limit:
            try:
                del self[next(iter(self))]
            except (KeyError, RuntimeError, StopIteration):  # another thread makes room at the same time
                return
