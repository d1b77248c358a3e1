"""Check arguments of losses and convert them to values per edge, entry or raw token."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from treefx.arguments import check_number, read_tensor
from treefx.errors import CoupledLossError, ForestError
from treefx.forests.forest import Forest
from treefx.forests.subset import EdgeSubset

__all__ = [
    "PerEdge",
    "PerRow",
    "check_finite",
    "check_logp",
    "check_weights",
    "counted",
    "read_bounds",
    "read_entries",
    "read_per_edge",
    "read_per_row",
    "read_per_token",
    "require_whole",
]

PerEdge: TypeAlias = Tensor | Sequence[Tensor]
"""[E]; or per row a vector as long as the row; or [B, T] for a forest from a padded batch."""
PerRow: TypeAlias = Tensor | Sequence[float] | Sequence[Tensor]
"""[R]; or per row a vector as long as the row; or [B, T] for a forest from a padded batch.

On a rank's share of a step, numbers and vectors of the step's rows do as well."""


def check_logp(logp: Tensor, forest: Forest, what: str = "log-probability", source: str = "edge_logprobs") -> None:
    """Raise unless the values are one floating-point number per edge, on the forest's device.

    Args:
        logp: the argument.
        forest: the forest.
        what: expected content, for messages.
        source: the function that gives it.
    """
    count = len(forest.edges)
    if not isinstance(logp, Tensor) or logp.shape != (count,) or not logp.is_floating_point():
        got = f"{logp.dtype} {list(logp.shape)}" if isinstance(logp, Tensor) else type(logp).__name__
        raise ForestError(f"expected one {what} per edge, floats [{count}], got {got}; use {source}")
    if logp.device != forest.device:
        raise ForestError(f"{what[:-1]}ies are on {logp.device}, the forest on {forest.device}; use forest.to(...)")


def check_weights(forest: Forest, name: str) -> None:
    """Refuse negative weights."""
    if bool((forest.raw_weight < 0).any()):
        raise ForestError(f"{name} needs weights of at least 0; put the sign into the advantages")


def check_finite(values: Tensor, name: str, counts: Tensor) -> Tensor:
    """Refuse NaN and infinity where an entry counts; elsewhere they become 0."""
    finite = values.isfinite()
    if bool((counts & ~finite).any()):
        raise ForestError(f"{name} must be finite wherever a weight is not 0, got NaN or infinity")
    return values.where(finite, 0.0)


def counted(values: Tensor, counts: Tensor) -> Tensor:
    """Return values where they are needed, and 0 elsewhere.

    -inf times a weight of 0 would be NaN, in the gradient likewise.

    Args:
        values: one number per edge, entry or token.
        counts: bool, of the same shape.
    """
    return values.where(counts, 0.0)


def require_whole(forest: Forest, name: str) -> None:
    """Refuse some of a forest's edges, where a term reads all edges of a row."""
    if isinstance(forest, EdgeSubset) and len(forest.edges) != len(forest.uncut.edges):
        raise CoupledLossError(
            f"{name} reads whole rows, but was called on {len(forest.edges)} of {len(forest.uncut.edges)} edges; "
            "call treefx.forward_backward with additive=False, so that it gets the log-probabilities of all of them"
        )


def read_bounds(clip: float | tuple[float, float]) -> tuple[float, float]:
    """(low, high) of a clip range [1 - low, 1 + high]."""
    bounds = tuple(clip) if isinstance(clip, tuple | list) and len(clip) == 2 else (clip, clip)
    low, high = (
        check_number(bound, "clip", "at least 0, or a pair (low, high) of such", least=0, infinite=True)
        for bound in bounds
    )
    return low, high


def read_per_edge(values: PerEdge, forest: Forest) -> Tensor | None:
    """Return values per edge [E] without gradient; None for any other form.

    In a part of a plan, values of all edges of the uncut forest are accepted.
    """
    if not isinstance(values, Tensor) or values.ndim != 1:
        return None
    _check_real(values, "values per edge")
    if len(values) == len(forest.edges):
        return values.detach().to(forest.device)
    if isinstance(forest, EdgeSubset) and len(values) == len(forest.uncut.edges):
        return values.detach().to(forest.device)[forest.edge_index]
    return None


def read_per_row(values: PerRow, forest: Forest, name: str) -> Tensor:
    """Return float64 [raw] from one number per row or a form of `read_per_token`."""
    values = _own_rows(values, forest)
    if isinstance(values, Tensor) and values.ndim == 1 and len(values) == len(forest):
        _check_real(values, name)
        numbers = values.detach().to(forest.device, torch.float64)
        return torch.repeat_interleave(numbers, forest.row_lengths)
    if not isinstance(values, Tensor) and all(isinstance(value, int | float) for value in read_entries(values, name)):
        return read_per_row(torch.tensor(values, dtype=torch.float64), forest, name)
    return read_per_token(values, forest, name)  # type: ignore[arg-type]


def _own_rows(values: PerRow, forest: Forest) -> PerRow:
    """Select this rank's rows from values for all rows of a step; leave others unchanged."""
    share = forest.share
    if share is None or (isinstance(values, Tensor) and values.ndim != 1) or len(share) == len(forest):
        return values
    if len(values) != len(share):
        return values
    if isinstance(values, Tensor):
        return values[share.rows.to(values.device)]
    return [values[row] for row in share.rows.tolist()]


def read_per_token(values: PerEdge, forest: Forest, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """Join values of all rows end to end: [raw] of a dtype.

    Inputs are a vector per row, or the padded batch's [B, T].
    """
    values = _own_rows(values, forest)  # type: ignore[assignment]
    if isinstance(values, Tensor):
        _check_real(values, name)
        got = str(list(values.shape))
        if values.shape == (len(forest), forest.padded_width):
            return _converted(values.detach().to(forest.device)[forest.padded_token_of() >= 0], name, dtype)
    else:
        rows = [_as_vector(row, name, dtype).detach().to(forest.device) for row in read_entries(values, name)]
        got = ", ".join(str(list(row.shape)) for row in rows)
        if [row.shape for row in rows] == [(length,) for length in forest.row_lengths.tolist()]:
            return torch.cat(rows)
    raise ForestError(
        f"{name} must be a tensor [{len(forest.edges)}] (log-probabilities, per edge) or [{len(forest)}] (advantages, "
        f"per row), a list of {len(forest)} vectors as long as their rows, or a tensor of the padded batch's "
        f"shape; got shape {got[:80]}"
    )


def read_entries(values: object, name: str) -> Sequence[Any]:
    """Raise unless the values are a list with an entry per row."""
    if isinstance(values, np.ndarray) and values.ndim:
        return list(values)
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ForestError(f"{name} must be a tensor, or a list with one entry per row, got {type(values).__name__}")
    return values


def _as_vector(row: object, name: str, dtype: torch.dtype) -> Tensor:
    try:
        vector = read_tensor(row)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ForestError(f"{name} must be numbers, a vector per row, got {type(row).__name__}: {error}") from error
    _check_real(vector, name)
    return _converted(vector, name, dtype)


def _converted(values: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """The same numbers in another dtype; integers are made of whole numbers alone."""
    if not dtype.is_floating_point and values.is_floating_point():
        whole = (values.trunc() == values) & values.isfinite()  # NaN equals nothing
        if not bool(whole.all()):
            raise ForestError(f"{name} must be whole numbers, got {float(values[~whole][0])}")
    return values.to(dtype)


def _check_real(values: Tensor, name: str) -> None:
    """Refuse complex numbers, whose imaginary parts a conversion would drop."""
    if values.is_complex():
        raise ForestError(f"{name} must be real numbers, got {values.dtype}")
