"""Rows to ranks: every row once, as even as brute force where ranges are contiguous, the same from hashes alone."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import Rows, SlowTrie, row_batches
from treefx.errors import ForestError, InputError
from treefx.forests.forest import Forest
from treefx.planning.cost.model import Seconds, Size
from treefx.scale.outline import Outline, fingerprint
from treefx.scale.price import Cost, price
from treefx.scale.ranges import fewest_duplicates, smallest_bound
from treefx.scale.rivals import largest_differencing, rival_balances
from treefx.scale.split import split
from treefx.tools.bench.assign import CASES, RANKS, eight_billion

PAIRS = Seconds(0.0, 3.0, 0.5)
COSTS: dict[str, Cost] = {
    "tokens": None,
    "tokens and pairs": PAIRS,
    "a function": lambda size: 3.0 * size.tokens + 0.5 * size.pairs,
    "a function with a floor": lambda size: max(20.0, 1.0 * size.tokens),
}


def outline_of(rows: Rows) -> Outline:
    return Outline.of_forest(Forest.from_sequences(rows))


def slow_amounts(rows: Rows) -> tuple[int, int]:
    """Distinct tokens and visible pairs of some rows, from the definition."""
    prefixes = SlowTrie(rows).through
    return len(prefixes), sum(len(prefix) for prefix in prefixes)


def slow_cost(cost: Cost, rows: Rows) -> float:
    tokens, pairs = slow_amounts(rows)
    if not rows:
        return 0.0
    return tokens if cost is None else cost(Size(tokens, 0, tokens, 0, pairs))  # type: ignore[operator]


@settings(max_examples=80, deadline=None)
@given(rows=row_batches(), ranks=st.integers(1, 6), name=st.sampled_from(list(COSTS)))
def test_every_row_is_on_one_rank_and_ranks_cost_what_they_say(rows: Rows, ranks: int, name: str) -> None:
    found = split(outline_of(rows), ranks, COSTS[name])
    assert sorted(np.concatenate(found.rows).tolist()) == list(range(len(rows)))
    assert len(found.rows) == ranks
    for own, tokens, cost in zip(found.rows, found.tokens, found.cost, strict=True):
        chosen = [rows[row] for row in own.tolist()]
        assert own.tolist() == sorted(own.tolist())
        assert slow_amounts(chosen)[0] == tokens
        assert slow_cost(COSTS[name], chosen) == pytest.approx(cost)
    assert found.balance >= 1.0 - 1e-9 or "floor" in name
    assert found.duplicated >= 0.0


@settings(max_examples=60, deadline=None)
@given(rows=row_batches(), ranks=st.integers(1, 4), name=st.sampled_from(list(COSTS)))
def test_contiguous_ranges_are_as_even_as_brute_force(rows: Rows, ranks: int, name: str) -> None:
    outline = outline_of(rows)
    ordered = [rows[row] for row in outline.row.tolist()]
    every = range(len(rows) + 1)
    best = min(
        max(slow_cost(COSTS[name], ordered[a:b]) for a, b in zip((0, *cuts), (*cuts, len(rows)), strict=True))
        for cuts in combinations([place for place in every for _ in range(ranks)], ranks - 1)
    )
    priced = price(outline, COSTS[name])
    bound, ends = smallest_bound(priced, ranks)
    busiest = max(slow_cost(COSTS[name], ordered[a:b]) for a, b in zip(ends, ends[1:], strict=False))
    assert len(ends) - 1 <= ranks
    assert best - 1e-9 <= busiest <= bound * (1 + 1e-6)
    assert bound <= max(best, priced.lower_bound(ranks)) * 1.0011


@settings(max_examples=60, deadline=None)
@given(rows=row_batches(), room=st.floats(1.0, 3.0))
def test_cuts_duplicate_as_little_as_brute_force(rows: Rows, room: float) -> None:
    outline = outline_of(rows)
    ordered = [rows[row] for row in outline.row.tolist()]
    priced = price(outline, PAIRS)
    bound = room * float(priced.rows.max())
    least = np.inf
    for count in range(len(rows)):
        for cuts in combinations(range(1, len(rows)), count):
            pieces = [ordered[a:b] for a, b in zip((0, *cuts), (*cuts, len(rows)), strict=True)]
            costs = [slow_cost(PAIRS, piece) for piece in pieces]
            least = min(least, sum(costs)) if max(costs) <= bound * (1 + 1e-9) else least
    ends = fewest_duplicates(priced, bound)
    costs = [slow_cost(PAIRS, ordered[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    assert max(costs) <= bound * (1 + 1e-6)
    assert sum(costs) == pytest.approx(least)


@settings(max_examples=40, deadline=None)
@given(rows=row_batches(), ranks=st.integers(1, 5))
def test_hashes_alone_give_the_costs_that_tokens_give(rows: Rows, ranks: int) -> None:
    """With a hash per token nothing is lost; the order of trees is the hashes', so rows may fall to other ranks."""
    lengths = [len(row) for row in rows]
    hashed = Outline.of_fingerprints(lengths, [fingerprint(row, 1) for row in rows], 1)
    assert hashed.tokens == outline_of(rows).tokens
    found = split(hashed, ranks, PAIRS)
    for own, tokens in zip(found.rows, found.tokens, strict=True):
        assert slow_amounts([rows[row] for row in own.tolist()])[0] == tokens
    again = split(Outline.of_fingerprints(lengths, [fingerprint(row, 1) for row in rows], 1), ranks, PAIRS)
    assert [own.tolist() for own in again.rows] == [own.tolist() for own in found.rows]


