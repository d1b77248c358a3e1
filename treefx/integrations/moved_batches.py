"""Keep host copies of batches that a trainer moves to a device, to avoid synchronizing.

Written for accelerate 1.15, whose data loaders (those of transformers' and TRL's trainers over a dataset too) move each
batch by ``send_to_device``. Other loops call it themselves: ``moved = remember_moved(batch, batch.to(device))``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from treefx.kernels import memory

__all__ = ["remember_moved", "watch_data_loaders"]

_T = TypeVar("_T")


def watch_data_loaders(data_loader: Any) -> None:
    """Make data loaders remember host copies of moved batches.

    Batches that are broadcast between ranks are left out.

    Args:
        data_loader: the module ``accelerate.data_loader``.
    """
    send, broadcast = data_loader.send_to_device, data_loader.broadcast
    if hasattr(send, "__wrapped__"):
        return

    @functools.wraps(send)
    def send_to_device(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(_small_tensors(tensor))  # a batch may be moved in place
        return _remember(before, send(tensor, *args, **kwargs))

    @functools.wraps(broadcast)
    def broadcast_and_forget(*args: Any, **kwargs: Any) -> Any:
        found = broadcast(*args, **kwargs)
        for _, tensor in _small_tensors(found):  # written in place, which the tensors do not tell
            memory.forget(tensor)
        return found

    data_loader.send_to_device, data_loader.broadcast = send_to_device, broadcast_and_forget


def remember_moved(batch: Any, moved: _T) -> _T:
    """Register the host copies of ids, masks, labels and positions of a moved batch.

    Args:
        batch: on the host: a tensor, or a mapping or sequence of them.
        moved: the same on a device.

    Returns:
        ``moved``.
    """
    return _remember(dict(_small_tensors(batch)), moved)


def _remember(before: Mapping[tuple[Any, ...], Tensor], moved: _T) -> _T:
    for path, tensor in _small_tensors(moved):
        host = before.get(path)
        if host is None or memory.is_on_device(host) or not memory.is_on_device(tensor):
            continue
        if host.shape == tensor.shape and host.dtype == tensor.dtype:
            # A collator may write into its memory again, also through numpy, which leaves no trace in the tensor.
            memory.remember(host.clone(), tensor)
    return moved


def _small_tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The whole numbers and booleans of one or two dimensions in a batch, by where they stand."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() and not value.is_complex() and value.dim() in (1, 2):
            yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _small_tensors(item, (*path, name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _small_tensors(item, (*path, number))
