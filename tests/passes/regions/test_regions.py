"""Which layers are found to be equal, and how they are written as calls of one subgraph and back."""

import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from treefx.passes.packing import compile_inner
from treefx.passes.packing.compile_inner import Inner
from treefx.passes.pipeline import build_passes
from treefx.passes.regions.find_regions import LEAST, find_regions, pays_off
from treefx.passes.regions.loadable import LoadableSizes, fill_freely
from treefx.passes.regions.make_regions import call_regions, copy_without_regions, subgraphs
from treefx.passes.regions.own_results import borrowed_results, own_results
from treefx.passes.trace.fingerprint import recompute_tags

aten = torch.ops.aten


class Stack:
    """A graph of layers on x [3, 4], written operator by operator; those of layer i are of the module ``stack.i``."""

    def __init__(self) -> None:
        self.graph, self.mode, self.layer = fx.Graph(), FakeTensorMode(), -1
        self.inputs: list[Tensor] = []

    def placeholder(self, *shape: int, learned: bool = True) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        self.inputs.append(torch.randn(shape, dtype=torch.float64))
        node.meta["val"] = self.mode.from_tensor(self.inputs[-1].clone().requires_grad_(learned))
        return node

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*fx.node.map_arg(args, lambda item: item.meta["val"]))
        if self.layer >= 0:
            path = f"stack.{self.layer}.linear.0"
            node.meta["nn_module_stack"] = {"": ("L['self']", nn.Module), "x": (path, nn.Module)}
        return node

    def module(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(nn.Module(), self.graph)


Layer = Callable[[Stack, fx.Node, fx.Node], fx.Node]


def plain(put: Stack, x: fx.Node, w: fx.Node) -> fx.Node:
    return put(aten.add.Tensor, x, put(aten.relu.default, put(aten.mm.default, x, w)))


def stack_of(*layers: Layer, learned: bool = True) -> tuple[fx.GraphModule, Stack]:
    """``learned``: whether the first layer's operand needs a gradient."""
    put = Stack()
    x = put.placeholder(3, 4, learned=learned)
    weights = [put.placeholder(4, 4) for _ in layers]
    for put.layer, (layer, w) in enumerate(zip(layers, weights, strict=True)):
        x = layer(put, x, w)
    put.layer = -1
    return put.module(put(aten.sin.default, x)), put


def sizes(gm: fx.GraphModule) -> list[int]:
    return [len(kind) for kind in find_regions(gm)]


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_equal_layers_become_one_subgraph_and_come_back() -> None:
    gm, put = stack_of(*[plain] * 5)
    called = call_regions(gm, find_regions(gm))
    called.graph.lint()
    (body,) = subgraphs(called)
    assert targets(called) == [torch.ops.higher_order.invoke_subgraph, operator.getitem] * 5 + [aten.sin.default]
    assert targets(body) == [aten.mm.default, aten.relu.default, aten.add.Tensor]
    back = copy_without_regions(called)
    assert targets(back) == targets(gm)
    for run in (called, back):
        torch.testing.assert_close(run(*put.inputs), gm(*put.inputs), rtol=0, atol=0)


def test_few_layers_stay() -> None:
    gm, _ = stack_of(*[plain] * (LEAST - 1))
    assert sizes(gm) == []
    assert targets(call_regions(gm, [])) == targets(gm)


def with_number(number: float) -> Layer:
    return lambda put, x, w: put(aten.mul.Tensor, plain(put, x, w), number)


def drawing(put: Stack, x: fx.Node, w: fx.Node) -> fx.Node:
    return put(aten.mul.Tensor, plain(put, x, w), put(aten.rand_like.default, x))


def changing(put: Stack, x: fx.Node, w: fx.Node) -> fx.Node:
    return put(aten.add_.Tensor, plain(put, x, w), 1.0)


def returning_a_view(put: Stack, x: fx.Node, w: fx.Node) -> fx.Node:
    plain(put, x, w)
    return put(aten.view.default, x, [3, 4])


def through_others(put: Stack, x: fx.Node, w: fx.Node) -> fx.Node:
    """A layer that reads what something outside makes of it."""
    inside, put.layer = put.layer, -1
    outside = plain(put, x, w)
    put.layer = inside
    half = plain(put, outside, w)
    put.layer = -1
    outside = put(aten.cos.default, half)
    put.layer = inside
    return plain(put, outside, w)


def around_a_change(put: Stack, x: fx.Node, w: fx.Node) -> fx.Node:
    """A layer in whose midst its weight changes."""
    product, inside = put(aten.mm.default, x, w), put.layer
    put.layer = -1
    put(aten.mul_.Tensor, w, 2.0)
    put.layer = inside
    return put(aten.mm.default, product, w)


def detached(put: Stack, x: fx.Node, w: fx.Node) -> fx.Node:
    return plain(put, x, put(aten.detach.default, w))


@pytest.mark.parametrize("layer", [drawing, changing, returning_a_view, through_others, around_a_change])
def test_layers_that_cannot_be_called_stay(layer: Layer) -> None:
    assert sizes(stack_of(*[layer] * 5)[0]) == []


def test_layers_that_differ_are_of_different_kinds() -> None:
    assert sizes(stack_of(*[with_number(2.0), with_number(3.0)] * 4)[0]) == [4, 4]
    assert sizes(stack_of(*[with_number(float(i)) for i in range(5)])[0]) == []
    assert sizes(stack_of(*[plain, detached] * 4)[0]) == [4, 4]


def test_a_layer_below_which_nothing_is_trained_is_another() -> None:
    assert sizes(stack_of(*[plain] * 5)[0]) == [5]
    assert sizes(stack_of(*[plain] * 5, learned=False)[0]) == [4]


@pytest.mark.parametrize(("tagged", "found"), [(lambda i: True, [8]), (lambda i: i % 2 == 0, [4, 4])])
def test_checkpoint_tags_tell_layers_apart_and_reach_the_key(tagged: Callable[[int], bool], found: list[int]) -> None:
    gm, _ = stack_of(*[plain] * 8)
    for node in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
        layer = int(node.meta["nn_module_stack"]["x"][0].split(".")[1])
        if tagged(layer):
            node.meta |= {"recompute": 1, "ac_graph_id": layer}
    assert sizes(gm) == found
    assert len(recompute_tags(call_regions(gm, find_regions(gm)))) == 1


def test_values_made_between_the_operators_of_a_layer_come_before_it() -> None:
    """What all layers share is written where the first of them reads it."""
    put = Stack()
    x, weights = put.placeholder(3, 4), [put.placeholder(4, 4) for _ in range(4)]
    shared = None
    for put.layer, w in enumerate(weights):
        product = put(aten.mm.default, x, w)
        if shared is None:
            put.layer = -1
            shared = put(aten.cos.default, weights[0])
            put.layer = 0
        x = put(aten.mm.default, product, shared)
    gm = put.module(x)
    called = call_regions(gm, find_regions(gm))
    called.graph.lint()
    assert targets(called)[0] is aten.cos.default and len(subgraphs(called)) == 1
    torch.testing.assert_close(called(*put.inputs), gm(*put.inputs), rtol=0, atol=0)


def test_what_waits_for_a_layer_does_not_pass_a_change() -> None:
    """Early results of layers are read behind the layers; a weight that changes in between must not be read new."""
    put = Stack()
    x, other, weights = put.placeholder(3, 4), put.placeholder(4, 4), [put.placeholder(4, 4) for _ in range(4)]
    sides = []
    for put.layer, w in enumerate(weights):
        product = put(aten.mm.default, x, w)
        inside, put.layer = put.layer, -1
        sides.append(put(aten.mm.default, product, other))
        put.layer = inside
        x = put(aten.relu.default, product)
    put.layer = -1
    put(aten.mul_.Tensor, other, 2.0)
    gm = put.module(x, *sides)
    called = call_regions(gm, find_regions(gm))
    assert len(subgraphs(called)) == 1
    runs = [run(*[x.clone() for x in put.inputs]) for run in (called, gm)]
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def keeping() -> tuple[fx.GraphModule, list[Tensor]]:
    """Two calls of a subgraph as the partitioner leaves it: it returns what it keeps for the backward."""
    inner = Stack()
    x, w = inner.placeholder(3, 4), inner.placeholder(4, 4)
    y = inner(aten.mm.default, x, w)
    hidden = inner(aten.relu.default, y)
    parts = inner(aten.split.Tensor, hidden, 2, 1)
    results = (
        y, x, inner(aten.t.default, w), inner(aten.t.default, y), y,
        inner(operator.getitem, parts, 0), inner(operator.getitem, parts, 1),
    )  # fmt: skip
    body = inner.module(*results)
    outer = Stack()
    outer.mode = inner.mode
    h, kept = outer.placeholder(3, 4), []
    weights = [outer.placeholder(4, 4) for _ in range(2)]
    root = {"body": body}
    for w in weights:
        args = (outer.graph.get_attr("body"), "body", h, w)
        call = outer.graph.call_function(torch.ops.higher_order.invoke_subgraph, args)
        call.meta["val"] = tuple(node.meta["val"] for node in results)
        taken = [outer(operator.getitem, call, i) for i in range(len(results))]
        h, kept = taken[0], [*kept, *taken]
    outer.graph.output(tuple(kept))
    return fx.GraphModule(root, outer.graph), outer.inputs


def test_what_subgraphs_keep_is_read_where_it_lies() -> None:
    gm, inputs = keeping()
    expected = gm(*inputs)
    (body,) = subgraphs(gm)
    assert set(borrowed_results(body)) == {1, 2, 3, 4, 5, 6}, "inductor assumes that each of them owns its memory"
    own_results(gm)
    gm.graph.lint()
    assert borrowed_results(body) == {}
    torch.testing.assert_close(gm(*inputs), expected, rtol=0, atol=0)
    values = [node.meta["val"] for node in next(iter(gm.graph.find_nodes(op="output"))).args[0]]
    assert [(x.shape, x.stride()) for x in values] == [(x.shape, x.stride()) for x in expected]


def used_and_kept() -> tuple[fx.GraphModule, list[Tensor]]:
    """A subgraph whose result is read for the last time while a view of it, and it itself again, are kept."""
    inner = Stack()
    x, w = inner.placeholder(3, 4), inner.placeholder(4, 4)
    y = inner(aten.mm.default, x, w)
    results = (y, inner(aten.permute.default, y, [1, 0]), y)
    outer = Stack()
    outer.mode = inner.mode
    operands = outer.placeholder(3, 4), outer.placeholder(4, 4)
    body = outer.graph.get_attr("body")
    call = outer.graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", *operands))
    call.meta["val"] = tuple(node.meta["val"] for node in results)
    h, *kept = (outer(operator.getitem, call, i) for i in range(len(results)))
    outer.graph.output((outer(aten.sin.default, h), *kept))
    return fx.GraphModule({"body": inner.module(*results)}, outer.graph), outer.inputs


@pytest.mark.parametrize("owned", [True, False])
def test_inductor_gives_the_memory_of_a_result_away(monkeypatch: pytest.MonkeyPatch, owned: bool) -> None:
    """After its last use, even if aliased: without separate results, saved values are overwritten."""
    if not owned:
        monkeypatch.setattr(compile_inner, "own_results", lambda gm: None)
    gm, inputs = used_and_kept()
    expected: Any = gm(*inputs)
    fake = [node.meta["val"].detach() for node in gm.graph.find_nodes(op="placeholder")]
    compile_graph = compile_inner._observed_inductor(lambda stage, graph: None)
    with torch.no_grad(), V.set_fake_mode(fake[0].fake_mode), torch._inductor.config.patch(force_disable_caches=True):
        got = compile_graph(gm, fake)(list(inputs))
    right = [torch.allclose(x, y, rtol=1e-12, atol=0) for x, y in zip(got, expected, strict=True)]
    assert right == [True, owned, owned]


def test_fills_of_a_backward_are_loaded_from_code() -> None:
    graph = fx.Graph()
    n, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    tangent.meta["val"] = torch.zeros(2)
    like = {"dtype": torch.float64, "device": torch.device("cpu")}
    fill = graph.call_function(aten.full.default, ([2, n], 1.5), like)
    graph.output(graph.call_function(aten.mul.Tensor, (fill, tangent)))
    gm = fx.GraphModule({}, graph)
    with pytest.raises(RuntimeError, match="full"):
        pickle.loads(pickle.dumps(gm))
    LoadableSizes()(graph)
    gm.recompile()
    assert targets(pickle.loads(pickle.dumps(gm))) == [aten.new_full.default, aten.mul.Tensor]
    fill_freely(gm)
    assert fill.target is aten.full.default
    torch.testing.assert_close(gm(2, torch.ones(2)), torch.full((2, 2), 1.5, dtype=torch.float64))


def test_layers_that_pay_off() -> None:
    """Large ones on the CPU: what a call costs elsewhere was not measured."""

    def pays(width: int, device: str = "cpu") -> bool:
        put = Stack()
        with torch.device(device):
            x, weights = put.placeholder(3, width), [put.placeholder(width, width) for _ in range(LEAST)]
        for put.layer, w in enumerate(weights):
            x = plain(put, x, w)
        put.layer = -1
        (kind,) = find_regions(put.module(put(aten.sin.default, x)))
        return pays_off(kind)

    assert pays(512) and not pays(500) and not pays(512, "meta")


def test_the_pass_is_of_inductor() -> None:
    def names(inner: Inner, regions: bool | str = "auto") -> list[str]:
        return [item.name for item in build_passes(inner, regions=regions) if item.stage == "compile"]

    assert names(Inner("inductor")) == ["regions", "compile_inner"]
    for left_out in (names(Inner("inductor"), regions=False), names(Inner("aot_eager")), names(Inner("eager"))):
        assert left_out == ["compile_inner"]
    assert names(Inner("inductor", "reduce-overhead")) == ["compile_inner"]
