"""Levels of a forest: every token in one, every node behind its parent, and a recurrence over them as over rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treefx.kernels.recurrence.tree_levels import Level, find_levels, levels_cost_less, run_levels
from treefx.kernels.recurrence.tree_scan import CHUNK


@st.composite
def forests(draw: st.DrawFn) -> list[int]:
    """The parent of each token in packed order, -1 at roots."""
    parents, path = [], list[int]()
    for token in range(draw(st.integers(1, 24))):
        kept = draw(st.integers(0, len(path)))
        path = path[:kept]
        parents.append(path[-1] if path else -1)
        path.append(token)
    return parents


def ends_of(parents: list[int]) -> Tensor:
    ends = list(range(1, len(parents) + 1))
    for token in reversed(range(len(parents))):
        if parents[token] >= 0:
            ends[parents[token]] = max(ends[parents[token]], ends[token])
    return torch.tensor(ends, dtype=torch.int32)


def summed(taken: list[Tensor], states: Tensor | None, level: Level) -> tuple[Tensor, Tensor | None]:
    """The running sum along every path: a recurrence whose state is the sum."""
    (x,) = taken
    bounds = level.bounds.tolist()
    out, final = [], []
    for node, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        found = x[:, first:last].cumsum(1)
        found = found if states is None else found + states[node]
        out.append(found)
        final.append(found[0, -1])
    return torch.cat(out, 1), torch.stack(final) if level.returns_states else None


@given(forests())
def test_a_recurrence_along_every_path(parents: list[int]) -> None:
    levels = find_levels(ends_of(parents))
    values = torch.arange(1.0, len(parents) + 1)[None, :, None].requires_grad_()
    found = run_levels(summed, [values], levels)
    wanted = [0.0] * len(parents)
    for token, parent in enumerate(parents):
        wanted[token] = values[0, token, 0].item() + (wanted[parent] if parent >= 0 else 0)
    assert found.flatten().tolist() == wanted
    (grad,) = torch.autograd.grad(found.sum(), values)
    below = [1] * len(parents)
    for token in reversed(range(len(parents))):
        if parents[token] >= 0:
            below[parents[token]] += below[token]
    assert grad.flatten().tolist() == below, "a token counts once for itself and each token below"
    assert sorted(torch.cat([level.tokens for level in levels.levels]).tolist()) == list(range(len(parents)))
    assert [level.longest for level in levels.levels] == [int(level.bounds.diff().max()) for level in levels.levels]


def test_a_chain_is_one_node() -> None:
    levels = find_levels(torch.full((200,), 200, dtype=torch.int32))
    assert (
        len(levels.levels) == 1 and levels.levels[0].bounds.tolist() == [0, 200] and not levels.levels[0].returns_states
    )


def test_nothing() -> None:
    assert find_levels(torch.zeros(0, dtype=torch.int32)).levels == ()


@pytest.mark.parametrize(("padded", "fewer"), [(False, True), (True, False)])
def test_padding_counts_as_work(padded: bool, fewer: bool) -> None:
    """A long branch next to fifty of one token: as sequences they cost what they have, as rows fifty times the long."""
    ends = torch.tensor([1050, *[1000] * 999, *range(1001, 1051)], dtype=torch.int32)
    levels = find_levels(ends)
    assert len(levels.levels) == 2
    assert levels_cost_less(levels, ends, CHUNK, padded=padded) is fewer


def test_many_short_levels_cost_more() -> None:
    comb = ends_of([-1 if token == 0 else token - 1 if token % 2 else token - 2 for token in range(401)])
    levels = find_levels(comb)
    assert len(levels.levels) == 201
    assert not levels_cost_less(levels, comb, CHUNK, padded=False)
