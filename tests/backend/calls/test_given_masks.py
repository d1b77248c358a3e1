"""Masks [.., T, T] that the caller gives: packed where the values of the call prove them, on rows by name elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.support import Pair, assert_packed, compare, in_case, llama
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.models import TinyLM

LENGTH, VOCAB, WINDOW = 12, 61, 5
LOWEST = torch.finfo(torch.float64).min


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As transformers' eager attention: an added mask in float64, or a fill by a boolean."""
    assert mask is not None
    scores = q @ k.mT / q.size(-1) ** 0.5
    mask = mask[..., : k.size(-2)]
    scores = scores.masked_fill(~mask, -1e9) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1) @ v


def model_of(function: Callable[..., Tensor], layers: int = 1) -> nn.Module:
    return TinyLM(lambda: Given(function), layers=layers).double()


class Given(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.function(q, k, v, mask)


def batch_of(padding: Any = None) -> Batch:
    return shared_batch(rows=4, length=LENGTH, shared=5, vocab=VOCAB, padding=padding, seed=3)


def causal(batch: Batch) -> Tensor:
    """bool [B, 1, T, T]: the past, without padding."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(len(batch.input_ids), 1, -1, -1)
    return seen.clone() if batch.attention_mask is None else seen & batch.attention_mask[:, None, None].bool()


def added(seen: Tensor, lowest: float = LOWEST) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, lowest)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda seen: seen,
    "lowest": added,
    "infinite": lambda seen: added(seen, -torch.inf),
    "finite": lambda seen: added(seen, -1e9),
    "three_dimensions": lambda seen: seen[:, 0],
    "all_heads": lambda seen: added(seen.repeat(1, 4, 1, 1)),
}


@pytest.mark.parametrize("form", FORMS)
def test_causal_and_padding(form: str) -> None:
    batch = batch_of("right")
    mask = FORMS[form](causal(batch))
    attend = eager if form in ("lowest", "finite") else sdpa
    mask = mask[:, None] if form == "three_dimensions" else mask
    checked = compare(model_of(attend), replace(batch, attention_mask=mask))
    # Where a number is added that large scores reach, padding stays and is asked about: it counts as tokens.
    counted = batch.without("attention_mask") if form == "finite" else batch
    assert_packed(checked, distinct_tokens(counted), layers=1)


@pytest.mark.parametrize("shape", [(1, 1), ()], ids=["one_row", "no_row"])
def test_one_mask_for_all_rows(shape: tuple[int, ...]) -> None:
    batch = batch_of()
    mask = causal(batch)[0, 0].reshape(*shape, LENGTH, LENGTH)
    assert_packed(compare(model_of(sdpa), replace(batch, attention_mask=mask)), distinct_tokens(batch), layers=1)


def test_documents() -> None:
    """Two documents in every row; the start of the second distinguishes tokens."""
    batch = batch_of()
    document = (torch.arange(LENGTH) >= torch.tensor([4, 4, 4, 7])[:, None]).long()
    mask = causal(batch) & (document[:, None, :, None] == document[:, None, None, :])
    checked = compare(model_of(eager, layers=2), replace(batch, attention_mask=mask))
    assert checked.stats["attention_rewritten"] == 2
    assert checked.stats["tokens"] < 4 * LENGTH
    same = torch.where(torch.tensor([False, False, False, True])[:, None], 7, 4)
    assert checked.stats["tokens"] == distinct_tokens(
        replace(batch, input_ids=batch.input_ids * 10 + same * (torch.arange(LENGTH) >= 4))
    )


def test_a_transformers_model() -> None:
    pair = Pair(llama())
    for padding in ("right", "left"):
        batch = batch_of(padding)
        assert batch.attention_mask is not None
        place = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
        with in_case(padding):
            checked = pair.check(replace(batch, attention_mask=added(causal(batch)), position_ids=place))
            assert_packed(checked, distinct_tokens(batch, "own"), layers=1)


def future(seen: Tensor) -> Tensor:
    seen[1, 0, 3, 4] = True
    return seen


def hole(seen: Tensor) -> Tensor:
    seen[2, 0, 7, 3] = False
    return seen


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "one_look_ahead": future,
    "one_hole": hole,
    "heads_differ": lambda seen: seen & (torch.arange(4)[:, None, None] != 1) | torch.eye(LENGTH, dtype=torch.bool),
    "soft": lambda seen: torch.where(seen, 0.0, -3.0).double(),
    "itself_at_padding": lambda seen: seen & (torch.arange(LENGTH) < 8) | torch.eye(LENGTH, dtype=torch.bool),
    "a_bias": lambda seen: added(seen) + torch.linspace(0, 1, LENGTH, dtype=torch.float64),
}


@pytest.mark.parametrize(
    "forms", [("one_look_ahead", "one_hole", "itself_at_padding"), ("soft", "a_bias"), ("heads_differ",)], ids="+".join
)
def test_other_masks_run_on_rows_by_name(forms: tuple[str, ...]) -> None:
    """Masks of one dtype and one shape run on one compilation."""
    batch, pair = batch_of(), Pair(model_of(sdpa))
    for form in forms:
        with in_case(form):
            stats = pair.check(replace(batch, attention_mask=WRONG[form](causal(batch)))).stats
            assert stats["attention_rewritten"] == 0
            reason = stats["expansions"][0]["reason"]
            assert "not proved causal" in reason if form == "soft" else "given by the caller" in reason


def test_a_bias_for_all_rows_is_read_as_it_is() -> None:
    """A table [1, 1, T, T] of the caller with a causal mask of the model."""
    batch = batch_of()
    bias = torch.randn(1, 1, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def attend(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None) -> Tensor:
        past = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        return ((q @ k.mT + given).masked_fill(~past, -torch.inf)).softmax(-1) @ v

    assert_packed(compare(model_of(attend), replace(batch, attention_mask=bias)), distinct_tokens(batch), layers=1)


def test_a_mask_for_all_rows_that_is_not_causal_is_named() -> None:
    mask = future(causal(batch_of()))[1:2]
    stats = compare(model_of(sdpa), replace(batch_of(), attention_mask=mask)).stats
    assert "[1, 1, 12, 12] given by the caller" in stats["expansions"][0]["reason"]


def test_masks_that_change_from_call_to_call() -> None:
    """One shape of inputs: each call is packed, or not, by its own values."""
    batch, padded = batch_of(), batch_of("right")
    window = causal(batch) & ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-WINDOW)
    calls = [
        (batch, causal(batch), 1), (batch, future(causal(batch)), 0), (batch, window, 1), (padded, causal(padded), 1),
        (batch, hole(causal(batch)), 0), (batch, causal(batch), 1),
    ]  # fmt: skip
    pair = Pair(model_of(sdpa))
    for number, (given, mask, rewritten) in enumerate(calls):
        with in_case(number):
            stats = pair.check(replace(given, attention_mask=mask)).stats
            assert stats["attention_rewritten"] == rewritten
            assert not rewritten or stats["tokens"] == distinct_tokens(given)


def test_a_padding_mask_of_as_many_rows_as_tokens() -> None:
    """[T, T] by accident: its values look causal, and are a mask of rows and keys all the same."""
    ids = torch.randint(3, VOCAB, (5, 5), generator=torch.Generator().manual_seed(0))
    ids[1:] = ids[0]
    mask = torch.ones(5, 5, dtype=torch.int64).tril()
    batch = Batch(ids, mask, ids.masked_fill(mask == 0, -100))

    def attend(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None) -> Tensor:
        assert given is not None
        seen = torch.ones(5, 5, dtype=torch.bool).tril() & given[:, None, None].bool()
        return F.scaled_dot_product_attention(q, k, v, seen)

    assert_packed(compare(model_of(attend), batch), distinct_tokens(batch), layers=1)
