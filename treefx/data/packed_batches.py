"""Pack documents into batches of one shape, for trainers that take no padding.

Documents that share prefixes go into one batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treefx.arguments import check_whole
from treefx.data.samples import IGNORED
from treefx.errors import InputError

__all__ = ["PackedBatch", "packed_batches"]

Numbers = npt.NDArray[np.int64]


class PackedBatch(NamedTuple):
    """Hold one batch, int64 [rows, columns] each; ``labels`` are the next tokens."""

    ids: Numbers
    positions: Numbers
    labels: Numbers


def packed_batches(
    documents: Sequence[tuple[Sequence[int], Sequence[int]]], *, rows: int, columns: int
) -> list[PackedBatch]:
    """Lay documents one behind the other, in the order of their prefix tree; none is cut.

    Args:
        documents: token ids of each, and their labels (the same ids, -100 where nothing is learned).
        rows: of a batch.
        columns: columns of a row. The rest of a row is a separate document of id 0 with labels -100.

    Returns:
        The batches, int64 [rows, columns] each.

    Raises:
        InputError: there are no documents, a document has no token to predict, other labels than tokens, or is longer
            than a row.

    Example:
        >>> (batch,) = packed_batches([([5, 6, 7], [5, 6, 7]), ([5, 6], [-100, 6])], rows=1, columns=4)
        >>> batch.ids.tolist(), batch.positions.tolist(), batch.labels.tolist()
        ([[5, 5, 6, 0]], [[0, 0, 1, 0]], [[6, 6, 7, -100]])
    """
    check_whole(rows, "rows", least=1)
    check_whole(columns, "columns", least=1)
    if not documents:
        raise InputError("expected documents to pack, got none")
    for number, (ids, labels) in enumerate(documents):
        if len(ids) != len(labels) or not 1 < len(ids) <= columns + 1:
            raise InputError(
                f"expected documents of 2 to {columns + 1} tokens (one more than the columns of a row) with a label "
                f"each, got {len(ids)} tokens and {len(labels)} labels in document {number}"
            )
    # Big-endian words compare as bytes exactly as the token ids compare as numbers.
    order = sorted(range(len(documents)), key=lambda number: np.asarray(documents[number][0], ">u8").tobytes())
    lines: list[list[int]] = []
    room = 0
    for number in order:
        size = len(documents[number][0]) - 1
        if size > room:
            lines.append([])
            room = columns
        lines[-1].append(number)
        room -= size
    return [_batch(documents, lines[at : at + rows], rows, columns) for at in range(0, len(lines), rows)]


def _batch(
    documents: Sequence[tuple[Sequence[int], Sequence[int]]], lines: list[list[int]], rows: int, columns: int
) -> PackedBatch:
    ids, labels = np.zeros((rows, columns), np.int64), np.full((rows, columns), IGNORED, np.int64)
    positions = np.tile(np.arange(columns), (rows, 1))
    for row, line in enumerate(lines):
        at = 0
        for number in line:
            tokens, wanted = documents[number]
            end = at + len(tokens) - 1
            ids[row, at:end], labels[row, at:end] = tokens[:-1], wanted[1:]
            positions[row, at:] -= positions[row, at]
            at = end
        positions[row, at:] -= positions[row, at] if at < columns else 0
    return PackedBatch(ids, positions, labels)
