"""Define laws of the causal domain: dependence on columns from that of the operands.

Movement operators are run on the tables themselves, pointwise operators take the largest column, reductions the largest
along their dimension, running sums the running largest, products the largest over the terms that are not known to be
zero. Known elements are computed by the operator itself. No law lets rows meet.
"""

from __future__ import annotations

from typing import Any

from treefx.passes.causal import library_laws as causal_library  # noqa: F401  (register laws)
from treefx.passes.causal import movement as causal_movement  # noqa: F401  (register laws)
from treefx.passes.causal import picks as causal_picks  # noqa: F401  (register laws)
from treefx.passes.causal import reductions as causal_reductions  # noqa: F401  (register laws)
from treefx.passes.causal.elements import pointwise
from treefx.passes.causal.step import LAWS, CausalLaw
from treefx.passes.labels.laws.gradients import is_pointwise

__all__ = ["find_causal_law"]


def find_causal_law(target: Any) -> CausalLaw | None:
    """The law of an operator, or None."""
    if target in LAWS:
        return LAWS[target]
    return pointwise if is_pointwise(target) else None
