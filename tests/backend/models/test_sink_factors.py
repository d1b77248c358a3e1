"""Attention sinks that a model writes as a factor on the result; other factors stay what they are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.backend.support import compare
from tests.batches import shared_batch
from tests.models import TinyLM
from treefx.passes.trace import sink_factors

BATCHES = [
    shared_batch(rows=4, length=length, shared=6, vocab=61, padding=padding, seed=1)
    for length, padding in ((12, None), (15, "right"), (13, "left"))
]


class Factor(nn.Module):
    """Granite's spelling; ``changed`` gives another factor, ``shown`` lets something else read the weights."""

    def __init__(self, changed: Callable[[Tensor, Tensor], Tensor] | None = None, *, shown: bool = False) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 0.0, 2.0]))
        self.changed, self.shown = changed, shown

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        fill = torch.finfo(q.dtype).min
        scores = (q @ k.transpose(2, 3) * 8**-0.5).masked_fill(future, fill)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :].bool(), fill)
        lse, sinks = torch.logsumexp(scores, dim=-1), self.sinks.view(1, -1, 1)
        factor = (lse - sinks).sigmoid() if self.changed is None else self.changed(lse, sinks)
        weights = scores.softmax(-1)
        out = (weights @ v) * factor.unsqueeze(-1)
        return out + weights.diagonal(dim1=2, dim2=3)[..., None] if self.shown else out


def test_a_factor_is_a_sink() -> None:
    for batch in BATCHES:
        stats = compare(TinyLM(Factor).double(), batch).stats
        assert stats["ran"] == "packed" and stats["expansions"] == [] and stats["attention_rewritten"] == 2


@pytest.mark.parametrize("changed", [
    lambda lse, sinks: (sinks - lse).sigmoid(),
    lambda lse, sinks: (lse + sinks).sigmoid(),
    lambda lse, sinks: torch.tanh(lse - sinks),
    lambda lse, sinks: (lse - sinks).sigmoid().to(torch.bool).to(lse.dtype),
    lambda lse, sinks: (lse.mean(1, keepdim=True) - sinks).sigmoid(),
])  # fmt: skip
def test_other_factors_stay(changed: Callable[[Tensor, Tensor], Tensor]) -> None:
    stats = compare(TinyLM(lambda: Factor(changed), layers=1).double(), BATCHES[1]).stats
    assert stats["expansions"], "the factor reads all scores"


def test_weights_that_something_else_reads_stay() -> None:
    stats = compare(TinyLM(lambda: Factor(shown=True), layers=1).double(), BATCHES[1]).stats
    assert stats["expansions"], "the factor reads all scores"


def test_a_sink_of_another_head_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rolled(gm: torch.fx.GraphModule, target: object, *args: object, **kwargs: object) -> torch.fx.Node:
        if target is torch.ops.aten.expand.default:
            args = (add(gm, torch.ops.aten.roll.default, args[0], [1], [1]), *args[1:])
        return add(gm, target, *args, **kwargs)

    add = sink_factors._add
    monkeypatch.setattr(sink_factors, "_add", rolled)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(TinyLM(Factor, layers=1).double(), BATCHES[0])
