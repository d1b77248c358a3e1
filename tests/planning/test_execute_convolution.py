"""Convolutions along the tree across cuts: windows that begin in parts above, against every row on its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import treefx
from tests.backend.native import TakesCacheFlag
from tests.mixers import CausalConvolution
from tests.models import TinyLM, double
from tests.oracle import FLOAT64, assert_close, compile_with, separate_rows, stats_of
from tests.planning.cuts import cut_at, every_node, random_cuts
from tests.planning.parts import (
    SHARED,
    TRAIN_AND_KV,
    assert_right_only_without,
    check_drawn_forests,
    plans_of,
    run,
    weighted_forest,
)
from tests.planning.parts import reproducible as reproducible
from tests.spellings import SPELLINGS
from treefx.passes.cuts.boundary_windows import find_windows
from treefx.planning.execution import boundary
from treefx.runtime.cut import Cut

Compiled = tuple[nn.Module, Any]


class TwoConvolutions(nn.Module):
    """A window of three tokens by channel, then one of five with a gap of two that mixes channels in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = CausalConvolution(), nn.Conv1d(32, 32, 3, padding=4, dilation=2, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.second(x.transpose(1, 2))[..., : x.size(1)].transpose(1, 2).tanh()


@pytest.fixture(scope="module")
def convolving() -> Compiled:
    torch.manual_seed(0)
    model = TakesCacheFlag(TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, before=TwoConvolutions())).double()
    return model, compile_with(model)


def test_cuts_everywhere(convolving: Compiled) -> None:
    """Parts of one token as well: windows then reach through several parts."""
    (model, compiled), (forest, rows, weights) = convolving, weighted_forest()
    expected = separate_rows(model, rows, weights)
    for plan in plans_of(forest):
        assert_close(run(compiled, model, plan), expected, FLOAT64)
    stats = stats_of(compiled)
    assert stats["compiles"] == TRAIN_AND_KV
    assert stats["fallback"] is None


def test_random_forests(convolving: Compiled) -> None:
    model, compiled = convolving
    check_drawn_forests(model, compiled, 8)


@pytest.mark.zoo
def test_lfm2() -> None:
    """One block with a convolution, one with attention."""
    model, (forest, rows, weights) = double("lfm2"), weighted_forest()
    assert set(model.config.layer_types) == {"conv", "full_attention"}
    compiled, expected = compile_with(model, inner="eager"), separate_rows(model, rows, weights)
    for plan in (every_node(forest), random_cuts(forest, 1, 0.3)):
        assert_close(run(compiled, model, plan), expected, FLOAT64)
    assert stats_of(compiled)["compiles"] == TRAIN_AND_KV


# Wrong ways of crossing a cut -----------------------------------------------------------------------------------------


def end_at_the_cut(own: Tensor, outside: Tensor, nothing: Tensor) -> list[Tensor]:
    """Windows read zeros above the part."""
    return [torch.where(own < len(own), own, nothing), outside, nothing]


def one_token_across(own: Tensor, outside: Tensor, nothing: Tensor) -> list[Tensor]:
    """The boundary has no parents, so that windows reach one token across the cut."""
    return [own, nothing.expand(len(outside)), nothing]


def the_token_before(own: Tensor, outside: Tensor, nothing: Tensor) -> list[Tensor]:
    """Parents are the tokens before in the part, whatever branch these are of."""
    return [torch.where(torch.arange(len(own)) > 0, torch.arange(len(own)) - 1, own), outside, nothing]


def no_relay(store: boundary.Store, crossings: Any, gradients: Any) -> None:
    """Gradients of what windows read above the cut do not cross; those of keys and values do."""
    add_gradients(store, crossings, [x if number < 2 else None for number, x in enumerate(gradients)])


add_gradients = boundary.Store.add_gradients


@pytest.mark.parametrize("wrong", [None, end_at_the_cut, one_token_across, the_token_before, no_relay])
def test_wrong_windows(wrong: Any, convolving: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, compiled), forest = convolving, treefx.Forest.from_sequences(SHARED)
    expected = separate_rows(model, SHARED, [[1.0] * len(row) for row in SHARED])
    call = Cut.call

    def spoiled(cut: Cut, *args: Any) -> Any:
        given = cut.parents()
        cut.parents = lambda: wrong(*given)
        return call(cut, *args)

    if wrong is no_relay:
        monkeypatch.setattr(boundary.Store, "add_gradients", no_relay)
    elif wrong is not None:
        monkeypatch.setattr(Cut, "call", spoiled)
    got = run(compiled, model, cut_at(forest, {3, 4}))
    assert_right_only_without(wrong, got, expected)


def test_what_reads_the_tree_otherwise_is_refused() -> None:
    """A gather that is no window: of the token itself and its parent in one, from a table without a row of zeros."""
    graph = fx.Graph()
    end, x = graph.placeholder("end"), graph.placeholder("x")
    parent = graph.call_function(torch.ops.aten.sub.Tensor, (end, 1))
    read = graph.call_function(torch.ops.aten.index_select.default, (x, 0, parent))
    graph.output((read,))
    end.meta["val"] = parent.meta["val"] = torch.zeros(4, dtype=torch.int64)
    x.meta["val"] = read.meta["val"] = torch.zeros(4, 2)
    with pytest.raises(treefx.UnsupportedError, match="reads the tree in another way"):
        find_windows(fx.GraphModule({}, graph), end)
