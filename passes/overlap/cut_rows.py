"""Where the rows of a product are cut."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["ALIGNED", "cut_lengths"]

ALIGNED = 16
"""Cuts stand at multiples of this. Libraries compute the last rows of a product by other code than full tiles, which
adds in another order: cut anywhere, float64 on the CPU differs in the last bit from the product in one piece."""


def cut_lengths(rows: int, chunks: int, ends: Collection[int] = ()) -> list[int]:
    """Lengths of at most ``chunks`` pieces, in order; one where the rows are too few.

    Args:
        rows: How many there are.
        chunks: How many pieces are wanted.
        ends: Where subtrees of the packed row end: the aligned ones among them are preferred, each within half a piece
            of where an even cut would be.
    """
    chunks = max(1, min(chunks, rows // ALIGNED))
    even = [rows * i // (chunks * ALIGNED) * ALIGNED for i in range(1, chunks)]
    aligned = [end for end in set(ends) if end % ALIGNED == 0 and ALIGNED <= end <= rows - ALIGNED]
    cuts = sorted({0, rows, *(_nearest(cut, aligned, rows / chunks / 2) for cut in even)})
    return [end - start for start, end in zip(cuts, cuts[1:], strict=False)]


def _nearest(cut: int, ends: Collection[int], within: float) -> int:
    best = min(ends, key=lambda end: (abs(end - cut), end), default=cut)
    return best if abs(best - cut) < within else cut
