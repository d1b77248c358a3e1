"""Every kind of batch: shapes, padding on either side, labels at padding, positions, embeddings."""

import pytest
import torch
from torch import Tensor, nn

from tests import oracle
from tests.backend.support import Pair, assert_packed, compare, in_case, llama, logits_at_real_tokens
from tests.batches import IGNORED, PAD, Batch, Side, distinct_tokens, left_padded, padded, shared_batch
from tests.models import TinyLM, double
from tests.spellings import PADDED, SPELLINGS
from treefx.runtime import padding as runtime_padding

SIDES: tuple[Side, ...] = ("right", "left")
STEM = [11, 12, 13, 14, 15, 16]

EQUAL_SHAPES: dict[str, list[list[int]]] = {
    "all equal": [[*STEM, 21, 22]] * 4,
    "nothing shared": [[b, *STEM] for b in range(21, 25)],
    "prefixes of others": [STEM[:n] for n in (1, 2, 4, 6)],
    "one fork at the root": [[21, 11, 12], [22, 11, 12], [21, 11, 13], [22, 11]],
    "tokens of the padding id": [[*STEM, PAD, 21], [*STEM, PAD, 22], [PAD, PAD, 23], [*STEM, PAD]],
}
"""Four rows, padded to eight columns."""
OTHER_SHAPES: dict[str, list[list[int]]] = {
    "one token a row": [[21], [22], [21]],
    "one row of one token": [[21]],
    "as many rows as tokens and heads": [[11, 12, x, y] for x, y in [(3, 4), (3, 5), (6, 7), (6, 8)]],
}


def test_rows() -> None:
    """Five sets of rows, padded on either side, on one compilation."""
    pair = Pair(llama())
    for name, rows in EQUAL_SHAPES.items():
        for side in SIDES:
            batch = padded(rows, side, 8)
            with in_case(f"{name}, {side}"):
                assert_packed(pair.check(batch), distinct_tokens(batch))


def test_one_row() -> None:
    """With padding on either side, and without."""
    pair, row = Pair(llama()), [*STEM, 21]
    for batch in (padded([[*row, 22, 23]], length=9), padded([row], "right", 9), padded([row], "left", 9)):
        with in_case(batch.attention_mask):
            assert_packed(pair.check(batch), distinct_tokens(batch))


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_rows_of_equal_sizes(name: str) -> None:
    """Sizes of 1, and sizes that are equal to each other."""
    batch = padded(OTHER_SHAPES[name])
    # Where no token is predicted, any loss that exists is the caller's own.
    step = batch if batch.input_ids.shape[1] > 1 else logits_at_real_tokens(batch)
    assert_packed(compare(llama(), step), distinct_tokens(batch))


@pytest.mark.parametrize("rows", [OTHER_SHAPES["one token a row"], EQUAL_SHAPES["all equal"]], ids=["tokens", "rows"])
def test_rows_of_equal_length_without_mask(rows: list[list[int]]) -> None:
    batch = padded(rows).without("attention_mask", "labels")
    assert_packed(compare(llama(), logits_at_real_tokens(batch)), distinct_tokens(batch))


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2"])
def test_left_padding_with_column_positions(name: str) -> None:
    """Also with labels of the first real tokens: the cell before them is padding, and counts."""
    pair, batch = Pair(double(name, **({} if name == "gemma2" else {"num_hidden_layers": 1}))), left_padded()
    assert_packed(pair.check(batch), distinct_tokens(batch))
    assert batch.attention_mask is not None
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORED)
    with in_case("first tokens predicted from padding"):
        pair.check(Batch(batch.input_ids, batch.attention_mask, labels))


def test_mask_of_booleans_and_of_floats() -> None:
    pair = Pair(TinyLM(PADDED["sdpa_padding"], layers=1).double())
    for dtype, side in zip((torch.bool, torch.float64), SIDES, strict=True):
        batch = shared_batch(rows=4, length=14, shared=6, vocab=61, padding=side)
        assert batch.attention_mask is not None
        with in_case(dtype):
            pair.check(Batch(batch.input_ids, batch.attention_mask.to(dtype), batch.labels))


