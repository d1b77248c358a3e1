"""A model that Dynamo cuts between embeddings and layers: the graphs behind know by what tokens are told apart.

The packed graph gives the gradient of all rows of a token to one of them. Behind the cut that is exact for the
parameters alone, so that a caller who looks at the gradient of what goes over the cut gets rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.support import Pair, compare, compile_with, in_case
from tests.batches import Batch, Side, distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT64, Step
from tests.spellings import PADDED
from treefx.errors import UnsupportedError
from treefx.runtime import output_keys


class Cut(nn.Module):
    """A layer with a cut behind the embeddings, and one in front of the head.

    Args:
        look: Called with what goes over the first cut.
    """

    def __init__(self, look: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.look = TinyLM(PADDED["sdpa_padding"], layers=1, width=16), look

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        model = self.text
        x = model.embed(ids) + model.place(torch.arange(ids.shape[1]))
        torch._dynamo.graph_break()
        if self.look is not None:
            self.look(x)
        for block in model.blocks:
            x = block(x, mask)
        torch._dynamo.graph_break()
        logits = model.head(model.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def step_of(batch: Batch) -> Step:
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    return lambda model: model(batch.input_ids, mask, batch.labels)


def batch_of(side: Side | None = None, **sizes: int) -> Batch:
    return shared_batch(**{"rows": 4, "length": 14, "shared": 6, "vocab": 61, **sizes}, padding=side)


def test_all_graphs_share() -> None:
    """Several batches on one compilation; padding runs, because nothing is known of what reads a graph's outputs."""
    pair = Pair(Cut().double())
    for rows, length, side in ((4, 14, None), (6, 17, "right"), (5, 12, "left")):
        batch = batch_of(side, rows=rows, length=length)
        with in_case(f"{rows} rows, padded {side}"):
            stats = pair.check(step_of(batch)).stats
            assert stats["tokens"] < stats["raw_tokens"] and (side or stats["tokens"] == distinct_tokens(batch))
            assert stats["attention_rewritten"] == 1 and stats["fallback"] is None
            assert not stats["warned"] and not stats["expansions"]
            reports = treefx.inspect(pair.compiled).reports
            assert [report.ran for report in reports if report.has_tokens] == ["ordinary", "packed", "packed"]


def test_tokens_of_a_call_are_those_of_the_layers() -> None:
    """Not those of the head, which reads padding: it counts every position, and is compiled before other layers."""
    pair, batch = Pair(Cut().double()), batch_of("right")
    assert batch.attention_mask is not None
    for mask in (batch.attention_mask, batch.attention_mask.bool()):
        with in_case(mask.dtype):
            stats = pair.check(lambda model, mask=mask: model(batch.input_ids, mask, batch.labels)).stats
            assert stats["raw_tokens"] == int(mask.sum()) < mask.numel() and stats["graphs"] == 3


def test_other_keys_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of all rows taken for one, behind a cut."""
    note = output_keys.note_tokens
    monkeypatch.setattr(output_keys, "note_tokens", lambda x, keys: note(x, [torch.zeros_like(key) for key in keys]))
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(Cut().double(), step_of(batch_of()))


def _keep(kept: list[Tensor], x: Tensor) -> None:
    x.retain_grad()
    kept.append(x)


def _hang(kept: list[Tensor], x: Tensor) -> None:
    x.register_hook(kept.append)


@pytest.mark.parametrize("look", [_keep, _hang])
def test_gradients_that_are_looked_at(look: Callable[[list[Tensor], Tensor], None]) -> None:
    """What goes over a cut has a gradient for each row, where a caller wants to see it."""
    found = []
    for compiles in (False, True):
        kept: list[Tensor] = []
        model = Cut(torch._dynamo.disable(functools.partial(look, kept))).double()
        step_of(batch_of())(compile_with(model) if compiles else model).backward()
        found.append(kept[0] if look is _hang else kept[0].grad)
    assert found[0] is not None and found[1] is not None
    assert float((found[0] - found[1]).abs().max()) <= FLOAT64 * float(found[0].abs().max())


LATE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "hook": lambda loss, x: (x.register_hook(lambda grad: None), loss.backward()),
    "retain_grad": lambda loss, x: (x.retain_grad(), loss.backward()),
    "autograd.grad": lambda loss, x: torch.autograd.grad(loss, x),
}


@pytest.mark.parametrize("late", LATE)
def test_gradients_that_are_asked_for_behind_the_call_are_refused(late: str) -> None:
    kept: list[Tensor] = []
    model = Cut(torch._dynamo.disable(kept.append)).double()
    loss = step_of(batch_of())(compile_with(model))
    with pytest.raises(UnsupportedError, match="between two graphs"):
        LATE[late](loss, kept[0])


def test_gradients_of_parameters_alone() -> None:
    model = Cut().double()
    weights = [model.text.embed.weight, model.text.head.weight]
    expected = torch.autograd.grad(step_of(batch_of())(model), weights)
    found = torch.autograd.grad(step_of(batch_of())(compile_with(model)), weights)
    for x, y in zip(found, expected, strict=True):
        assert float((x - y).abs().max()) <= FLOAT64 * float(y.abs().max())


def test_values_that_are_changed_in_place() -> None:
    """What a graph left is not what the next one gets."""

    def change(x: Tensor) -> None:
        with torch.no_grad():
            x[1, 2] += 1

    batch = batch_of()
    stats = compare(Cut(torch._dynamo.disable(change)).double(), step_of(batch)).stats
    assert stats["attention_rewritten"] == 0
