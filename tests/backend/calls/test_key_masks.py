"""Masks on keys: padding goes where all attentions hide it and its outputs are unused; any other condition on keys
stays."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.masked import (
    HEADS,
    LM,
    LOWEST,
    SPECIAL,
    Attend,
    batch_of,
    causal,
    distinct,
    model_of,
    plain,
    scores,
    step_of,
)
from tests.backend.support import Pair, compare, compile_with, in_case
from tests.batches import shared_batch
from tests.models import double
from tests.oracle import FLOAT64
from tests.planning.cuts import every_node
from treefx.passes.analysis import Analysis
from treefx.runtime.padding import Padding

# Two masks on keys ----------------------------------------------------------------------------------------------------


def padding_alone(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, causal(q) & mask[:, None, None].bool())


def two_booleans(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, causal(q) & (mask.bool() & (ids != SPECIAL))[:, None, None])


def two_sums(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    bias = torch.zeros(ids.shape, dtype=q.dtype).masked_fill(mask == 0, float("-inf"))
    bias = bias + torch.where(ids == SPECIAL, float("-inf"), 0.0).to(q.dtype)
    bias = bias[:, None, None] + torch.full((ids.shape[1],) * 2, float("-inf"), dtype=q.dtype).triu(1)
    return F.scaled_dot_product_attention(q, k, v, bias)


def two_fills(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    masked = scores(q, k).masked_fill(~causal(q), LOWEST) + (1.0 - mask[:, None, None].to(q.dtype)) * LOWEST
    return masked.clamp(min=LOWEST).masked_fill((ids == SPECIAL)[:, None, None], -1e9).softmax(-1) @ v


def of_one_head(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    first = torch.arange(HEADS)[:, None, None] == 0
    seen = causal(q) & mask[:, None, None].bool() & (first | (ids != SPECIAL)[:, None, None])
    return F.scaled_dot_product_attention(q, k, v, seen)


def of_documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    document = (ids == SPECIAL).cumsum(1)
    same = document[:, None, :, None] == document[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, causal(q) & same & mask[:, None, None].bool())


ATTENDS = [two_booleans, two_sums, two_fills, of_one_head, of_documents]


@pytest.mark.parametrize("attend", ATTENDS, ids=lambda attend: attend.__name__)
def test_padding_and_another_condition(attend: Attend) -> None:
    pair = Pair(model_of(attend))
    for side in ("left", "none", "right", "holes"):
        ids, mask, labels = batch_of(side)
        with in_case(side):
            stats = pair.check(step_of(ids, mask, labels)).stats
            assert stats["fallback"] is None and not stats["expansions"]
            assert stats["tokens"] < int(mask.sum())


@pytest.mark.parametrize(
    "attends",
    [(plain, padding_alone), (two_booleans, padding_alone), (padding_alone, two_fills), (of_one_head, plain)],
    ids=lambda attends: "_".join(attend.__name__ for attend in attends),
)
def test_layers_with_masks_of_their_own(attends: tuple[Attend, ...]) -> None:
    pair = Pair(model_of(*attends))
    for side in ("right", "left"):
        with in_case(side):
            assert pair.check(step_of(*batch_of(side))).stats["fallback"] is None


def test_what_all_layers_hide_is_padding() -> None:
    """Each layer by another condition, all of which fail at padding."""
    ids, mask, labels = batch_of("right")
    stats = compare(model_of(two_booleans, padding_alone), step_of(ids, mask, labels)).stats
    assert stats["tokens"] == distinct(ids, mask) and stats["raw_tokens"] == int(mask.sum())


def test_equal_tokens_under_another_mask() -> None:
    """The second row hides one of the shared tokens: what comes after it is not shared."""
    ids, mask, labels = batch_of("none")
    mask[1, 5] = 0
    stats = compare(model_of(padding_alone, plain), step_of(ids, mask, labels)).stats
    assert stats["fallback"] is None and stats["tokens"] == distinct(ids + 100 * mask, torch.ones_like(mask))


def test_the_next_batch_hides_other_keys() -> None:
    model = model_of(two_booleans)
    compiled = compile_with(model)
    for side, special in (("right", False), ("left", True), ("holes", True), ("none", False), ("none", True)):
        inputs = batch_of(side, special=special)
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=FLOAT64, atol=0)


@pytest.mark.parametrize("wrong", ["dropped", "shared"])
def test_a_condition_on_keys_that_is_forgotten(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out of the graph, or out of the keys of tokens."""
    if wrong == "dropped":
        forget = lambda self, *where, **how: frozenset(c for a in self._analysis.attentions for c in a.padding)  # noqa: E731
        monkeypatch.setattr(Padding, "redundant", forget)
        inputs = batch_of("right")
    else:
        monkeypatch.setattr(Analysis, "identity_without", lambda self, redundant: self.identity[:1])
        ids, mask, labels = batch_of("none")
        mask[1, 5] = 0
        inputs = ids, mask, labels
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(model_of(padding_alone, two_booleans, plain), step_of(*inputs), 1e-3)


