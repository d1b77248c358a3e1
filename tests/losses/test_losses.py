"""Edge log-probabilities and losses in float64 against the same loss over separate rows."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.strategies import Rows, row_batches, weighted_row_batches
from treefx import Forest, ForestError, InputError, edge_logprobs, losses

VOCABULARY = 71
REDUCTIONS: list[losses.Reduction] = ["sum", "token_mean", "row_mean"]
many = settings(max_examples=60)

RowLosses = Callable[[torch.Tensor, int], torch.Tensor]
"""(log-probs of the row's tokens 1.. , row number) -> loss of each."""


def random_logits(forest: Forest, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(forest.raw_tokens)
    return 3 * torch.randn(1, forest.num_tokens, VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)


def separate_loss(
    logits: torch.Tensor, forest: Forest, weights: list[Any], reduction: str, row_losses: RowLosses
) -> torch.Tensor:
    """The loss by its definition: every row has its own copy of its logits, its terms and its mean."""
    sums, totals = [], []
    for number, (row, index) in enumerate(zip(forest.sequences(), forest.token_of, strict=True)):
        weight = torch.as_tensor(weights[number], dtype=torch.float64).expand(len(row))[1:]
        logp = torch.log_softmax(logits[0, index[:-1]], dim=-1).gather(1, row[1:, None])[:, 0]
        sums.append((weight * row_losses(logp, number)).sum())
        totals.append(weight.sum())
    if reduction == "sum":
        return torch.stack(sums).sum()
    if reduction == "token_mean":
        sums, totals = [torch.stack(sums).sum()], [torch.stack(totals).sum()]
    return torch.stack([s / t if t > 0 else 0 * s for s, t in zip(sums, totals, strict=True)]).mean()


def value_and_grad(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().clone().requires_grad_()
    value = function(leaf)
    value.backward()
    assert leaf.grad is not None
    return [value.detach(), leaf.grad]


def negative_log_likelihood(logp: torch.Tensor, number: int) -> torch.Tensor:
    return -logp


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-10) -> None:
    for left, right in zip(got, expected, strict=True):
        assert (left - right).norm() <= tolerance * max(float(right.norm()), 1e-3)


def misses(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return bool((got[1] - expected[1]).norm() > 1e-3 * expected[1].norm())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@many
@given(weighted_row_batches())
def test_sft_equals_separate_rows(reduction: losses.Reduction, batch: tuple[Rows, list[list[float]]]) -> None:
    rows, weights = batch
    forest = Forest.from_sequences(rows, weights)
    logits = random_logits(forest)
    assert_equal(
        value_and_grad(lambda x: losses.sft(edge_logprobs(x, forest), forest, reduction), logits),
        value_and_grad(lambda x: separate_loss(x, forest, weights, reduction, negative_log_likelihood), logits),
    )


def test_token_mean_is_cross_entropy_over_labels_that_are_not_ignored() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]]
    mask = [[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1]]
    forest = Forest.from_sequences(rows, mask)
    logits = random_logits(forest)
    labels = torch.tensor(rows).where(torch.tensor(mask) == 1, -100)
    separate = torch.stack([logits[0, index] for index in forest.token_of])
    expected = torch.nn.functional.cross_entropy(separate[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    got = losses.sft(edge_logprobs(logits, forest), forest, "token_mean")
    assert torch.allclose(got, expected, rtol=1e-12)


def test_wrong_scales_are_told_apart() -> None:
    """No scale, and the source's multiplicity at forks: both must miss what separate rows give."""
    rows = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 6]]
    forest = Forest.from_sequences(rows)
    logits = random_logits(forest)
    expected = value_and_grad(lambda x: separate_loss(x, forest, [1.0] * 4, "sum", negative_log_likelihood), logits)

    def scaled(scale: torch.Tensor) -> list[torch.Tensor]:
        return value_and_grad(lambda x: -(scale * edge_logprobs(x, forest)).sum(), logits)

    assert_equal(scaled(forest.multiplicity[forest.edges.target]), expected)
    assert misses(scaled(forest.multiplicity[forest.edges.source]), expected)
    assert misses(scaled(torch.ones(len(forest.edges))), expected)


def clipped(old: list[torch.Tensor], advantages: list[Any], low: float, high: float) -> RowLosses:
    """The clipped policy loss as PPO writes it, one row at a time."""

    def row_losses(logp: torch.Tensor, number: int) -> torch.Tensor:
        ratio = (logp - old[number][1:]).exp()
        advantage = torch.as_tensor(advantages[number], dtype=torch.float64).expand(len(old[number]))[1:]
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)

    return row_losses


