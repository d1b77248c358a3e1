"""Hold the buffer values that a proof has read, and check that they still hold.

A buffer of up to 16 MiB is compared by content at every call, for any writer and any model. Of a larger one, address
and version are compared. So one change is not detected, here and wherever only versions are compared
(``treefx.runtime.kept.given`` looks at some numbers too): that a *large* tensor was written in a way that counts no
version, which is through ``.data``, a NumPy array or a DLPack capsule that shares its memory, a kernel that takes raw
pointers, or anything under ``torch.inference_mode`` if the tensor was made under it. ``torch.compiler.reset()`` forgets
every proof.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from treefx.kernels.lasting import lasting

__all__ = ["COMPARED_BYTES", "Proof", "bits", "version_of"]

COMPARED_BYTES = 1 << 24
"""The largest tensor to be copied and compared: half a millisecond to four on a CPU."""


class Proof:
    """The buffers that a proof read, as they were.

    Args:
        args: The tensors of the call that it was made in.
        read: Positions of the tensors with values that entered it.
    """

    def __init__(self, args: Sequence[Any] = (), read: Iterable[int] = ()) -> None:
        self._seen: dict[int, _Seen] = {i: _see(args[i]) for i in read}

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the same could be proved with these."""
        for i, seen in self._seen.items():
            if not seen.is_in(args[i]):
                return False
        return True


class _Seen(Protocol):
    def is_in(self, x: Tensor) -> bool:
        """Whether a tensor has the value that was seen."""


class _Content:
    """A value, by content."""

    def __init__(self, x: Tensor) -> None:
        self._kind = (x.shape, x.dtype, x.device)
        self._bits = bits(x).clone()

    def is_in(self, x: Tensor) -> bool:
        return (x.shape, x.dtype, x.device) == self._kind and torch.equal(bits(x), self._bits)


class _Place:
    """A value, by where it lies and how often that was written to."""

    def __init__(self, x: Tensor) -> None:
        self._version = version_of(x)
        self._storage = x.untyped_storage()  # held, so that no other tensor gets its address

    def is_in(self, x: Tensor) -> bool:
        return version_of(x) == self._version


_contents: weakref.WeakSet[_Content] = weakref.WeakSet()


def _see(x: Tensor) -> _Seen:
    """Layers and models with equal buffers share one copy."""
    if x.numel() * x.element_size() > COMPARED_BYTES:
        return _Place(x)
    known = next((content for content in list(_contents) if content.is_in(x)), None)
    if known is None:
        with lasting():
            known = _Content(x)
        _contents.add(known)
    return known


def bits(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, eight at a time where they allow it.

    Equal bits, not equal numbers (NaN, -0.0).
    """
    with torch.no_grad():
        flat = x.detach().contiguous().view(-1)
        whole = flat.numel() * flat.element_size() % 8 == 0
        return flat.view(torch.int64 if whole and flat.storage_offset() == 0 else torch.uint8)


def version_of(x: Tensor) -> tuple[int, int | None]:
    """Return a tensor's address and version; None as version under inference mode."""
    return x.data_ptr(), None if x.is_inference() else x._version
