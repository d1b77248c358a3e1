"""The cache of prefixes: missing tokens are named once, and written ones are read."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import Rows, row_batches
from treefx.rl.samplers.prefix_cache import PrefixCache, common_length


def feed(cache: PrefixCache, prefixes: Rows) -> list[int]:
    """Feed missing tokens, a layer of the token's own id for keys; returns the tokens that were fed."""
    fed: list[int] = []
    while pieces := cache.missing_pieces(prefixes):
        for path, tokens in pieces:
            slots = cache.extend(path, tokens)
            values = torch.tensor(tokens, dtype=torch.float64)[:, None, None]
            cache.write(0, torch.tensor(slots), values.expand(-1, 2, 3), -values.expand(-1, 2, 1))
            cache.logits[slots[-1]] = torch.zeros(1)
            fed += tokens
    return fed


@given(row_batches())
def test_every_distinct_token_is_fed_once(rows: Rows) -> None:
    cache = PrefixCache()
    fed = feed(cache, rows)
    assert len(fed) == len(cache) == len({tuple(row[:i]) for row in rows for i in range(1, len(row) + 1)})
    for row in rows:
        path = cache.find(row)
        assert len(path) == len(row) and path[-1] in cache.logits
        keys, values = cache.read(0, torch.tensor([path]))
        assert keys.shape == (1, 2, len(row), 3) and values.shape == (1, 2, len(row), 1)
        assert keys[0, 1, :, 2].tolist() == row and (-values[0, 0, :, 0]).tolist() == row


@given(row_batches(), st.data())
def test_what_is_held_is_not_fed_again(rows: Rows, data: st.DataObject) -> None:
    cache = PrefixCache()
    first = data.draw(st.integers(0, len(rows)))
    feed(cache, rows[:first])
    held = {tuple(row[:i]) for row in rows[:first] for i in range(1, len(row) + 1)}
    ends = {tuple(row) for row in rows[:first]}
    # Of a prefix that ends inside a held one, only the last token: its logits were not computed.
    later = {tuple(row) for row in rows[first:]}
    again = {row for row in later - ends if row in held}
    new = {row[:i] for row in later for i in range(1, len(row) + 1)} - held
    assert len(feed(cache, rows[first:])) == len(new) + len(again)
    assert feed(cache, rows) == []


def test_slots_survive_growth() -> None:
    cache = PrefixCache()
    rows = [[number, *range(1000, 1100)] for number in range(10)]
    for row in rows:
        feed(cache, [row])
    assert len(cache) == 1010
    for row in rows:
        assert cache.read(0, torch.tensor([cache.find(row)]))[0][0, 0, :, 0].tolist() == row


def test_common_length() -> None:
    assert [common_length(a, b) for a, b in (([1, 2], [1, 3]), ([1], [1, 2]), ([], [1]), ([2], [1]))] == [1, 1, 0, 0]
