"""Make fake tensors with the properties of inputs that tracing and AOTAutograd read.

AOTAutograd treats an input that the graph changes in place by its place in the autograd graph: the gradient of a leaf
does not pass the change. A fake leaf in place of a result of another operator would lose that gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["fake_inputs", "strided_fake"]


def fake_inputs(inputs: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Fake tensors with static shapes for run-time inputs; numbers stay."""
    return [_fake(x, mode) if isinstance(x, Tensor) else x for x in inputs]


def _fake(x: Tensor, mode: FakeTensorMode) -> Tensor:
    """Make a fake outside of inference mode, so that AOTAutograd can set ``requires_grad``."""
    fake = mode.from_tensor(x, static_shapes=True)
    return strided_fake(x, x.shape, x.stride(), x.storage_offset(), mode) if fake.is_inference() else fake


def strided_fake(
    x: Tensor, sizes: Sequence[Any], strides: Sequence[Any] | None, offset: Any, mode: FakeTensorMode
) -> Tensor:
    """Make a fake of an input with other sizes.

    Type, device, conjugation and place in the autograd graph stay.

    Args:
        x: The input.
        sizes: The sizes of the fake; numbers or symbols of ``mode``.
        strides: Its strides; None for a contiguous one.
        offset: Its offset in storage.
        mode: The mode of the fake.
    """
    with mode:
        if strides is None:
            fake = torch.empty(sizes, dtype=x.dtype, device=x.device)
        else:
            memory = torch.empty(_extent(sizes, strides, offset), dtype=x.dtype, device=x.device)
            fake = memory.as_strided(sizes, strides, offset).detach()
        torch._C._set_conj(fake, x.is_conj())
        torch._C._set_neg(fake, x.is_neg())
        fake.requires_grad_(x.requires_grad)
        if x.is_leaf:
            return fake
        with torch.enable_grad():
            return torch.ops.aten.alias.default(fake)  # type: ignore[no-any-return]


def _extent(sizes: Sequence[Any], strides: Sequence[Any], offset: Any) -> Any:
    """How many elements of memory a tensor reaches into, from the start of its storage."""
    if any(size == 0 for size in sizes):
        return offset
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
