"""What is refused of rows behind ``treefx.convert``, and mistakes in what runs packed: each must be found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import treefx
from tests.oracle import outcome, relative_errors
from tests.trainers.converted.test_head import NEXT, logits, pair, scored, trl_selected
from treefx.runtime.converted import row_laws, row_views

pytestmark = pytest.mark.sample(3)

__all__ = ["pair"]


@pytest.mark.parametrize("how", ["hook", "retain_grad", "grad", "backward"])
def test_gradients_on_rows_asked_too_late_are_refused(how: str, pair: tuple[Any, Any]) -> None:
    x = logits(pair[0])
    loss = scored(x)
    late: dict[str, Callable[[], Any]] = {
        "hook": lambda: x.register_hook(lambda grad: grad),
        "retain_grad": x.retain_grad,
        "grad": lambda: torch.autograd.grad(loss, x),
        "backward": lambda: loss.backward(inputs=[x]),
    }
    with pytest.raises(treefx.UnsupportedError, match="without pack_lm_head"):
        late[how]()


def test_changes_that_other_views_would_see_are_refused(pair: tuple[Any, Any]) -> None:
    x = logits(pair[0])
    part = x[:, 1:]
    with pytest.raises(treefx.UnsupportedError, match=r"clone\(\)"):
        part.masked_fill_(NEXT[..., None] == 3, 0.0)
    y = logits(pair[0])
    part = y[:, 1:]
    y.transpose(1, 2).mul_(2.0)
    with pytest.raises(treefx.UnsupportedError, match=r"clone\(\)"):
        part.log_softmax(-1)


class _LastRow(torch.autograd.Function):
    """Entries whose gradient is that of one of the rows which share a pair."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(x, token_of, target)
        return x[token_of, target]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, token_of, target = ctx.saved_tensors
        found = torch.zeros_like(x)
        found[token_of, target] = grad
        return found, None, None


def _by_token_alone(x: Tensor, token_of: Tensor, target: Tensor) -> Tensor:
    first = {token: i for i, token in reversed(list(enumerate(token_of.tolist())))}
    return x[token_of, target[[first[token] for token in token_of.tolist()]]]


@pytest.mark.parametrize("mistake", ["pairs by token", "no sum over rows", "shift"])
def test_wrong_laws_are_found(mistake: str, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "shift":
        right = row_views._taken
        monkeypatch.setattr(row_views, "_taken", lambda x, take, *more: right(x, lambda y: take(y.roll(1, 1)), *more))
    else:
        monkeypatch.setattr(row_laws, "pick", _LastRow.apply if mistake == "no sum over rows" else _by_token_alone)
    model, twin = pair
    got = outcome(model, lambda: trl_selected(model))
    assert max(relative_errors(got, outcome(twin, lambda: trl_selected(twin))).values()) > 1e-3