def test_chunks_of_tokens_share_what_they_wholly_agree_in() -> None:
    rows = [list(range(40)), [*range(20), 99, 98], [*range(16)], [7]]
    outline = Outline.of_fingerprints([len(row) for row in rows], [fingerprint(row) for row in rows])
    of_row = dict(zip(outline.row.tolist(), outline.shared.tolist(), strict=True))
    assert sorted(of_row[row] for row in (0, 1, 2)) == [0, 16, 16]
    assert of_row[3] == 0
    assert fingerprint(range(32)).tolist() == fingerprint(range(40)).tolist()[:2]
    assert fingerprint([5]).tolist() != fingerprint([6]).tolist()


def test_a_piece_of_a_tree_beside_another_of_it_counts_their_prefix_once() -> None:
    """Longest first puts both halves of the tree on one rank where there is one: as if it were never cut."""
    rows = [[*range(10), 100 + row, *range(200, 205)] for row in range(6)]
    found = split(outline_of(rows), 1)
    assert found.tokens.tolist() == [10 + 6 * 6]
    assert found.balance == 1.0 and found.duplicated == 0.0


def test_cutting_and_packing_beats_ranges_where_trees_are_uneven() -> None:
    """Large trees stand in front of the small ones that would fill their ranks."""
    rows = [[1000 * tree, *range(size)] for tree, size in enumerate([*[39] * 6, *[19] * 6])]
    priced = price(outline_of(rows), None)
    assert smallest_bound(priced, 6)[0] > 1.3 * priced.lower_bound(6)
    found = split(outline_of(rows), 6)
    assert found.balance == 1.0 and found.duplicated == 0.0


@pytest.mark.parametrize("name", [name for name in CASES if "forks" not in name])
def test_large_steps_are_even_and_duplicate_little(name: str) -> None:
    outline, cost = CASES[name](), eight_billion()
    for ranks in RANKS:
        found = split(outline, ranks, cost)
        assert found.balance <= 1.10
        assert found.duplicated <= 0.08
        assert sorted(np.concatenate(found.rows).tolist()) == list(range(len(outline)))


def test_rivals_that_keep_trees_whole_are_bound_by_the_largest() -> None:
    outline, cost = CASES["agents, 256 tasks"](), eight_billion()
    balances = rival_balances(outline, 64, cost)
    assert balances["whole trees, KK"] > 2.0 and balances["whole trees, LPT"] > 2.0
    assert balances["rows, LPT"] > 1.5


def test_largest_differencing_is_what_was_published() -> None:
    """Karmarkar and Karp's own example: 8, 7, 6, 5, 4 in two sets differ by 2, longest first by 4."""
    assert largest_differencing(np.array([8.0, 7, 6, 5, 4]), 2).tolist() == [14.0, 16.0]
    assert sorted(largest_differencing(np.array([3.0]), 3).tolist()) == [0.0, 0.0, 3.0]


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, "2", None])
def test_ranks_that_are_none_are_refused(ranks: object) -> None:
    with pytest.raises(InputError, match="ranks must be a whole number of at least 1"):
        split(outline_of([[1, 2]]), ranks)  # type: ignore[arg-type]


def test_costs_and_fingerprints_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match="cost must be the result of treefx.profile"):
        split(outline_of([[1, 2]]), 2, 3.0)  # type: ignore[arg-type]
    for wrong in (0.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="cost must be a number above 0 for every row"):
            split(outline_of([[1, 2]]), 2, lambda size, wrong=wrong: wrong)  # type: ignore[misc]
    with pytest.raises(InputError, match="row 0 of 20 tokens should have a hash per 16 tokens, 2, got 1"):
        Outline.of_fingerprints([20], [fingerprint([1])])
    with pytest.raises(ForestError):
        fingerprint([])
