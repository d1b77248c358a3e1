"""Fake tensors of static shapes for the inputs of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["fake_inputs"]


def fake_inputs(inputs: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Fake tensors with static shapes for run-time inputs; numbers stay."""
    return [_fake(x, mode) if isinstance(x, Tensor) else x for x in inputs]


def _fake(x: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor, no inference tensor: AOTAutograd copies ``requires_grad``, which those do not let it set."""
    fake = mode.from_tensor(x, static_shapes=True)
    if not fake.is_inference():
        return fake
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)
