"""Calls that lose sharing warn, once per compiled object, with the reason, the user's line and the loss."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.inspection.situations import LM, compiled, ids_of, train
from treefx.runtime.lost_sharing.distinct_tokens import CallRows, Counts
from treefx.runtime.lost_sharing.graph_breaks import find_break
from treefx.runtime.lost_sharing.warned import warn_once

DISTINCT, RAW = 6 + 4 * 3, 4 * 9


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the warnings about lost sharing inside."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", treefx.SharingWarning)
        yield texts
    texts += [str(item.message) for item in caught if item.category is treefx.SharingWarning]


ROWS = "every row of LM separately"
REASONS = {
    "not causal": (ROWS, "scaled_dot_product_attention: attention that is not proved causal"),
    "dropout": (ROWS, "dropout", "F.dropout(x, 0.1)"),
    "mean": ("1 of 2 attention layers of LM on rows", "aten.mean.dim: mixes positions", "x.mean(1, keepdim=True)"),
    "break in the loop": (ROWS, "could not capture LM.forward", "compiled Block.forward separately", "treefx.convert"),
    "break before the blocks": (ROWS, "could not capture LM.forward", "compiled the rest separately", "treefx.convert"),
    "break behind the blocks": (
        "a part of LM on every row",
        "could not capture LM.forward",
        "compiled the rest separately",
        "treefx.convert",
    ),
}


@pytest.mark.parametrize("what", REASONS)
def test_a_model_that_loses_sharing_warns_once(what: str) -> None:
    """Also when it is compiled again for another length, and in a second graph of the same model."""
    model = compiled(what)
    with warned() as texts:
        for ids in (ids_of(), ids_of(), ids_of(columns=11)):
            train(model, ids)
        with torch.no_grad():
            model(input_ids=ids_of())
    (text,) = texts
    assert all(part in text for part in REASONS[what]), text
    assert "situations.py:" in text and "treefx.inspect(model)" in text
    assert f"{RAW} tokens, of which {DISTINCT} are distinct (sharing ratio {RAW / DISTINCT:.2f})" in text
    assert "no input [B, T]" not in text
    if "break" in what:
        assert ("`torch._dynamo.graph_break()`" if "loop" in what else "`x = outside(x)`") in text
        assert "no input [B, T]" not in treefx.inspect(model).stats["fallback"]


class Behind(nn.Module):
    """All attention of a language model runs packed; ``what`` is done to the hidden states behind it."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lm, self.what = LM(), what

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.lm.embedding(input_ids)
        for block in self.lm.blocks:
            x = block(x)
        logits: Tensor = self.lm.head(self.what(x))
        return logits.logsumexp(-1).sum()


def next_token_too(x: Tensor) -> Tensor:
    """As heads that predict several tokens: a later position is read."""
    return x[:, :-1] + x[:, 1:]


BEHIND: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dropout": (lambda x: nn.functional.dropout(x, 0.1), "aten.native_dropout"),
    "later positions": (next_token_too, "aten.slice.Tensor: mixes positions"),
    "one vector per row": (lambda x: x[:, -1], ""),
    "the mean of a row": (lambda x: x.mean(1), ""),
    "nothing": (lambda x: x, ""),
}


@pytest.mark.parametrize("name", BEHIND)
def test_a_head_on_rows_behind_packed_attention_warns(name: str) -> None:
    """A head on one vector per row has nothing to share, and is quiet."""
    what, reason = BEHIND[name]
    model = torch.compile(Behind(what), backend="treefx", options={"inner": "eager"})
    with warned() as texts:
        for _ in range(2):
            model(input_ids=ids_of()).backward()
    stats = treefx.inspect(model).stats
    assert stats["ran"] == "packed" and stats["attention_rewritten"] == 2 == stats["attention_layers"]
    if not reason:
        assert texts == []
        return
    (text,) = texts
    assert "a part of Behind on rows (products with weights: 1)" in text and reason in text and __file__ in text


