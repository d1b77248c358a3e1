"""Possible sharing of a whole optimizer step, and actual sharing of its calls."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import treefx
from tests.backend.packed import AGENTS, loss_inside, pack, trie_size
from tests.batches import Batch, shared_batch
from tests.models import double
from tests.strategies import Rows, row_batches
from treefx.forests.trie import Prefixes
from treefx.inspection.text import describe_step
from treefx.runtime.call_plan import Batch as PackedBatch
from treefx.runtime.call_plan import build_batch, find_unshared
from treefx.runtime.records import Steps, version_of


def padded(rows: Rows, *, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    gaps = [[0] * (width - len(row)) for row in rows]
    ids = [gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)]
    kept = [
        [0] * len(gap) + [1] * len(row) if left else [1] * len(row) + [0] * len(gap) for row, gap in zip(rows, gaps)
    ]
    return torch.tensor(ids), torch.tensor(kept).bool()


def prefixes(rows: Rows) -> set[tuple[int, ...]]:
    return {tuple(row[: end + 1]) for row in rows for end in range(len(row))}


def numbers_of(batch: PackedBatch) -> np.ndarray[Any, np.dtype[np.uint64]]:
    assert batch.prefixes is not None
    return batch.prefixes.numbers


@given(first=row_batches(), second=row_batches())
def test_prefixes_are_numbered_alike_in_all_batches(first: Rows, second: Rows) -> None:
    one, other = (numbers_of(build_batch([ids], kept)) for ids, kept in (padded(first), padded(second)))
    assert len(one) == len(set(one.tolist())) == len(prefixes(first))
    assert len(np.intersect1d(one, other)) == len(prefixes(first) & prefixes(second))


@given(first=row_batches(), second=row_batches())
def test_prefixes_of_packed_rows_are_numbered_alike_in_all_batches(first: Rows, second: Rows) -> None:
    one, other = (numbers_of(packed(rows)) for rows in (first, second))
    assert len(one) == len(set(one.tolist())) == len(prefixes(first))
    assert len(np.intersect1d(one, other)) == len(prefixes(first) & prefixes(second))


def packed(rows: Rows) -> Any:
    """The rows behind each other in one, as segments."""
    ids = torch.tensor([token for row in rows for token in row])[None]
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    return build_batch([ids], None, [places], starts=places == 0)


@given(rows=row_batches(), split=st.integers(0, 8))
def test_rows_that_start_in_other_columns_are_other_prefixes(rows: Rows, split: int) -> None:
    """A model that counts columns computes other numbers there; one that counts tokens says so by its places."""
    some, others = rows[: split % len(rows) + 1], rows
    width = max(map(len, others))
    starts = {(width - len(row), *row[: end + 1]) for row in others for end in range(len(row))}
    left, kept = padded(others, left=True)
    found = numbers_of(build_batch([left], kept))
    assert len(set(found.tolist())) == len(starts)
    right, everywhere = padded(some)
    same_column = [row for row in others if len(row) == width]
    again = numbers_of(build_batch([right], everywhere))
    assert len(np.intersect1d(found, again)) == len(prefixes(same_column) & prefixes(some))


def test_places_of_their_own_make_rows_alike_in_any_column() -> None:
    ids, kept = torch.tensor([[0, 5, 6, 7], [5, 6, 7, 8]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    places = (kept.cumsum(1) - 1).clamp(min=0)
    both = build_batch([ids], kept, [places])
    alone = build_batch(
        [torch.tensor([[0, 0, 5, 6]])], torch.tensor([[0, 0, 1, 1]]).bool(), [torch.tensor([[0, 0, 0, 1]])]
    )
    assert both.own_positions and both.tokens == 4
    assert len(np.intersect1d(numbers_of(both), numbers_of(alone))) == 2


@given(rows=row_batches(), left=st.booleans(), own=st.booleans())
@example(rows=[[5, 6], [6, 6, 6], [7]], left=True, own=False)
@example(rows=[[5, 6], [6, 6, 6], [7]], left=True, own=True)
@example(rows=[[5, 6], [6], [5, 6, 6]], left=True, own=False)  # equal heads, in other columns
def test_what_needs_no_trie_has_the_prefixes_that_the_trie_would_find(rows: Rows, left: bool, own: bool) -> None:
    ids, kept = padded(rows, left=left)
    places = [(kept.cumsum(1) - 1).clamp(min=0)] if own else None
    found, batch = find_unshared([ids], kept, places), build_batch([ids], kept, places)
    heads = [row[0] for row in rows if row]
    assert (found is None) == (len(set(heads)) < len(heads))
    if found is not None:
        ids.zero_(), kept.zero_()  # numbers are asked for when the caller has gone on to its next batch
        assert len(found) == batch.tokens == sum(map(len, rows))
        assert sorted(found.numbers.tolist()) == sorted(numbers_of(batch).tolist())


def test_rows_without_columns_have_no_first_token() -> None:
    empty = torch.zeros((3, 0), dtype=torch.int64)
    assert find_unshared([empty], None) is None and find_unshared([empty], empty.bool()) is None


def of(*numbers: int) -> Prefixes:
    return Prefixes(len(numbers), lambda: np.array(numbers, dtype=np.uint64))


def test_a_step_ends_where_the_parameters_change() -> None:
    steps = Steps()
    assert steps.last(0) is None
    steps.count(0, 10, 5, of(1, 2, 3, 4, 5))
    underway = steps.last(0)
    assert underway is not None and (underway.calls, underway.possible) == (1, 2.0)
    steps.count(0, 10, 5, of(1, 2, 3, 4, 6))
    complete = steps.last(1)
    assert complete is not None and (complete.calls, complete.ratio) == (2, 2.0)
    assert complete.distinct_tokens == 6
    steps.count(1, 8, 1, of(9))
    assert steps.last(1) == complete  # of the step under way too little is known
    after = steps.last(2)
    assert after is not None and (after.calls, after.distinct_tokens) == (1, 1)


def test_the_very_tensor_of_an_earlier_call_is_left_out() -> None:
    """Equal rows in another tensor are a loss all the same, and so are other rows in the same tensor."""
    steps, ids = Steps(), torch.zeros((2, 5), dtype=torch.int64)
    for tensor in (ids, ids, ids.clone(), None):
        steps.count(0, 10, 5, of(1, 2, 3, 4, 5), tensor)
    seen = steps.last(0)
    assert seen is not None and (seen.calls, seen.repeats, seen.raw_tokens, seen.possible) == (4, 1, 30, 30 / 5)
    ids.add_(1)
    steps.count(0, 10, 5, of(1, 2, 3, 4, 6), ids)
    seen = steps.last(0)
    assert seen is not None and (seen.repeats, seen.raw_tokens, seen.distinct_tokens) == (1, 40, 6)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No optimizer is ever seen: the figures are of pieces."""
    monkeypatch.setattr("treefx.runtime.records.MOST_TOKENS", 4)
    steps = Steps()
    for _ in range(5):
        steps.count(0, 4, 2, of(1, 2))
    piece = steps.last(0)
    assert piece is not None and (piece.calls, piece.distinct_tokens) == (2, 2)


