"""Which rows train a token that several rows share."""

from typing import Literal, TypeAlias

import numpy as np

from treefx.errors import InputError, shorten
from treefx.forests.input import FloatArray, IntArray

__all__ = ["Weighting", "weigh"]

Weighting: TypeAlias = Literal["rows", "once"]
"""What `Forest.from_sequences` takes."""


def weigh(raw_weight: FloatArray, token_of: IntArray, weighting: Weighting) -> FloatArray:
    """Return the weight of predicting each raw token under a weighting.

    Args:
        raw_weight: float64 [raw], of each row, rows end to end in the caller's order.
        token_of: int64 [raw], the distinct token that each raw token is.
        weighting: "rows", or "once": what a row trains, later rows mask.

    Returns:
        float64 [raw].

    Raises:
        InputError: there is no such weighting.
    """
    if weighting not in ("rows", "once"):
        raise InputError(f"weighting must be 'rows' or 'once', got {shorten(repr(weighting), 80)}")
    if weighting == "rows":
        return raw_weight
    weighed = np.flatnonzero(raw_weight)
    _, first = np.unique(token_of[weighed], return_index=True)
    once = np.zeros_like(raw_weight)
    once[weighed[first]] = raw_weight[weighed[first]]
    return once
