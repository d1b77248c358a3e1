"""Wrong ways of crossing a cut: each must give wrong gradients, so that the right one is seen to be needed."""

from typing import Any

import pytest
import torch

import treefx
from tests.oracle import separate_rows
from tests.planning.cuts import cut_at
from tests.planning.parts import SHARED, assert_right_only_without, run, tiny
from tests.planning.parts import reproducible as reproducible
from treefx.planning.execution.boundary import Store
from treefx.runtime.cut import Cut


def no_relay(store: Store, crossings: Any, taken: Any) -> None:
    """K/V gradients do not cross."""


def only_to_the_parent(store: Store, crossings: Any, taken: Any) -> None:
    """Gradients reach the nearest owner alone."""
    add_gradients(store, crossings[-1:], taken)


def last_child_alone(store: Store, crossings: Any, taken: Any) -> None:
    """Children that share a cut overwrite each other's gradients."""
    for item in crossings:
        store._gradients.pop(item.owner, None)
    add_gradients(store, crossings, taken)


add_gradients = Store.add_gradients


@pytest.mark.parametrize("wrong", [None, no_relay, only_to_the_parent, last_child_alone])
def test_wrong_accumulation(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, compiled), forest = tiny("alibi"), treefx.Forest.from_sequences(SHARED)
    expected = separate_rows(model, SHARED, [[1.0] * len(row) for row in SHARED])
    if wrong is not None:
        monkeypatch.setattr(Store, "add_gradients", wrong)
    got = run(compiled, model, cut_at(forest, {3, 5, 8, 10}))
    assert_right_only_without(wrong, got, expected)


@pytest.mark.parametrize("wrong", [None, "columns", "lo", "hi", "leaves"])
def test_wrong_boundary(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """ALiBi: every key's depth counts, not only whether it is seen."""
    (model, compiled), forest = tiny("alibi"), treefx.Forest.from_sequences(SHARED)
    expected = separate_rows(model, SHARED, [[1.0] * len(row) for row in SHARED])
    call = Cut.call

    def spoiled(cut: Cut, *args: Any) -> Any:
        lo, hi, columns, leaves = cut.vectors
        packed = torch.arange(len(columns))  # places among the boundary instead of depths
        full = torch.full_like(hi, 1 << 20)
        cut.vectors = {
            "columns": (lo, hi, packed.flip(0), leaves),
            "lo": (lo + 1, hi, columns, leaves),
            "hi": (lo, torch.where(hi > 0, hi - 1, full * 0), columns, leaves),
            "leaves": (lo, hi, columns, leaves.flip(0)),
        }.get(str(wrong), cut.vectors)
        return call(cut, *args)

    monkeypatch.setattr(Cut, "call", spoiled)
    got = run(compiled, model, cut_at(forest, {3, 5, 8, 10}))
    assert_right_only_without(wrong, got, expected)