class Output(NamedTuple):
    """What treefx.backward reads."""

    logits: Tensor


class Logits(nn.Module):
    """One attention of an ``LM`` as the native level calls it, with masks made from the token ids alone."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.inner, self.attend = model_of(attend), attend

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Output:
        inner, mask = self.inner, torch.ones_like(input_ids)
        x = inner.embed(input_ids) + inner.place(position_ids)
        q, k, v = inner.qkv[0](x).view(*input_ids.shape, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
        return Output(inner.head(x + self.attend(q, k, v, input_ids, mask).transpose(1, 2).flatten(2)))


def check_forest(ids: Tensor, attend: Attend) -> None:
    """The packed logits of the rows' forest are those of the rows."""
    model, forest = Logits(attend), treefx.Forest.from_sequences(ids.tolist())
    compiled = torch.compile(model, backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    with treefx.use(forest):
        packed = compiled(**forest.model_inputs()).logits
    rows = model(ids, torch.arange(12).expand(4, 12)).logits
    for row, path in enumerate(forest.token_of):
        torch.testing.assert_close(packed[0, torch.as_tensor(path)], rows[row], rtol=FLOAT64, atol=FLOAT64)


def test_forest_with_keys_that_nobody_sees() -> None:
    """In the native level token ids are packed: a condition that reads them stays."""
    check_forest(batch_of("none")[0], two_booleans)


# Queries that see no key ----------------------------------------------------------------------------------------------


def soft(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    seen = causal(q) & (mask.bool() & (ids != SPECIAL))[:, None, None]
    return scores(q, k).masked_fill(~seen, LOWEST).softmax(-1) @ v


def soft_in_one_head(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    first = torch.arange(HEADS)[:, None, None] == 0
    seen = causal(q) & (first | (mask.bool() & (ids != SPECIAL))[:, None, None])
    return scores(q, k).masked_fill(~seen, LOWEST).softmax(-1) @ v


@pytest.mark.parametrize("attend", [soft, soft_in_one_head], ids=lambda attend: attend.__name__)
def test_a_real_token_that_sees_nothing(attend: Attend) -> None:
    """The first token of a row is one without attention to it: a mean over all columns, which rows alone have."""
    ids, mask, labels = batch_of("right", special=False)
    ids[0, 0] = SPECIAL
    assert "sees no key" in compare(model_of(attend), step_of(ids, mask, labels)).stats["fallback"]


def test_a_real_token_that_sees_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Padding, "is_defined", lambda *where: True)
    with pytest.raises(AssertionError, match="differ by more than"):
        test_a_real_token_that_sees_nothing(soft)


def not_itself(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *more: Tensor) -> Tensor:
    """Tokens of other ids alone are seen: none by the first token of a row."""
    seen = causal(q) & (ids[:, None, :, None] != ids[:, None, None])
    return F.scaled_dot_product_attention(q, k, v, torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, LOWEST))


def test_a_token_of_a_forest_that_sees_nothing() -> None:
    """What a query without keys gets is that of its row; whether there is one, the ids of a forest decide."""
    ids, _, _ = batch_of("none")
    check_forest(ids, soft)
    first = ids.index_fill(1, torch.tensor([0]), SPECIAL)
    for rows, attend in ((first, soft), (first, soft_in_one_head), (ids, not_itself)):
        with pytest.raises(treefx.UnsupportedError, match="may see no key"):
            check_forest(rows, attend)
    check_forest(first, two_booleans)


def strictly_before(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
    place = torch.arange(q.size(-2))
    return scores(q, k).masked_fill(place >= place[:, None], LOWEST).softmax(-1) @ v


def test_a_token_of_a_plan_that_sees_nothing() -> None:
    """Every part is asked with its whole paths: those below the root would all see something."""
    forest = treefx.Forest.from_sequences(batch_of("none")[0].tolist())
    compiled = torch.compile(Logits(strictly_before), backend="treefx", options={"inner": "eager"})
    with pytest.raises(treefx.UnsupportedError, match="may see no key"):
        treefx.backward(compiled, every_node(forest), treefx.losses.sft)


def test_a_token_of_a_forest_that_sees_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Padding, "is_defined", lambda *where: True)
    with pytest.raises(AssertionError, match="not close"):
        check_forest(batch_of("none")[0], not_itself)


def test_zero_is_what_hard_masks_give_a_query_without_keys() -> None:
    ids, mask, labels = batch_of("right", special=False)
    ids[0, 0] = SPECIAL
    assert compare(model_of(two_booleans), step_of(ids, mask, labels)).stats["fallback"] is None


# Scores that others read ----------------------------------------------------------------------------------------------


class Probabilities(LM):
    """Returns the probabilities of its attention with the loss."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, *more: Tensor) -> Any:
        x = self.embed(ids)
        q, k, v = self.qkv[0](x).view(*ids.shape, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
        seen = causal(q) & mask[:, None, None].bool()
        weights = scores(q, k).masked_fill(~seen, LOWEST).softmax(-1)
        x = x + (weights @ v).transpose(1, 2).flatten(2)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss, weights


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("outside", [True, False], ids=["by_the_caller", "by_nobody"])
def test_probabilities_that_are_returned(outside: bool, side: str) -> None:
    def step(model: nn.Module) -> Tensor:
        loss, weights = model(*batch_of(side))
        return loss + weights.square().mean() if outside else loss

    torch.manual_seed(0)
    checked = compare(Probabilities(plain).double(), step)
    assert "attention scores" in checked.stats["expansions"][0]["reason"]
    assert (checked.compiled(*batch_of(side))[1] - checked.model(*batch_of(side))[1]).abs().max() <= FLOAT64


def test_attentions_of_transformers() -> None:
    batch = shared_batch(rows=4, length=14, shared=6, padding="left")

    def step(model: nn.Module) -> Tensor:
        out = model(**batch.inputs(), output_attentions=True)
        return out.loss + out.attentions[0].square().mean()

    compare(double("llama", num_hidden_layers=1, attn_implementation="eager"), step)


# Numbers of rows that are inputs --------------------------------------------------------------------------------------


def windowed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    place = torch.arange(ids.shape[1])
    near = place[:, None] - place < number.reshape(-1, 1, 1)
    return F.scaled_dot_product_attention(q, k, v, (causal(q) & near)[:, None])


def of_length(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    inside = torch.arange(ids.shape[1]) < number.reshape(-1, 1) * 3
    return F.scaled_dot_product_attention(q, k, v, causal(q) & inside[:, None, None])


def of_temperature(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    score = q @ k.mT / number.reshape(-1, 1, 1, 1)
    return score.masked_fill(~causal(q), LOWEST).softmax(-1) @ v


@pytest.mark.parametrize(
    ("attend", "dtype", "shape"),
    [
        (windowed, torch.int64, (4,)), (windowed, torch.float64, (4, 1)), (of_length, torch.int64, (4, 1)),
        (of_length, torch.float64, (4, 1, 1)), (of_temperature, torch.int64, (4, 1, 1)),
        (of_temperature, torch.float64, (4,)),
    ],
)  # fmt: skip
def test_a_number_per_row(attend: Attend, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Rows with the same number share their tokens, others none."""
    number = torch.tensor([2, 3, 3, 5], dtype=dtype).reshape(shape)
    stats = compare(model_of(attend), step_of(*batch_of("none"), number)).stats
    assert stats["fallback"] is None and stats["tokens"] == 12 + 12 + 4 + 12


def test_numbers_per_row_of_several_kinds() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, window: Tensor, heat: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        near = (place[:, None] - place < window[:, None, None])[:, None]
        score = q @ k.mT * heat.exp()[:, None, None, None]
        return score.masked_fill(~(causal(q) & near & mask[:, None, None].bool()), LOWEST).softmax(-1) @ v

    numbers = torch.tensor([2, 3, 3, 3]), torch.tensor([0.1, 0.1, 0.1, 0.2], dtype=torch.float64)
    compare(model_of(both), step_of(*batch_of("right"), *numbers))
