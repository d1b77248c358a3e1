"""Recurrences over the parts of a forest, states handed from part to part: equal to the uncut forest in float64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.planning.cuts import random_cuts
from tests.strategies import row_batches
from treefx import Forest
from treefx.kernels.recurrence import part_scan as parts
from treefx.kernels.recurrence.tree_chunks import Doors
from treefx.kernels.recurrence.tree_levels import Level, find_part_levels, run_part_levels
from treefx.kernels.recurrence.tree_scan import per_head, tree_delta_rule, tree_scan, tree_ssd
from treefx.planning.execution.boundary import Store
from treefx.planning.search.part import boundary
from treefx.runtime.cut import PartTokens

GROUPS, HEADS, KEY, VALUE = 1, 2, 3, 2
RunPart = Callable[[list[Tensor], Tensor, Tensor, Doors], tuple[Tensor, Tensor]]


def in_parts(forest: Forest, seed: int, share: float, operands: list[Tensor], run: RunPart) -> Tensor:
    """Run the parts of a random plan in order; each takes its states from the tokens above."""
    plan = random_cuts(forest, seed, share)
    store, states = Store(forest, plan.parts, 1), dict[int, Tensor]()
    results: list[Tensor] = [operands[0]] * forest.num_tokens
    for part in plan.parts:
        above, exits = boundary(forest, plan.parts, part), store.exits(part)
        tokens = PartTokens(forest, forest, part.tokens, above, part.tokens[:0], 1, exits)
        doors = tokens.doors()
        given = [states[token] for token in tokens.entries.tolist()]
        given += [operands[0].new_zeros(HEADS, KEY, VALUE)] * (doors.given - len(given))
        ends = torch.searchsorted(part.tokens, forest.subtree_end[part.tokens].to(torch.int64))
        own = torch.cat([ends, torch.arange(len(ends) + 1, tokens.sizes[0] + 1)])
        filled = torch.cat([part.tokens, part.tokens[:1].expand(len(own) - len(ends))])
        out, left = run([x[filled] for x in operands], own.to(torch.int32), torch.stack(given), Doors(*doors))
        states |= dict(zip(exits.tolist(), left, strict=False))
        for number, token in enumerate(part.tokens.tolist()):
            results[token] = out[number]
    return torch.stack(results)


def operands_of(forest: Forest, by_feature: bool, groups: int = GROUPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(forest.num_tokens)
    shapes = ((groups, KEY), (groups, KEY), (HEADS, VALUE), (HEADS, KEY) if by_feature else (HEADS,), (HEADS,))
    q, k, v, g, beta = (
        torch.randn(forest.num_tokens, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, -F.softplus(g), beta.sigmoid())]


def assert_equal(got: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    weight = torch.arange(1.0, got.numel() + 1, dtype=torch.float64).cos().view_as(got)
    found = [torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True) for out in (got, wanted)]
    for left, right in zip((got, *found[0]), (wanted, *found[1]), strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-11)


def chunked(delta: bool, chunk: int) -> RunPart:
    def run(x: list[Tensor], ends: Tensor, given: Tensor, doors: Doors) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = x
        w = None
        if delta or g.dim() == 3:
            q, k = per_head(q, HEADS), per_head(k, HEADS)
        if delta:
            v, w = beta[..., None] * v, beta[..., None] * k
        out: tuple[Tensor, Tensor] = parts.part_scan(q, k, v, g, w, ends, chunk, given, *doors.vectors)
        return out

    return run


@settings(max_examples=15, deadline=None)
@given(
    row_batches(), st.integers(0, 99), st.floats(0.05, 1.0), st.sampled_from([1, 2, 8]), st.booleans(), st.booleans()
)
def test_chunks_of_any_parts(
    rows: list[list[int]], seed: int, share: float, chunk: int, delta: bool, by_feature: bool
) -> None:
    forest = Forest.from_sequences(rows)
    x = operands_of(forest, by_feature)
    q, k, v, g, beta = x
    wanted = (
        tree_delta_rule(q, k, v, g, beta, forest.subtree_end) if delta else tree_ssd(q, k, v, g, forest.subtree_end)
    )
    leaves = x if delta else x[:4]
    assert_equal(in_parts(forest, seed, share, x, chunked(delta, chunk)), wanted, leaves)


def by_token(taken: list[Tensor], states: Tensor | None, level: Level) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule as a library has it: sequences between bounds, token after token."""
    assert states is not None
    bounds, outs, finals = level.bounds.tolist(), list[Tensor](), list[Tensor]()
    for node, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = states[node]
        for t in range(first, last):
            q, k, v, g, beta = (x[0, t] for x in taken)
            state = state * g.exp().reshape(HEADS, -1, 1)
            written = beta[:, None] * (v - torch.einsum("hd,hde->he", k, state))
            state = state + k[..., None] * written[:, None]
            outs.append(torch.einsum("hd,hde->he", q, state))
        finals.append(state)
    return torch.stack(outs)[None], torch.stack(finals) if level.returns_states else None


