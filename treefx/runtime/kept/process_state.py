"""Key compiled code by the state of the process that it depends on."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["process_state"]


def process_state() -> tuple[Any, ...]:
    """Return a key: code compiled under one state never runs under another.

    Dynamo guards all of it, but it does not see every call: reading a lazy output runs the graph again, and
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
