"""What compiled code takes for granted of the process, beside its inputs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["process_state"]


def process_state() -> tuple[Any, ...]:
    """A key: what was compiled under one state never runs under another.

    Dynamo guards all of it, but it does not see every call: an output that is read late runs the graph again, and
    gradients may be off then. Autocast is no part of it, because its casts are in the traced graph; nor is inference
    mode, in which nothing is compiled.
    """
    return (
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.fp32_precision,
    )
