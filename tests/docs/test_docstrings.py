"""Docstrings of public names state shapes, units and errors, by the rules of ``tests.docs.docstrings``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from tests.docs.docstrings import complaints_about, entries_of, public_entries


def complaints(item: Any) -> list[str]:
    return [text.partition(": ")[2] for entry in entries_of("x", item) for text in complaints_about(entry)]


def test_public_docstrings_state_shapes_units_and_errors() -> None:
    entries = list(public_entries())
    found = {entry.name: complaints_about(entry) for entry in entries}
    assert not [text for texts in found.values() for text in texts]
    assert len(found) > 250
    assert sum("Tensor" in text for entry in entries for text in entry.parameters.values()) > 60
    assert sum(bool(entry.raised) for entry in entries) > 60


def test_without_its_args_a_public_docstring_is_refused() -> None:
    (entry,) = (item for item in public_entries() if item.name == "kernels.tree_attention")
    bare = type(entry)(entry.name, "Attend.", entry.parameters, {}, entry.result, entry.raised)
    assert {"q states no shape", "window states no unit", "the result states no shape"} <= {
        text.partition(": ")[2] for text in complaints_about(bare)
    }
    assert "kernels.tree_attention: Raises does not name InputError" in complaints_about(bare)


def _no_shapes(x: Tensor, window: int) -> Tensor:
    """Sum.

    Args:
        x: The values.
        window: The reach.

    Returns:
        The sum.
    """
    return x[-window:].sum()


def _fine(x: Tensor, y: Tensor, window: int, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum.

    Args:
        x: [B, T], the values.
        y: As `x`.
        window: Tokens that are seen.
        f: Called with each.

    Returns:
        Scalar.

    Raises:
        ValueError: No window.
    """
    if not window:
        raise ValueError("no window")
    return f(x + y).sum()


def _raises_itself(x: int) -> None:
    """Raise nothing, it says."""
    raise ValueError(f"{x}")


def _raises_by_helper(x: int) -> None:
    """Check.

    Raises:
        TypeError: Another one.
    """
    _raises_itself(x)


def _raises_later() -> Callable[[], None]:
    """Return a function that raises."""

    def later() -> None:
        raise ValueError("later")

    return later


def _free_bytes() -> int:
    """Return the size of the free memory."""
    return 0


@dataclass
class _Record:
    """Hold a part."""

    x: Tensor
    seconds: float
    """Of the part."""

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.seconds < 0:
            raise ValueError("negative")


@dataclass
class _FineRecord:
    """Hold a part.

    Attributes:
        x: [N], its tokens.

    Raises:
        ValueError: The time is negative.
    """

    x: Tensor
    seconds: float
    """Seconds of the part."""

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError("negative")


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (_no_shapes, ["x states no shape", "window states no unit", "the result states no shape"]),
        (_fine, []),
        (_raises_itself, ["Raises does not name ValueError"]),
        (_raises_by_helper, ["Raises does not name ValueError"]),
        (_raises_later, []),
        (_Record, ["x states no shape", "seconds states no unit", "Raises does not name ValueError"]),
        (_FineRecord, []),
    ],
)
def test_planted_docstrings(item: Any, expected: list[str]) -> None:
    assert complaints(item) == expected


def test_a_number_that_is_returned_has_a_unit() -> None:
    (entry,) = entries_of("free_bytes", _free_bytes)
    assert complaints_about(entry) == ["free_bytes: the result states no unit"]
