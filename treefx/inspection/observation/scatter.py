"""Which setting of a trainer lets rows that share prefixes come in different calls.

The rows of the last step are dealt out again to calls of as many rows, in the order of their prefixes. The tokens this
saves are lost by the order of rows; the further tokens that one call of all rows saves are lost by the number of rows
of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from treefx.forests.trie import IntArray, build_trie
from treefx.inspection.observation.records import Scatter
from treefx.inspection.text import line_to_change
from treefx.runtime.observed.observer import Settings
from treefx.runtime.observed.tallies import Epoch
from treefx.runtime.observed.tokens import ObservedCall

__all__ = ["find_scatter"]

_LITTLE = 0.05
"""Share of the tokens that run, below which a loss is not worth a line."""
_POSITIONS = "position_ids=attention_mask.cumsum(1) - 1, padding on the right, or rows of equal lengths in one call"


def find_scatter(calls: Sequence[ObservedCall], epoch: Epoch, settings: Settings) -> tuple[Scatter, ...]:
    """List the settings that scatter rows, the largest loss first.

    Args:
        calls: Of one step.
        epoch: Steps with different rows.
        settings: Of the trainer.
    """
    found = [*_in_step(calls, settings), *_over_steps(epoch, settings), *_over_columns(calls)]
    worth = [item for item in found if item.tokens > _LITTLE * item.of_tokens]
    return tuple(sorted(worth, key=lambda item: -item.tokens / max(1, item.of_tokens)))


def _in_step(calls: Sequence[ObservedCall], settings: Settings) -> Iterator[Scatter]:
    by_call = [rows for call in calls if (rows := call.rows())]
    if len(by_call) < 2:
        return
    rows = [row for each in by_call for row in each]
    trie = build_trie(rows)
    ends = np.cumsum([len(each) for each in by_call])[:-1]
    dealt = [[rows[row] for row in part] for part in np.split(trie.row_order, ends)]
    as_they_come, in_order = _distinct(by_call), _distinct(dealt)
    order = settings.order or "the order of rows"
    yield Scatter(order, "order", as_they_come - in_order, in_order, settings.way_out or line_to_change())
    batch = settings.batch or f"{_sizes(by_call)} rows in a call"
    larger = "as many rows in a call as memory holds: shared prefixes leave room"
    yield Scatter(batch, "batch", min(in_order, as_they_come) - trie.num_tokens, trie.num_tokens, larger)


def _over_steps(epoch: Epoch, settings: Settings) -> Iterator[Scatter]:
    if epoch.steps > 1 and not settings.samples:
        together = epoch.distinct_tokens()
        order = settings.order or "the order of rows"
        way_out = settings.way_out or line_to_change()
        yield Scatter(f"{order} (over steps)", "steps", epoch.step_tokens - together, together, way_out)


def _over_columns(calls: Sequence[ObservedCall]) -> Iterator[Scatter]:
    """Report rows that start in different columns, in calls without positions.

    Most models count columns then.
    """
    apart = together = 0
    for call in calls:
        mask = call.tensors.get(call.names.get("mask", ""))
        if mask is None or "positions" in call.names:
            continue
        kept = np.broadcast_to(mask.numpy() != 0, call.copies.tensors["ids"].shape)
        first = kept.argmax(1)[kept.any(1)]
        rows = call.rows()
        by_column = [[row for row, at in zip(rows, first, strict=True) if at == column] for column in np.unique(first)]
        apart, together = apart + _distinct(by_column), together + _distinct([rows])
    setting = "padding on the left without position_ids, in a model that counts columns"
    yield Scatter(setting, "columns", apart - together, together, _POSITIONS)


def _distinct(calls: Sequence[Sequence[IntArray]]) -> int:
    """Distinct tokens of each call, summed."""
    return sum(build_trie(list(rows)).num_tokens for rows in calls if rows)


def _sizes(by_call: Sequence[Sequence[IntArray]]) -> str:
    sizes = sorted({len(rows) for rows in by_call})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