def label_at_one_padded_cell(batch: Batch, mask: Tensor, labels: Tensor) -> Batch:
    labels[int(mask.sum(1).argmin()), -1] = 17
    return Batch(batch.input_ids, mask, labels)


def labels_at_padding(batch: Batch, mask: Tensor, labels: Tensor) -> Batch:
    """Labels equal to the ids, padding included: these labels count, wrong or not."""
    return Batch(batch.input_ids, mask, batch.input_ids)


def rows_without_labels(batch: Batch, mask: Tensor, labels: Tensor) -> Batch:
    """All labels ignored in some rows: their tokens still run, and get no gradient."""
    labels[1:] = IGNORED
    return Batch(batch.input_ids, mask, labels)


def mask_with_holes(batch: Batch, mask: Tensor, labels: Tensor) -> Batch:
    """A padded cell in the middle of a row: the tokens after it do not see it."""
    mask[1, 4], mask[2, 0] = 0, 0
    return Batch(batch.input_ids, mask, labels)


def test_labels_and_masks() -> None:
    pair = Pair(llama())
    for change in (rows_without_labels, label_at_one_padded_cell, labels_at_padding, mask_with_holes):
        for side in SIDES if change is labels_at_padding else SIDES[:1]:
            batch = shared_batch(rows=4, length=14, shared=6, padding=side)
            assert batch.labels is not None and batch.attention_mask is not None
            with in_case(f"{change.__name__}, {side}"):
                checked = pair.check(change(batch, batch.attention_mask.clone(), batch.labels.clone()))
                if change is rows_without_labels:
                    assert_packed(checked, distinct_tokens(batch))


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

    assert compare(llama(), step).stats["fallback"] is not None  # each row has another gradient


def distinct_vectors(batch: Batch, vectors: Tensor) -> int:
    """The distinct prefixes of vectors, by listing them all."""
    assert batch.attention_mask is not None
    paths = set()
    for row, kept in zip(vectors, batch.attention_mask.bool()):
        bits = [(column, row[column].numpy().tobytes()) for column in kept.nonzero()[:, 0].tolist()]
        paths.update(tuple(bits[: t + 1]) for t in range(len(bits)))
    return len(paths)


def test_embeddings_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen embeddings, and vectors of a frozen tower among them, are tokens by their bits; on one compilation."""
    pair = Pair(llama())
    table = pair.eager.get_input_embeddings().weight.detach().clone()

    def step(batch: Batch, vectors: Tensor) -> oracle.Step:
        return lambda model: model(inputs_embeds=vectors, attention_mask=batch.attention_mask, labels=batch.labels).loss

    for rows, length, side in ((4, 14, "right"), (6, 17, "left")):
        batch = shared_batch(rows=rows, length=length, shared=6, padding=side)
        vectors = table[batch.input_ids]
        with in_case(f"{side}, by ids"):
            assert_packed(pair.check(step(batch, vectors)), distinct_tokens(batch))
        vectors[1, length // 2] = torch.nextafter(vectors[1, length // 2], torch.tensor(9.0, dtype=torch.float64))
        with in_case(f"{side}, another image in one row"):
            assert_packed(pair.check(step(batch, vectors)), distinct_vectors(batch, vectors))
    monkeypatch.setattr(runtime_padding, "number_tokens", lambda x, dims: batch.input_ids)
    vectors[1, length // 2] += 1
    with pytest.raises(AssertionError, match="differ by more than"):  # a trie of ids alone
        pair.check(step(batch, vectors))


def test_tied_embeddings_and_position_ids() -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    place = torch.arange(14).expand(4, 14).contiguous()
    model = double("gpt2", num_hidden_layers=1, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    checked = compare(model, Batch(batch.input_ids, batch.attention_mask, batch.labels, place))
    assert_packed(checked, distinct_tokens(batch))


def test_padding_idx_gets_no_gradient() -> None:
    """With labels at padding, and with labels ignored there."""
    pair = Pair(TinyLM(SPELLINGS["sdpa_is_causal"], padding_idx=PAD, layers=1).double())
    batch = shared_batch(rows=4, length=14, shared=6, vocab=61)
    for labels in (batch.input_ids, batch.labels):
        pair.check(Batch(batch.input_ids, None, labels))
        assert pair.model.embed.weight.grad[PAD].abs().max() == 0