def test_frozen_parameters_and_reading_change_no_version() -> None:
    weight, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    before = version_of([weight, frozen])
    with torch.no_grad():
        frozen.add_(1.0)
    (weight * 2).sum().backward()
    assert version_of([weight, frozen]) == before
    with torch.no_grad():
        weight.sub_(0.1)
    assert version_of([weight, frozen]) != before


@pytest.mark.parametrize("kind", ["fused", "foreach", "capturable"])
def test_every_optimizer_of_torch_ends_a_step(kind: str) -> None:
    """The fused ones, transformers' default, leave the versions of tensors alone. Another model's end none."""
    weight, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    mine, critics = (torch.optim.AdamW([x], **{kind: kind != "capturable"}) for x in (weight, other))
    for x in (weight, other):
        x.grad = torch.ones(2)
    seen = []
    for optimizer in (mine, critics, mine):
        optimizer.step()
        seen.append(version_of([weight]))
    assert seen[0] == seen[1] < seen[2]


def test_an_optimizer_can_still_be_compiled() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1))
    before = version_of([weight])
    torch.compile(lambda: optimizer.step(), backend="aot_eager")()
    assert version_of([weight]) != before


def tiny_llama() -> Any:
    return double(
        "llama", num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1
    )


def tiny() -> Any:
    model = tiny_llama()
    model.compile(backend="treefx", options={"inner": "eager"})
    return model


def call(model: Any, batch: Batch, rows: list[int]) -> Any:
    return model(**{name: value[rows] for name, value in batch.inputs().items()}).loss


