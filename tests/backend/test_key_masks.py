"""Masks on keys: padding goes where all attentions hide it and nobody reads it; any other condition on keys stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.support import compare, compile_with
from tests.batches import IGNORED, PAD, shared_batch
from tests.models import double
from tests.oracle import FLOAT64, Step
from treefx.passes import pack_tokens
from treefx.passes.padding import Padding
from treefx.passes.pipeline import Analysis

VOCAB, WIDTH, HEADS = 32, 16, 2
SPECIAL = 7
"""A token that nobody attends to."""
LOWEST = torch.finfo(torch.float64).min

Attend = Callable[..., Tensor]
"""q, k, v [B, H, T, D], ids and mask [B, T], more inputs -> [B, H, T, D]."""


class LM(nn.Module):
    """An embedding, one attention per given function, and a head; returns the loss."""

    def __init__(self, *attends: Attend) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in attends)
        self.head, self.attends = nn.Linear(WIDTH, VOCAB), attends
        self.register_buffer("lowest", torch.tensor(LOWEST, dtype=torch.float64))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, *more: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for project, attend in zip(self.qkv, self.attends):
            q, k, v = project(x).view(*ids.shape, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
            x = x + attend(q, k, v, ids, mask, *more).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model_of(*attends: Attend) -> nn.Module:
    torch.manual_seed(0)
    return LM(*attends).double()


def batch_of(side: str, *, special: bool = True, predicted: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask and labels of four rows of 12 that share eight tokens, some padded by three; the fourth is special.

    With ``predicted`` the first token of a row that is padded on the left is predicted, from padding.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(8, VOCAB, (4, 12), generator=generator)
    ids[:, :8] = ids[0, :8]
    if special:
        ids[:, 3] = SPECIAL
    mask = torch.ones_like(ids)
    if side == "right":
        mask[1:3, 9:] = 0
    elif side == "left":
        ids[1:3] = ids[1:3].roll(3, 1)
        mask[1:3, :3] = 0
    elif side == "holes":
        mask[1, 4], mask[2, 0] = 0, 0
    ids = ids.masked_fill(mask == 0, PAD)
    labels = ids.masked_fill(mask == 0, IGNORED)
    if not predicted:
        labels[mask.cumsum(1) == 1] = IGNORED
    return ids, mask, labels


def distinct(keys: Tensor, mask: Tensor) -> int:
    """Number of prefixes of the rows under a mask."""
    rows = [row[kept.bool()].tolist() for row, kept in zip(keys, mask)]
    return len({tuple(row[: t + 1]) for row in rows for t in range(len(row))})


def step_of(*inputs: Any) -> Step:
    return lambda model: model(*inputs)


def causal(q: Tensor) -> Tensor:
    place = torch.arange(q.size(-2), device=q.device)
    return place <= place[:, None]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.size(-1) ** -0.5


# Two masks on keys ----------------------------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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


@pytest.mark.parametrize("side", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("attend", ATTENDS, ids=lambda attend: attend.__name__)
def test_padding_and_another_condition(attend: Attend, side: str) -> None:
    ids, mask, labels = batch_of(side)
    stats = compare(model_of(attend), step_of(ids, mask, labels)).stats
    assert stats["fallback"] is None and not stats["expansions"]
    assert stats["tokens"] < int(mask.sum())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "attends",
    [(plain, padding_alone), (two_booleans, padding_alone), (padding_alone, two_fills), (of_one_head, plain)],
    ids=lambda attends: "_".join(attend.__name__ for attend in attends),
)
def test_layers_with_masks_of_their_own(attends: tuple[Attend, ...], side: str) -> None:
    assert compare(model_of(*attends), step_of(*batch_of(side))).stats["fallback"] is None


def test_what_all_layers_hide_is_padding() -> None:
    """Each layer by a condition of its own, all of which fail at padding."""
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
    """Left out of the graph, or out of what tells tokens apart."""
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


def test_forest_with_keys_that_nobody_sees() -> None:
    """In the native level token ids are packed: a condition that reads them stays."""
    ids, _, _ = batch_of("none")
    model = model_of(two_booleans)
    forest = treefx.Forest.from_sequences(ids.tolist())

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            inner, mask = self.inner, torch.ones_like(input_ids)
            x = inner.embed(input_ids) + inner.place(position_ids)
            q, k, v = inner.qkv[0](x).view(*input_ids.shape, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
            return inner.head(x + two_booleans(q, k, v, input_ids, mask).transpose(1, 2).flatten(2))

    outer = Logits()
    compiled = torch.compile(outer, backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    with treefx.use(forest):
        packed = compiled(**forest.model_inputs())
    rows = outer(ids, torch.arange(12).expand(4, 12))
    for row, path in enumerate(forest.token_of):
        torch.testing.assert_close(packed[0, torch.as_tensor(path)], rows[row], rtol=FLOAT64, atol=FLOAT64)


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
    """The first token of a row is one that nobody attends to: a mean over all columns, which rows alone have."""
    ids, mask, labels = batch_of("right", special=False)
    ids[0, 0] = SPECIAL
    assert "sees no key" in compare(model_of(attend), step_of(ids, mask, labels)).stats["fallback"]


def test_a_real_token_that_sees_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Padding, "is_defined", lambda *where: True)
    with pytest.raises(AssertionError, match="differ by more than"):
        test_a_real_token_that_sees_nothing(soft)


def test_zero_is_what_hard_masks_give_a_query_without_keys() -> None:
    ids, mask, labels = batch_of("right", special=False)
    ids[0, 0] = SPECIAL
    assert compare(model_of(two_booleans), step_of(ids, mask, labels)).stats["fallback"] is None


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
    stats = compare(model, step_of(ids, mask, labels)).stats
    assert stats["fallback"] is None and stats["raw_tokens"] == int(mask.sum())
    stats = compare(model, step_of(*batch_of("left", predicted=True))).stats
    assert attend is logarithm or "sees no key" in stats["fallback"]


# Masks filled with numbers that scores may reach ----------------------------------------------------------------------


def filled(fill: float, scale: float, additive: bool) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
        seen = causal(q) & mask[:, None, None].bool()
        score = scale * (q @ k.mT)
        hidden = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, fill)
        return ((score + hidden) if additive else score.masked_fill(~seen, fill)).softmax(-1) @ v

    return attend


@pytest.mark.parametrize("additive", [True, False], ids=["added", "filled"])
@pytest.mark.parametrize("fill", [-1e4, -1e9, LOWEST, float("-inf")], ids=["-1e4", "-1e9", "lowest", "infinite"])
def test_ordinary_scores_do_not_reach_a_fill(fill: float, additive: bool) -> None:
    ids, mask, labels = batch_of("right")
    stats = compare(model_of(filled(fill, 1.0, additive)), step_of(ids, mask, labels)).stats
    assert stats["fallback"] is None and stats["tokens"] < int(mask.sum()) + 6
    assert stats["raw_tokens"] == (48 if additive and fill in (-1e4, -1e9) else int(mask.sum()))


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
    monkeypatch.setattr(pack_tokens, "is_hidden", lambda *where: torch.ones((), dtype=torch.bool))
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


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_a_fill_inside_of_what_the_score_reads(side: str) -> None:
    compare(model_of(key_bias), step_of(*batch_of(side, predicted=True)))


# Scores that others read ----------------------------------------------------------------------------------------------


class Probabilities(LM):
    """Returns the probabilities of its attention beside the loss."""

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


@pytest.mark.parametrize("padding", ["right", "left"])
def test_attentions_of_transformers(padding: Any) -> None:
    batch = shared_batch(rows=4, length=14, shared=6, padding=padding)

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


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("attend", [windowed, of_length, of_temperature], ids=lambda attend: attend.__name__)
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
