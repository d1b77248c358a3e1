"""Choose the form of an attention to listed keys: Triton kernels if right, else PyTorch's operators.

A process compares both on the first tokens when it first meets a kind of attention on a device; the host waits for that
one time. PyTorch's operators remain for the CPU, for float64, for devices and environments without these kernels, for a
new kind while a CUDA graph is captured, and, with a warning, where the kernels cannot be compiled or differ.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from types import ModuleType

import torch

from treefx.errors import InputError, UnsupportedError
from treefx.kernels.common import are_right, random_gradient, relative_error
from treefx.kernels.gpu.triton_tree import support
from treefx.kernels.memory import Bounded
from treefx.kernels.sparse import chunks, reference
from treefx.kernels.sparse.problem import Listed
from treefx.refusal_codes import PLAIN_FORM

__all__ = ["IMPLEMENTATIONS", "choose_implementation", "dense_pairs", "largest_errors"]

IMPLEMENTATIONS = ("auto", "reference", "chunks", "triton")
_CHECKED_TOKENS, _CHECKED_KEYS = 256, 64
_TOLERANCE = {torch.float32: 1e-3}
_SIXTEEN_BITS_TOLERANCE = 0.02
"""Relative error of a whole result."""
_DENSE_PAIRS = {"cpu": (4.0, 16.0), "cuda": (2.0, 98.0)}
"""Masked pairs of tiles that take as long as one gathered pair, forward and backward: ``a + b / group``.

On the CPU (one core, float32 and bfloat16, heads of 64 to 192) 13 to 21 were measured for a group of one, 7 for four
and 3 for 16. On a device the numbers are those of a roofline, of gathered bytes from its cache and products of tensor
cores, and not measured.
"""
_verdicts: Bounded[Hashable, bool] = Bounded(256)


def dense_pairs(device: str, group: float) -> float:
    """Return how many pairs under a mask take as long as one gathered pair.

    Args:
        device: A type of device.
        group: Query heads of a key head: a gathered key serves all of them.
    """
    fixed, shared = _DENSE_PAIRS.get(device, _DENSE_PAIRS["cuda"])
    return fixed + shared / group


def choose_implementation(impl: str, given: Listed) -> ModuleType:
    """Return the module that computes ``impl`` for these inputs.

    Raises:
        InputError: an unknown ``impl``.
        UnsupportedError: the kernels cannot run these inputs.
    """
    if impl == "auto":
        impl = "triton" if _runs_fused(given) else "chunks"
    if impl == "reference":
        return reference
    if impl == "chunks":
        return chunks
    if impl == "triton":
        reason = support.refusal(given.q)
        if reason is not None:
            raise UnsupportedError(f"impl='triton' {reason}")
        from treefx.kernels.sparse import fused

        return fused
    raise InputError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def _runs_fused(given: Listed) -> bool:
    q = given.q
    if q.device.type != "cuda" or support.kind_refusal(q) or support.device_refusal(q.device):
        return False
    kind = q.device, q.dtype, given.group, q.shape[-1], given.v.shape[-1], given.sinks is None
    if kind not in _verdicts:
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            _verdicts[kind] = _judge(given.first_tokens(_CHECKED_TOKENS, _CHECKED_KEYS))
        except torch.OutOfMemoryError:  # it says nothing of the kernels
            return False
    return _verdicts[kind]


def _judge(given: Listed) -> bool:
    close = _TOLERANCE.get(given.q.dtype, _SIXTEEN_BITS_TOLERANCE)
    return are_right(lambda: largest_errors(given), close, _INSTEAD, PLAIN_FORM)


_INSTEAD = "treefx: PyTorch's operators compute attention to chosen keys instead of a Triton kernel"


def largest_errors(given: Listed) -> list[float]:
    """Return the kernels' relative errors per result, against PyTorch's operators in float64."""
    from treefx.kernels.sparse import fused

    sinks = None if given.sinks is None else given.sinks.double()
    wide = replace(given, q=given.q.double(), k=given.k.double(), v=given.v.double(), sinks=sinks)
    expected, lse = chunks.forward(wide)
    grad = random_gradient(expected, lse)
    right = [expected, *chunks.backward(grad, wide, expected, lse)]
    out, own_lse = fused.forward(given)
    found = [out, *fused.backward(grad.to(out.dtype), given, out, own_lse)]
    return [relative_error(*pair) for pair in zip(found, right, strict=True)]
