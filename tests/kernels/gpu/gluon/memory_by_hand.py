"""Simulate a Gluon kernel's memory: numbers, addresses, barriers, shared memory, boxes."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["Barrier", "Barriers", "Box", "Pointer", "Shared", "Value", "value"]


class Value(Tensor):
    """Wrap a tensor of numbers with Triton's conversions."""

    def to(self, dtype: Any, *, bitcast: bool = False) -> Any:  # type: ignore[override]
        if bitcast:  # to unsigned numbers of 32 bits
            return self & 0xFFFFFFFF
        return super().to(dtype)

    @property
    def type(self) -> Any:  # type: ignore[override]
        """Return a type; kernels read only its layout."""
        return SimpleNamespace(layout=None)


def value(data: Any) -> Any:
    return torch.as_tensor(data).as_subclass(Value)  # type: ignore[no-untyped-call]


class Pointer:
    """Hold one or more addresses in a tensor's memory."""

    def __init__(self, tensor: Tensor, offset: Any) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + other)

    def __getitem__(self, index: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset[index])

    def to(self, dtype: Any, *, bitcast: bool) -> "Pointer":
        """Return the address as a number for the inline assembly."""
        return self

    def memory(self) -> Tensor:
        whole = self.tensor.untyped_storage()
        return torch.empty(0, dtype=self.tensor.dtype).set_(whole)  # type: ignore[call-overload, no-any-return]


class Barrier:
    """Complete a phase when all expected arrivals and bytes have come."""

    def __init__(self) -> None:
        self.count, self.arrived, self.bytes, self.phases = 0, 0, 0, 0
        self.copies: list[Callable[[], object]] = []

    def index(self, number: Any) -> "Barrier":
        return self

    def passed(self, phase: int) -> bool:
        return phase != self.phases & 1

    def settle(self, *, late: bool = False) -> None:
        """Complete the phase if all arrivals and bytes have come; copies finish late."""
        assert self.arrived <= self.count, "more arrive than the barrier counts"
        if self.arrived == self.count and self.bytes == 0 and (late or not self.copies):
            for copy in self.copies:
                copy()
            self.copies, self.arrived = [], 0
            self.phases += 1


class Barriers:
    def __init__(self, number: int) -> None:
        self.each = [Barrier() for _ in range(number)]

    def index(self, number: Any) -> Barrier:
        return self.each[int(number)]


class Shared:
    """Simulate shared memory: no usable number at first, stores invisible before a fence."""

    stored: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def __init__(self, data: Tensor, layout: Any = None) -> None:
        self.data, self.layout, self.dtype = data, layout, data.dtype

    def index(self, number: Any) -> "Shared":
        return Shared(self.data[int(number)], self.layout)

    def permute(self, order: Any) -> "Shared":
        return Shared(self.data.permute(order), self.layout)

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.data.narrow(dim, start, length), self.layout)

    def load(self, layout: Any) -> Any:
        return value(self.data.clone())

    def store(self, data: Tensor) -> None:
        self.stored[threading.get_ident()].append((self.data, data))

    @classmethod
    def fence(cls) -> None:
        for room, data in cls.stored.pop(threading.get_ident(), ()):
            room.copy_(data)


class Box:
    def __init__(self, pointer: Pointer, shape: Sequence[Any], strides: Sequence[Any], block: Any, layout: Any) -> None:
        self.pointer, self.shape, self.layout = pointer, [int(n) for n in shape], layout
        self.strides, self.block_shape, self.dtype = [int(n) for n in strides], list(block), pointer.tensor.dtype

    def read(self, corner: Sequence[Any]) -> Tensor:
        """Return a block; elements outside of the tensor read 0."""
        address, inside = torch.tensor(int(self.pointer.offset)), torch.tensor(True)
        for dim, (first, length) in enumerate(zip(corner, self.block_shape, strict=True)):
            index = int(first) + torch.arange(length)
            shape = [-1 if dim == other else 1 for other in range(len(self.block_shape))]
            address = address + (index * self.strides[dim]).view(shape)
            inside = inside & (index < self.shape[dim]).view(shape)
        found = self.pointer.memory()[torch.where(inside, address, 0)]
        return torch.where(inside, found, torch.zeros_like(found))
