"""Convolutions and recurrences along a tree: equal to every row alone, in float64, gradients included."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.strategies import row_batches
from treefx import Forest, TreefxError
from treefx.kernels.recurrence import tree_scan as tree_scan_module
from treefx.kernels.recurrence.scan_chunk import Chunk
from treefx.kernels.recurrence.tree_chunks import plan_chunks
from treefx.kernels.recurrence.tree_conv import find_parents, tree_conv1d
from treefx.kernels.recurrence.tree_scan import tree_delta_rule, tree_scan, tree_ssd

HEADS, KEY, VALUE, CHANNELS = 2, 3, 2, 4
Inputs = list[Tensor]


def inputs_of(tokens: int, *shapes: tuple[int, ...]) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, *shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def recurrence_inputs(tokens: int, by_feature: bool = False) -> Inputs:
    decays = (HEADS, KEY) if by_feature else (HEADS,)
    return inputs_of(tokens, (HEADS, KEY), (HEADS, KEY), (HEADS, VALUE), decays, (HEADS,))


def sequential(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
    """The definition, one token after the other."""
    state, outs = q.new_zeros(HEADS, KEY, VALUE), []
    for t in range(len(q)):
        state = state * g[t].exp().reshape(HEADS, -1, 1)
        written = v[t] if beta is None else beta[t, :, None] * (v[t] - torch.einsum("hd,hde->he", k[t], state))
        state = state + k[t][..., None] * written[:, None]
        outs.append(torch.einsum("hd,hde->he", q[t], state))
    return torch.stack(outs)


def assert_equal_to_rows(
    forest: Forest, inputs: Inputs, tree: Callable[..., Tensor], row: Callable[..., Tensor], parameters: Inputs
) -> None:
    """Weighted sums over all rows agree, and so do the gradients of all inputs and parameters."""
    packed = tree(*inputs)
    total, expected = packed.new_zeros(()), packed.new_zeros(())
    for number, place in enumerate(forest.token_of):
        index = torch.as_tensor(place)
        alone = row(*[x[index] for x in inputs])
        weight = torch.linspace(0.5, 2.0, alone.numel(), dtype=torch.float64).view(alone.shape) * (1 + number)
        total, expected = total + (packed[index] * weight).sum(), expected + (alone * weight).sum()
    leaves = [*inputs, *parameters]
    got, wanted = (torch.autograd.grad(loss, leaves, allow_unused=True) for loss in (total, expected))
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    for left, right in zip(got, wanted, strict=True):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-11)


def check_scan(rows: list[list[int]], chunk: int, delta: bool, by_feature: bool = False) -> None:
    forest = Forest.from_sequences(rows)
    ends = forest.subtree_end

    def tree(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        decay = -F.softplus(g)
        if delta:
            return tree_delta_rule(q, F.normalize(k, dim=-1), v, decay, beta.sigmoid(), ends, chunk)
        return tree_ssd(q, k, v, decay, ends, chunk)

    def row(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        if delta:
            return sequential(q, F.normalize(k, dim=-1), v, -F.softplus(g), beta.sigmoid())
        return sequential(q, k, v, -F.softplus(g), None)

    assert_equal_to_rows(forest, recurrence_inputs(forest.num_tokens, by_feature), tree, row, [])


def check_convolution(rows: list[list[int]], taps: int, dilation: int, groups: int) -> None:
    forest = Forest.from_sequences(rows)
    parent = forest.parent.to(torch.int64)
    weight, bias = inputs_of(CHANNELS, (CHANNELS // groups, taps), ())
    distances = [tap * dilation for tap in reversed(range(taps))]

    def row(x: Tensor) -> Tensor:
        padded = F.pad(x.t()[None], ((taps - 1) * dilation, 0))
        return F.conv1d(padded, weight, bias, dilation=dilation, groups=groups)[0].t()

    assert_equal_to_rows(
        forest, inputs_of(forest.num_tokens, (CHANNELS,)),
        lambda x: tree_conv1d(x, weight, bias, parent, distances=distances, groups=groups), row, [weight, bias],
    )  # fmt: skip


def forked_at(position: int, length: int = 11) -> list[list[int]]:
    """Three rows: two that part after ``position`` tokens, and one that parts from the second a token later."""
    stem = list(range(position))
    second = [*stem, *range(200, 200 + length - position)]
    return [stem + list(range(100, 100 + length - position)), second, [*second[: position + 1], 300, 301]]


@pytest.mark.parametrize("position", range(1, 10))
@pytest.mark.parametrize("by_feature", [False, True], ids=["head", "feature"])
@pytest.mark.parametrize("delta", [False, True], ids=["ssd", "delta_rule"])
def test_fork_at_every_position_of_a_chunk(position: int, delta: bool, by_feature: bool) -> None:
    check_scan(forked_at(position), chunk=4, delta=delta, by_feature=by_feature)


@pytest.mark.parametrize("position", range(1, 7))
@pytest.mark.parametrize("groups", [1, CHANNELS])
def test_fork_at_every_position_of_a_window(position: int, groups: int) -> None:
    check_convolution(forked_at(position, 8), taps=4, dilation=1, groups=groups)


@settings(max_examples=20)
@given(row_batches(), st.sampled_from([1, 2, 3, 8]), st.booleans(), st.booleans())
def test_recurrences_on_any_forest(rows: list[list[int]], chunk: int, delta: bool, by_feature: bool) -> None:
    check_scan(rows, chunk, delta, by_feature)


def test_a_mean_decay_is_no_decay_by_feature() -> None:
    """What the tests above would find: every feature of a head decays alike."""
    ends = Forest.from_sequences(forked_at(4)).subtree_end
    q, k, v, g, _ = recurrence_inputs(len(ends), by_feature=True)
    decay = -F.softplus(g)
    right, wrong = tree_ssd(q, k, v, decay, ends), tree_ssd(q, k, v, decay.mean(-1), ends)
    assert float((right - wrong).detach().abs().max() / right.detach().abs().max()) > 1e-2


def float32_errors(strength: float, reset: bool, delta: bool, by_feature: bool = False) -> list[float]:
    """Of the output and of all gradients in float32, relative to the recurrence in float64, token after token."""
    tokens = 72
    ends = torch.full((tokens,), tokens, dtype=torch.int32)
    q, k, v, g, beta = (x.detach() for x in recurrence_inputs(tokens, by_feature))
    g = -F.softplus(g) * strength
    if reset:
        g[10] = -300.0
    given = [x.float().double() for x in (q, F.normalize(k, dim=-1), v, g, *([beta.sigmoid()] if delta else []))]

    def results(run: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out = run(*leaves)
        weight = torch.arange(out.numel(), dtype=torch.float64).cos().view_as(out).to(dtype)
        return [out, *torch.autograd.grad(out, leaves, weight)]

    exact = results(lambda *x: sequential(*x, *([] if delta else [None])), torch.float64)
    tree = tree_delta_rule if delta else tree_ssd
    found = results(lambda *x: tree(*x, ends), torch.float32)
    return [float((x.double() - y).detach().abs().max() / y.abs().max()) for x, y in zip(found, exact, strict=True)]


@pytest.mark.parametrize("by_feature", [False, True], ids=["head", "feature"])
@pytest.mark.parametrize("delta", [False, True], ids=["ssd", "delta_rule"])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("strength", [0.05, 1.0, 20.0])
def test_strong_decays_cost_no_precision(strength: float, reset: bool, delta: bool, by_feature: bool) -> None:
    assert max(float32_errors(strength, reset, delta, by_feature)) <= 2e-6


def test_they_would_with_running_sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chunk, "total", property(lambda self: self.g.cumsum(-1)))
    assert all(max(float32_errors(0.05, True, delta)) > 5e-6 for delta in (False, True))


@settings(max_examples=10)
@given(row_batches(), st.booleans(), st.booleans())
def test_heads_share_queries_and_keys(rows: list[list[int]], decays: bool, in_pieces: bool) -> None:
    """As if they were repeated; without decay; in pieces of one chunk, as where memory is short."""
    ends = Forest.from_sequences(rows).subtree_end
    q, k, v, g = inputs_of(len(ends), (1, KEY), (1, KEY), (HEADS, VALUE), (HEADS,))
    decay = -F.softplus(g) if decays else None
    with mock.patch.object(tree_scan_module, "_ENTRIES_ON_CPU", 1 if in_pieces else 1 << 20):
        shared = tree_scan(q, k, v, decay, None, ends, 4)
        got = torch.autograd.grad(shared.square().sum(), (q, k, v))
    zero = -F.softplus(g) if decays else torch.zeros_like(g)
    apart = tree_ssd(q.expand(-1, HEADS, -1), k.expand(-1, HEADS, -1), v, zero, ends, 8)
    wanted = torch.autograd.grad(apart.square().sum(), (q, k, v))
    for left, right in zip((shared, *got), (apart, *wanted), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-11)


@settings(max_examples=20)
@given(row_batches(), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, CHANNELS]))
def test_convolutions_on_any_forest(rows: list[list[int]], taps: int, dilation: int, groups: int) -> None:
    check_convolution(rows, taps, dilation, groups)


@given(row_batches())
def test_parents_follow_from_depth_and_subtree_end(rows: list[list[int]]) -> None:
    forest = Forest.from_sequences(rows)
    found = find_parents(torch.as_tensor(forest.depth), torch.as_tensor(forest.subtree_end))
    assert found.tolist() == forest.parent.tolist()


def test_steps_are_as_many_as_the_longest_row_has_chunks() -> None:
    """A chunk never crosses a fork, all branches of a level are one step, and the state of a leaf is unused."""
    rows = [[0] * 16 + [branch] * 13 for branch in range(1, 6)]
    plan = plan_chunks(Forest.from_sequences(rows).subtree_end, 8)
    assert [(segment.first, segment.count) for segment in plan.segments] == [(0, 1), (1, 1), (2, 5)]
    assert [tuple(chunks.tokens.shape) for chunks in plan.chunks] == [(12, 8)]


def test_short_chunks_are_padded_little() -> None:
    rows = [[0] * 64 + [branch] * size for branch, size in enumerate((5, 9, 31, 40), 1)]
    plan = plan_chunks(Forest.from_sequences(rows).subtree_end, 64)
    assert [tuple(chunks.tokens.shape) for chunks in plan.chunks] == [(1, 8), (1, 16), (1, 32), (2, 64)]


@pytest.mark.parametrize("call", [
    lambda x, parent: tree_conv1d(x, torch.ones(4, 1, 3), None, parent, distances=[1, 0, -1], groups=4),
    lambda x, parent: tree_ssd(x[:, None], x[:, None], x[:2, None], x[:, :1], parent),
    lambda x, parent: tree_delta_rule(*[x[:, None]] * 3, x[:, :1], x, parent),
])  # fmt: skip
def test_refusals(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(TreefxError, match="expected"):
        call(torch.ones(3, 4), torch.tensor([-1, 0, 1]))
