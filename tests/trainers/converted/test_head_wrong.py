"""Refusals of rows behind ``treefx.convert``, and mistakes in packed runs: each must be found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import treefx
from tests.oracle import FLOAT64, outcome, relative_errors
from tests.trainers.converted.test_head import NEXT, case, logits, pair, scored, trl_selected
from treefx.runtime.converted import row_laws, row_views

__all__ = ["pair"]


def test_gradients_on_rows_asked_too_late_are_refused(pair: tuple[Any, Any]) -> None:
    x = logits(pair[0])
    loss = scored(x)
    late: dict[str, Callable[[], Any]] = {
        "hook": lambda: x.register_hook(lambda grad: grad),
        "retain_grad": x.retain_grad,
        "grad": lambda: torch.autograd.grad(loss, x),
        "backward": lambda: loss.backward(inputs=[x]),
    }
    for how, ask in late.items():
        with case(how), pytest.raises(treefx.UnsupportedError, match="without pack_lm_head"):
            ask()


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


def test_wrong_laws_are_found(pair: tuple[Any, Any]) -> None:
    right = row_views._taken
    mistakes: dict[str, tuple[Any, str, Any]] = {
        "shift": (row_views, "_taken", lambda x, take, *more: right(x, lambda y: take(y.roll(1, 1)), *more)),
        "pairs by token": (row_laws, "pick", _by_token_alone),
        "no sum over rows": (row_laws, "pick", _LastRow.apply),
    }
    model, twin = pair
    expected = outcome(twin, lambda: trl_selected(twin))
    for mistake, place in mistakes.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*place)
            got = outcome(model, lambda: trl_selected(model))
        assert max(relative_errors(got, expected).values()) > 1e-3, mistake
    assert max(relative_errors(outcome(model, lambda: trl_selected(model)), expected).values()) <= FLOAT64
