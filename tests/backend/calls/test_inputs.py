"""Every kind of batch: shapes, padding on either side, labels at padding, positions, embeddings."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.support import assert_packed, compare, llama, logits_at_real_tokens
from tests.batches import IGNORED, PAD, Batch, distinct_tokens, left_padded, padded, shared_batch
from tests.models import TinyLM, double
from tests.spellings import PADDED, SPELLINGS

pytestmark = pytest.mark.sample(4)

STEM = [11, 12, 13, 14, 15, 16]

ROWS: dict[str, list[list[int]]] = {
    "one_row": [[*STEM, 21, 22]],
    "one_row_with_padding": [[*STEM, 21]],
    "one_token": [[21], [22], [21]],
    "one_row_of_one_token": [[21]],
    "all_equal": [[*STEM, 21, 22]] * 4,
    "nothing_shared": [[b, *STEM] for b in range(21, 25)],
    "prefixes_of_others": [STEM[:n] for n in range(1, 7)],
    "as_many_rows_as_tokens_and_heads": [[11, 12, x, y] for x, y in [(3, 4), (3, 5), (6, 7), (6, 8)]],
    "one_fork_at_the_root": [[21, 11, 12], [22, 11, 12], [21, 11, 13]],
    "tokens_of_the_padding_id": [[*STEM, PAD, 21], [*STEM, PAD, 22, PAD], [PAD, PAD, 23]],
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_rows(rows: list[list[int]], side: Any) -> None:
    length = max(map(len, rows)) + (2 if rows == ROWS["one_row_with_padding"] else 0)
    batch = padded(rows, side, length)
    if max(map(len, rows)) == 1:
        # No token is predicted: any loss that exists is the caller's own.
        assert_packed(compare(llama(), logits_at_real_tokens(batch)), distinct_tokens(batch))
    else:
        assert_packed(compare(llama(), batch), distinct_tokens(batch))


@pytest.mark.parametrize("name", ["one_row", "one_token", "all_equal", "as_many_rows_as_tokens_and_heads"])
def test_rows_of_equal_length_without_mask(name: str) -> None:
    rows = ROWS[name]
    shortest = min(map(len, rows))
    batch = padded([row[:shortest] for row in rows]).without("attention_mask", "labels")
    assert_packed(compare(llama(), logits_at_real_tokens(batch)), distinct_tokens(batch))


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
def test_left_padding_with_column_positions(name: str) -> None:
    batch = left_padded()
    assert_packed(compare(double(name), batch), distinct_tokens(batch))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_first_tokens_predicted_from_padding(name: str) -> None:
    """Labels of the first real tokens: with left padding, the cell before them is padding, and counts."""
    batch = left_padded()
    assert batch.attention_mask is not None
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORED)
    compare(double(name), Batch(batch.input_ids, batch.attention_mask, labels))


@pytest.mark.parametrize("padding", ["right", "left"])
def test_mask_of_booleans_and_of_floats(padding: Any) -> None:
    batch = shared_batch(rows=4, length=14, shared=6, vocab=61, padding=padding)
    assert batch.attention_mask is not None
    for dtype in (torch.bool, torch.float64):
        given = Batch(batch.input_ids, batch.attention_mask.to(dtype), batch.labels)
        compare(TinyLM(PADDED["sdpa_padding"]).double(), given)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_labels_at_padding(padding: Any) -> None:
    """Labels equal to the ids, padding included: what stands there counts, wrong as it is."""
    batch = shared_batch(rows=4, length=14, shared=6, padding=padding)
    compare(llama(), Batch(batch.input_ids, batch.attention_mask, batch.input_ids))


def test_label_at_one_padded_cell() -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    assert batch.labels is not None and batch.attention_mask is not None
    labels = batch.labels.clone()
    row = int(batch.attention_mask.sum(1).argmin())
    labels[row, -1] = 17
    compare(llama(), Batch(batch.input_ids, batch.attention_mask, labels))


def test_rows_without_labels() -> None:
    """All labels ignored in some rows: their tokens still run, and get no gradient."""
    batch = shared_batch(rows=4, length=14, shared=6)
    assert batch.labels is not None
    labels = batch.labels.clone()
    labels[1:] = IGNORED
    checked = compare(llama(), Batch(batch.input_ids, batch.attention_mask, labels))
    assert_packed(checked, distinct_tokens(batch))


def test_mask_with_holes() -> None:
    """A padded cell in the middle of a row: the tokens after it do not see it."""
    batch = shared_batch(rows=4, length=14, shared=6)
    assert batch.attention_mask is not None
    mask = batch.attention_mask.clone()
    mask[1, 4], mask[2, 0] = 0, 0
    compare(llama(), Batch(batch.input_ids, mask, batch.labels))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_position_ids(name: str) -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    place = torch.arange(14).expand(4, 14).contiguous()
    given = Batch(batch.input_ids, batch.attention_mask, batch.labels, place)
    assert_packed(compare(double(name), given), distinct_tokens(batch))


def test_position_ids_that_separate_rows() -> None:
    """The same tokens at other positions are other tokens."""
    batch = shared_batch(rows=4, length=14, shared=6, padding=None)
    place = torch.arange(14)[None] + torch.tensor([0, 0, 5, 5])[:, None]
    checked = compare(llama(), Batch(batch.input_ids, None, batch.labels, place))
    first, second = (Batch(batch.input_ids[half], None, None) for half in (slice(0, 2), slice(2, 4)))
    assert_packed(checked, distinct_tokens(first) + distinct_tokens(second))


def test_position_ids_of_one_row() -> None:
    batch = shared_batch(rows=4, length=14, shared=6, padding=None)
    place = torch.arange(3, 17)[None]
    assert_packed(compare(llama(), Batch(batch.input_ids, None, batch.labels, place)), distinct_tokens(batch))


def test_embeddings_as_input() -> None:
    batch = shared_batch(rows=4, length=14, shared=6)

    def step(model: nn.Module) -> Tensor:
        source = getattr(model, "_orig_mod", model)
        embedded = source.get_input_embeddings()(batch.input_ids)
        return model(inputs_embeds=embedded, attention_mask=batch.attention_mask, labels=batch.labels).loss

    compare(llama(), step)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_tied_embeddings(name: str) -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    model = double(name, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert_packed(compare(model, batch), distinct_tokens(batch))


@pytest.mark.parametrize("kept", [True, False], ids=["labels_at_padding", "labels_ignored"])
def test_padding_idx_gets_no_gradient(kept: bool) -> None:
    model = TinyLM(SPELLINGS["sdpa_is_causal"], padding_idx=PAD).double()
    batch = shared_batch(rows=4, length=14, shared=6, vocab=61).without("attention_mask")
    checked = compare(model, Batch(batch.input_ids, None, batch.input_ids if kept else batch.labels))
    assert checked.model.embed.weight.grad[PAD].abs().max() == 0
