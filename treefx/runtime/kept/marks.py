"""Numbers of a call's parameters that tell of writes which count no version.

``p.data -= lr * p.grad``, the step of many loops without an optimizer, changes every weight and no version. Comparing
all weights would cost a copy of the model; a few numbers of its smallest trained parameters (norms, biases, adapters),
which have dense gradients, cost one launch per dtype. A write that spares them all is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from treefx.runtime.kept.proof import bits

__all__ = ["WATCHED", "Marks", "marks", "watched"]

WATCHED, NUMBERS = 16, 64
"""How many parameters are watched, and how many numbers of each."""
Marks: TypeAlias = list[Tensor]


def watched(args: Sequence[Any], roles: Sequence[str]) -> list[int]:
    """Positions of the smallest parameters, trained ones first."""
    plain = [i for i, (x, role) in enumerate(zip(args, roles, strict=True)) if role == "parameter" and _is_plain(x)]
    return sorted(plain, key=lambda i: (not args[i].requires_grad, args[i].numel()))[:WATCHED]


def marks(args: Sequence[Any], positions: Sequence[int]) -> Marks:
    """The first numbers of each, in memory of their own."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for i in positions:
            x = args[i].detach()
            kinds.setdefault((x.device, x.dtype), []).append(x.as_strided((min(NUMBERS, x.numel()),), (1,)))
        return [bits(torch.cat(parts)) for parts in kinds.values()]


def _is_plain(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.numel() > 0 and x.is_contiguous()
