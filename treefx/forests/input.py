"""Check the rows, padding and weights a forest is built from and bring them to one form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from treefx.errors import ForestError, InputError, shorten

__all__ = ["RowBatch", "Weighting", "read_padded", "read_sequences", "weigh"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Weighting: TypeAlias = Literal["rows", "once"]
"""Weighting of `Forest.from_sequences`."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Checked rows in the caller's order.

    Attributes:
        rows: one non-empty array of non-negative int64 token ids per row.
        raw_weight: float64 [raw], weight of predicting each raw token; 0 at every row's first token.
        row_start: int64 [R], column of the row's first token in the padded batch; 0 without one.
        padded_width: columns T of the padded batch; None without one.
        device: where the caller's tensors live; CPU where there are none.
    """

    rows: list[IntArray]
    raw_weight: FloatArray
    row_start: IntArray
    padded_width: int | None
    device: torch.device


def read_sequences(sequences: Iterable[Any], weights: Iterable[Any] | None) -> RowBatch:
    """Check rows given one by one; `Forest.from_sequences` lists the accepted forms.

    Raises:
        ForestError: no rows, an empty row, a token that is not a non-negative integer, unfit weights, several
            devices.
    """
    given = _as_list(sequences, "sequences")
    row_weights = None if weights is None else _as_list(weights, "weights")
    device = _common_device([*given, *(row_weights or [])])
    rows = [_read_row(row, number) for number, row in enumerate(given)]
    start = np.zeros(len(rows), dtype=np.int64)
    return RowBatch(rows, _read_weights(row_weights, [len(row) for row in rows]), start, None, device)


def read_padded(input_ids: Any, attention_mask: Any, weights: Any) -> RowBatch:
    """Cut the real tokens out of a padded batch; `Forest.from_padded` lists accepted forms.

    Raises:
        ForestError: shapes that differ, a mask with holes or other values than 0 and 1, a row without tokens,
            a token that is not a non-negative integer, unfit weights, several devices.
    """
    device = _common_device([input_ids, attention_mask, weights])
    ids = _read_batch(input_ids, "input_ids")
    mask = np.ones(ids.shape, dtype=bool) if attention_mask is None else _read_mask(attention_mask, ids.shape)
    start, stop = _find_spans(mask)
    rows = [_check_tokens(ids[b, start[b] : stop[b]], b) for b in range(len(ids))]
    return RowBatch(rows, _read_padded_weights(weights, ids.shape, start, stop), start, ids.shape[1], device)


def weigh(raw_weight: FloatArray, token_of: IntArray, weighting: Weighting) -> FloatArray:
    """Return the weight of predicting each raw token under a weighting.

    Args:
        raw_weight: float64 [raw], of each row, rows end to end in the caller's order.
        token_of: int64 [raw], the distinct token that each raw token is.
        weighting: "rows", or "once": only the first weighted row through a token keeps its weight.

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


def _as_list(values: Any, name: str) -> list[Any]:
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise ForestError(f"{name} must be a list with one entry per row, got {_describe(values)}")
    if isinstance(values, torch.Tensor | np.ndarray) and values.ndim == 0:
        raise ForestError(f"{name} must be a list with one entry per row, got a number; wrap it in a list")
    rows = list(values)
    if not rows:
        raise ForestError(f"{name} is empty: a forest needs at least one row")
    return rows


def _read_row(row: Any, number: int) -> IntArray:
    if isinstance(row, torch.Tensor | np.ndarray):
        array = row.detach().cpu().numpy() if isinstance(row, torch.Tensor) else row
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ForestError(f"row {number}: expected integer token ids in one dimension, got {_describe(row)}")
        return _check_tokens(array, number)
    if isinstance(row, str | bytes | dict) or not isinstance(row, Sequence):
        raise ForestError(
            f"row {number}: expected a sequence of integer token ids, got {_describe(row)}; "
            "tokenise text first, and wrap a single row in a list"
        )
    wrong = {kind for kind in set(map(type, row)) if kind is bool or not issubclass(kind, int | np.integer)}
    if wrong:
        at = next(i for i, token in enumerate(row) if type(token) in wrong)
        raise ForestError(f"row {number}: expected integer token ids, got {_describe(row[at])} at position {at}")
    try:
        return _check_tokens(np.array(row, dtype=np.int64), number)
    except OverflowError as error:
        raise ForestError(f"row {number}: a token id does not fit in 64 bits") from error


def _check_tokens(row: npt.NDArray[Any], number: int) -> IntArray:
    if not len(row):
        raise ForestError(f"row {number} is empty: every row needs at least one token; leave the row out")
    tokens = np.ascontiguousarray(row, dtype=np.int64)
    if tokens.min() < 0:
        at = int((tokens < 0).argmax())
        raise ForestError(
            f"row {number}: token ids must be at least 0, got {tokens[at]} at position {at}; "
            "labels such as -100 do not belong in a row: give that token weight 0"
        )
    return tokens


