"""Pad tokens for sequence parallelism: all ranks must get equally many."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["split_over"]


def split_over(*models: nn.Module) -> int:
    """How many ranks the tokens of a row may be split over; 1 where nothing says so.

    Sequence parallelism (``SequenceParallel``, ``PrepareModuleInput`` to ``Shard(1)``) leaves no mark on a model but
    its weights: along tensor parallel ranks some are copies, or cut along another dimension than the first. FSDP
    cuts the first one of all. A dimension of a mesh that is taken for one of these costs a few tokens.
    """
    sizes = set[int]()
    for model in models:
        parameters: Iterable[Any] = model.parameters()
        for parameter in parameters:
            for dim, placement in enumerate(getattr(parameter, "placements", ())):
                if placement.is_replicate() or (placement.is_shard() and placement.dim > 0):
                    sizes.add(int(parameter.device_mesh.size(dim)))
    return math.lcm(*sizes)
