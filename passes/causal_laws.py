"""Laws of the causal domain: how the dependence of a result on columns follows from that of its operands.

Movement operators are run on the tables themselves, pointwise operators take the largest column, reductions the largest
along their dimension, running sums the running largest, products the largest over the terms that are not known to be
zero. What is known is computed by the operator itself. No law lets rows meet.
"""

from __future__ import annotations

from typing import Any

import torch

from treefx.passes import causal_movement, causal_reductions  # noqa: F401  (register laws)
from treefx.passes.causal_elements import pointwise
from treefx.passes.causal_step import LAWS, CausalLaw

__all__ = ["find_causal_law"]


def find_causal_law(target: Any) -> CausalLaw | None:
    """The law of an operator, or None."""
    if target in LAWS:
        return LAWS[target]
    tags = getattr(target, "tags", ())
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return pointwise if is_pointwise else None
