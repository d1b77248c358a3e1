"""What a model computes from the number of columns of its inputs: a forest's row has another one than its rows."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.native import Rows, TakesCacheFlag, native_loss, rollouts
from tests.models import TinyLM
from tests.oracle import FLOAT64, assert_close, compile_with, outcome, refused, separate_rows, stats_of
from treefx.runtime.ways import column_counts
from treefx.runtime.ways.column_counts import ColumnCounts

Layer = Callable[[Tensor], Tensor]
USES: dict[str, tuple[Layer, str]] = {
    "number": (lambda x: x * x.shape[1] / 5, "aten.mul.Tensor"),
    "quotient": (lambda x: x * (x.shape[1] // 3), "aten.mul.Tensor"),
    "root": (lambda x: x * x.shape[1] ** 0.5, "pow"),
    "last position": (lambda x: x * torch.arange(x.shape[1]).max(), "aten.max"),
    "element from the end": (lambda x: x * torch.arange(x.shape[1])[-1], "aten.select"),
    "ones": (lambda x: x * torch.ones(x.shape[1]).sum(), "aten.sum"),
    "filled": (lambda x: x * torch.full((), x.shape[1]), "aten.full"),
    "share of the row": (lambda x: x * (torch.arange(x.shape[1]) / x.shape[1])[:, None], "aten.div"),
    "grid": (lambda x: x * (x[..., :1] > torch.arange(x.shape[1]) / 50).sum(-1, keepdim=True), "aten.sum"),
    "features": (lambda x: x * x[..., : x.shape[1]].sum(-1, keepdim=True), "decides"),
    "branch": (lambda x: 2 * x if x.shape[1] > 12 else x, "decides"),
    "epsilon": (lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-3 * x.shape[1]), "decides"),
    "loop": (lambda x: x * sum(1.0 for _ in range(x.shape[1])), "Python number"),
}
"""Layers [1, T, C] -> [1, T, C], and what the refusal says."""
HARMLESS: tuple[Layer, ...] = (
    lambda x: x * (1 + torch.arange(x.shape[1]))[:, None] / 20,
    lambda x: x * torch.ones(x.shape[1]).cumsum(0)[:, None] / 10,
    lambda x: x * (torch.arange(2 * x.shape[1])[: x.shape[1]] // 2 + 1)[:, None],
    lambda x: x.reshape(x.shape[0], x.shape[1], 4, -1).flip(2).flatten(2).view(x.shape),
    lambda x: x[:, -x.shape[1] :] * 2,
    lambda x: x + torch.ones(1, 1, x.shape[1]).repeat(3, 1, 1).view(1, 3, x.shape[1])[:, 1, :, None],
)
"""Positions, a running count, halves of positions, views, all tokens counted from the end, repeats."""


class _Layer(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class _Sdpa(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def model_with(layer: Layer) -> nn.Module:
    torch.manual_seed(0)
    return TakesCacheFlag(TinyLM(_Sdpa, layers=1, width=16, before=_Layer(layer))).double()


@pytest.mark.parametrize("name", USES)
def test_refused_by_name(name: str) -> None:
    layer, words = USES[name]
    compiled, forest = compile_with(model_with(layer), inner="eager"), treefx.Forest.from_sequences(rollouts())
    with refused("number of columns", words):
        native_loss(forest)(compiled)


def step_of(model: nn.Module, forest: treefx.Forest, compiled: Any) -> Any:
    return outcome(model, lambda: native_loss(forest)(compiled))


def ones(rows: Rows) -> list[list[float]]:
    return [[1.0] * len(row) for row in rows]


def test_harmless() -> None:
    """Exact, two forests through one compiled model, and nothing expanded."""
    model = model_with(lambda x: functools.reduce(lambda x, layer: layer(x), HARMLESS, x))
    compiled: Any = compile_with(model, inner="eager")
    for seed in (0, 1):
        rows = rollouts(seed)
        forest = treefx.Forest.from_sequences(rows)
        assert_close(step_of(model, forest, compiled), separate_rows(model, rows, ones(rows)), FLOAT64)
        assert stats_of(compiled)["tokens"] == forest.num_tokens


def test_a_branch_that_all_rows_take() -> None:
    """The condition is asked of the lengths of a forest's rows, not of its distinct tokens."""
    model = model_with(lambda x: 2 * x if x.shape[1] > 4 else x)
    compiled: Any = compile_with(model, inner="eager")
    rows = [row for row in rollouts() if len(row) > 4]
    forest = treefx.Forest.from_sequences(rows)
    assert_close(step_of(model, forest, compiled), separate_rows(model, rows, ones(rows)), FLOAT64)
    with refused("decides by the number of columns"):
        native_loss(treefx.Forest.from_sequences([*rows, [1, 2, 3]]))(compiled)


@pytest.mark.parametrize("part", ["find_column_count", "_check_guards"])
def test_wrong_without_the_proof(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_counts, "find_column_count", lambda gm: None)
    monkeypatch.setattr(ColumnCounts, "_check_guards", lambda *_: None)
    layer, _ = USES["number" if part == "find_column_count" else "branch"]
    model, rows = model_with(layer), rollouts()
    got = step_of(model, treefx.Forest.from_sequences(rows), compile_with(model, inner="eager"))
    with pytest.raises(AssertionError):
        assert_close(got, separate_rows(model, rows, ones(rows)), FLOAT64)


def test_numbers_where_dynamo_is_asked_for_them() -> None:
    """``dynamic=False``, and a mask that is not marked dynamic: a forest's columns are a symbol."""
    model, rows = model_with(HARMLESS[0]).model.double(), rollouts()
    options = {"inner": "eager", "min_sharing": 1.0}
    compiled = torch.compile(model, backend="treefx", options=options, dynamic=False)
    forest = treefx.Forest.from_sequences(rows)
    inputs = {name: x.clone() for name, x in forest.model_inputs().items()}
    with treefx.use(forest):
        logits = compiled(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits
    want = model(input_ids=torch.tensor([rows[0]])).logits
    torch.testing.assert_close(logits[0, forest.token_of[0]], want[0])


def test_parts_and_profiles() -> None:
    layer, words = USES["number"]
    compiled = compile_with(model_with(layer), inner="aot_eager")
    forest = treefx.Forest.from_sequences(rollouts())
    with refused("number of columns", words):
        treefx.profile(compiled, forest, lengths=(4, 8))
