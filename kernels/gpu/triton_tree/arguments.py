"""Pass tensors to kernels: strides, dense features, aligned rows, scratch, score values.

Parts of a score that read one query or one key alone are evaluated before a kernel in Gluon, in the order of its tiles.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, make_indices
from treefx.kernels.memory import host_copies
from treefx.kernels.score import Expr, Score, evaluate, loads
from treefx.kernels.tiles.tree_blocks import Keys

__all__ = [
    "TOO_LARGE",
    "ColumnValues",
    "KeySource",
    "RowValues",
    "buffer_arguments",
    "dense_features",
    "forest_numbers",
    "padded",
    "padded_length",
    "scratch",
    "split_heads",
    "strides",
]

TOO_LARGE = (
    "whole numbers that a score reads must fit 32 bits in Gluon, got larger ones in a later batch than the first: "
    "set TREEFX_KERNEL_PATH=plain"
)

_ALIGNED = 128
"""Vectors that are read by tiles have a multiple of this many elements, so that every one of them starts aligned."""


@dataclass(frozen=True)
class KeySource:
    """Keys and values of one launch.

    Attributes:
        k: ``[B, Hkv, K, D]``, or a pool ``[B, Hkv, R, D]`` of which ``rows`` picks the keys.
        v: ``[B, Hkv, K, Dv]``, or a pool ``[B, Hkv, R, Dv]``.
        keys: which queries see them.
        rows: int32 ``[K]``: where in the pool each key lies; ``None``: key j is row j. Keys of ancestors are used in
            place this way, without a gathered copy.
        values: values of the score for Gluon, see ``Attention.with_values``.
    """

    k: Tensor
    v: Tensor
    keys: Keys
    rows: Tensor | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys.high)


def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Return device memory for the descriptors that a kernel makes."""
    del alignment, stream
    return torch.empty(size, device="cuda", dtype=torch.int8)


def padded_length(length: int) -> int:
    """Return the length of a row that the next one starts aligned behind."""
    return -(-length // _ALIGNED) * _ALIGNED


def padded(matrix: Tensor) -> Tensor:
    """Return the matrix with rows that start aligned."""
    length = matrix.shape[-1]
    return torch.nn.functional.pad(matrix, (0, padded_length(length) - length)).contiguous()


def split_heads(tensor: Tensor, group: int) -> Tensor:
    """Return ``[B, H, ...]`` as ``[B, H / group, group, ...]``."""
    return tensor.view(tensor.shape[0], -1, group, *tensor.shape[2:])


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Return strides of batch, heads and tokens of ``[B, H, N, D]`` with dense features."""
    batch, head, token, _ = tensor.stride()
    return {f"{name}_batch": batch, f"{name}_head": head, f"{name}_token": token}


def buffer_arguments(buffers: Sequence[Tensor], numbers: Sequence[int]) -> dict[str, Any]:
    """Return some of the buffers that a score reads, with strides and sizes."""
    arguments: dict[str, Any] = {}
    for number in numbers:
        buffer = buffers[number]
        # A pointer to booleans is one to bits in Triton.
        arguments[f"buffer_{number}"] = buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer
        for dim in range(buffer.ndim):
            arguments[f"buffer_{number}_stride_{dim}"] = buffer.stride(dim)
            arguments[f"buffer_{number}_size_{dim}"] = buffer.shape[dim]
    return arguments


def forest_numbers(inputs: Inputs, score: Score) -> tuple[int, ...]:
    """Return numbers of the forest's buffers: the condition's, and those sent by the host."""
    sent = (number for number in loads(score.value) if host_copies([inputs.buffers[number]]) is not None)
    return tuple(sorted({*loads(score.visible), *sent}))


def dense_features(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with features side by side in memory, as the kernels read them."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


@dataclass(frozen=True)
class _Values(ABC):
    """A part of a score that needs no product; called with all buffers.

    Attributes:
        expr: that part.
        shape: of the queries, ``[B, H, N, D]``.
        outside: keys of a boundary.
        device: where the queries are.
        group: query heads per key head.
        base: index of the first key.
        keys: how many.
    """

    expr: Expr
    shape: torch.Size
    outside: int
    device: torch.device
    group: int
    base: int
    keys: int

    def __call__(self, *buffers: Tensor) -> Tensor:
        """Return the values, int32 or float32, with rows that start aligned."""
        q, k, head, number = make_indices(self.shape, self.outside, self.device, 0, self.shape[2])
        dot = torch.zeros((), device=self.device)
        value = evaluate(self.expr, dot=dot, q=q, k=k, head=head, batch=number, buffers=buffers).detach()
        kept = value.to(torch.float32 if value.is_floating_point() else torch.int32)
        if value.dtype == torch.int64:  # of a later forest than that on which forms were compared
            torch._assert_async((kept == value).all(), TOO_LARGE)
        return padded(self._packed(kept))

    @abstractmethod
    def _packed(self, value: Tensor) -> Tensor: ...


class RowValues(_Values):
    """Of each query and head, ``[B * Hkv, N * group and more]``."""

    def _packed(self, value: Tensor) -> Tensor:
        batch, heads, queries, _ = self.shape
        value = value.expand(batch, heads, queries, 1).reshape(batch, heads, queries)
        return split_heads(value, self.group).transpose(2, 3).reshape(batch * heads // self.group, -1)


class ColumnValues(_Values):
    """Of each key, ``[B, K and more]``."""

    def _packed(self, value: Tensor) -> Tensor:
        if value.ndim and value.shape[-1] > 1:  # of all keys, the boundary's first
            value = value.narrow(-1, self.base, self.keys)
        return value.expand(self.shape[0], 1, 1, self.keys).reshape(self.shape[0], self.keys)