def shift_logp(forest: Forest, logits: torch.Tensor) -> torch.Tensor:
    """Old log-probs [E] some way off, so that ratios fall below, inside and above the clip range."""
    generator = torch.Generator().manual_seed(1)
    return edge_logprobs(logits, forest) + 0.4 * torch.randn(len(forest.edges), generator=generator).double()


def edges_to_rows(values: torch.Tensor, forest: Forest) -> list[torch.Tensor]:
    """[E] as one vector per row, 0 for each first token."""
    by_token = torch.zeros(forest.num_tokens, dtype=values.dtype)
    by_token[forest.edges.target] = values
    return [by_token[index] for index in forest.token_of]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", ["per_row", "per_token"])
@settings(max_examples=30)
@given(weighted_row_batches(), st.sampled_from([0.2, (0.1, 0.28), 0.0]))
def test_policy_equals_separate_rows(
    reduction: losses.Reduction, form: str, batch: tuple[Rows, list[list[float]]], clip: Any
) -> None:
    rows, weights = batch
    forest = Forest.from_sequences(rows, weights)
    logits = random_logits(forest)
    old = shift_logp(forest, logits)
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    generator = torch.Generator().manual_seed(2)
    per_row = torch.randn(len(rows), generator=generator)
    per_token = [torch.randn(len(row), generator=generator) for row in rows]
    advantages: Any = per_row if form == "per_row" else per_token

    def separate(old_rows: list[torch.Tensor]) -> list[torch.Tensor]:
        terms = clipped(old_rows, list(advantages), low, high)
        return value_and_grad(lambda x: separate_loss(x, forest, weights, reduction, terms), logits)

    def packed(old_logp: Any) -> list[torch.Tensor]:
        return value_and_grad(
            lambda x: losses.policy(edge_logprobs(x, forest), forest, old_logp, advantages, clip, reduction),
            logits,
        )

    expected = separate(edges_to_rows(old, forest))
    assert_equal(packed(old), expected)
    assert_equal(packed(edges_to_rows(old, forest)), expected)
    # What samplers return for a shared token differs from row to row.
    noisy = [o + 0.05 * torch.randn(len(o), generator=generator) for o in edges_to_rows(old, forest)]
    assert_equal(packed(noisy), separate(noisy))


def test_summed_advantages_are_told_apart() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]]
    forest = Forest.from_sequences(rows)
    logits = random_logits(forest)
    advantages, old = [1.5, -1.0, -0.6], shift_logp(forest, logits)
    terms = clipped(edges_to_rows(old, forest), advantages, 0.2, 0.2)
    expected = value_and_grad(lambda x: separate_loss(x, forest, [1.0] * 3, "sum", terms), logits)
    edges = forest.edges
    summed = edges.sum_entries(torch.tensor(advantages, dtype=torch.float64)[edges.row_index])

    def wrong(x: torch.Tensor) -> torch.Tensor:
        ratio = (edge_logprobs(x, forest) - old).exp()
        return -torch.minimum(ratio * summed, ratio.clamp(0.8, 1.2) * summed).sum()

    assert_equal(
        value_and_grad(lambda x: losses.policy(edge_logprobs(x, forest), forest, old, advantages, 0.2, "sum"), logits),
        expected,
    )
    assert misses(value_and_grad(wrong, logits), expected)


def test_values_of_the_padded_batch_are_accepted() -> None:
    rows, nan = [[1, 2, 3, 4], [1, 2, 5]], float("nan")
    ids = torch.tensor([[1, 2, 3, 4], [0, 1, 2, 5]])
    old = torch.tensor([[nan, -1.0, -2.0, -3.0], [nan, nan, -1.5, -2.5]])
    advantages = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, -1.0, -2.0]])
    padded = Forest.from_padded(ids, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]))
    plain = Forest.from_sequences(rows)
    logp = edge_logprobs(random_logits(plain), plain)
    got = losses.policy(logp, padded, old, advantages)
    expected = losses.policy(logp, plain, [old[0], old[1, 1:]], [advantages[0], advantages[1, 1:]])
    assert got == expected != 0
    with pytest.raises(ForestError, match="old_logp must be"):
        losses.policy(logp, plain, old, [1.0, 1.0])


def test_unset_old_logp_does_no_harm_where_the_weight_is_zero() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]], [[0, 0, 1], [0, 0, 1]])
    logits, nan = random_logits(forest), float("nan")
    old = [torch.tensor([nan, nan, -1.0]), torch.tensor([nan, nan, -2.0])]
    value, grad = value_and_grad(lambda x: losses.policy(edge_logprobs(x, forest), forest, old, [1.0, -1.0]), logits)
    assert value.isfinite() and grad.isfinite().all() and grad.norm() > 0


