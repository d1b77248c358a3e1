"""What the overlap pass makes of graphs, and which it leaves alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from treefx.errors import ConfigError
from treefx.passes.overlap import OverlapCollectives, Rates, overlap_collectives
from treefx.passes.overlap.cut_rows import ALIGNED, cut_lengths

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ROWS, WIDTH, RANKS = 150, 8, 2
ISSUED = (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default, c10d.all_gather_into_tensor.default)
GATE = Rates(flops_per_second=1e9, bytes_per_second=1e9, latency_seconds=1e-6)


def graph_of(function: Callable[..., Any], rows: int = ROWS) -> fx.GraphModule:
    """As AOTAutograd traces; nothing is sent."""
    inputs = torch.zeros(rows, WIDTH), torch.zeros(WIDTH, WIDTH)
    gm: fx.GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    return gm


def reduced(value: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(value, "sum", "0"))


def scattered(value: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(value, "sum", RANKS, "0"))


def gathered(value: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(value, RANKS, "0"))


def names(graph: fx.Graph, *targets: Any) -> list[str]:
    """The operators of a graph, in order, those of the given ones only."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [node.target._opname for node in calls if node.target in targets]


def products_meanwhile(graph: fx.Graph) -> list[int]:
    """For every collective, the products between its issue and its wait: what it can hide behind."""
    order = list(graph.nodes)
    issues = [node for node in order if node.target in ISSUED]
    spans = [order[order.index(node) : order.index(next(iter(node.users)))] for node in issues]
    return [sum(node.target is aten.mm.default for node in span) for span in spans]


