"""A model that Dynamo cuts between embeddings and layers: the graphs behind know by what tokens are told apart.

The packed graph gives the gradient of all rows of a token to one of them. Behind the cut that is exact for the
parameters alone, so that a caller who looks at the gradient of what goes over the cut gets rows.
"""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.support import Pair, compare, compile_with, in_case
from tests.batches import Batch, Side, distinct_tokens, distinct_with_padding, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT64, Step
from tests.spellings import PADDED
from treefx.errors import UnsupportedError
from treefx.passes.analysis import Analysis
from treefx.runtime import output_keys
from treefx.runtime.ways import between


class Cut(nn.Module):
    """A layer with a cut behind the embeddings, and one in front of the head.

    Args:
        look: Called with what goes over the first cut.
        behind: Called with what goes over the second one; the loss adds what it returns.
    """

    def __init__(
        self,
        look: Callable[[Tensor], Any] | None = None,
        behind: Callable[[Tensor], Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.look = TinyLM(PADDED["sdpa_padding"], layers=1, width=16), look
        self.behind = behind

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, places: Tensor | None = None) -> Tensor:
        model = self.text
        x = model.embed(ids)
        x = x + model.place(torch.arange(ids.shape[1])) if places is None else x
        torch._dynamo.graph_break()
        x = x if places is None else x + model.place(places)
        if self.look is not None:
            self.look(x)
        for block in model.blocks:
            x = block(x, mask)
        torch._dynamo.graph_break()
        more = None if self.behind is None else self.behind(x)
        logits = model.head(model.norm(x))[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return loss if more is None else loss + more


class Masked(nn.Module):
    """Layers behind a cut, and a mask [B, 1, T, T] from in front of it: as where rotations ask for a number."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place, self.head = nn.Embedding(61, 16), nn.Embedding(64, 16), nn.Linear(16, 61)
        self.mixes, self.window = nn.ModuleList(nn.Linear(16, 48) for _ in range(2)), window

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.place(places)
        seen = (places <= places[:, None]) & mask.bool()[:, None, None]
        seen = seen if self.window is None else seen & (places[:, None] - places < self.window)
        torch._dynamo.graph_break()
        for mix in self.mixes:
            q, k, v = mix(x).unflatten(2, (6, 8)).transpose(1, 2).chunk(3, 1)
            x = x + F.scaled_dot_product_attention(2 * q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        torch._dynamo.graph_break()
        logits = self.head(x)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def step_of(batch: Batch) -> Step:
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    return lambda model: model(batch.input_ids, mask, batch.labels)


def batch_of(side: Side | None = None, **sizes: int) -> Batch:
    return shared_batch(**{"rows": 4, "length": 14, "shared": 6, "vocab": 61, **sizes}, padding=side)


def test_all_graphs_share() -> None:
    """Several batches on one compilation, without padding: nothing but the head reads what the layers return."""
    pair = Pair(Cut().double())
    for rows, length, side in ((4, 14, None), (6, 17, "right"), (5, 12, "left")):
        batch = batch_of(side, rows=rows, length=length)
        with in_case(f"{rows} rows, padded {side}"):
            stats = pair.check(step_of(batch)).stats
            assert stats["tokens"] == distinct_tokens(batch) < stats["raw_tokens"]
            assert stats["attention_rewritten"] == 1 and stats["fallback"] is None
            assert not stats["warned"] and not stats["expansions"]
            reports = treefx.inspect(pair.compiled).reports
            assert [report.ran for report in reports if report.has_tokens] == ["ordinary", "packed", "packed"]


@pytest.mark.parametrize("window", [None, 3])
def test_a_mask_from_in_front_of_the_cut(window: int | None) -> None:
    """Only hidden states say there how many columns there are."""
    pair = Pair(Masked(window).double())
    for rows, length, side in ((4, 14, None), (5, 12, "right")):
        batch = batch_of(side, rows=rows, length=length)
        with in_case(f"{rows} rows, padded {side}"):
            stats = pair.check(step_of(batch)).stats
            assert stats["attention_rewritten"] == stats["attention_layers"] == 2 and not stats["expansions"]
            assert stats["tokens"] == distinct_tokens(batch)


def test_tokens_of_a_call_are_those_of_the_layers() -> None:
    """Not those of the head, which reads padding: it counts every position, and is compiled before other layers."""
    pair, batch = Pair(Cut().double()), batch_of("right")
    assert batch.attention_mask is not None
    for mask in (batch.attention_mask, batch.attention_mask.bool()):
        with in_case(mask.dtype):
            stats = pair.check(lambda model, mask=mask: model(batch.input_ids, mask, batch.labels)).stats
            assert stats["raw_tokens"] == int(mask.sum()) < mask.numel() and stats["graphs"] == 3


def test_positions_of_rows() -> None:
    """Rows that are padded on the left share, where they count their own positions."""
    sizes: list[tuple[int, int, Side]] = [(4, 14, "right"), (5, 12, "left")]
    for rows, length, side in sizes:
        batch = batch_of(side, rows=rows, length=length)
        assert batch.attention_mask is not None
        given = batch.input_ids, batch.attention_mask, batch.labels, (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
        stats = compare(Cut().double(), lambda model, given=given: model(*given)).stats
        assert stats["tokens"] == distinct_tokens(batch, "own") and stats["fallback"] is None


def test_positions_of_columns_taken_for_own_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of("left")
    torch.compiler.reset()
    monkeypatch.setattr(Analysis, "find_own_positions", lambda self, redundant=(): [])
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(Cut().double(), step_of(batch))


def _weigh(x: Tensor) -> Tensor:
    """Weigh every number differently, those of padding too."""
    return (x.square() * torch.linspace(0, 1, x.numel()).reshape(x.shape)).sum()


def _see(x: Tensor) -> None:
    found = float(x.detach()[:, -1].sum())
    assert found == found


BEHIND: dict[str, Callable[[Tensor], Tensor | None]] = {
    "a loss of all": _weigh,
    "a loss of the last column": lambda x: _weigh(x[:, -1]),
    "a change in place": lambda x: (x.mul_(2.0), None)[1],
    "numbers": _see,
    "a hook": lambda x: (x.register_hook(lambda grad: None), None)[1],
}


@pytest.mark.parametrize("behind", BEHIND)
def test_padding_that_is_read(behind: str) -> None:
    """Code between the layers and the head gets every position, and from the second call on within the call."""
    pair = Pair(Cut(behind=torch._dynamo.disable(BEHIND[behind])).double())
    for seed, rows in enumerate((4, 5 if behind == "a loss of all" else 4)):
        batch = batch_of("right", rows=rows, seed=seed)
        with in_case(rows):
            stats = pair.check(step_of(batch)).stats
            assert stats["attention_rewritten"] == 1
            assert stats["tokens"] == distinct_with_padding(batch.input_ids, batch.attention_mask)


def test_hooks_of_modules_get_all_positions_at_once() -> None:
    """A sharded model's hooks give weights back before they look at hidden states, so that nothing may run again."""
    batch, model = batch_of("right"), Cut().double()
    model.register_forward_hook(lambda module, args, result: None)
    pair = Pair(model)
    pair.check(step_of(batch))
    reports = treefx.inspect(pair.compiled).reports
    assert [report.calls for report in reports if report.has_tokens] == [1, 1, 1]
    assert pair.check(step_of(batch)).stats["tokens"] == distinct_with_padding(batch.input_ids, batch.attention_mask)


def test_padding_of_tokens_that_ran_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros, where nothing ran."""
    monkeypatch.setattr(between.RowsBetween, "rows", property(lambda self: self.packed.rows()))
    behind = torch._dynamo.disable(BEHIND["a loss of all"])
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(Cut(behind=behind).double(), step_of(batch_of("right")))


def test_what_goes_over_a_cut_is_freed() -> None:
    """Neither Dynamo nor a record of treefx keeps it."""
    seen: list[weakref.ref[Tensor]] = []
    model = compile_with(Cut(behind=torch._dynamo.disable(lambda x: seen.append(weakref.ref(x)))).double())
    for _ in range(2):
        step_of(batch_of("right"))(model).backward()
        gc.collect()
    assert len(seen) == 2 and all(x() is None for x in seen)


def test_other_keys_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of all rows taken for one, behind a cut."""
    note = output_keys.note_tokens
    zeros = lambda x, keys, **more: note(x, [torch.zeros_like(key) for key in keys], **more)  # noqa: E731
    monkeypatch.setattr(output_keys, "note_tokens", zeros)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(Cut().double(), step_of(batch_of()))


def _keep(kept: list[Tensor], x: Tensor) -> None:
    x.retain_grad()
    kept.append(x)


def _hang(kept: list[Tensor], x: Tensor) -> None:
    x.register_hook(kept.append)


@pytest.mark.parametrize("look", [_keep, _hang])
def test_gradients_that_are_looked_at(look: Callable[[list[Tensor], Tensor], None]) -> None:
    """What goes over a cut has a gradient for each row, where a caller wants to see it."""
    found = []
    for compiles in (False, True):
        kept: list[Tensor] = []
        model = Cut(torch._dynamo.disable(functools.partial(look, kept))).double()
        step_of(batch_of())(compile_with(model) if compiles else model).backward()
        found.append(kept[0] if look is _hang else kept[0].grad)
    assert found[0] is not None and found[1] is not None
    assert float((found[0] - found[1]).abs().max()) <= FLOAT64 * float(found[0].abs().max())


LATE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "hook": lambda loss, x: (x.register_hook(lambda grad: None), loss.backward()),
    "retain_grad": lambda loss, x: (x.retain_grad(), loss.backward()),
    "autograd.grad": lambda loss, x: torch.autograd.grad(loss, x),
}


@pytest.mark.parametrize("late", LATE)
def test_gradients_that_are_asked_for_behind_the_call_are_refused(late: str) -> None:
    kept: list[Tensor] = []
    model = Cut(torch._dynamo.disable(kept.append)).double()
    loss = step_of(batch_of())(compile_with(model))
    with pytest.raises(UnsupportedError, match="between two graphs"):
        LATE[late](loss, kept[0])


def test_gradients_of_parameters_alone() -> None:
    model = Cut().double()
    weights = [model.text.embed.weight, model.text.head.weight]
    expected = torch.autograd.grad(step_of(batch_of())(model), weights)
    found = torch.autograd.grad(step_of(batch_of())(compile_with(model)), weights)
    for x, y in zip(found, expected, strict=True):
        assert float((x - y).abs().max()) <= FLOAT64 * float(y.abs().max())


def test_values_that_are_changed_in_place() -> None:
    """What a graph left is not what the next one gets."""

    def change(x: Tensor) -> None:
        with torch.no_grad():
            x[1, 2] += 1

    batch = batch_of()
    stats = compare(Cut(torch._dynamo.disable(change)).double(), step_of(batch)).stats
    assert stats["attention_rewritten"] == 0
