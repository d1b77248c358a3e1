"""Time the host's launches of one attention without a device, by Triton's dispatch."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treefx.kernels import memory
from treefx.kernels.common import Inputs
from treefx.kernels.gpu.triton_tree import attention
from treefx.kernels.score import Score, make_score
from treefx.tools.kernels.stand_in import on_device, standing_in

__all__ = ["KINDS", "Kind", "run"]

_TOKENS, _KEY_HEADS, _WIDTH = 1040, 2, 16
"""Narrow heads: what the stand-in does in the device's place takes little."""
_PATH = "TREEFX_KERNEL_PATH"
_LAYERS, _FORESTS = 200, 5
_SCALED = make_score(scale=0.25)
_ALIBI = make_score(scale=0.25, depth=0, alibi=1)


@dataclass(frozen=True)
class Kind:
    """An attention.

    Attributes:
        score: what its logits are.
        group: query heads per key head.
        deterministic: whether the bits have to be the same every time, which plain kernels take two passes for.
        path: of kernels; by default the one that a Hopper takes, Gluon.
    """

    score: Score
    group: int = 1
    deterministic: bool = False
    path: str | None = None


KINDS = {
    "a product": Kind(_SCALED),
    "a product, plain, one pass": Kind(_SCALED, path="plain"),
    "a product, plain, two passes": Kind(_SCALED, deterministic=True, path="plain"),
    "four heads per key head": Kind(_SCALED, 4),
    "window": Kind(make_score(scale=0.25, window=50, depth=0), 4),
    "ALiBi": Kind(_ALIBI, 4),
}


def run() -> Iterator[dict[str, Any]]:
    """Time forward and backward of attentions on a Hopper that is not there.

    Yields:
        One record per kind: ``kernels`` that a layer launches, and the thread's processor time in milliseconds:
        ``first_forward_ms, first_backward_ms`` of the first layer of a forest, ``forward_ms, backward_ms`` of a layer
        after it.
    """
    for name, kind in KINDS.items():
        launched: list[str] = []
        with standing_in(lambda name: None, launched.append), on_device(), _forced(kind.path):
            yield {"kind": name, **_measure(kind, launched)}


@contextmanager
def _forced(path: str | None) -> Iterator[None]:
    before = os.environ.get(_PATH)
    if path is not None:
        os.environ[_PATH] = path
    try:
        yield
    finally:
        os.environ.pop(_PATH, None)
        if before is not None:
            os.environ[_PATH] = before


def _measure(kind: Kind, launched: list[str]) -> dict[str, Any]:
    _layer(kind, _forest())  # which compiles, and compares the forms
    launched.clear()
    steps = []
    for ends in [_forest() for _ in range(_FORESTS)]:
        launched.clear()
        steps.append(_layer(kind, ends))
        kernels = len(launched)
        steps += [_layer(kind, ends) for _ in range(_LAYERS)]
    first, after = steps[:: _LAYERS + 1], [step for number, step in enumerate(steps) if number % (_LAYERS + 1)]
    times = {"first_forward_ms": first, "first_backward_ms": first, "forward_ms": after, "backward_ms": after}
    return {
        "kernels": kernels,
        **{name: statistics.median(x["backward" in name] for x in found) for name, found in times.items()},
    }


def _layer(kind: Kind, ends: Tensor) -> tuple[float, float]:
    """Return the milliseconds of the forward and of the backward."""
    heads = kind.group * _KEY_HEADS, _KEY_HEADS, _KEY_HEADS
    q, k, v = (torch.zeros(1, len(ends), h, _WIDTH, dtype=torch.bfloat16).transpose(1, 2) for h in heads)
    buffers = [_DEPTH, torch.ones(heads[0])]
    inputs = Inputs(q, k, v, ends, buffers, deterministic=kind.deterministic)
    forward, (out, lse) = _timed(lambda: attention.forward(inputs, kind.score))
    grad = torch.zeros_like(out)
    backward, _ = _timed(lambda: attention.backward(grad, inputs, out, lse, kind.score, [False, False]))
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
    memory.remember(host, ends)
    return ends
