"""Rows that start in different columns: their tokens are one where only their places differ."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tests.backend.support import Pair, assert_packed, compare, in_case, llama
from tests.batches import IGNORED, PAD, Batch, distinct_tokens, left_padded
from tests.models import TinyLM, double, zoo
from tests.softmax_spellings import causal
from tests.spellings import CHUNK, PADDED, Spelling
from treefx.passes.packing import emit_attention
from treefx.passes.packing.emitters import Packer
from treefx.passes.packing.layout import Metadata


def with_places(batch: Batch) -> Batch:
    """The batch with positions that count each row's own tokens, as agents' frameworks pass them."""
    assert batch.attention_mask is not None
    place = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
    return Batch(batch.input_ids, batch.attention_mask, batch.labels, place)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_positions_of_the_caller(name: str) -> None:
    batch = with_places(left_padded())
    assert_packed(compare(double(name, num_hidden_layers=1), batch), distinct_tokens(batch, "own"))


@pytest.mark.parametrize("name", ["opt", "bloom"])
def test_positions_that_the_model_counts_in_the_mask(name: str) -> None:
    batch = left_padded()
    assert_packed(compare(zoo(name, num_hidden_layers=1), batch), distinct_tokens(batch, "own"))


@pytest.mark.parametrize("name", ["xglm", "gpt2", "falcon"])
def test_positions_that_the_model_counts_in_columns(name: str) -> None:
    batch = left_padded()
    stats = compare(zoo(name, num_hidden_layers=1), batch).stats
    if name != "falcon":
        assert stats["fallback"] is None and stats["tokens"] == distinct_tokens(batch)


def scattered(seed: int, gap: bool = False) -> Batch:
    """Rows of a common stem at any place of a batch of 14 columns; with ``gap``, one mask has a hole."""
    draw = random.Random(seed)
    stem = [draw.randrange(3, 60) for _ in range(6)]
    ids, mask = torch.full((5, 14), PAD), torch.zeros(5, 14, dtype=torch.int64)
    for row in range(5):
        own = stem[: draw.randint(1, 6)] + [draw.randrange(3, 60) for _ in range(draw.randint(0, 4))]
        start = draw.randint(0, 14 - len(own))
        ids[row, start : start + len(own)] = torch.tensor(own)
        mask[row, start : start + len(own)] = 1
    if gap:
        full = int(mask.sum(1).argmax())
        mask[full, int(mask[full].argmax()) + 1] = 0
    first = mask.cumsum(1) <= 1  # nothing has to be predicted from padding
    return with_places(Batch(ids, mask, ids.masked_fill((mask == 0) | first, IGNORED)))


def test_rows_that_start_anywhere() -> None:
    """What was compiled for some starts serves others."""
    pair = Pair(llama())
    for seed in range(3):
        batch = scattered(seed)
        with in_case(seed):
            assert_packed(pair.check(batch), distinct_tokens(batch, "own"))


class RopeByProduct(nn.Module):
    """Angles as products of matrices, as transformers 5.17 writes them: the frequencies of each row, or one of all."""

    def __init__(self, inv_freq: Tensor, each_row: bool) -> None:
        super().__init__()
        self.each_row, self.inv_freq = each_row, nn.Buffer(inv_freq)
        self.of_rows = nn.Buffer(inv_freq * torch.linspace(1, 2, 5, dtype=inv_freq.dtype)[:, None])

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1)
        left = self.of_rows[:, :, None] if self.each_row else shared
        angles = (left @ position_ids[:, None].to(x.dtype)).transpose(1, 2).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


@pytest.mark.parametrize("each_row", [False, True])
def test_angles_as_products(each_row: bool) -> None:
    """One frequency of all rows is proved through the views around the product; frequencies of rows stay apart."""
    batch, model = scattered(0), llama()
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    model.model.rotary_emb = RopeByProduct(rotary.inv_freq.double(), each_row)  # type: ignore[union-attr]
    stats = compare(model, batch).stats
    assert (stats["tokens"] == distinct_tokens(batch, "own")) == (not each_row)
    assert bool(stats["expansions"]) == each_row


def test_masks_with_holes() -> None:
    """Distances of columns are not those of places there: tokens are known by their columns."""
    batch = scattered(1, gap=True)
    stats = compare(double("mistral", num_hidden_layers=1, sliding_window=3), batch).stats
    assert stats["fallback"] is None and stats["tokens"] > distinct_tokens(batch, "own")


def test_window() -> None:
    batch = scattered(2)
    model = double("mistral", num_hidden_layers=1, sliding_window=3)
    assert_packed(compare(model, batch), distinct_tokens(batch, "own"))


def test_window_by_the_column_of_one_row_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def column(packer: Packer) -> Tensor:
        metadata: Metadata = packer.metadata
        return metadata.column

    monkeypatch.setattr(emit_attention, "places", column)
    with pytest.raises(AssertionError, match="differ by more"):
        compare(double("mistral", num_hidden_layers=1, sliding_window=3), scattered(2))


def by_chunks_of_columns(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention within chunks of columns, wherever a row starts."""
    assert mask is not None
    columns = torch.arange(q.size(2), device=q.device)
    seen = causal(q) & (columns[:, None] // CHUNK == columns // CHUNK) & (mask != 0)[:, None, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=seen)


@pytest.mark.parametrize(
    "attention",
    [lambda: Spelling(by_chunks_of_columns), PADDED["chunked_from_the_first_token"]],
    ids=["of_columns", "from_the_first_token"],
)
def test_chunks(attention: Any) -> None:
    """The mask speaks of columns, not of their distance alone: only rows that start together share."""
    batch = with_places(left_padded())
    model: nn.Module = TinyLM(attention, layers=1, vocab=128).double()
    assert_packed(compare(model, batch), distinct_tokens(batch))


def by_column(x: Tensor) -> Tensor:
    """A constant [T, C] whose rows differ in more than a shift, which norms would take away."""
    return 2.0 + torch.arange(x.shape[1] * x.shape[2], dtype=x.dtype).sin().view(x.shape[1:])


class TimesConstant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


MEETINGS = {
    "product": lambda x: x * by_column(x),
    "lerp": lambda x: torch.lerp(x, -x, by_column(x)),
    "floor_divide": lambda x: x + torch.floor_divide(x.detach(), by_column(x)),
    "baddbmm": lambda x: torch.baddbmm(by_column(x)[None], x, torch.eye(x.shape[2]).to(x).expand(x.shape[0], -1, -1)),
    "custom_function": lambda x: TimesConstant.apply(x, by_column(x).expand_as(x).contiguous()),
}


class Meeting(nn.Module):
    """Hidden states meet a constant, in one of these ways."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return MEETINGS[self.name](x)


@pytest.mark.parametrize("name", MEETINGS)
def test_constants_by_column(name: str) -> None:
    """Whatever operator reads them, their tokens are known by their columns."""
    batch = with_places(left_padded())
    model = TinyLM(PADDED["sdpa_padding"], layers=1, vocab=128, before=Meeting(name)).double()
    assert_packed(compare(model, batch), distinct_tokens(batch))