def test_rows_without_predictions_add_nothing() -> None:
    forest = Forest.from_sequences([[1], [2]])
    logits = random_logits(forest)
    for reduction in REDUCTIONS:
        value, grad = value_and_grad(lambda x: losses.sft(edge_logprobs(x, forest), forest, reduction), logits)
        assert value == 0 and not grad.any()


@many
@given(row_batches(), st.sampled_from([1.0, 0.5, 1.7]))
def test_logprobs_against_log_softmax(rows: Rows, temperature: float) -> None:
    forest = Forest.from_sequences(rows)
    edges = forest.edges
    logits = random_logits(forest)
    probe = torch.linspace(-1, 2, len(edges), dtype=torch.float64)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(x[0] / temperature, -1)[edges.source, edges.token]

    assert torch.allclose(edge_logprobs(logits, forest, temperature), plain(logits), atol=1e-12)
    assert_equal(
        value_and_grad(lambda x: (probe * edge_logprobs(x, forest, temperature)).sum(), logits),
        value_and_grad(lambda x: (probe * plain(x)).sum(), logits),
        1e-12,
    )
    assert torch.equal(edge_logprobs(logits[0], forest), edge_logprobs(logits, forest))


@pytest.mark.parametrize("chunk", [1, 8, 64, VOCABULARY, 4096])
@pytest.mark.parametrize(("has_bias", "softcap", "temperature"), [(False, None, 1.0), (True, 4.0, 0.7)])
def test_hidden_form_equals_logits_form(chunk: int, has_bias: bool, softcap: float | None, temperature: float) -> None:
    forest = Forest.from_sequences([[1, 2, 3, 70], [1, 2, 3, 0], [1, 2], [1, 9, 9, 9, 64]])
    hidden = torch.randn(1, forest.num_tokens, 16, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 16, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, dtype=torch.float64) if has_bias else None
    probe = torch.randn(len(forest.edges), dtype=torch.float64)
    given = [hidden, weight] if bias is None else [hidden, weight, bias]

    def fused(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return edge_logprobs(h, forest, temperature, weight=w, bias=b, softcap=softcap, chunk=chunk)

    def plain(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        logits = torch.nn.functional.linear(h, w, b)
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        return edge_logprobs(logits, forest, temperature)

    results = []
    for function in (fused, plain):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        logp = function(*leaves)
        results.append([logp.detach(), *torch.autograd.grad((probe * logp).sum(), leaves)])
    assert_equal(results[0], results[1], 1e-12)


def test_hidden_form_with_a_frozen_head_and_no_edges() -> None:
    forest = Forest.from_sequences([[1], [2]])
    hidden = torch.randn(2, 4, requires_grad=True)
    logp = edge_logprobs(hidden, forest, weight=torch.randn(9, 4))
    assert logp.shape == (0,)
    (grad,) = torch.autograd.grad(logp.sum(), hidden)
    assert not grad.any()


def test_low_precision_logits_are_computed_in_float32() -> None:
    forest = Forest.from_sequences([[1, 2, 3, 4], [1, 2, 3, 5]])
    logits = random_logits(forest, torch.bfloat16)
    exact = edge_logprobs(logits.double(), forest)
    logp = edge_logprobs(logits, forest)
    assert logp.dtype == torch.float32 and exact.dtype == torch.float64
    assert torch.allclose(logp.double(), exact, atol=1e-5)
    _, grad = value_and_grad(lambda x: losses.sft(edge_logprobs(x, forest), forest), logits)
    _, expected = value_and_grad(lambda x: losses.sft(edge_logprobs(x, forest), forest), logits.double())
    assert grad.dtype == torch.bfloat16
    # One rounding to bfloat16 and nothing more.
    assert ((grad.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-7).all()


def test_hidden_form_under_autocast_rounds_as_the_linear_layer_does() -> None:
    forest = Forest.from_sequences([[1, 2, 3, 4], [1, 2, 3, 5]])
    hidden, weight = torch.randn(1, forest.num_tokens, 16), torch.randn(VOCABULARY, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused = value_and_grad(lambda h: edge_logprobs(h, forest, weight=weight).sum(), hidden)
        plain = value_and_grad(lambda h: edge_logprobs(torch.nn.functional.linear(h, weight), forest).sum(), hidden)
    assert_equal(fused, plain, 1e-2)
    assert_equal(fused[:1], plain[:1], 1e-5)
    assert fused[1].dtype == torch.float32


class LargestFloat(TorchDispatchMode):
    """Remembers the largest floating-point tensor any op returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return result


def test_hidden_form_never_holds_all_logits() -> None:
    forest = Forest.from_sequences([list(range(300))])
    hidden = torch.randn(300, 8, requires_grad=True)
    weight = torch.randn(2000, 8, requires_grad=True)
    with LargestFloat() as seen:
        edge_logprobs(hidden, forest, weight=weight, chunk=128).sum().backward()
    assert seen.elements <= 300 * 128 < 300 * 2000


@pytest.mark.parametrize(
    ("shape", "arguments", "words"),
    [
        ((1, 3, 9), {}, "N = 4 tokens"),
        ((2, 4, 9), {}, "N = 4 tokens"),
        ((4, 5), {}, "token 8, but the vocabulary has only 5"),
        ((4, 9), {"temperature": 0.0}, "temperature"),
        ((4, 9), {"softcap": 3.0}, "hidden-state form"),
        ((4, 6), {"weight": torch.zeros(9, 5)}, "H = 6"),
        ((4, 6), {"weight": torch.zeros(3, 6)}, "only 3"),
        ((4, 6), {"weight": torch.zeros(9, 6), "bias": torch.zeros(6)}, "V = 9"),
        ((4, 6), {"weight": torch.zeros(9, 6), "softcap": -1.0}, "softcap"),
        ((4, 6), {"weight": torch.zeros(9, 6), "chunk": 0}, "chunk"),
        ((4, 6), {"weight": torch.zeros(9, 6), "chunk": 2.5}, "whole number"),
        ((4, 6), {"weight": torch.zeros(9, 6).double()}, "one dtype, got torch.float32, torch.float64"),
        ((4, 9), {"temperature": "1"}, "temperature"),
        ((4, 9), {"temperature": torch.ones((), requires_grad=True)}, "gets no gradient"),
    ],
)
def test_unfit_logits_are_refused(shape: tuple[int, ...], arguments: dict[str, Any], words: str) -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 8]])
    with pytest.raises(InputError, match=words):
        edge_logprobs(torch.zeros(shape), forest, **arguments)


def test_integers_and_other_devices_are_refused() -> None:
    forest = Forest.from_sequences([[1, 2]])
    with pytest.raises(InputError, match="pass out.logits"):
        edge_logprobs([[0.0]], forest)  # type: ignore[arg-type]
    with pytest.raises(ForestError, match="got NoneType"):
        edge_logprobs(torch.zeros(2, 3), None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="torch.int64"):
        edge_logprobs(torch.zeros(2, 9, dtype=torch.int64), forest)
    with pytest.raises(ForestError, match="on meta, the forest on cpu"):
        edge_logprobs(torch.zeros(2, 9, device="meta"), forest)
    with pytest.raises(ForestError, match="on meta, the forest on cpu"):
        losses.sft(torch.zeros(1, device="meta"), forest)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: losses.sft(torch.zeros(4), f), r"floats \[3\]"),
        (lambda f: losses.sft([0.0] * 3, f), "got list"),
        (lambda f: losses.sft(torch.zeros(3), f, "mean"), "'sum', 'token_mean' or 'row_mean', got 'mean'"),
        (lambda f: losses.policy(torch.zeros(3), f, torch.zeros(3), [1.0, 2.0], clip=-0.1), "clip"),
        (lambda f: losses.policy(torch.zeros(3), f, torch.zeros(4), [1.0, 2.0]), "old_logp must be"),
        (
            lambda f: losses.policy(torch.zeros(3), f, torch.full((3,), torch.nan), [1.0, 2.0]),
            "old_logp must be fin",
        ),
        (lambda f: losses.policy(torch.zeros(3), f, torch.zeros(3), [1.0]), "advantages must be"),
        (
            lambda f: losses.policy(torch.zeros(3), f, torch.zeros(3), [1.0, torch.nan]),
            "advantages must be finite",
        ),
    ],
)
def test_unfit_arguments_are_refused(call: Callable[[Forest], torch.Tensor], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(Forest.from_sequences([[1, 2, 3], [1, 2, 8]]))


def test_means_that_do_not_exist_are_refused() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]], [[0, 1, -1], [0, 1, -1]])
    logp = torch.zeros(len(forest.edges))
    for reduction in ("token_mean", "row_mean"):
        with pytest.raises(ForestError, match="sum to 0"):
            losses.sft(logp, forest, reduction)
    assert losses.sft(logp, forest, "sum") == 0
    with pytest.raises(ForestError, match="at least 0"):
        losses.policy(logp, forest, logp, [1.0, 1.0])


def test_edges_of_a_repeated_token_differ_in_their_source() -> None:
    forest = Forest.from_sequences([[5, 5, 5, 5]])
    pairs = list(pairwise(range(4)))
    assert list(zip(forest.edges.source.tolist(), forest.edges.target.tolist(), strict=True)) == pairs
