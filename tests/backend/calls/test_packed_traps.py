"""Packed rows in which segments are not what they seem: computed as written, and wrong if shared all the same."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx.runtime.call_plan
from tests.backend.calls.test_packed_rows import one_layer
from tests.backend.packed import (
    AGENTS,
    DocumentLM,
    GivenMaskLM,
    Packed,
    but_for_pads,
    by_document,
    by_position,
    causal,
    loss_inside,
    loss_of_documents,
    loss_outside,
    pack,
    same,
    trie_size,
)
from tests.backend.support import Pair, compare
from tests.models import zoo
from tests.oracle import Step
from treefx.passes.packing import emit_attention
from treefx.passes.packing.emitters import Packer
from treefx.passes.scores import attention_facts
from treefx.runtime import call_plan, segments, shapes

PACKED = pack(AGENTS)


def assert_unshared(checked: Any, tokens: int = PACKED.input_ids.numel()) -> None:
    assert checked.stats["ran"] == "ordinary" or checked.stats["tokens"] == tokens


def assert_wrong(model: nn.Module, step: Step) -> None:
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(model, step)


# Masks of a model's own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", [(by_document,), (by_position,), (by_position, by_document)])
def test_documents_that_are_an_input(masks: tuple[Any, ...]) -> None:
    stats = compare(DocumentLM(*masks).double(), loss_of_documents(PACKED)).stats
    assert stats["ran"] == "packed" and stats["tokens"] == trie_size(PACKED)


def test_pads_that_no_query_sees() -> None:
    """Unused pads do not run; where the caller reads all logits, their mask separates documents."""
    packed = pack(AGENTS, pads=5)
    documents = (packed.position_ids == 0).cumsum(1) * (packed.input_ids != 0)
    model, real = DocumentLM(but_for_pads).double(), trie_size(PACKED)

    def inside(model: nn.Module) -> Tensor:
        return model(packed.input_ids, documents, packed.position_ids, packed.labels)  # type: ignore[no-any-return]

    stats = compare(model, inside).stats
    assert (stats["tokens"], stats["raw_tokens"], stats["ran"]) == (real, PACKED.input_ids.numel(), "packed")
    stats = compare(model, loss_of_documents(packed, documents)).stats
    assert stats["fallback"] is None and stats["tokens"] == packed.input_ids.numel()


def test_one_attention_that_sees_other_segments_ends_all_sharing() -> None:
    assert_unshared(compare(DocumentLM(causal, by_position).double(), loss_of_documents(PACKED)))


def test_sharing_where_one_attention_sees_other_segments_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_facts, "unseen_relations", lambda constants, columns: ["future"])
    assert_wrong(DocumentLM(by_document, causal).double(), loss_of_documents(PACKED))


def test_positions_with_a_gap_inside_a_document() -> None:
    """One document sees across the gap, by places that the other counts differently."""
    packed, documents = with_a_gap()
    checked = compare(DocumentLM(by_position).double(), loss_of_documents(packed, documents))
    assert_unshared(checked, 16)
    assert "positions that count up by one" in checked.stats["fallback"]


def with_a_gap() -> tuple[Packed, Tensor]:
    packed = pack([[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 9, 10, 11, 12]])
    places = packed.position_ids + 2 * (packed.position_ids > 3)
    return packed.with_positions(places), torch.arange(16)[None] // 8


def test_windows_by_depth_over_a_gap_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, documents = with_a_gap()
    right = segments.find_starts

    def ignoring(analysis: Any, args: Any) -> Tensor | None:
        analysis.segments.counting.clear()
        return right(analysis, args)

    for module in (shapes, call_plan):
        monkeypatch.setattr(module, "find_starts", ignoring)
    assert_wrong(DocumentLM(by_position).double(), loss_of_documents(packed, documents))


def test_documents_that_come_again() -> None:
    packed = pack([[5, 6, 7], [5, 6, 9], [5, 6, 7]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0]])
    assert_unshared(compare(DocumentLM(by_document).double(), loss_of_documents(packed, documents)), 9)


def test_documents_that_come_again_taken_for_new_ones_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_comes_again", lambda x, changes: False)
    packed = pack([[5, 6, 7], [5, 6, 9], [5, 6, 7]])
    assert_wrong(
        DocumentLM(by_document).double(), loss_of_documents(packed, torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0]]))
    )


def test_layers_that_disagree_on_the_documents() -> None:
    """The second layer sees pairs of documents."""

    def by_pair(documents: Tensor, positions: Tensor) -> Tensor:
        return by_document(torch.div(documents, 2, rounding_mode="floor").cumsum(1), positions)

    assert_unshared(compare(DocumentLM(by_document, by_pair).double(), loss_of_documents(PACKED)))


def positions_in_bfloat16(documents: Tensor, positions: Tensor) -> Tensor:
    """From 256 on every other number is rounded: a query sees the position behind its own."""
    rounded = (positions + 256).to(torch.bfloat16)
    return (rounded[:, None, :, None] >= rounded[:, None, None]) & same(documents)


def columns_in_bfloat16(documents: Tensor, positions: Tensor) -> Tensor:
    """The same of columns."""
    rounded = (torch.arange(documents.shape[1]) + 256).to(torch.bfloat16)
    return (rounded[:, None] >= rounded) & same(documents)


def numbers_in_bfloat16(documents: Tensor, positions: Tensor) -> Tensor:
    """Pairs of documents have one number."""
    rounded = (documents + 256).to(torch.bfloat16)
    return causal(documents, positions) & same(rounded)


def window_of_tenths(documents: Tensor, positions: Tensor) -> Tensor:
    """Three or four positions, as the tenths of positions happen to be rounded."""
    tenths = positions * 0.1
    return by_document(documents, positions) & (tenths[:, None, :, None] - tenths[:, None, None] <= 0.3)


@pytest.mark.parametrize("mask", [positions_in_bfloat16, columns_in_bfloat16, numbers_in_bfloat16, window_of_tenths])
def test_numbers_that_a_type_rounds(mask: Any) -> None:
    assert_unshared(compare(DocumentLM(mask).double(), loss_of_documents(PACKED)))


# Masks that the caller gives ------------------------------------------------------------------------------------------


def filled(seen: Tensor) -> Tensor:
    """A mask of float64, finfo.min where nothing is seen."""
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)


def given_mask(packed: Packed) -> Tensor:
    """[1, 1, T, T], as LLaMA-Factory packs rows: hidden between sequences, after the query, and at pads."""
    real = (packed.input_ids != 0)[:, None, None]
    seen = by_document((packed.position_ids == 0).cumsum(1), packed.position_ids) & real & real.mT
    return filled(seen)


def test_documents_of_a_given_mask() -> None:
    """Without pads, with pads that nothing reads, and with pads that see nothing and are read: those run on rows."""
    pair, padded, more = Pair(GivenMaskLM().double()), pack(AGENTS, pads=3), pack([*AGENTS, [2, 3, 4]])
    for packed, step in ((more, loss_outside), (padded, loss_inside), (padded, loss_outside), (more, loss_inside)):
        stats = pair.check(step(packed, attention_mask=given_mask(packed))).stats
        if step is loss_outside and packed is padded:
            assert stats["ran"] == "ordinary"
        else:
            assert (stats["tokens"], stats["ran"]) == (trie_size(PACKED) + 3 * (packed is more), "packed")


def starts_that_overlap(packed: Packed) -> Tensor:
    """Each sequence sees the last token of the one before."""
    seen = by_document((packed.position_ids == 0).cumsum(1), packed.position_ids)[0, 0].clone()
    first = torch.nonzero(packed.position_ids[0] == 0).flatten()[1:]
    for at in first.tolist():
        length = int((packed.position_ids[0, at:] == 0).cumsum(0).eq(1).sum())
        seen[at : at + length, at - 1] = True
    return filled(seen[None, None])


def test_a_given_mask_whose_documents_overlap() -> None:
    assert_unshared(compare(GivenMaskLM().double(), loss_inside(PACKED, attention_mask=starts_that_overlap(PACKED))))


def test_sharing_documents_that_overlap_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_begins", lambda x, starts: True)
    assert_wrong(GivenMaskLM().double(), loss_inside(PACKED, attention_mask=starts_that_overlap(PACKED)))


# Models of transformers -----------------------------------------------------------------------------------------------


def test_a_mask_of_numbers_is_read_as_a_plain_one() -> None:
    """Segments numbered from 1 (axolotl) see each other with sdpa."""
    documents = (PACKED.position_ids == 0).cumsum(1)
    assert_unshared(compare(one_layer("llama"), loss_inside(PACKED, attention_mask=documents)))


def test_no_mask_by_name_is_one_causal_sequence() -> None:
    """A dictionary of None (AReaL), which leaves the segments to FlashAttention."""
    none = dict.fromkeys(("full_attention", "sliding_attention"))
    assert_unshared(compare(one_layer("gemma2"), loss_inside(PACKED, attention_mask=none)))


def test_a_model_that_keeps_positions_from_its_mask() -> None:
    model = zoo("gpt_oss")
    assert_unshared(compare(model, loss_inside(PACKED)))


def test_lengths_for_flash_attention_do_not_matter_to_sdpa() -> None:
    """They join two segments whose positions restart."""
    joined = {"cu_seq_lens_q": torch.tensor([0, 9, PACKED.input_ids.numel()], dtype=torch.int32), "max_length_q": 9}
    stats = compare(one_layer("llama"), loss_inside(PACKED, **joined)).stats
    assert stats["ran"] == "packed" and stats["tokens"] == trie_size(PACKED)


def test_columns_for_depth_in_a_window_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def columns(packer: Packer) -> Tensor:
        return packer.metadata.column

    monkeypatch.setattr(emit_attention, "places", columns)
    assert_wrong(one_layer("mistral"), loss_inside(PACKED))


def test_a_causal_mask_over_distinct_tokens_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = treefx.runtime.call_plan._tensors

    def causal_over_tokens(row: Any, column: Any, end: Any, *rest: Any) -> Any:
        return right(row, column, end * 0 + len(end), *rest)

    monkeypatch.setattr(treefx.runtime.call_plan, "_tensors", causal_over_tokens)
    monkeypatch.setattr(treefx.runtime.call_plan, "_recent", deque(maxlen=1))
    assert_wrong(one_layer("llama"), loss_inside(PACKED))