def _read_weights(weights: list[Any] | None, lengths: list[int]) -> FloatArray:
    """Flatten per-row weights; None weighs every prediction 1."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    flat = np.ones(offsets[-1], dtype=np.float64)
    if weights is not None:
        if len(weights) != len(lengths):
            raise ForestError(f"weights must have one entry per row: expected {len(lengths)}, got {len(weights)}")
        for number, weight in enumerate(weights):
            flat[offsets[number] : offsets[number + 1]] = _read_row_weight(weight, number, lengths[number])
    flat[offsets[:-1]] = 0.0
    if not np.isfinite(flat).all():
        number = int(np.searchsorted(offsets, (~np.isfinite(flat)).argmax(), side="right")) - 1
        raise ForestError(f"weights of row {number}: expected finite numbers, got NaN or infinity")
    return flat


def _read_row_weight(weight: Any, number: int, length: int) -> FloatArray:
    values = _as_float_array(weight, f"weights of row {number}")
    if values.ndim > 1 or (values.ndim == 1 and len(values) != length):
        raise ForestError(
            f"weights of row {number}: expected one number or a vector as long as the row ({length}), "
            f"got shape {list(values.shape)}; entry t weighs the prediction of token t, entry 0 is not used"
        )
    return values


def _as_float_array(values: Any, name: str) -> FloatArray:
    if isinstance(values, torch.Tensor):
        if values.requires_grad:
            raise ForestError(f"{name} require gradients, which a forest cannot pass on; detach() them first")
        if values.is_complex():
            raise ForestError(f"{name}: expected real numbers, got {values.dtype}")
        return values.cpu().to(torch.float64).numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ForestError(f"{name}: expected numbers, got a ragged nested list") from error
    if array.dtype.kind not in "biuf":
        raise ForestError(f"{name}: expected numbers, got {_describe(values)}")
    return array.astype(np.float64)


def _read_batch(values: Any, name: str) -> npt.NDArray[Any]:
    if not isinstance(values, torch.Tensor | np.ndarray):
        raise ForestError(
            f"{name} must be a tensor [B, T], got {_describe(values)}; pass lists to Forest.from_sequences"
        )
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ForestError(f"{name} must be integers of shape [B, T], got {_describe(values)}")
    if not array.size:
        raise ForestError(f"{name} is empty (shape {list(array.shape)}): a forest needs at least one token")
    return array


def _read_mask(mask: Any, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    values = _as_float_array(mask, "attention_mask")
    if values.shape != shape:
        raise ForestError(
            f"attention_mask must have the shape of input_ids {list(shape)}, got {list(values.shape)}; "
            "pass the [B, T] padding mask"
        )
    mask_bool: npt.NDArray[np.bool_] = values != 0
    if not (mask_bool == values).all():
        raise ForestError("attention_mask must hold only 0 and 1 (1: a real token), got other values")
    return mask_bool


def _find_spans(mask: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """First and one-past-last real column of every row."""
    start = mask.argmax(axis=1)
    stop = mask.shape[1] - mask[:, ::-1].argmax(axis=1)
    count = mask.sum(axis=1)
    if not count.all():
        raise ForestError(f"attention_mask masks all of row {int((count == 0).argmax())}; leave that row out")
    if (stop - start != count).any():
        row = int((stop - start != count).argmax())
        raise ForestError(
            f"attention_mask of row {row} has a hole: expected one run of ones, padded on the left or right, "
            f"got {int(count[row])} ones between columns {int(start[row])} and {int(stop[row]) - 1}"
        )
    return start, stop


def _read_padded_weights(weights: Any, shape: tuple[int, ...], start: IntArray, stop: IntArray) -> FloatArray:
    lengths = (stop - start).tolist()
    if weights is None:
        return _read_weights(None, lengths)
    values = _as_float_array(weights, "weights")
    if values.shape not in (shape, shape[:1]):
        raise ForestError(
            f"weights must have the shape of input_ids {list(shape)}, or one number per row [{shape[0]}], "
            f"got {list(values.shape)}"
        )
    if values.ndim == 1:
        return _read_weights(list(values), lengths)
    return _read_weights([values[b, start[b] : stop[b]] for b in range(shape[0])], lengths)


def _common_device(values: list[Any]) -> torch.device:
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ForestError(f"expected all tensors on one device, got {names}; move them with .to(device)")
    return devices.pop() if devices else torch.device("cpu")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} of {value.dtype} and shape {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