def leveled(x: list[Tensor], ends: Tensor, given: Tensor, doors: Doors) -> tuple[Tensor, Tensor]:
    out, left = run_part_levels(by_token, [y[None] for y in x], find_part_levels(ends, doors), given)
    return out[0], left


@settings(max_examples=8, deadline=None)
@given(row_batches(), st.integers(0, 99), st.floats(0.05, 1.0), st.booleans())
def test_levels_and_chunks_take_turns(rows: list[list[int]], seed: int, share: float, alone: bool) -> None:
    """A part by a library's kernel starts from the states of one by ``tree_scan``, and the other way round."""
    forest = Forest.from_sequences(rows)
    x, turn = operands_of(forest, False, HEADS), [0]

    def run(*given: object) -> tuple[Tensor, Tensor]:
        turn[0] += 1
        return (leveled if alone or turn[0] % 2 else chunked(True, 2))(*given)  # type: ignore[arg-type]

    assert_equal(in_parts(forest, seed, share, x, run), tree_delta_rule(*x, forest.subtree_end), x)


@pytest.mark.parametrize("wrong", [None, "zero", "another", "before"])
def test_wrong_states(wrong: str | None) -> None:
    """Of zero, of another path, or of the token above the exit."""
    forest = Forest.from_sequences([[1, 2, 3, 4, 5], [1, 2, 6, 7, 8], [9, 10, 11, 12]])
    x = operands_of(forest, False)

    def run(values: list[Tensor], ends: Tensor, given: Tensor, doors: Doors) -> tuple[Tensor, Tensor]:
        states = {"zero": given * 0, "another": given.flip(0)}.get(str(wrong), given)
        exits = doors.exits.clamp(min=1) - 1 if wrong == "before" else doors.exits
        return chunked(True, 8)(values, ends, states, Doors(doors.given, doors.entry, exits))

    got = in_parts(forest, 3, 0.4, x, run)
    wanted = tree_delta_rule(*x, forest.subtree_end)
    if wrong is None:
        assert_equal(got, wanted, x)
    else:
        assert not torch.allclose(got, wanted, rtol=1e-3)


def test_nan_stays_on_its_path() -> None:
    """A state that is not finite reaches the tokens below it alone."""
    ends = torch.tensor([2, 2, 4, 4], dtype=torch.int32)
    q, k, v = (torch.rand(4, HEADS, size, dtype=torch.float64) for size in (KEY, KEY, VALUE))
    given = torch.zeros(2, HEADS, KEY, VALUE, dtype=torch.float64)
    given[1] = torch.nan
    entry, exits = torch.tensor([0, 2, 1, 2]), torch.tensor([1, 3])
    out, left = parts.part_scan(q, k, v, None, None, ends, 64, given, entry, exits)
    assert out[:2].isfinite().all() and left[0].isfinite().all()
    assert out[2:].isnan().all() and left[1].isnan().all()
    torch.testing.assert_close(out[:2], tree_scan(q[:2], k[:2], v[:2], None, None, ends[:2]))
