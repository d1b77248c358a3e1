"""Random numbers are drawn for every row, as in the original: with one seed the result is the original's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.support import compare, compile_with
from tests.batches import Batch, shared_batch
from tests.mixers import Dropout
from tests.models import TinyLM, zoo
from tests.oracle import Step, loss_of, refused, stats_of
from tests.spellings import SPELLINGS


class Layerdrop(nn.Module):
    """Leaves a hidden state out where a number is drawn below a rate, asked in the ways that models ask."""

    def __init__(self, how: str, rate: float = 0.0) -> None:
        super().__init__()
        self.how, self.rate = how, rate

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "unread":
            torch.rand([])
        if self.how == "branch" and torch.rand([]) < self.rate:
            return torch.zeros_like(x)
        if self.how == "mask":
            return x.masked_fill(torch.rand(x.shape[-1]) < self.rate, 0.0)
        return x * (~(torch.rand([]) < self.rate)).to(x.dtype) if self.how == "number" else x


def batch_with_forks() -> Batch:
    return shared_batch(rows=4, length=16, shared=8)


def tiny(**modules: nn.Module) -> nn.Module:
    return TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, vocab=128, **modules).double()


def seeded(batch: Batch) -> Step:
    """The ordinary step with the same random draws in every run."""

    def step(model: nn.Module) -> Tensor:
        torch.manual_seed(5)
        return loss_of(batch)(model)

    return step


@pytest.mark.parametrize(("name", "changes"), [("gpt2", {"resid_pdrop": 0.2}), ("phimoe", {"num_hidden_layers": 1})])
def test_draws_between_the_layers(name: str, changes: dict[str, Any]) -> None:
    stats = compare(zoo(name, **changes), seeded(batch_with_forks())).stats
    assert stats["fallback"] is None
    assert stats["attention_rewritten"] >= 1  # the first layer's; what comes behind a draw differs from row to row
    drawn = [item for item in stats["expansions"] if "dropout" in item["op"] or "exponential" in item["op"]]
    assert drawn and all("modeling_" in item["line"] for item in drawn)


def test_dropout_in_attention() -> None:
    stats = compare(zoo("llama", num_hidden_layers=1, attention_dropout=0.2), seeded(batch_with_forks())).stats
    assert "dropout in attention draws for every row" in stats["fallback"]


def test_another_seed_is_another_loss() -> None:
    """The comparisons above see the draws."""
    batch = batch_with_forks()
    model = zoo("gpt2", resid_pdrop=0.2)
    torch.manual_seed(6)
    other = loss_of(batch)(model)
    assert abs(float((other / seeded(batch)(model)).detach()) - 1) > 1e-3


def test_rows_that_share_tokens_draw_independently() -> None:
    """Two equal rows come out different, which one draw per distinct token could not do."""
    row = torch.arange(3, 15)
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, after=Dropout())
    compiled = compile_with(model)
    out = compiled(input_ids=row.repeat(2, 1))
    stats = stats_of(compiled)
    assert stats["tokens"] == len(row) and "dropout" in stats["expansions"][0]["op"]
    same = (out.hidden[0] == out.hidden[1]).all(-1)
    assert not bool(same.any())


def test_draws_are_refused_where_everything_must_be_packed() -> None:
    compiled = compile_with(zoo("gpt2", resid_pdrop=0.2), on_unsupported="error")
    with refused("dropout", "on_unsupported"):
        compiled(**batch_with_forks().inputs())


@pytest.mark.parametrize("how", ["branch", "mask", "number", "unread"])
def test_a_rate_of_zero_drops_nothing(how: str) -> None:
    """Only a branch is decided without the numbers; other uses of a comparison stay tensors."""
    stats = compare(tiny(before=Layerdrop(how)), seeded(batch_with_forks())).stats
    assert (stats["fallback"] is None) == (how in ("branch", "unread"))
    assert how not in ("branch", "unread") or stats["expansions"] == []


def test_a_rate_above_zero_drops_what_the_original_drops() -> None:
    for rate in (0.4, 1.0):
        compare(tiny(before=Layerdrop("branch", rate)), seeded(batch_with_forks()))


def test_draws_that_come_later_are_the_originals() -> None:
    compare(tiny(before=Layerdrop("number"), after=Dropout()), seeded(batch_with_forks()))
