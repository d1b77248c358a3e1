"""A module in front of a small model's attention, compiled and eager."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.backend.small import Small
from tests.batches import Batch, shared_batch
from tests.oracle import FLOAT64, assert_close, compile_with, outcome, stats_of
from tests.spellings import SPELLINGS

__all__ = ["SHAPES", "check_in_front"]

_FIRST = shared_batch(rows=4, length=12, shared=6, vocab=61, padding=None)
SHAPES = (
    _FIRST,
    shared_batch(rows=5, length=9, shared=9, vocab=61, padding=None),  # everything is shared
    shared_batch(rows=3, length=17, shared=0, vocab=61, padding=None),
    shared_batch(rows=7, length=5, shared=2, vocab=61, padding=None),
    shared_batch(rows=1, length=6, shared=6, vocab=61, padding=None),
)
"""Batches for one compiled model: other sizes, all or nothing shared, one row."""


def check_in_front(
    make: Callable[[], nn.Module], *, inner: str = "aot_eager", batches: Sequence[Batch] = (_FIRST,)
) -> dict[str, Any]:
    """Loss and gradients of all parameters equal eager's in float64, on every batch; return the statistics.

    With several batches, the first call is one under inference mode, and logits are read in each.
    """
    torch.manual_seed(0)
    model = Small(SPELLINGS["tril_buffer"], before=make()).double()
    twin = copy.deepcopy(model)
    compiled = compile_with(model, inner=inner)
    if len(batches) > 1:
        with torch.inference_mode():
            compiled(**batches[0].inputs())
    for batch in batches:

        def step(run: Any, batch: Batch = batch) -> Any:
            out = run(**batch.inputs())
            return out.loss + 0.1 * out.logits.square().mean() if len(batches) > 1 else out.loss

        expected = outcome(twin, lambda step=step: step(twin))  # type: ignore[misc]
        assert_close(outcome(model, lambda step=step: step(compiled)), expected, FLOAT64)  # type: ignore[misc]
    return stats_of(compiled)
