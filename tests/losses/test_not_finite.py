"""Log-probabilities of -inf or NaN at tokens of weight 0: as on rows, where masked tokens are left out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import treefx
from tests.losses.every_loss import ADVANTAGES, FOREST, OLD, OLD_ROWS, PAIRS, SUMS, WHOLE_ROWS
from tests.planning.parts import Loss
from treefx import Forest, losses

UNCOUNTED = ~FOREST.edges.has_weight
MEANS = ["sum", "token_mean", "row_mean", losses.Constant(7), losses.PromptMean([0] * len(FOREST))]
LOSSES: dict[str, Loss] = {
    **SUMS,
    **WHOLE_ROWS,
    "entropy": lambda logp, f: losses.entropy(-logp, f, "row_mean"),
    "sequence_token_per_row": lambda logp, f: losses.cispo(logp, f, OLD_ROWS, ADVANTAGES, level="sequence_token"),
    "kl_old": lambda logp, f: losses.kl(logp, f, OLD, "k1", old_logp=OLD),
}


def value_and_gradient(loss: Loss, logp: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logp.clone().requires_grad_()
    value = loss(leaf, FOREST)
    value.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
@pytest.mark.parametrize("name", LOSSES)
def test_tokens_of_no_weight_are_left_out(name: str, bad: float) -> None:
    assert 3 < UNCOUNTED.sum() < len(UNCOUNTED) - 3
    logp = -4 + 0.1 * torch.randn(len(FOREST.edges), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = value_and_gradient(LOSSES[name], logp)
    assert (wanted[1][UNCOUNTED] == 0).all() and wanted[1].norm() > 0
    got = value_and_gradient(LOSSES[name], logp.masked_fill(UNCOUNTED, bad))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["clipped", "clipped_by_row", "cispo", "kl", "entropy", "dpo"])
def test_metrics(name: str) -> None:
    def means(logp: Tensor) -> dict[str, float]:
        metrics = losses.Metrics()
        {
            "clipped": lambda: losses.clipped(logp, FOREST, OLD, ADVANTAGES, metrics=metrics),
            "clipped_by_row": lambda: losses.clipped(logp, FOREST, OLD_ROWS, ADVANTAGES, metrics=metrics),
            "cispo": lambda: losses.cispo(logp, FOREST, OLD, ADVANTAGES, metrics=metrics),
            "kl": lambda: losses.kl(logp, FOREST, OLD, metrics=metrics),
            "entropy": lambda: losses.entropy(-logp, FOREST, metrics=metrics),
            "dpo": lambda: losses.dpo(logp, FOREST, OLD, PAIRS, metrics=metrics),
        }[name]()
        return metrics.means()

    logp = torch.linspace(-6, -1, len(FOREST.edges), dtype=torch.float64)
    assert means(logp.masked_fill(UNCOUNTED, -math.inf)) == pytest.approx(means(logp))


@pytest.mark.parametrize("reduction", MEANS, ids=str)
def test_every_reduction(reduction: losses.Reduction) -> None:
    logp = torch.linspace(-3, -1, len(FOREST.edges), dtype=torch.float64)
    for loss in (losses.sft, lambda x, f, r: losses.policy_gradient(x, f, ADVANTAGES, r)):
        wanted = value_and_gradient(lambda x, f: loss(x, f, reduction), logp)
        got = value_and_gradient(lambda x, f: loss(x, f, reduction), logp.masked_fill(UNCOUNTED, -math.inf))
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["sft", "policy_gradient", "dpo", "simpo"])
def test_tokens_that_count_stay_infinite(name: str) -> None:
    logp = torch.full((len(FOREST.edges),), -2.0, dtype=torch.float64)
    counted = int((~UNCOUNTED).nonzero()[-1])
    logp[counted] = -math.inf
    assert not LOSSES[name](logp, FOREST).isfinite()


def test_a_shared_token_counts_in_the_rows_that_weigh_it() -> None:
    """Row 0 gives the token a weight of 0 and row 1 does not: a pair of rows 0 and 2 never reads it."""
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4], [1, 5, 6]], [[0, 0, 1.0], [0, 1.0, 1.0], [0, 1.0, 1.0]])
    logp = torch.tensor([-1.0, -2.0, -3.0, -0.5, -0.25], dtype=torch.float64)
    shared = int((forest.edges.token == 2).nonzero())

    def of_pair(values: Tensor, pair: tuple[int, int]) -> tuple[Tensor, Tensor]:
        leaf = values.clone().requires_grad_()
        loss = losses.dpo(leaf, forest, torch.zeros(5, dtype=torch.float64), [pair])
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    bad = logp.clone()
    bad[shared] = -math.inf
    torch.testing.assert_close(of_pair(bad, (0, 2)), of_pair(logp, (0, 2)))
    assert of_pair(bad, (1, 2))[0] == math.inf


@pytest.mark.parametrize("head", [False, True])
def test_forbidden_tokens_in_a_prompt(head: bool) -> None:
    """Logits of -inf, by themselves or from the head's bias, a whole chunk of the vocabulary too."""
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4], [5, 6]], [[0, 0, 1.0], [0, 0, 1.0], [0, 1.0]])
    torch.manual_seed(0)
    x = torch.randn(1, forest.num_tokens, 8, dtype=torch.float64)
    bias, weight = torch.zeros(8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)

    def run(forbidden: float) -> list[Tensor]:
        leaf, values = x.clone().requires_grad_(), bias.clone()
        values[2] = forbidden
        logits: Callable[[], Tensor] = lambda: treefx.edge_logprobs(leaf + values, forest)  # noqa: E731
        logp = treefx.edge_logprobs(leaf, forest, weight=weight, bias=values, chunk=1) if head else logits()
        loss = losses.sft(logp, forest) + losses.dpo(logp, forest, torch.zeros(len(logp)), [(0, 1)])
        return [loss.detach(), *torch.autograd.grad(loss, leaf)]

    torch.testing.assert_close(run(-math.inf), run(-1e4))
