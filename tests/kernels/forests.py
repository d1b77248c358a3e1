"""Forests as lists of parents in packed order."""

import itertools

from hypothesis import strategies as st

__all__ = ["FORESTS", "chain_forest", "random_parents"]


def chain_forest(*nodes: tuple[int, int]) -> list[int]:
    """Return the parents of a forest given as (parent node, length) in packed order."""
    parents: list[int] = []
    last: list[int] = []
    for parent, length in nodes:
        parents.append(last[parent] if parent >= 0 else -1)
        parents += range(len(parents) - 1, len(parents) + length - 2)
        last.append(len(parents) - 1)
    return parents


FORESTS = {
    "empty": [],
    "one": [-1],
    "chain": chain_forest((-1, 63)),
    "prefix": chain_forest((-1, 140), (0, 33), (0, 130), (0, 1)),
    "leaves": chain_forest((-1, 111), *[(0, 1)] * 60),
    "comb": [-1, *itertools.chain.from_iterable((2 * i, 2 * i) for i in range(60))],
    "two_trees": chain_forest((-1, 20), (0, 9), (0, 30), (2, 4), (2, 7), (-1, 40), (5, 3), (5, 150)),
}


@st.composite
def random_parents(draw: st.DrawFn) -> list[int]:
    """Draw parents in depth-first pre-order: each token hangs below a token on the path of the one before."""
    parents, path = [], []
    for climb in draw(st.lists(st.sampled_from([0, 0, 0, 0, 1, 2, 5, 40]), min_size=1, max_size=200)):
        path = path[: max(0, len(path) - climb)]
        parents.append(path[-1] if path else -1)
        path.append(len(parents) - 1)
    return parents
