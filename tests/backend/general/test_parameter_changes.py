"""Models that keep their weights within bounds in the forward: the change comes first, the rest runs packed."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.backend.small import Small
from tests.backend.support import Pair, assert_packed
from tests.batches import batch_with_forks, distinct_tokens
from tests.oracle import loss_of, outcome, relative_errors
from tests.spellings import SPELLINGS

BATCH = batch_with_forks()


def through_data(weight: Tensor) -> None:
    weight.data.clamp_(-0.05, 0.05)


def without_gradients(weight: Tensor) -> None:
    with torch.no_grad():
        weight.clamp_(min=-0.05).clamp_(max=0.05)


def scaled(weight: Tensor) -> None:
    weight.detach().mul_(0.5).add_(0.01)


class Bounded(nn.Module):
    """A projection whose weight is changed in training; `early` reads it before."""

    def __init__(self, change: Callable[[Tensor], None], early: bool = False) -> None:
        super().__init__()
        self.mix, self.change, self.early = nn.Linear(32, 32), change, early

    def forward(self, x: Tensor) -> Tensor:
        if self.early:
            x = x * self.mix.weight.mean()
        if self.training:
            self.change(self.mix.weight)
        return x + self.mix(x)


def _model(change: Callable[[Tensor], None], early: bool = False) -> Small:
    torch.manual_seed(0)
    return Small(SPELLINGS["sdpa_is_causal"], before=Bounded(change, early)).double()


@pytest.mark.parametrize("change", [through_data, without_gradients, scaled])
def test_a_changed_parameter_is_packed(change: Callable[[Tensor], None]) -> None:
    """Two steps: the second finds what the first has changed."""
    pair = Pair(_model(change))
    before = pair.model.before.mix.weight.detach().clone()
    for _ in range(2):
        checked = pair.check(BATCH)
        assert_packed(checked, distinct_tokens(BATCH), 1)
        assert torch.equal(pair.model.before.mix.weight, pair.eager.before.mix.weight)
    assert not torch.equal(pair.model.before.mix.weight, before)
    assert before.abs().max() > 0.05


def test_the_change_is_what_the_gradients_see() -> None:
    """Against a model whose weight was never changed, the gradients differ: the test above would find that."""
    model = _model(through_data)
    kept = copy.deepcopy(model)
    kept.before.change = lambda weight: None
    got, other = (outcome(item, lambda item=item: loss_of(BATCH)(item)) for item in (model, kept))
    assert max(relative_errors(got, other).values()) > 1e-2


def test_what_was_read_before_keeps_its_place() -> None:
    """The parameter is read before the change: the call runs on rows, and is exact."""
    pair = Pair(_model(through_data, early=True))
    stats = pair.check(BATCH).stats
    assert stats["ran"] == "ordinary" and "changes a value in place" in stats["fallback"]
    assert torch.equal(pair.model.before.mix.weight, pair.eager.before.mix.weight)
