"""Detect that Dynamo gave up on a function, so that later calls run uncompiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch._dynamo.utils import counters

__all__ = ["given_up"]


def given_up(frames: Iterable[int | None]) -> str | None:
    """Return a warning for a model with graphs of functions that Dynamo gave up on, or None.

    Functions are Dynamo's frame numbers.
    """
    times = max(Counter(frame for frame in frames if frame is not None).values(), default=0)
    told = any("recompile limit" in reason for reason in counters["unimplemented"])
    if not told or times < torch._dynamo.config.recompile_limit:
        return None
    return (
        f"Dynamo compiled the model for {times} kinds of calls, which is its recompile_limit, and runs calls of other "
        "kinds uncompiled, on every row: none of them is in these figures. TORCH_LOGS=recompiles shows how calls "
        "differ; raise torch._dynamo.config.recompile_limit where they must"
    )
