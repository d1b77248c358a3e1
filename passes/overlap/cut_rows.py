"""Cut the rows of a product evenly, independent of the trees of the rows.

Products are row-wise, so every cut is exact. Ends of subtrees would be no better places for one: tokens stand in
depth-first order and read their ancestors, which come first, so operators behind a chunk (attention too) need the
chunks before it and no later one, for any cuts; backwards the same in reverse. They would be worse: pieces of uneven
length hide less, few subtrees end where tiles of products do, and they end elsewhere in every batch, so that a graph
would hold for one forest. Of a gather or a reduce-scatter a chunk is a piece of every rank's share, which has no
subtrees.
"""

from __future__ import annotations

__all__ = ["ALIGNED", "cut_lengths"]

ALIGNED = 16
"""Cuts stand at multiples of this. Libraries compute the last rows of a product by other code than full tiles, which
adds in another order: cut anywhere, float64 on the CPU differs in the last bit from the product in one piece."""


def cut_lengths(rows: int, chunks: int) -> list[int]:
    """Lengths of at most ``chunks`` pieces, in order; one where the rows are too few.

    Args:
        rows: How many there are.
        chunks: How many pieces are wanted.
    """
    chunks = max(1, min(chunks, rows // ALIGNED))
    cuts = [*(rows * i // (chunks * ALIGNED) * ALIGNED for i in range(chunks)), rows]
    return [end - start for start, end in zip(cuts, cuts[1:], strict=False)]
