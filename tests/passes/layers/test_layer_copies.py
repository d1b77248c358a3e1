"""Equal layers are traced once and copied; what differs in anything is traced by itself."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import treefx
from tests.batches import shared_batch
from tests.models import double
from tests.oracle import FLOAT64, Outcome, assert_close, loss_of, outcome, stats_of
from treefx.passes.layers.copies import LayerCopies
from treefx.passes.layers.find_layers import Layer, exact, find_layers, key_of
from treefx.passes.packing import packed_layers
from treefx.passes.packing.pack_tokens import PackingInterpreter
from treefx.passes.trace import trace

IDS = torch.randint(0, 50, (6, 16), generator=torch.Generator().manual_seed(0))
IDS[:, :9] = IDS[0, :9]


class Block(nn.Module):
    """Attention and a product, with all that may tell it from its neighbour."""

    def __init__(self, scale: float = 0.5, window: int = 16, dtype: torch.dtype = torch.float64, counts: bool = False):
        super().__init__()
        self.scale, self.window, self.dtype = scale, window, dtype
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        if counts:
            self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)[:, None]
        column = torch.arange(x.shape[1])
        distance = column[:, None] - column
        seen = (distance >= 0) & (distance < self.window)
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=seen)[:, 0]
        y = y.to(self.dtype).sin().mul_(self.scale).to(torch.float64)
        if hasattr(self, "steps"):
            self.steps.add_(1)
        return x + y


class Model(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]):
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 8, dtype=torch.float64), nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Layer]:
    """The layers that are copied, in both traces."""
    found: list[Layer] = []
    make = LayerCopies.copy

    def seen(self: LayerCopies, key: Any, layer: Layer, operands: Sequence[Any]) -> Any:
        result = make(self, key, layer, operands)
        found.extend([layer] if result is not None else [])
        return result

    monkeypatch.setattr(LayerCopies, "copy", seen)
    return found


def both(model: nn.Module) -> tuple[Outcome, Outcome]:
    """What eager and treefx compute, from the same state."""
    twin = copy.deepcopy(model)
    compiled: Any = torch.compile(twin, backend="treefx", options={"min_sharing": 1.0, "inner": "eager"})
    got, expected = outcome(twin, lambda: compiled(IDS)), outcome(model, lambda: model(IDS))
    assert stats_of(compiled)["ran"] == "packed"
    return got, expected


def build(*changes: dict[str, Any]) -> Model:
    torch.manual_seed(0)
    return Model([Block(**change) for change in changes])


def test_layers_that_are_equal_are_copied(copied: list[Layer]) -> None:
    assert_close(*both(build({}, {}, {}, {})), FLOAT64)
    assert len(copied) == 2 * 3


@pytest.mark.parametrize("other", [{"scale": 0.25}, {"window": 3}, {"dtype": torch.float32}, {"counts": True}])
def test_layers_that_differ_are_traced(copied: list[Layer], other: dict[str, Any]) -> None:
    """Each is copied from the one of its kind before, not from its neighbour."""
    tolerance = 1e-6 if "dtype" in other else FLOAT64  # sums of float32 are taken in another order
    assert_close(*both(build({}, other, {}, other)), tolerance)
    assert len(copied) == 2 * 2 if "counts" not in other else len(copied) < 2 * 2


def test_frozen_weights_are_copied_from_frozen_ones(copied: list[Layer]) -> None:
    model = build({}, {}, {}, {})
    for layer in model.layers[1::2]:
        layer.requires_grad_(False)
    assert_close(*both(model), FLOAT64)
    assert len(copied) == 2 + 3, "the rewritten graph is the same whatever needs a gradient"


def test_a_key_without_numbers_is_noticed(copied: list[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that keys are there to prevent: layers told apart by their operators alone."""

    def operators(layer: Layer, known: Any) -> Any:
        return tuple(str(node.target) for node in layer.nodes)

    monkeypatch.setattr(trace, "key_of", operators)
    monkeypatch.setattr(packed_layers, "key_of", operators)
    got, expected = both(build({}, {"scale": 0.25}))
    assert copied
    with pytest.raises(AssertionError):
        assert_close(got, expected, FLOAT64)