class Flat(nn.Module):
    """Takes ids [T] of several sequences, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = LM()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.lm.embedding(input_ids) + position_ids[:, None]
        q, apart = x[None, None], position_ids.cummin(0).values * 0.0
        y = nn.functional.scaled_dot_product_attention(q, q, q, apart[None] + apart[:, None])
        logits: Tensor = self.lm.head(y[0, 0])
        return logits


def test_ids_without_a_dimension_of_rows_lose_sharing() -> None:
    model = torch.compile(Flat(), backend="treefx", options={"inner": "eager"})
    ids = ids_of()
    with warned() as texts:
        for _ in range(2):
            model(input_ids=ids.flatten(), position_ids=torch.arange(9).repeat(4))
    (text,) = texts
    assert "every row of Flat" in text and "ids[None] is a row" in text and f"{DISTINCT} are distinct" in text


def test_the_warning_stands_at_the_call_of_the_user() -> None:
    model = compiled("not causal")
    with pytest.warns(treefx.SharingWarning) as caught:
        model(input_ids=ids_of())
    assert caught[0].filename == __file__


def test_two_models_of_one_class_warn_each() -> None:
    """They share the compiled graph."""
    first, second = compiled("not causal"), compiled("not causal")
    with warned() as texts:
        for model in (first, second, first, second):
            train(model, ids_of())
    assert len(texts) == 2


class Pooled(nn.Module):
    """No token ids, and a graph break: a general function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def generate(model: Any) -> None:
    with torch.no_grad():
        model(input_ids=torch.ones((4, 1), dtype=torch.int64))


