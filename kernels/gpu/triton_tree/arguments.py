"""How tensors are handed to kernels: strides, dense features, aligned rows, scratch memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["dense_features", "padded", "padded_length", "scratch", "split_heads", "strides"]

_ALIGNED = 128
"""Vectors that are read by tiles have a multiple of this many elements, so that every one of them starts aligned."""


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
    """Return the strides over batch, heads and tokens of a ``[B, H, N, D]`` tensor with dense features."""
    batch, head, token, _ = tensor.stride()
    return {f"{name}_batch": batch, f"{name}_head": head, f"{name}_token": token}


def dense_features(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with features side by side in memory, as the kernels read them."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
