"""What the planner counts for attention on a CUDA device that need not be there: never less than launches allocate."""

from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("triton")

from tests.kernels.gpu.test_launches import SCORE, device, poisoned_memory  # noqa: F401
from tests.kernels.gpu.test_triton_host import compiled  # noqa: F401 - a fixture
from tests.kernels.gpu.test_workspace import FORMS, counted, counted_forward, part, runner
from treefx.kernels.common import Inputs
from treefx.kernels.score import Expr, Score
from treefx.planning.cost.device import device_lists, device_workspace, uncounted
from treefx.planning.cost.graph_cost import Sizes, TrainGraphs, backward_rows, forward_rows
from treefx.planning.cost.liveness import size_expression
from treefx.planning.cost.model import Bytes

DISTANCE: Expr = ("sub", ("q",), ("k",))
NEAR = Score(SCORE.value, ("lt", DISTANCE, ("const", 64.0)))
TWICE = Score(("sub", SCORE.value, ("mul", DISTANCE, ("const", 0.5))), NEAR.visible)
"""Both its statements read the same of query and key."""
OPERATORS = {
    "forward": torch.ops.treefx.tree_attention.default,
    "backward": torch.ops.treefx.tree_attention_backward.default,
}


def graph_of(way: str, inputs: Inputs, place: str = "cuda", of: Score = SCORE) -> tuple[fx.GraphModule, fx.Node, Sizes]:
    """A graph of one attention with the heads of some inputs and unknown sizes, on a device."""
    env, graph = ShapeEnv(), fx.Graph()
    mode = FakeTensorMode(shape_env=env)
    tokens, outside = env.create_unbacked_symint(), env.create_unbacked_symint()

    def given(name: str, *shape: Any, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(*shape, dtype=dtype, device=place)
            if len(shape) == 4:
                node.meta["val"] = node.meta["val"].transpose(1, 2)
        return node

    def heads(name: str, count: Any, like: torch.Tensor) -> fx.Node:
        return given(name, 1, count, like.shape[1], like.shape[3])

    q, k, v = (heads(name, tokens, getattr(inputs, name)) for name in "qkv")
    shared = q, k, v, given("ends", tokens, dtype=torch.int32), [], None
    out, lse = heads("out", tokens, inputs.q), given("lse", 1, inputs.q.shape[1], tokens, dtype=torch.float32)
    score = of.to_json(), "auto"
    arguments = (*shared, *score) if way == "forward" else (out, *shared, out, lse, *score, [])
    if inputs.boundary is not None:
        keys = heads("bk", outside, inputs.k), heads("bv", outside, inputs.v)
        arguments += (*keys, *(given(name, outside, dtype=torch.int32) for name in ("lo", "hi")))
    node = graph.call_function(OPERATORS[way], arguments)
    node.meta["val"] = (q.meta["val"], lse.meta["val"])
    graph.output((node,))
    sizes = Sizes(size_expression(tokens), size_expression(outside), sympy.Symbol("outgoing"))
    return fx.GraphModule(torch.nn.Module(), graph), node, sizes


def at(expression: sympy.Expr, sizes: Sizes, inputs: Inputs) -> float:
    """The bytes that the planner reads from an expression, for a part of this size."""
    outside = 0 if inputs.boundary is None else inputs.boundary.k.shape[2]
    return Bytes([sizes.row(expression)])(inputs.q.shape[2], outside, 0)


@pytest.mark.parametrize(("seed", "form"), [(seed, [*FORMS][(seed + seed // 3) % 3]) for seed in range(20)])
def test_never_less_than_launches_allocate(seed: int, form: str, device: None) -> None:  # noqa: F811
    inputs = part(seed)
    forward, backward, lists = counted(runner(inputs, SCORE, form))
    (first, node, sizes), (second, again, sizes_again) = (graph_of(way, inputs) for way in ("forward", "backward"))
    assert at(device_workspace(node), sizes, inputs) >= forward
    assert at(device_workspace(again), sizes_again, inputs) >= backward
    most = at(device_lists(first), sizes, inputs) + at(device_lists(second), sizes_again, inputs)
    assert most >= lists


@pytest.mark.parametrize("of", [SCORE, TWICE])
def test_gluon_is_counted_unless_the_plain_form_is_asked_for(
    of: Score,
    device: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its descriptors, also of a boundary whose score shares values of pairs; queries are read where they lie."""
    inputs = next(inputs for inputs in map(part, range(1, 20, 2)) if inputs.q.shape[1] > inputs.k.shape[1])
    given = replace(runner(inputs, of, "two passes"), path="gluon")
    assert inputs.boundary is not None
    _, node, sizes = graph_of("forward", inputs, of=of)
    counts = {}
    for path in ("", "gluon", "plain"):
        monkeypatch.setenv("TREEFX_KERNEL_PATH", path)
        counts[path] = at(device_workspace(node), sizes, inputs)
    assert counts[""] == counts["gluon"] >= counted_forward(given)
    assert 0 < counts[""] - counts["plain"] < inputs.q.nbytes


ROWS = {"forward": forward_rows, "backward": lambda graphs, sizes: backward_rows(graphs, sizes)[0]}


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_rows_of_a_profile_hold_it(way: str, device: None) -> None:  # noqa: F811
    """Around attention all of it, at every operator the lists of tiles, which stay."""
    inputs = part(1)
    assert inputs.boundary is not None
    size = inputs.q.shape[2], inputs.boundary.k.shape[2], 0
    (gm, node, sizes), (bare, _, bare_sizes) = (graph_of(way, inputs, place) for place in ("cuda", "meta"))
    rows, without = (
        ROWS[way](TrainGraphs(None, found, found), symbols)  # type: ignore[arg-type]
        for found, symbols in ((gm, sizes), (bare, bare_sizes))
    )
    lists = at(device_lists(gm), sizes, inputs)
    assert Bytes(rows)(*size) - Bytes(without)(*size) == pytest.approx(
        lists + at(device_workspace(node), sizes, inputs)
    )
    assert min(Bytes([row])(*size) for row in rows) >= lists > 0


def test_layers_of_one_kind_share_their_lists(device: None) -> None:  # noqa: F811
    gm, node, _ = graph_of("forward", part(1))
    once = device_lists(gm)
    with gm.graph.inserting_after(node):
        gm.graph.call_function(node.target, node.args).meta["val"] = node.meta["val"]  # type: ignore[arg-type]
    assert device_lists(gm) == once
    with gm.graph.inserting_after(node):
        windowed = [NEAR.to_json() if item == SCORE.to_json() else item for item in node.args]
        gm.graph.call_function(node.target, tuple(windowed)).meta["val"] = node.meta["val"]  # type: ignore[arg-type]
    assert device_lists(gm) == 2 * once


def test_float64_is_left_to_the_measured_parts(device: None) -> None:  # noqa: F811
    gm, node, _ = graph_of("forward", part(1))
    for source in node.args[:3]:
        source.meta["val"] = source.meta["val"].double()  # type: ignore[union-attr]
    assert device_workspace(node) == device_lists(gm) == 0
    assert uncounted(gm) == ["attention in float64"]


def test_gradients_of_learned_biases_are_named(device: None) -> None:  # noqa: F811
    gm, node, _ = graph_of("backward", part(1))
    assert uncounted(gm) == []
    node.args = tuple([True] if item == [] else item for item in node.args)
    assert uncounted(gm) == ["the gradient of a learned bias"]


def test_one_pass_is_counted_where_it_may_be_taken(device: None) -> None:  # noqa: F811
    """Its sums are float32 ``[B * Hkv, rows, features]``; deterministic runs pay none of them.

    But for the descriptors of Gluon, which one pass has not.
    """
    inputs = part(0)
    _, node, sizes = graph_of("backward", inputs)
    free = at(device_workspace(node), sizes, inputs)
    node.kwargs = {"deterministic": True}
    fixed = at(device_workspace(node), sizes, inputs)
    sums = inputs.q.shape[1] * inputs.q.shape[2] * inputs.q.shape[3] * 4
    assert 0.9 * sums < free - fixed < 1.1 * sums