def test_the_report_tells_what_the_order_of_rows_lost() -> None:
    model, batch = tiny(), shared_batch(rows=8, length=12, shared=8, padding=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distinct = treefx.Forest.from_padded(batch.input_ids, None).num_tokens
    with torch.no_grad():
        call(model, batch, [0, 0, 0])  # a reference model's call, say
    for rows in ([0, 1], [2, 3], [4, 5], [6, 7]):
        call(model, batch, rows).backward()
    optimizer.step()
    inspection = treefx.inspect(model)
    assert inspection.stats["step_calls"] == 4
    assert inspection.stats["sharing_possible"] == pytest.approx(96 / distinct)
    assert inspection.stats["step_sharing_ratio"] == pytest.approx(96 / (4 * 16), rel=0.05)
    assert "came in different calls" in inspection.summary()
    call(model, batch, list(range(8))).backward()
    optimizer.step()
    stats = treefx.inspect(model).stats
    assert stats["step_calls"] == 1
    assert stats["sharing_possible"] == stats["step_sharing_ratio"] == stats["sharing_ratio"]
    assert "came in different calls" not in treefx.inspect(model).summary()


@pytest.mark.parametrize(
    ("loaded", "line"),
    [
        ("trl.trainer.base_trainer", "treefx.integrations.trl.keep_groups(trainer)"),
        ("transformers.trainer", "treefx.integrations.transformers.keep_groups(trainer)"),
        ("lightning.pytorch.trainer", "batch_sampler=treefx.data.TreeBatchSampler("),
        (None, "batch_sampler=treefx.data.TreeBatchSampler("),
    ],
)
def test_the_report_says_which_line_to_change(monkeypatch: pytest.MonkeyPatch, loaded: str | None, line: str) -> None:
    for module in ("trl.trainer.base_trainer", "transformers.trainer"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    if loaded is not None:
        monkeypatch.setitem(sys.modules, loaded, ModuleType(loaded))
    step = {"sharing_possible": 4.0, "step_calls": 4, "step_repeats": 0}
    told = "\n".join(describe_step({**step, "step_sharing_ratio": 1.25}))
    assert "4 calls: sharing ratio 1.25, of 4.00" in told and line in told
    assert line not in "\n".join(describe_step({**step, "step_sharing_ratio": 3.9}))


def test_packed_rows_in_several_calls_tell_what_one_call_would_share() -> None:
    model, parts = tiny(), [pack(AGENTS[:3]), pack(AGENTS[2:]), pack(AGENTS[1:5])]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in parts:
        loss_inside(part)(model).backward()
    optimizer.step()
    raw, ran = (sum(map(count, parts)) for count in (lambda part: part.input_ids.numel(), trie_size))
    together = trie_size(pack([list(item) for part in parts for item in part.segments]))
    stats = treefx.inspect(model).stats
    assert (stats["step_calls"], stats["step_sharing_ratio"]) == (3, pytest.approx(raw / ran))
    assert stats["sharing_possible"] == pytest.approx(raw / together) and together < ran


@pytest.mark.parametrize("way", ["compiled", "converted"])
def test_calls_that_run_ordinarily_count_as_they_ran(way: str) -> None:
    """Single rows share nothing, each for itself; as one call they would."""
    batch = shared_batch(rows=4, length=12, shared=8, padding=None)
    model = tiny() if way == "compiled" else treefx.convert(tiny_llama())
    for row in range(4):
        model(input_ids=batch.input_ids[[row]], labels=batch.input_ids[[row]]).loss.backward()
    stats = treefx.inspect(model).stats
    assert stats["ran"] == "ordinary" and stats["step_calls"] == 4
    distinct = treefx.Forest.from_padded(batch.input_ids, None).num_tokens
    assert (stats["step_sharing_ratio"], stats["sharing_possible"]) == (1.0, pytest.approx(48 / distinct))


def test_forests_of_the_caller_are_of_no_step() -> None:
    model, batch = tiny(), shared_batch(rows=4, length=12, shared=8, padding=None)
    forest = treefx.Forest.from_padded(batch.input_ids, None)
    with treefx.use(forest):
        model(**forest.model_inputs(), use_cache=False)
    assert treefx.inspect(model).stats["sharing_possible"] is None
    assert "not counted: the caller gave a forest" in treefx.inspect(model).summary()
