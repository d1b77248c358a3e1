"""What rows behind ``treefx.convert`` share memory with, and what a result that is kept depends on: as unconverted."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import treefx
from tests.oracle import outcome, relative_errors
from tests.trainers.converted.test_head import BARE, IDS, Step, case, check, logits, pair, scored
from treefx.runtime.converted import row_laws

__all__ = ["pair"]


def doubled(part: Callable[[Tensor], Tensor]) -> Step:
    """A part of logits is changed in place; the loss reads both."""

    def step(run: Any) -> Tensor:
        x = logits(run)
        found = part(x)
        found.mul_(2.0)
        return scored(x) + found.logsumexp(-1).sin().sum()

    return step


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number in a tensor": lambda x: x[torch.tensor(1)],
    "numbers of NumPy": lambda x: x[np.int64(1), -1],
    "indices of NumPy": lambda x: x[np.array([0, 1])],
    "a tuple of indices": lambda x: x[0, (0, 1)],
    "a list": lambda x: x[[0, 1]],
    "a slice in another shape": lambda x: x[:, 1:].unsqueeze(0),
    "a slice, flat": lambda x: x[:, 1:].reshape(-1, x.shape[-1]),
    "a slice, contiguous": lambda x: x[:, 1:].contiguous(),
    "whole, contiguous": lambda x: x.contiguous(),
    "a mask": lambda x: x[IDS > 20],
    "a mask of NumPy": lambda x: x[(IDS > 20).numpy()],
}


def test_parts_share_memory_where_those_of_rows_do(pair: tuple[Any, Any]) -> None:
    for name, part in PARTS.items():
        with case(name):
            check(pair, doubled(part))


def after_a_change(run: Any) -> Tensor:
    x = logits(run)
    part = x[:, 1:]
    x[:, :2].mul_(2.0)
    flat = part.reshape(-1, x.shape[-1])
    flat.mul_(3.0)
    return scored(x) + part.logsumexp(-1).sin().sum()


def features(run: Any) -> Tensor:
    part = logits(run)[..., :5]
    copy = part.contiguous()
    copy.contiguous().mul_(2.0)
    return part.logsumexp(-1).sin().sum() + copy.logsumexp(-1).sum()


def in_place_by_argument(run: Any) -> Tensor:
    x, y = logits(run), logits(run)
    F.silu(y, inplace=True)
    return F.relu(x, inplace=True).logsumexp(-1).sin().sum() + scored(x) + y.cumsum(1).sin().sum()


def of_one_tensor(run: Any) -> Tensor:
    """Two names of one tensor in the outputs."""
    found = run.model(**BARE, output_hidden_states=True)
    assert found.hidden_states[-1] is found.last_hidden_state
    found.hidden_states[-1].mul_(2.0)
    return scored(run.lm_head(found.last_hidden_state))


def of_each_row(run: Any) -> Tensor:
    """An argument changes in place while rows of the same tokens are read."""
    bias, total = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(logits(run)):
        total = total + (row + bias.fill_(i)).sin().logsumexp(-1).sum() * (row / (0.0 if i % 2 else -0.0) < 0).sum()
    return total


def twice(run: Any) -> Tensor:
    """Gradients of gradients, through entries and through rows."""
    x = logits(run)
    first = torch.autograd.grad(scored(x) + x.pow(3).cumsum(1).sin().sum(), run.lm_head.weight, create_graph=True)[0]
    return first.pow(2).sum() * 1e-3


def spelled(run: Any) -> Tensor:
    x, pairs = logits(run), torch.tensor([1])
    assert x.type() == "torch.DoubleTensor"
    total = torch.chunk(input=x, chunks=2)[0].logsumexp(-1).sum() + x[pairs, :, IDS[:1]].sin().cumsum(1).sum()
    return total + x.detach().view(torch.int64).sum() * 0 + x.view(torch.float64).logsumexp(-1).sin().sum()


STEPS: dict[str, Step] = {
    "after a change": after_a_change,
    "features": features,
    "in place by argument": in_place_by_argument,
    "one tensor": of_one_tensor,
    "each row": of_each_row,
    "twice": twice,
    "spelled": spelled,
}


def test_steps(pair: tuple[Any, Any]) -> None:
    for name, step in STEPS.items():
        with case(name):
            check(pair, step)


def test_bytes_of_another_type(pair: tuple[Any, Any]) -> None:
    x, y = (logits(run).detach().view(torch.float32) for run in pair)
    assert x.shape == y.shape


# Refusals and mistakes --------------------------------------------------------------------------------------------


def test_gradients_on_rows_that_copies_have_led_by_are_refused(pair: tuple[Any, Any]) -> None:
    copies: dict[str, Callable[[Tensor], Tensor]] = {
        "contiguous": lambda x: x[:, :-1].contiguous(),
        "reshape": lambda x: x[:, :-1].reshape(-1, x.shape[-1]),
        "mask": lambda x: x[IDS > 20],
    }
    asks: tuple[Callable[[Tensor, Tensor], Any], ...] = (
        torch.autograd.grad,
        lambda loss, x: x.retain_grad(),
        lambda loss, x: x.register_hook(lambda grad: grad),
    )
    for how, copied in copies.items():
        x = logits(pair[0])
        loss = copied(x).logsumexp(-1).sum() + x.cumsum(1).sum()
        for ask in asks:
            with case(how), pytest.raises(treefx.UnsupportedError, match="without pack_lm_head"):
                ask(loss, x)


def test_arrays_that_views_would_not_see_changed_are_read_only(pair: tuple[Any, Any]) -> None:
    x = logits(pair[0]).detach()
    part = x[:, 1:]
    with pytest.raises(ValueError, match="read-only"):
        x.numpy()[:] = 0.0
    del part
    x.numpy()[:] = 0.0
    assert not x.sin().any()


def test_a_result_kept_for_a_tensor_that_has_changed_is_found(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_laws, "version", lambda x: 0)
    model, twin = pair
    got = outcome(model, lambda: of_each_row(model))
    assert max(relative_errors(got, outcome(twin, lambda: of_each_row(twin))).values()) > 1e-3
