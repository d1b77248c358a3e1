"""Pictures of masks over a forest, and weights of its edges, against their definitions."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

import treefx
from tests.strategies import Rows as Rows_
from tests.strategies import row_batches
from treefx.inspection.report.forest import TILE, account_forest, visited_tiles
from treefx.inspection.report.formulas import visible_of
from treefx.inspection.report.masks import MOST_CELLS, draw_mask
from treefx.inspection.report.material import Rows
from treefx.inspection.reported import rows_of_forest

WINDOW: Any = ("lt", ("sub", ("load", 0, ("q",)), ("load", 0, ("k",))), ("const", 3))


def dense(forest: Any, window: int | None = None) -> Any:
    """[N, N] by the definition: a token sees those above it on its path, itself included."""
    found = np.zeros((forest.num_tokens, forest.num_tokens), dtype=bool)
    for q in range(forest.num_tokens):
        k, steps = q, 0
        while k >= 0 and (window is None or steps < window):
            found[q, k] = True
            k, steps = int(forest.parent[k]), steps + 1
    return found


def drawn(mask: Any) -> Any:
    return np.array([[int(shade) for shade in row] for row in mask.shades])


FOREST = treefx.Forest.from_sequences([[1, 2, 3, 4], [1, 2, 5, 6, 7], [1, 8], [9, 9]], weights=[1.0, 2.0, 4.0, 8.0])


@pytest.mark.parametrize("window", [None, 3])
def test_a_small_forest_has_a_cell_per_pair(window: int | None) -> None:
    condition = visible_of(WINDOW if window else None, ["column"])
    mask = draw_mask(condition, rows_of_forest(FOREST))
    assert mask.tokens == FOREST.num_tokens and not mask.note
    assert np.array_equal(drawn(mask), 9 * dense(FOREST, window))
    assert not np.array_equal(drawn(mask), 9 * dense(FOREST, 2))


@settings(deadline=None)
@given(row_batches(), st.integers(1, 5))
def test_tiles_are_those_with_a_visible_pair(rows: Rows_, size: int) -> None:
    forest = treefx.Forest.from_sequences(rows)
    mask, blocks = dense(forest), range(0, forest.num_tokens, size)
    seen = sum(bool(mask[q : q + size, k : k + size].any()) for q in blocks for k in blocks)
    found = visited_tiles(rows_of_forest(forest), size)
    assert found == (seen, len(blocks) ** 2)


def test_tiles_of_a_forest_are_fewer_than_those_of_a_causal_mask() -> None:
    """Four branches of two tiles each do not see each other."""
    branches = [[*range(TILE), *range(1000 * i, 1000 * i + 2 * TILE)] for i in range(1, 5)]
    found = visited_tiles(rows_of_forest(treefx.Forest.from_sequences(branches)))
    assert found == (1 + 4 * (2 + 3), 81)


def test_many_tokens_share_cells() -> None:
    forest = treefx.Forest.from_sequences([[*range(300), *range(1000 + 200 * i, 1200 + 200 * i)] for i in range(3)])
    shades = drawn(draw_mask(visible_of(None, []), rows_of_forest(forest)))
    assert shades.shape == (MOST_CELLS, MOST_CELLS)
    at = np.linspace(0, forest.num_tokens, MOST_CELLS + 1).astype(int)
    sums = np.add.reduceat(np.add.reduceat(dense(forest).astype(float), at[:-1], 0), at[:-1], 1)
    share = sums / np.outer(np.diff(at), np.diff(at))
    assert np.abs(shades / 9 - share).max() < 0.35 and np.abs(shades / 9 - share).mean() < 0.01


def test_what_is_not_known_is_named() -> None:
    condition = visible_of(("gt", ("load", 0, ("k",)), ("const", 0)), ["attention_mask"])
    mask = draw_mask(condition, rows_of_forest(FOREST))
    assert mask.note == "without the part of the condition that depends on attention_mask"
    assert np.array_equal(drawn(mask), 9 * dense(FOREST))


def test_columns_are_those_of_padded_rows() -> None:
    rows = Rows(np.array([[-1, 0, 1], [0, 1, 2]]), np.array([3, 3, 3]))
    row, column = rows.row_and_column
    assert row.tolist() == [0, 0, 1] and column.tolist() == [1, 2, 2]
    assert sympy.Symbol("q", real=True) in visible_of(None, []).free_symbols


def test_edges_have_the_weights_of_their_rows() -> None:
    material: Any = SimpleNamespace(rows=rows_of_forest(FOREST), stats={"tokens": FOREST.num_tokens})
    found = account_forest(material)
    assert found is not None
    assert {(run.ids, run.weight) for run in found.nodes} == {
        ((1,), None), ((2,), 3.0), ((3, 4), 1.0), ((5, 6, 7), 2.0), ((8,), 4.0), ((9, 9), None)
    }  # fmt: skip
