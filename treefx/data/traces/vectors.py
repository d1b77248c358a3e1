"""Check lists of token ids, masks and numbers, and convert them to arrays."""

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from treefx.data.files import Value
from treefx.documents import names

__all__ = ["read_mask", "read_numbers", "read_token_ids", "require_fields"]

_LARGEST = float(np.finfo(np.float64).max)


def read_token_ids(value: Value) -> npt.NDArray[np.int64]:
    """Return int64 [T] of a list, array or tensor of token ids, each at least 0."""
    raw = _listed(value, "a list of token ids")
    for number, item in enumerate(raw):
        if type(item) is not int or not 0 <= item < 2**63:
            _fail_at(value, number, item, "a token id, a whole number of at least 0")
    return np.array(raw, dtype=np.int64)


def read_mask(value: Value, length: int, what: str) -> npt.NDArray[np.bool_]:
    """Return bool [length] of a list of 0 and 1, or of truth values.

    Args:
        value: the list.
        length: required length.
        what: the entries' meaning, for messages, such as "token of the response".
    """
    raw = _listed(value, "a list of 0 and 1")
    _check_length(value, raw, length, what)
    for number, item in enumerate(raw):
        if not isinstance(item, int | float) or item not in (0, 1):
            _fail_at(value, number, item, "0 or 1")
    return np.array(raw, dtype=np.bool_)


def read_numbers(value: Value, length: int, what: str) -> npt.NDArray[np.float64]:
    """Return float64 [length] of a list of finite numbers; see `read_mask`."""
    raw = _listed(value, "a list of numbers")
    _check_length(value, raw, length, what)
    for number, item in enumerate(raw):
        if type(item) not in (int, float) or not -_LARGEST <= item <= _LARGEST:  # NaN is neither
            _fail_at(value, number, item, "a finite number")
    return np.array(raw, dtype=np.float64)


def require_fields(record: Value, required: tuple[str, ...], what: str) -> None:
    """Raise unless an object has all fields, if it has any of them.

    Args:
        record: the object.
        required: names of the fields.
        what: expected content, for messages.
    """
    missing = [name for name in required if record.get(name) is None]
    if missing:
        raise record.place.error(
            f"expected {what} with {', '.join(required)}, got none of {', '.join(missing)}; "
            f"the fields are {names(record.raw)}"
        )


def _listed(value: Value, expected: str) -> list[Any]:
    raw = value.raw.tolist() if hasattr(value.raw, "tolist") else value.raw
    return raw if isinstance(raw, list) else value.fail(expected)


def _check_length(value: Value, raw: list[Any], length: int, what: str) -> None:
    if len(raw) != length:
        raise value.place.error(f"expected {length:,} entries, one per {what}, got {len(raw):,}")


def _fail_at(value: Value, number: int, item: Any, expected: str) -> NoReturn:
    Value(item, value.place.inside(number)).fail(expected)
