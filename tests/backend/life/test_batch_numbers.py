"""What reads the number of columns and still holds for every batch: causal convolutions, and biases."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.life.test_batches import SHAPES, batch_of, compile_for_all, step, steps
from tests.backend.small import Small
from tests.batches import distinct_tokens
from tests.mixers import CausalConvolution, SameConvolution
from tests.spellings import SPELLINGS
from treefx.passes import pipeline
from treefx.passes.causal import convolutions
from treefx.passes.causal.tree_mixers import TreeConvolution
from treefx.passes.scores import attention_facts


class Convolved(nn.Module):
    """x + a convolution of it, by a function of x [B, C, T] that gives [B, C, T]."""

    def __init__(self, width: int = 32, taps: int = 3, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, taps, **options)
        self.taps = taps

    def forward(self, x: Tensor) -> Tensor:
        return x + self.along(x.transpose(1, 2)).transpose(1, 2)

    def along(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.taps - 1, 0)))


class Dilated(Convolved):
    def __init__(self) -> None:
        super().__init__(taps=3, dilation=2, groups=4, bias=False)

    def along(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (4, 0)))


class Delayed(Convolved):
    """Reads the last token's past only: the padding is one longer than the filter needs."""

    def along(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (3, 0)))[..., : x.shape[-1]]


class Ahead(Convolved):
    """Starts one later behind the padding: reads the next token."""

    def along(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (2, 1)))[..., 1:]


class FromTheEnd(Convolved):
    """As many as there are columns, counted from the end: their past depends on the padding there."""

    def along(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (2, 2)))[..., -x.shape[-1] :]


def model_with(before: nn.Module) -> nn.Module:
    return Small(SPELLINGS["sdpa_is_causal"], before=before).double()


def test_causal_convolutions_compile_once() -> None:
    model = model_with(nn.Sequential(Convolved(), Dilated(), Delayed(), CausalConvolution()))
    assert steps(model, SHAPES[:3])["compiles"] == 1


@pytest.mark.parametrize("before", [Ahead, FromTheEnd, SameConvolution])
def test_convolutions_that_read_ahead_run_on_rows(before: Any) -> None:
    model = model_with(before())
    compiled = compile_for_all(model)
    for rows, columns in SHAPES[:2]:
        stats = step(compiled, model, batch_of(rows, columns, padding=None))
        assert stats["expansions"] or stats["ran"] != "packed"


def test_a_convolution_whose_taps_were_not_looked_at_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the test above hold: a tap that reads ahead."""
    found = convolutions.find_tree_convolution

    def any_tap(node: Any) -> TreeConvolution | None:
        law = found(node)
        if law is not None or "slice" not in str(node.target):
            return law
        call = node.args[0]
        if "convolution" not in str(call.target):
            return None
        return TreeConvolution(call.args[0].args[0], call.args[1], call.args[2], (2, 1, 0), 1)

    monkeypatch.setattr(convolutions, "find_tree_convolution", any_tap)
    model = model_with(Ahead())
    with pytest.raises(AssertionError, match="differ by more than"):
        step(compile_for_all(model), model, batch_of(*SHAPES[0], padding=None))


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def attend(scores: Tensor, v: Tensor) -> Tensor:
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return F.softmax(scores.masked_fill(~causal, torch.finfo(scores.dtype).min), dim=-1) @ v


def from_the_end(q: Tensor) -> Tensor:
    """1 - T, ..., 0, in the model's own precision: formulas are not rounded like integers times a number are."""
    return torch.arange(1 - q.shape[2], 1).to(q.dtype)


def slopes(q: Tensor) -> Tensor:
    return 2.0 ** -torch.arange(1, q.shape[1] + 1, dtype=q.dtype).view(-1, 1, 1)


class Alibi(nn.Module):
    """``slope * (key + 1 - T)``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attend(scores_of(q, k) + slopes(q) * from_the_end(q), v)


class AlibiOfATable(nn.Module):
    """MPT's: the end of a table for more columns, and the slope in front."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        table = torch.arange(1 - 200, 1).view(1, 1, 200) * slopes(q)
        return attend(scores_of(q, k) + table[:, :, max(0, 200 - q.shape[2]) :], v)


class Distances(nn.Module):
    """A difference of two numbers that are both counted from the end."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        back = from_the_end(q)
        return attend(scores_of(q, k) - 0.3 * (back[:, None] - back), v)


def test_biases_counted_from_the_end_compile_once() -> None:
    assert steps(Small(Alibi, AlibiOfATable, Distances).double(), SHAPES[:3])["compiles"] == 1


class Curved(nn.Module):
    """The distance from the end squared: a shift alone would not make it another one's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attend(scores_of(q, k) - 0.01 * from_the_end(q) ** 2, v)


class OfSomeKeys(nn.Module):
    """Every third key alone is shifted."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        shifted = torch.where(torch.arange(q.shape[2]) % 3 == 0, 0.1 * from_the_end(q), 0.0)
        return attend(scores_of(q, k) + shifted, v)


class BesideASink(nn.Module):
    """One more logit, which is not shifted."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores_of(q, k) + 0.1 * from_the_end(q)
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, -torch.inf)
        sink = torch.zeros(1, dtype=q.dtype).expand(*scores.shape[:-1], 1)
        return F.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1] @ v


class Tapered(nn.Module):
    """A fill that a large shift would reach."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores_of(q, k) + 5.0 * from_the_end(q)
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return F.softmax(scores.masked_fill(~causal, -100.0), dim=-1) @ v


def left_out(expr: Any) -> Any:
    if not isinstance(expr, tuple):
        return expr
    return ("const", 0) if expr[0] == "size" else (expr[0], *map(left_out, expr[1:]))


@pytest.mark.parametrize("attention", [Curved, OfSomeKeys, BesideASink, Tapered])
def test_numbers_that_a_softmax_notices_are_kept(attention: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out of any term, they are missed."""

    def run() -> None:
        torch._dynamo.reset()
        model = Small(attention).double()
        compiled = compile_for_all(model)
        for rows, columns in SHAPES[:2]:
            step(compiled, model, batch_of(rows, columns, padding=None))

    run()
    if attention is Curved:
        monkeypatch.setattr(attention_facts, "_without_numbers_of_batch", lambda score, sinks: (left_out(score), False))
        with pytest.raises(AssertionError, match="differ by more than"):
            run()


# Guards of compiled code on the number of tokens ----------------------------------------------------------------------


def test_code_that_holds_for_few_tokens_makes_room_for_code_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sorts of experts do: they count in 16 bits while they can."""
    plain = pipeline.compile_inner

    def asking(gm: Any, inputs: Any, mode: Any, *rest: Any) -> Any:
        assert mode.shape_env.count <= mode.shape_env.hint
        return plain(gm, inputs, mode, *rest)

    monkeypatch.setattr(pipeline, "compile_inner", asking)
    model = Small(SPELLINGS["sdpa_is_causal"]).double()
    compiled = compile_for_all(model)
    compiles = []
    for rows, columns in [(2, 6), (4, 12), (4, 12), (3, 6), (8, 30), (2, 6)]:
        batch = batch_of(rows, columns, padding=None)
        stats = step(compiled, model, batch)
        assert stats["tokens"] == distinct_tokens(batch) and stats["fallback"] is None
        compiles.append(stats["compiles"])
    assert compiles == [1, 2, 2, 2, 3, 3]
