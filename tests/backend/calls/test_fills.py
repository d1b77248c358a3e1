"""Whatever fills a mask hides keys, unless scores may reach it: those calls run on rows."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.masked import (
    LOWEST,
    Attend,
    batch_of,
    causal,
    model_of,
    plain,
    scores,
    step_of,
)
from tests.backend.support import Pair, compare, in_case
from treefx.passes.packing import emit_attention


def tensor_fill(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    seen = causal(q) & mask[:, None, None].bool()
    low, zero = torch.tensor(LOWEST, dtype=q.dtype), torch.tensor(0.0, dtype=q.dtype)
    return (scores(q, k) + torch.where(seen, zero, low)).softmax(-1) @ v


def tensor_of_another_type(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    seen = causal(q) & mask[:, None, None].bool()
    return scores(q, k).masked_fill(~seen, torch.tensor(-3e38)).softmax(-1) @ v


def logarithm(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, (causal(q) & mask[:, None, None].bool()).to(q.dtype).log())


def subtracted(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    seen = causal(q) & mask[:, None, None].bool()
    return (scores(q, k) - torch.where(seen, 0.0, 1e30).to(q.dtype)).softmax(-1) @ v


def buffer_fill(model: nn.Module) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
        seen = causal(q) & mask[:, None, None].bool()
        return torch.where(seen, scores(q, k), model.lowest).softmax(-1) @ v

    return attend


FILLS = [tensor_fill, tensor_of_another_type, logarithm, subtracted, None]


@pytest.mark.parametrize("attend", FILLS, ids=lambda attend: attend.__name__ if attend else "buffer")
def test_whatever_holds_the_fill(attend: Attend | None) -> None:
    """It makes a condition: padding goes, and where it is read, the query that sees nothing is the model's own."""
    model = model_of(plain)
    model.attends = (buffer_fill(model) if attend is None else attend,)  # type: ignore[assignment]
    ids, mask, labels = batch_of("left")
    pair = Pair(model)
    stats = pair.check(step_of(ids, mask, labels)).stats
    assert stats["fallback"] is None and stats["raw_tokens"] == int(mask.sum())
    stats = pair.check(step_of(*batch_of("left", predicted=True))).stats
    assert attend is logarithm or "sees no key" in stats["fallback"]


def filled(fill: float, scale: float, additive: bool) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
        seen = causal(q) & mask[:, None, None].bool()
        score = scale * (q @ k.mT)
        hidden = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, fill)
        return ((score + hidden) if additive else score.masked_fill(~seen, fill)).softmax(-1) @ v

    return attend


@pytest.mark.parametrize("additive", [True, False], ids=["added", "filled"])
@pytest.mark.parametrize("fill", [-1e9, LOWEST, float("-inf")], ids=["-1e9", "lowest", "infinite"])
def test_ordinary_scores_do_not_reach_a_fill(fill: float, additive: bool) -> None:
    ids, mask, labels = batch_of("right")
    stats = compare(model_of(filled(fill, 1.0, additive)), step_of(ids, mask, labels)).stats
    assert stats["fallback"] is None and stats["tokens"] < int(mask.sum()) + 6
    assert stats["raw_tokens"] == (48 if additive and fill == -1e9 else int(mask.sum()))


@pytest.mark.parametrize("additive", [True, False], ids=["added", "filled"])
@pytest.mark.parametrize(("fill", "scale"), [(-1e4, 1e5), (-1e9, 1e10)])
def test_scores_as_large_as_the_fill(fill: float, scale: float, additive: bool) -> None:
    """What a mask does not hide is seen: on rows."""
    stats = compare(model_of(filled(fill, scale, additive)), step_of(*batch_of("right"))).stats
    assert "fill masks with -inf" in stats["fallback"]


def test_no_finite_score_reaches_the_lowest_number() -> None:
    stats = compare(model_of(filled(LOWEST, 1e10, True)), step_of(*batch_of("right")), 1e-5).stats
    assert stats["fallback"] is None


def test_scores_that_reach_the_fill_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_attention, "is_hidden", lambda *where: torch.ones((), dtype=torch.bool))
    with pytest.raises(AssertionError, match="differ by more than"):
        test_scores_as_large_as_the_fill(-1e4, 1e5, True)


def test_scores_between_fill_and_bound_run_compiled_too() -> None:
    """The answer is one more result of the graph, whatever compiles it."""
    attend = filled(-1e4, 1.0, False)
    assert compare(model_of(attend), step_of(*batch_of("left")), inner="aot_eager").stats["fallback"] is None


def key_bias(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    """A learned number per key, itself filled at padding: no condition that is seen as one."""
    bias = v.mean(-1).masked_fill(mask[:, None] == 0, LOWEST)[:, :, None]
    return (scores(q, k) + bias).masked_fill(~causal(q), LOWEST).softmax(-1) @ v


def test_a_fill_inside_of_what_the_score_reads() -> None:
    pair = Pair(model_of(key_bias))
    for side in ("none", "right", "left"):
        with in_case(side):
            pair.check(step_of(*batch_of(side, predicted=True)))
