"""Fit bytes that measured parts held beyond their graphs.

These are workspaces of libraries and Python's own tensors.

They are fitted as `constant + a N + b P` from above, so that no measured step is above its prediction.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treefx.planning.cost.model import Bytes, CostModel, coefficients, sum_rows
from treefx.planning.execution.measure import Sample
from treefx.planning.execution.nonnegative import fit_nonnegative

__all__ = ["add_unseen"]

_SLACK = coefficients(constant=16384.0)
"""Small tensors of the executor, and garbage between two steps."""
_NEAR = 0.03
"""How far a measured peak may be above the graphs' to be the same operator's."""


def add_unseen(cost: CostModel, samples: Sequence[Sample], attention: Bytes) -> CostModel:
    """Add unseen bytes to the graphs' bytes: first to held bytes, then to peaks alone.

    Args:
        cost: as the graphs say.
        samples: measured steps; none of them is above its prediction afterwards.
        attention: the rows of the backward around attention; all rows where there is none.
    """
    runs = {kind: [sample for sample in samples if sample.kind == kind] for kind in ("forward", "backward", "kv")}
    left = [item.left_bytes - item.predicted_left(cost) for item in runs["forward"]]
    staying = _fit(runs["forward"], left)
    for kind in ("saved", "forward", "backward"):
        cost = _raise(cost, kind, staying)
    for kind in ("forward", "kv"):
        missing = [item.bytes - item.predicted_bytes(cost) for item in runs[kind]]
        cost = _raise(cost, kind, _fit(runs[kind], missing))
    cost = _add_to_backward(cost, runs["backward"], attention)
    return _raise(_raise(cost, "forward", _SLACK), "backward", _SLACK)


def _add_to_backward(cost: CostModel, samples: Sequence[Sample], attention: Bytes) -> CostModel:
    """The same for the backward, in which one of two operators is the largest.

    At the loss all saved tensors are there, and little else that graphs do not show. Around attention, inductor may
    delay products of matrices and keep their inputs: measurements far above the graphs are attributed to the rows
    there.
    """
    missing = [item.bytes - item.predicted_bytes(cost) for item in samples]
    pairs = list(zip(samples, missing, strict=True))
    near = [(item, more) for item, more in pairs if more <= _NEAR * item.bytes]
    if near:
        cost = _raise(cost, "backward", _fit(*zip(*near, strict=True)))
    far = [item for item in samples if item.bytes > item.predicted_bytes(cost)]
    if not far:
        return cost
    inner = replace(cost, backward=attention)
    raised = _raise(inner, "backward", _fit(far, [item.bytes - item.predicted_bytes(inner) for item in far]))
    return replace(cost, backward=Bytes([*cost.backward.rows, *raised.backward.rows]))


def _raise(cost: CostModel, name: str, unseen: Sequence[float]) -> CostModel:
    raised: dict[str, Any] = {name: Bytes([sum_rows(row, unseen) for row in getattr(cost, name).rows])}
    return replace(cost, **raised)


def _fit(samples: Sequence[Sample], missing: Sequence[float]) -> list[float]:
    """Fit `constant + a N + b P` bytes above the prediction, raised until none is above it."""
    tokens = {sample.size.tokens for sample in samples}
    # Without parts of several lengths, N and the constant could be told apart by chance alone.
    features = np.array(
        [(1, sample.size.tokens * (len(tokens) > 1), sample.size.boundary) for sample in samples], dtype=np.float64
    )
    positive = np.maximum(missing, 0.0)
    fitted = fit_nonnegative(features, positive)
    fitted[0] += max((positive - features @ fitted).max(), 0.0)
    result: list[float] = np.ceil(fitted).tolist()
    return result