CUT = {
    "all_reduce": lambda x, w: torch.relu(reduced(x @ w)),
    "views": lambda x, w: torch.relu(reduced((x @ w).view(1, ROWS, WIDTH)).view(ROWS, WIDTH)),
    "bias": lambda x, w: torch.relu(reduced(torch.addmm(w[0], x, w))),
    "sum of products": lambda x, w: torch.relu(reduced((x @ w).unsqueeze(0) + (x @ w.t()).unsqueeze(0))),
    "identity slice": lambda x, w: torch.relu(reduced(aten.slice(x @ w, 0, 0, ROWS))),
    "dead product": lambda x, w: [torch.relu(reduced(aten.clone(p := x @ w))), aten.relu(p)][0],
    "reduce_scatter": lambda x, w: torch.relu(scattered(x @ w)),
    "rows behind 1": lambda x, w: scattered(torch.cat((x @ w).view(1, ROWS, WIDTH).split(ROWS // RANKS, 1))).exp(),
    "all_gather": lambda x, w: gathered(x) @ w,
    "gathered, sliced": lambda x, w: aten.slice(gathered(x), 0, 0, RANKS * ROWS) @ w,
    "gathered, three readers": lambda x, w: ((g := gathered(x)) @ w, g @ w.t(), g.t() @ g),
}


@pytest.mark.parametrize("case", CUT)
@pytest.mark.parametrize("chunks", [2, 4])
def test_cut(case: str, chunks: int) -> None:
    gm = graph_of(CUT[case])
    before = [node.meta["val"].shape for node in gm.graph.find_nodes(op="output")[0].all_input_nodes]
    assert overlap_collectives(gm.graph, chunks) == 1
    assert len(names(gm.graph, *ISSUED)) == chunks
    assert [node.meta["val"].shape for node in gm.graph.find_nodes(op="output")[0].all_input_nodes] == before
    gm.recompile()


LEFT = {
    "no collective": lambda x, w: torch.relu(x @ w),
    "no product": lambda x, w: reduced(torch.relu(x)),
    "something between": lambda x, w: reduced(torch.relu(x @ w)),
    "read by another": lambda x, w: (reduced(p := x @ w), torch.relu(p)),
    "a view read by another": lambda x, w: (reduced((p := x @ w).view(1, ROWS, WIDTH)), torch.relu(p)),
    "a matrix as bias": lambda x, w: reduced(torch.addmm(x, x, w)),
    "a real slice": lambda x, w: reduced((x @ w)[: ROWS // 2]),
    "a number added": lambda x, w: reduced(x @ w + 1.0),
    "a vector added": lambda x, w: reduced(x @ w + w[0]),
    "rows of two rows of a batch": lambda x, w: scattered(torch.cat((x @ w).view(2, 75, WIDTH).split(25, 1))),
    "parts out of order": lambda x, w: scattered(torch.cat((x @ w).view(1, ROWS, WIDTH).split(75, 1)[::-1])),
    "gathered, then added to": lambda x, w: gathered(x) @ w + 1.0,
    "gathered on the right": lambda x, w: w @ gathered(x).t(),
    "gathered for the gradient of a weight": lambda x, w: gathered(x).t() @ gathered(x),
}


@pytest.mark.parametrize("case", LEFT)
def test_left_alone(case: str) -> None:
    gm = graph_of(LEFT[case])
    before = str(gm.graph)
    assert overlap_collectives(gm.graph, 4) == 0
    assert str(gm.graph) == before


@pytest.mark.parametrize("case", ["all_reduce", "reduce_scatter", "all_gather"])
def test_left_alone_where_rows_are_too_few(case: str) -> None:
    gm = graph_of(CUT[case], rows=RANKS * ALIGNED - 2)
    assert overlap_collectives(gm.graph, 4) == 0 if case != "all_reduce" else True
    assert overlap_collectives(graph_of(CUT[case], rows=ALIGNED).graph, 4) == 0


def test_each_chunk_is_sent_at_once_and_waited_for_behind_the_last() -> None:
    gm = graph_of(CUT["all_reduce"])
    overlap_collectives(gm.graph, 4)
    order = names(gm.graph, aten.mm.default, c10d.wait_tensor.default, *ISSUED)
    assert order == ["mm", "all_reduce"] * 4 + ["wait_tensor"] * 4
    assert products_meanwhile(gm.graph) == [3, 2, 1, 0]


def test_each_chunk_is_computed_while_the_next_is_gathered() -> None:
    gm = graph_of(CUT["all_gather"])
    overlap_collectives(gm.graph, 4)
    order = names(gm.graph, aten.mm.default, c10d.wait_tensor.default, *ISSUED)
    assert order == ["all_gather_into_tensor"] * 4 + ["wait_tensor", "mm"] * 4
    assert products_meanwhile(gm.graph) == [0, 1, 2, 3]


def test_waits_behind_work_that_does_not_read_them() -> None:
    gm = graph_of(lambda x, w: (y := reduced(x @ w), z := x @ w.t(), torch.relu(y) + z)[2])
    overlap_collectives(gm.graph, 2)
    assert products_meanwhile(gm.graph) == [2, 1]


def test_waits_right_behind_the_issue_would_hide_nothing() -> None:
    gm = graph_of(CUT["all_reduce"])
    overlap_collectives(gm.graph, 4)
    for node in list(gm.graph.nodes):
        if node.target in ISSUED:
            node.append(next(iter(node.users)))
    assert products_meanwhile(gm.graph) == [0, 0, 0, 0]


@pytest.mark.parametrize("rows", [16, 32, 100, 150, 1000, 2047])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8, 200])
def test_cuts_are_aligned_and_pieces_long_enough(rows: int, chunks: int) -> None:
    lengths = cut_lengths(rows, chunks)
    assert sum(lengths) == rows and len(lengths) <= chunks
    assert all(length % ALIGNED == 0 for length in lengths[:-1])
    assert min(lengths) >= min(rows, ALIGNED)


def test_gate_cuts_where_it_pays_only() -> None:
    assert GATE.best(flops=1e9, size=1e9) == 8
    assert GATE.best(flops=1e9, size=1e6) == 1  # nothing to hide
    assert GATE.best(flops=1e3, size=1e3) == 1  # the latency of each chunk is all there is
    alone = Rates(flops_per_second=1e9, bytes_per_second=1e9, hidden=0.0)
    assert alone.best(flops=1e9, size=1e9) == 1  # a machine that does one after the other


@pytest.mark.parametrize("flops", [1e5, 1e7, 1e9])
@pytest.mark.parametrize("size", [0.0, 1e4, 1e7, 1e9])
def test_gate_expects_a_gain_or_leaves_alone(flops: float, size: float) -> None:
    best = GATE.best(flops, size)
    assert best == 1 or GATE.seconds(flops, size, best) < 0.98 * GATE.seconds(flops, size, 1)


def test_gate_asks_rates_for_a_number() -> None:
    slow = Rates(flops_per_second=1e6, bytes_per_second=1e6)
    assert overlap_collectives(graph_of(CUT["reduce_scatter"]).graph, slow) == 1
    nothing_hidden = Rates(flops_per_second=1e6, bytes_per_second=1e6, hidden=0.0)
    assert overlap_collectives(graph_of(CUT["reduce_scatter"]).graph, nothing_hidden) == 0


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="expected a number of chunks of at least 1, or Rates"):
        OverlapCollectives(0)
    with pytest.raises(ConfigError, match="expected rates above 0"):
        Rates(flops_per_second=float("nan"), bytes_per_second=1.0)


def test_caches_tell_passes_apart() -> None:
    keys = [OverlapCollectives(chunks).uuid() for chunks in (2, 4, GATE, 2)]
    assert keys[0] == keys[3]
    assert len(set(map(str, keys))) == 3
