"""Recurrences across cuts: states that enter parts from parts above, against every row on its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import treefx
from tests.backend.models.test_libraries import MODELS
from tests.backend.native import TakesCacheFlag
from tests.libraries import CALLS, double_with_libraries
from tests.mixers import CausalConvolution
from tests.models import TinyLM
from tests.oracle import FLOAT64, assert_close, compile_with, separate_rows, stats_of
from tests.planning.cuts import cut_at, random_cuts
from tests.planning.parts import (
    SHARED,
    TRAIN_AND_KV,
    assert_right_only_without,
    check_drawn_forests,
    run,
    weighted_forest,
)
from tests.planning.parts import reproducible as reproducible
from tests.spellings import SPELLINGS
from treefx.passes.cuts.boundary_kv import check_operators
from treefx.passes.trace import library_tree
from treefx.planning.execution import boundary
from treefx.runtime.cut import Cut

Compiled = tuple[nn.Module, Any]
STATE_DIMS = 5


class Recurrence(nn.Module):
    """A gated delta rule, or a state space whose heads share keys, as libraries name them."""

    def __init__(self, delta: bool) -> None:
        super().__init__()
        self.delta, self.inputs = delta, nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g, step = self.inputs(x).split([8, 8, 16, 4, 12], -1)
        q, k = (y.unflatten(-1, (2 if self.delta else 1, -1)) for y in (q, k))
        v, decay = v.unflatten(-1, (4, -1)), -F.softplus(g)
        beta = step[..., :4].sigmoid() if self.delta else None
        return x + F.pad(torch.ops.treefx.row_scan(q, F.normalize(k, dim=-1), v, decay, beta).flatten(2), (0, 16))


class Hybrid(nn.Module):
    """Two recurrences of different states with a convolution between them."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.Sequential(Recurrence(True), CausalConvolution(), Recurrence(False))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mixers(x)
        return mixed


@pytest.fixture(scope="module")
def hybrid() -> Compiled:
    torch.manual_seed(0)
    model = TakesCacheFlag(TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, before=Hybrid())).double()
    return model, compile_with(model, inner="eager")


def test_cuts_everywhere(hybrid: Compiled) -> None:
    """Parts of one token as well, siblings joined, and all modes, by two compilations."""
    model, compiled = hybrid
    forest = treefx.Forest.from_sequences(SHARED)
    expected = separate_rows(model, SHARED, [[1.0] * len(row) for row in SHARED])
    assert_close(run(compiled, model, cut_at(forest, range(forest.num_tokens))), expected, FLOAT64)
    forest, rows, weights = weighted_forest()
    assert_close(run(compiled, model, random_cuts(forest, 1, 0.3)), separate_rows(model, rows, weights), FLOAT64)
    stats = stats_of(compiled)
    assert stats["compiles"] == TRAIN_AND_KV
    assert stats["fallback"] is None


def test_random_forests(hybrid: Compiled) -> None:
    model, compiled = hybrid
    check_drawn_forests(model, compiled, 4)


@pytest.mark.parametrize("name", ["sparse_tree_attention", "row_scan", "library"])
def test_no_other_operator_crosses_cuts(name: str) -> None:
    """Neither between parts nor between ranks: attention to chosen keys, and recurrences on rows."""
    graph = fx.Graph()
    graph.output(graph.call_function(getattr(torch.ops.treefx, name).default, (graph.placeholder("x"),)))
    with pytest.raises(treefx.UnsupportedError, match=f"a known recurrence, but the model runs treefx.{name}"):
        check_operators(fx.GraphModule(nn.Module(), graph))


@pytest.mark.zoo
def test_library_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: each part runs the library's kernel once per level of its nodes, from the states above."""
    monkeypatch.setattr(library_tree, "_KEPT_WHOLE", {"cpu"})
    model = double_with_libraries("qwen3_next", num_hidden_layers=1, **MODELS["qwen3_next"])
    compiled, plan = compile_with(model, inner="eager"), cut_at(treefx.Forest.from_sequences(SHARED), {3, 5, 8, 10})
    expected = separate_rows(model, SHARED, [[1.0] * len(row) for row in SHARED])
    CALLS.clear()
    assert_close(run(compiled, model, plan), expected, FLOAT64)
    assert set(CALLS) == {"chunk_gated_delta_rule"}
    CALLS.clear()


# Wrong ways of crossing a cut -----------------------------------------------------------------------------------------


def from_zero(store: boundary.Store, crossings: Any, sizes: Any, like: Any) -> list[Tensor]:
    """Each part starts from states of zero."""
    found = gather(store, crossings, sizes, like)
    return [x * 0 if x.dim() == STATE_DIMS else x for x in found]


def of_another_path(store: boundary.Store, crossings: Any, sizes: Any, like: Any) -> list[Tensor]:
    found = gather(store, crossings, sizes, like)
    return [x.flip(1) if x.dim() == STATE_DIMS else x for x in found]


def no_relay(store: boundary.Store, crossings: Any, gradients: Any) -> None:
    """Gradients of states do not cross; those of keys, values and windows do."""
    add_gradients(store, crossings, [None if x is None or x.dim() == STATE_DIMS else x for x in gradients])


def last_part_alone(store: boundary.Store, crossings: Any, gradients: Any) -> None:
    """Parts on one state overwrite each other's gradients."""
    for item in crossings:
        for total in store._gradients.get(item.owner, ()):
            if total.dim() == STATE_DIMS:
                total.zero_()
    add_gradients(store, crossings, gradients)


def exits_above(cut: Cut, *args: Any) -> Any:
    """States leave one token too early."""
    cut.doors = cut.doors._replace(exits=(cut.doors.exits - 1).clamp(min=-1))
    return call(cut, *args)


gather, add_gradients, call = boundary.Store.gather, boundary.Store.add_gradients, Cut.call
PLACES: dict[Any, tuple[Any, str]] = {
    from_zero: (boundary.Store, "gather"), of_another_path: (boundary.Store, "gather"),
    no_relay: (boundary.Store, "add_gradients"), last_part_alone: (boundary.Store, "add_gradients"),
    exits_above: (Cut, "call"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", [None, *PLACES])
def test_wrong_states(wrong: Any, hybrid: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, compiled), forest = hybrid, treefx.Forest.from_sequences(SHARED)
    expected = separate_rows(model, SHARED, [[1.0] * len(row) for row in SHARED])
    if wrong is not None:
        owner, name = PLACES[wrong]
        monkeypatch.setattr(owner, name, wrong)
    got = run(compiled, model, cut_at(forest, {3, 5, 8, 10}))
    assert_right_only_without(wrong, got, expected)
