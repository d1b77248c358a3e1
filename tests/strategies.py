"""Hypothesis strategies of rows that share prefixes, and the slow definitions a forest is judged by."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

Rows = list[list[int]]

_token = st.integers(0, 3)


@st.composite
def chains(draw: st.DrawFn) -> Rows:
    """Nested prefixes of one sequence, shuffled: one sample per turn of a conversation."""
    whole = draw(st.lists(st.integers(0, 50), min_size=1, max_size=24))
    cuts = draw(st.lists(st.integers(1, len(whole)), min_size=1, max_size=6))
    return [whole[:cut] for cut in cuts]


@st.composite
def stars(draw: st.DrawFn) -> Rows:
    """One prompt, several completions, some of them empty or equal."""
    prompt = draw(st.lists(_token, min_size=1, max_size=12))
    tails = draw(st.lists(st.lists(_token, max_size=6), min_size=1, max_size=6))
    return [prompt + tail for tail in tails]


@st.composite
def caterpillars(draw: st.DrawFn) -> Rows:
    """A spine with a leg at every joint: thinking that is stripped before the next turn."""
    spine: list[int] = []
    rows: Rows = []
    for _ in range(draw(st.integers(1, 5))):
        spine = spine + draw(st.lists(_token, min_size=1, max_size=5))
        rows.append(spine + [7, *draw(st.lists(_token, max_size=4))])
    return draw(st.permutations(rows))


@st.composite
def with_duplicates(draw: st.DrawFn) -> Rows:
    """Rows of which several are equal."""
    rows = draw(stars())
    return draw(st.permutations(rows + rows[: draw(st.integers(1, len(rows)))]))


def first_token_forks() -> st.SearchStrategy[Rows]:
    """Rows that differ from the first token on: several trees."""
    return st.lists(st.lists(_token, min_size=1, max_size=5), min_size=2, max_size=6).map(
        lambda rows: [[10 + number, *row] for number, row in enumerate(rows)]
    )


def one_token_rows() -> st.SearchStrategy[Rows]:
    """Rows of a single token: nothing is predicted."""
    return st.lists(_token.map(lambda token: [token]), min_size=1, max_size=5)


def random_rows() -> st.SearchStrategy[Rows]:
    """Rows over a tiny alphabet, which share prefixes by chance."""
    return st.lists(st.lists(_token, min_size=1, max_size=10), min_size=1, max_size=8)


def row_batches() -> st.SearchStrategy[Rows]:
    """Rows of every shape above."""
    return st.one_of(
        chains(),
        stars(),
        caterpillars(),
        with_duplicates(),
        first_token_forks(),
        one_token_rows(),
        random_rows(),
    )


@st.composite
def weighted_row_batches(draw: st.DrawFn) -> tuple[Rows, list[list[float]]]:
    """Rows with a weight per token: zeros, ones and fractions; entry 0 of each row must not matter."""
    rows = draw(row_batches())
    weight = st.sampled_from([0.0, 0.25, 0.7, 1.0, 1.0, 3.0])
    return rows, [draw(st.lists(weight, min_size=len(row), max_size=len(row))) for row in rows]


@dataclass
class SlowTrie:
    """The trie by its definition: a token is a distinct prefix of a row.

    Attributes:
        through: for every distinct prefix, the rows that start with it.
    """

    rows: Rows
    through: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            for length in range(1, len(row) + 1):
                self.through.setdefault(tuple(row[:length]), []).append(number)

    def edge_weights(self, weights: list[list[float]]) -> dict[tuple[int, ...], float]:
        """Weight of the edge into every prefix of two or more tokens."""
        return {
            prefix: sum(weights[number][len(prefix) - 1] for number in numbers)
            for prefix, numbers in self.through.items()
            if len(prefix) > 1
        }
