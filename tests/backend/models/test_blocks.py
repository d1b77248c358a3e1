"""Tokens that see each other in a causal model: patches of an image, or a prefix. Rows share them whole or not at all.

Types are 1 at ids from ``FIRST_PATCH`` on; a run of them is a block, and the first run of a row is its prefix.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.small import Small
from tests.backend.support import Pair, assert_packed, compare, compile_with, in_case
from tests.batches import Batch, Side, padded
from tests.oracle import FLOAT32, Step
from tests.spellings import Spelling
from treefx.kernels.common import Boundary
from treefx.passes.packing import emit_attention
from treefx.runtime import call_plan

FIRST_PATCH, WINDOW = 40, 3


def causal(types: Tensor) -> Tensor:
    column = torch.arange(types.shape[1])
    return column <= column[:, None]


def near(types: Tensor) -> Tensor:
    column = torch.arange(types.shape[1])
    return column > column[:, None] - WINDOW


def same_block(number: Tensor) -> Tensor:
    return (number[:, :, None] == number[:, None, :]) & (number[:, :, None] >= 0)


def patches(types: Tensor) -> Tensor:
    """As Gemma 3 numbers blocks: the starts of runs before each token, -1 outside."""
    patch = types == 1
    before = F.pad(patch, (1, 0), value=False)[:, :-1]
    return same_block(torch.where(patch, (patch & ~before).int().cumsum(1) - 1, -1))


def patches_by_rolling(types: Tensor) -> Tensor:
    """As Gemma 4 does."""
    patch = types == 1
    before = patch.roll(1, -1)
    before[..., 0] = False
    return same_block(torch.where(patch, (patch & ~before).int().cumsum(1) - 1, -1))


def prefix(types: Tensor) -> Tensor:
    """bool [B, T], the first run of patches where a row begins with one; padding in front is none of it."""
    return (types == 1) & ((types == 0).int().cumsum(1) == 0)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "patches": lambda types: causal(types) | patches(types),
    "patches by rolling": lambda types: causal(types) | patches_by_rolling(types),
    "patches in a window": lambda types: (causal(types) | patches(types)) & near(types),
    "patches or a window": lambda types: (causal(types) & near(types)) | patches(types),
    "a prefix of number 0": lambda types: causal(types) | same_block(torch.where(prefix(types), 0, -1)),
    "a prefix of keys": lambda types: causal(types) | prefix(types)[:, None, :],
}


class Blocked(nn.Module):
    """A model whose mask is one of the forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.see = FORMS[form]
        attention = functools.partial(Spelling, F.scaled_dot_product_attention)
        self.text = Small(attention, width=16)

    def forward(self, ids: Tensor, types: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        visible = self.see(types) & mask[:, None, :].bool()
        return self.text(ids, visible[:, None], labels)


def types_of(batch: Batch) -> Tensor:
    return (batch.input_ids >= FIRST_PATCH).long()


def step_of(batch: Batch) -> Step:
    return lambda model: model(batch.input_ids, types_of(batch), batch.attention_mask, batch.labels).loss


def distinct(batch: Batch, form: str) -> int:
    """The distinct paths of tokens, each told apart by all that it sees, by listing them all."""
    assert batch.attention_mask is not None
    visible = FORMS[form](types_of(batch)).expand(len(batch.input_ids), -1, -1) & batch.attention_mask[:, None].bool()
    columns = torch.arange(batch.input_ids.shape[1])
    paths = set()
    for row, ids in enumerate(batch.input_ids.tolist()):
        last = torch.where(visible[row], columns, 0).amax(1).maximum(columns).tolist()
        kept = [t for t, real in enumerate(batch.attention_mask[row].tolist()) if real]
        for t in kept:
            seen = [(s, ids[s], last[s]) for s in kept if s <= last[t]]
            paths.add((t, tuple(seen)))
    return len(paths)


TOGETHER = [[3, 40, 41, 42, 4, 5], [3, 40, 41, 42, 4, 6], [3, 40, 41, 43, 4, 5], [3, 40, 41], [3, 40, 41, 42, 4, 5]]
"""Two rows share a block; another block begins as theirs does, and a row ends inside of one."""
PREFIXES = [[40, 41, 42, 4, 5, 41, 6], [40, 41, 42, 4, 5, 41, 7], [40, 41, 4, 5], [40, 41, 43, 4, 6], [40, 41]]
SIDES: tuple[Side, ...] = ("right", "left")


def rows_of(form: str) -> list[list[int]]:
    return PREFIXES if "prefix" in form else TOGETHER


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """Padded on either side, and in sizes of another batch, on one compilation per kind of graph."""
    pair = Pair(Blocked(form).double())
    sides = SIDES[:1] if "prefix" in form else SIDES
    for side in sides:
        for rows in (rows_of(form), [[3, 4, *row] for row in TOGETHER[:3]]):
            batch = padded(rows, side)
            with in_case((side, len(rows))):
                assert_packed(pair.check(step_of(batch)), distinct(batch, form), layers=1)
    assert pair.check(step_of(padded(rows_of(form)))).stats["compiles"] <= 2 * len(sides)


ROWS = st.lists(st.lists(st.sampled_from([3, 4, FIRST_PATCH, FIRST_PATCH + 1]), min_size=2, max_size=9), min_size=1)


@settings(max_examples=12)
@given(ROWS, st.sampled_from(SIDES))
def test_drawn_rows(rows: list[list[int]], side: Side) -> None:
    form = "patches in a window"
    batch = padded(rows, side, length=9)
    checked = _pair(form).check(step_of(batch))
    assert checked.stats["fallback"] is None
    assert checked.stats["tokens"] == distinct(batch, form)


@functools.cache
def _pair(form: str) -> Pair:
    return Pair(Blocked(form).double())


@pytest.mark.parametrize("form", ["patches in a window", "a prefix of number 0"])
def test_a_causal_mask_is_wrong(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what comes as keys from outside."""
    original = emit_attention.boundary_of_blocks

    def nothing(*given: Any) -> Boundary:
        found = original(*given)
        return Boundary(found.k, found.v, found.hi, found.hi)

    monkeypatch.setattr(emit_attention, "boundary_of_blocks", nothing)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(Blocked(form).double(), step_of(padded(rows_of(form))))


def test_a_trie_that_splits_inside_a_block_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokens of two blocks are not one because these begin alike."""
    found: list[Tensor] = []

    def number(blocks: Any, grid: Any, keep: Any, keys: Any) -> Tensor:
        numbers = call_plan_number(blocks, grid, keep, keys)
        assert numbers is not None
        found.append(numbers)
        return torch.where(numbers >= 0, 0, -1)

    call_plan_number = call_plan.number_blocks
    monkeypatch.setattr(call_plan, "number_blocks", number)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(Blocked("patches").double(), step_of(padded(TOGETHER)))
    assert len(found[0].unique()) == 4  # two whole blocks, one cut off, and tokens outside of blocks


class Numbered(Blocked):
    """Use the types as numbers of blocks."""

    def __init__(self) -> None:
        super().__init__("patches")
        self.see = lambda types: causal(types) | same_block(types)


@pytest.mark.parametrize("numbers", [[-1, 0, -1, 0, -1], [0, 1, 0, 1, 0]])
def test_blocks_that_come_again_run_on_rows(numbers: list[int]) -> None:
    """Their tokens are no run of a row; other numbers of the same graph run packed."""
    model, batch = Numbered().double(), padded([[3, 4, 5, 6, last] for last in (7, 8, 7)])
    pair = Pair(model)
    for given_numbers, packed in ((numbers, False), ([-1, 0, 0, 5, 5], True)):
        types = torch.tensor(given_numbers).expand(3, 5)
        stats = pair.check(lambda m: m(batch.input_ids, types, batch.attention_mask, batch.labels).loss).stats
        assert (stats["ran"] == "packed") == packed
        assert packed or "no runs of a row" in stats["fallback"]


def test_inductor() -> None:
    batch = padded(TOGETHER)
    checked = compare(Blocked("patches in a window"), step_of(batch), inner="inductor", tolerance=FLOAT32)
    assert_packed(checked, distinct(batch, "patches in a window"), layers=1)


def test_a_forest_in_use_is_refused() -> None:
    forest = treefx.Forest.from_sequences(TOGETHER)

    class OnIds(Blocked):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
            types = (input_ids >= FIRST_PATCH).long()
            return self.text(input_ids, self.see(types)[:, None], position_ids=position_ids).logits

    with treefx.use(forest), pytest.raises(Exception, match="block"):
        compile_with(OnIds("patches").double())(**forest.model_inputs())
