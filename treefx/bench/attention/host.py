"""What the launches of one attention cost the host, without a device: Triton's dispatch, a launch that does nothing."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import Inputs
from treefx.kernels.gpu.inspection.stand_in import on_device, standing_in
from treefx.kernels.gpu.triton_tree import attention
from treefx.kernels.score import Score, make_score
from treefx.kernels.tiles import hosted

__all__ = ["KINDS", "run"]

_TOKENS, _KEY_HEADS, _WIDTH = 1040, 2, 16
"""Narrow heads: copies that a device would make are the host's here."""
_LAYERS, _FORESTS = 200, 5
_SCALED = make_score(scale=0.25)
KINDS: dict[str, tuple[Score, int, bool]] = {
    "a product, one pass": (_SCALED, 1, False),
    "a product, deterministic": (_SCALED, 1, True),
    "four heads per key head": (_SCALED, 4, False),
    "window": (make_score(scale=0.25, window=50, depth=0), 4, False),
    "ALiBi": (make_score(scale=0.25, depth=0, alibi=1), 4, False),
}
"""Score, query heads per key head, and whether the bits have to be the same every time."""


def run() -> Iterator[dict[str, Any]]:
    """Time forward and backward of attentions on a Hopper that is not there.

    Yields:
        One record per kind: ``kernels`` that a layer launches, and the thread's processor time in milliseconds:
        ``first_forward_ms, first_backward_ms`` of the first layer of a forest, ``forward_ms, backward_ms`` of a layer
        after it.
    """
    for kind in KINDS:
        launched: list[str] = []
        with standing_in(lambda name: None, launched.append), on_device():
            yield {"kind": kind, **_measure(*KINDS[kind], launched)}


def _measure(score: Score, group: int, deterministic: bool, launched: list[str]) -> dict[str, Any]:
    _layer(score, group, deterministic, _forest())  # which compiles, and compares the forms
    launched.clear()
    steps = []
    for ends in [_forest() for _ in range(_FORESTS)]:
        launched.clear()
        steps.append(_layer(score, group, deterministic, ends))
        kernels = len(launched)
        steps += [_layer(score, group, deterministic, ends) for _ in range(_LAYERS)]
    first, after = steps[:: _LAYERS + 1], [step for number, step in enumerate(steps) if number % (_LAYERS + 1)]
    times = {"first_forward_ms": first, "first_backward_ms": first, "forward_ms": after, "backward_ms": after}
    return {
        "kernels": kernels,
        **{name: statistics.median(x["backward" in name] for x in found) for name, found in times.items()},
    }


def _layer(score: Score, group: int, deterministic: bool, ends: Tensor) -> tuple[float, float]:
    """Return the milliseconds of the forward and of the backward."""
    heads = group * _KEY_HEADS, _KEY_HEADS, _KEY_HEADS
    q, k, v = (torch.zeros(1, len(ends), h, _WIDTH, dtype=torch.bfloat16).transpose(1, 2) for h in heads)
    buffers = [_DEPTH, torch.ones(heads[0])]
    inputs = Inputs(q, k, v, ends, buffers, deterministic=deterministic)
    forward, (out, lse) = _timed(lambda: attention.forward(inputs, score))
    grad = torch.zeros_like(out)
    backward, _ = _timed(lambda: attention.backward(grad, inputs, out, lse, score, [False, False]))
    return forward, backward


_DEPTH = torch.arange(_TOKENS)


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.thread_time()
    result = function()
    return 1e3 * (time.thread_time() - start), result


def _forest() -> Tensor:
    """Return ``subtree_end`` of a new prefix with four branches, as sent to a device."""
    host = torch.full((_TOKENS,), _TOKENS, dtype=torch.int32)
    for branch in range(4):
        first = _TOKENS // 2 + branch * _TOKENS // 8
        host[first:] = first + _TOKENS // 8
    ends = host.clone()
    hosted.remember(host, ends)
    return ends