class Changing(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        y.detach().mul_(0.5)
        return super().forward(x) + self.linear(y)


def test_a_change_that_autograd_does_not_see_is_found_in_every_layer() -> None:
    """The first layer reads a frozen embedding: there is no gradient there that the change could miss."""
    torch.manual_seed(0)
    model = Model([Changing() for _ in range(4)])
    model.embed.requires_grad_(False)
    compiled: Any = torch.compile(model, backend="treefx", options={"min_sharing": 1.0, "inner": "eager"})
    compiled(IDS)
    assert "detach() or .data" in stats_of(compiled)["fallback"]


class Grouped(Block):
    def forward(self, x: Tensor, key: Tensor, keys: Tensor) -> Tensor:  # type: ignore[override]
        q = self.linear(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, keys, keys, is_causal=True)
        return x + y.transpose(1, 2).reshape(x.shape) + key[:, 0, 0].repeat(1, 1, 2)


class SharedKeys(Model):
    """Layers that get a key and repeated keys; of some, those repeated are another layer's."""

    def __init__(self, blocks: Sequence[Block]):
        super().__init__(blocks)
        self.weights = nn.ParameterList(torch.randn(4, 8, dtype=torch.float64) for _ in blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        keys = [F.linear(x, w).view(*x.shape[:2], 1, 4).transpose(1, 2)[:, :, None] for w in self.weights]
        for layer, key, other in zip(self.layers, keys, [keys[0], *keys[2:], keys[0]], strict=True):
            x = layer(x, key, other.expand(-1, -1, 2, -1, -1).reshape(len(x), 2, -1, 4))
        return x.square().mean()


def test_what_an_emitter_looks_at_behind_an_operand_tells_layers_apart() -> None:
    torch.manual_seed(0)
    assert_close(*both(SharedKeys([Grouped() for _ in range(4)])), FLOAT64)


class Loss(nn.Module):
    def forward(self, logits: Tensor, shifted: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(shifted.reshape(-1, 8), labels.reshape(-1) % 8)
        return loss + logits.logsumexp(-1).square().mean()


class Losses(Model):
    """Equal losses on logits that were shifted by another number of tokens before."""

    def forward(self, ids: Tensor) -> Tensor:
        logits, length = self.layers[0](self.embed(ids)), ids.shape[1]
        shifted = [logits[:, i : length - 4 + i].contiguous() for i in range(4)]
        losses = [self.layers[i + 1](logits, item, ids[:, 4:].contiguous()) / (i + 1) for i, item in enumerate(shifted)]
        return torch.stack(losses).sum()


@pytest.mark.parametrize("by_key", [True, False])
def test_losses_on_shifted_logits_are_no_copies(by_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their key differs; without it, the facts read behind operands would."""
    known = PackingInterpreter._known
    if not by_key:
        monkeypatch.setattr(PackingInterpreter, "_known", lambda self, node: known(self, node)[:-1])
    torch.manual_seed(0)
    assert_close(*both(Losses([Block(), *[Loss() for _ in range(4)]])), FLOAT64)


def test_a_layer_is_no_copy_of_one_whose_operands_lie_otherwise_in_memory(
    copied: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reshape is written as follows from that, and the key of a packed layer does not tell it."""
    monkeypatch.setattr(trace, "key_of", lambda layer, known: tuple(str(node.target) for node in layer.nodes))

    class Turned(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.layers[0](self.embed(ids))
            return self.layers[1](x.mT.contiguous().mT).square().mean()

    torch.manual_seed(0)
    assert_close(*both(Turned([Block(), Block()])), FLOAT64)
    assert not any(copied)


@pytest.mark.parametrize("name, use_cache", [("llama", True), ("gpt2", False)])
def test_the_graph_is_the_one_without_copies(
    name: str, use_cache: bool, copied: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators, shapes, and the modules and lines of the user that they belong to.

    In both traces at least two of four layers are copies, also where each begins a cache, with an empty constant.
    """
    model = double(name, num_hidden_layers=4, **({"n_layer": 4} if name == "gpt2" else {}))
    model.config.use_cache = use_cache
    found = [graph_lines(model)]
    assert len(copied) >= 4
    monkeypatch.setattr(LayerCopies, "__contains__", lambda self, key: False)
    torch._dynamo.reset()
    found.append(graph_lines(model))
    assert found[0] == found[1]


def graph_lines(model: nn.Module) -> list[Any]:
    compiled: Any = torch.compile(model, backend="treefx", options={"min_sharing": 1.0, "inner": "eager"})
    loss_of(shared_batch(rows=4, length=12, shared=6))(compiled)
    graphs = treefx.inspect(compiled).graphs
    return [line for stage in ("captured", "rewritten") for line in map(described, graphs[stage].graph.nodes)]


def described(node: fx.Node) -> Any:
    value = node.meta.get("val")
    shape = (str(value.shape), str(value.stride()), value.dtype) if isinstance(value, Tensor) else str(value)
    stack = node.meta.get("nn_module_stack") or {}
    number = {other: i for i, other in enumerate(node.graph.nodes)}
    operands = repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda item: f"%{number[item]}"))
    target = "" if node.op == "placeholder" else str(node.target)
    return target, operands, shape, [path for path, _ in stack.values()], node.meta.get("stack_trace")


def test_what_has_no_equal_is_itself_alone() -> None:
    thing, number = object(), dict[fx.Node, int]()
    assert exact(thing, number) == exact(thing, number) != exact(object(), number)
    assert len({exact(x, number) for x in (0.0, -0.0, 0, False, None, "0")}) == 6
    assert exact(float("nan"), number) == exact(float("nan"), number)
    assert exact([1, slice(2)], number) != exact((1, slice(2)), number)


def test_keys_name_nodes_of_others_by_themselves() -> None:
    """A layer that reads the same value as its neighbour is no copy of one that reads its neighbour's."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for i in range(2):
        for node in (graph.call_function(torch.sin, (x,)), graph.call_function(torch.add, (x, y))):
            node.meta["nn_module_stack"] = {"": (f"layers.{i}", nn.Module)}
    first, second = find_layers(graph)
    assert first.operands == second.operands == (x, y)
    assert key_of(first, lambda node: None) == key_of(second, lambda node: None)
    assert key_of(first, lambda node: y) != key_of(second, lambda node: x)
    other = list(graph.nodes)[-1]
    assert key_of(first, lambda node: other) != key_of(second, lambda node: other)
