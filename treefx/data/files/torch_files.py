"""Load files of ``torch.save`` that hold lists, objects, numbers, text, arrays and tensors, and no code."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treefx.data.files.values import Place, Value

__all__ = ["is_torch_file", "parse_torch_file"]

_HEADER = b"PK\x03\x04"
_FORBIDDEN = re.compile(r"GLOBAL ([\w.]+)")
_DTYPES = "?bhilqBHILQefd"


def is_torch_file(path: Path) -> bool:
    """Whether a file is an archive of ``torch.save``: a zip whose first entry is a ``data.pkl``."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError:
        return False
    return head.startswith(_HEADER) and head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b"data.pkl")


def parse_torch_file(path: Path, longest: int) -> Value:
    """Return the whole file as one record.

    Args:
        path: the file.
        longest: most bytes of a record.

    Raises:
        RecordError: it is too long or truncated, or holds an object of another class.
    """
    place = Place(str(path))
    size = path.stat().st_size
    if size > longest:
        raise place.error(f"expected a file of at most {longest:,} bytes, got {size:,}: max_record_bytes= is too small")
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return Value(torch.load(path, map_location="cpu", weights_only=True), place)
    except pickle.UnpicklingError as error:
        found = _FORBIDDEN.search(str(error))
        what = f"an object of {found[1]}" if found else "an object of a class"
        raise place.error(
            f"holds {what}, which is not loaded, as that may run code: expected lists, objects, numbers, text, arrays "
            "and tensors"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).partition(". ")[0]
        raise place.error(f"is no whole file of torch.save ({reason}): it may be truncated") from error


def _numpy_globals() -> list[Any]:
    """Return what arrays and scalars of numpy are pickled with, under the names of numpy 1 and 2."""
    functions: list[Any] = [np.zeros(1).__reduce__()[0], np.float64(1).__reduce__()[0]]
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    named = [(each, f"{module}.{each.__name__}") for each in functions for module in modules]
    return [*named, np.ndarray, np.dtype, *{type(np.dtype(code)) for code in _DTYPES}]
