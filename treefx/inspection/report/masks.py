"""Draw a small picture of which keys the queries of a forest see.

It uses the condition that the report shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treefx.inspection.report.forest import count_tokens
from treefx.inspection.report.material import Rows
from treefx.inspection.report.records import Mask

__all__ = ["MOST_CELLS", "draw_mask"]

MOST_CELLS = 96
"""Along each side: more tokens share a cell."""
_SAMPLES = 4
"""Tokens of a cell, along each side, at which the condition is evaluated."""


def draw_mask(condition: Any, rows: Rows) -> Mask:
    """The condition at pairs of packed tokens, at most ``MOST_CELLS`` squared cells.

    Args:
        condition: Of sympy, in q and k, see ``treefx.inspection.report.formulas.visible_of``.
        rows: The trie of the last call.
    """
    count = count_tokens(rows)
    cells = min(count, MOST_CELLS)
    samples = min(_SAMPLES, -(-count // cells))
    at = (np.arange(cells * samples) * count) // (cells * samples)
    evaluate, note = _function(condition, rows)
    seen = np.broadcast_to(evaluate(at[:, None], at[None, :]), (len(at), len(at)))
    share = seen.reshape(cells, samples, cells, samples).mean((1, 3))
    # Any visible pair gives a shade: thin windows would vanish otherwise.
    shades = np.where(share > 0, np.maximum(1, np.rint(9 * share)), 0).astype(int)
    return Mask(count, tuple("".join(map(str, row)) for row in shades.tolist()), note)


def _function(condition: Any, rows: Rows) -> tuple[Any, str]:
    """Return the condition over arrays of q and k, and a note on parts it omits."""
    import sympy

    row, column = rows.row_and_column
    arrays = {"end": rows.subtree_end, "row": row, "column": column}
    functions = {name: lambda at, array=array: array[np.asarray(at, dtype=np.int64)] for name, array in arrays.items()}
    k, q = (sympy.Symbol(name, real=True) for name in "kq")
    called = {str(item.func) for item in condition.atoms(sympy.core.function.AppliedUndef)}
    missing = sorted((called - set(functions)) | {str(item) for item in condition.free_symbols - {k, q}})
    if missing:
        end = sympy.Function("end")
        condition = sympy.And(sympy.Le(k, q), sympy.Lt(q, end(k)))
    note = f"without the part of the condition that depends on {', '.join(missing)}" if missing else ""
    return sympy.lambdify([q, k], condition, modules=[functions, "numpy"]), note