class Seeing(nn.Module):
    """Images in front of a model of tokens: Dynamo breaks there, and no token runs on rows because of it."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.lm = Pooled(), LM()

    def forward(self, input_ids: Tensor, pixels: Tensor) -> Tensor:
        seen = self.tower(pixels).mean()
        logits: Tensor = self.lm(input_ids)
        return logits + seen


QUIET: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "no two rows share a prefix": (lambda: compiled("not causal"), lambda model: train(model, ids_of(shared=0))),
    "below min_sharing": (lambda: compiled("not causal", min_sharing=2.5), lambda model: train(model, ids_of())),
    "one token a row": (lambda: compiled("not causal"), generate),
    "everything shared": (compiled, lambda model: train(model, ids_of())),
    "shares too little": (lambda: compiled(min_sharing=9.0), lambda model: train(model, ids_of())),
    "images in front": (
        lambda: torch.compile(Seeing(), backend="treefx", options={"inner": "eager"}),
        lambda model: [model(input_ids=ids_of(), pixels=torch.randn(7, 5)) for _ in range(2)],
    ),
    "no token ids": (
        lambda: torch.compile(Pooled(), backend="treefx", options={"inner": "eager"}),
        lambda model: model(torch.randn(4, 5)),
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_calls_that_lose_nothing_are_quiet(name: str) -> None:
    make, call = QUIET[name]
    with warned() as texts:
        call(make())
    assert texts == []


def test_a_later_call_that_loses_sharing_warns() -> None:
    """The first ones share nothing; calls 1, 2, 4, 8, ... on rows are counted."""
    model = compiled("not causal")
    with warned() as texts:
        for shared in (0, 0, 0, 6, 6):
            train(model, ids_of(shared))
    assert len(texts) == 1


def test_the_report_counts_what_calls_on_rows_could_have_shared() -> None:
    model = compiled("not causal")
    for shared in (6, 6, 3):  # the third is counted when the report is read
        ids = ids_of(shared)
        train(model, ids)
    stats = treefx.inspect(model).stats
    assert (stats["raw_tokens"], stats["tokens"], stats["distinct_tokens"]) == (RAW, RAW, 3 + 4 * 6)
    assert stats["sharing_ratio"] == 1.0 and stats["possible_ratio"] == pytest.approx(RAW / 27)
    assert "27 are distinct: sharing ratio 1.33 is possible" in treefx.inspect(model).summary()
    train(model, ids)
    ids.zero_()  # a buffer that the caller overwrites: its rows are not those of the call any more
    assert treefx.inspect(model).stats["distinct_tokens"] is None


def test_the_loss_of_a_model_without_token_ids_is_that_of_a_counted_call() -> None:
    model = compiled("break in the loop")
    for shared in (0, 6, 0):  # the second one is counted
        train(model, ids_of(shared))
    stats, summary = treefx.inspect(model).stats, treefx.inspect(model).summary()
    assert (stats["raw_tokens"], stats["distinct_tokens"]) == (RAW, DISTINCT)
    assert stats["counted_call"] == 2 and "in call 2" in summary


def test_rows_of_a_packed_sequence_and_padding_are_counted_apart() -> None:
    ids = torch.tensor([[7, 8, 9, 7, 8, 5]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = CallRows.find({"input_ids": ids, "position_ids": positions})
    assert packed is not None and packed.counts is not None
    assert (packed.counts.raw_tokens, packed.counts.distinct_tokens) == (6, 4)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    padded = CallRows.find({"labels": ids, "input_ids": torch.tensor([[3, 4, 5], [4, 5, 6]]), "attention_mask": mask})
    assert padded is not None and padded.counts is not None
    assert (padded.counts.raw_tokens, padded.counts.distinct_tokens) == (5, 3)
    assert CallRows.find({"input_ids": ids, "past": torch.zeros(1, 2, 3, 4)}) is None
    assert CallRows.find({"labels": ids}) is None
    assert CallRows.find({"ends": torch.tensor([3, 6]), "positions": positions[0]}) is None


def test_a_graph_break_in_a_called_module_names_its_line() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = LM("break before the blocks")

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.lm(input_ids) * 2

    model = torch.compile(Outer(), backend="treefx", options={"inner": "eager"})
    with warned() as texts:
        model(input_ids=ids_of())
    (text,) = texts
    assert "every row of Outer" in text and "situations.py:" in text and "`x = outside(x)`" in text


class Stopped(nn.Module):
    """Dynamo skips ``forward`` because of one of two lines in its loop."""

    def __init__(self, reads_a_number: bool) -> None:
        super().__init__()
        self.lm, self.reads_a_number = LM(), reads_a_number

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.lm.embedding(input_ids)
        for block in self.lm.blocks:
            x = block(x)
            if self.reads_a_number:
                assert x.mean().item() is not None
            else:
                torch._dynamo.graph_break()
        logits: Tensor = self.lm.head(x)
        return logits


def test_a_function_that_is_analysed_again_gets_the_line_of_its_last_analysis() -> None:
    """One model with one line, then another, as a user meets them who takes out the first one."""
    lines = ((True, "x.mean().item()"), (False, "`torch._dynamo.graph_break()`"), (True, ".item()"))
    for reads_a_number, line in lines:
        torch._dynamo.reset()
        model = torch.compile(Stopped(reads_a_number), backend="treefx", options={"inner": "eager"})
        with warned() as texts:
            model(input_ids=ids_of())
        assert len(texts) == 1 and line in texts[0], texts


def test_dynamo_without_its_records_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are private: other versions may have none."""
    monkeypatch.delattr("torch._dynamo.utils.graph_break_reasons")
    monkeypatch.delattr("torch._dynamo.utils.get_compilation_metrics")
    assert find_break(torch.fx.symbolic_trace(lambda x: x)) is None


def test_what_cannot_be_remembered_warns_each_time() -> None:
    """A callable without weak references or a hash: the report of its graph remembers the warning instead."""
    with warned() as texts:
        for _ in range(2):
            warn_once([], "every row of {}", "a reason", Counts(4, 2))
    assert len(texts) == 2 and "every row of list: a reason; this call has 4 tokens" in texts[0]
