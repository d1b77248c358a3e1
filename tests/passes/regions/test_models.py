"""Models of equal layers through inductor: gradients of all parameters, and how often their layers are compiled."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import treefx
from tests.batches import Batch, shared_batch
from tests.models import double
from tests.oracle import FLOAT64, Outcome, assert_close, eager_step, loss_of, outcome, stats_of
from treefx.passes.packing import compile_inner
from treefx.passes.regions import find_regions
from treefx.passes.regions.make_regions import subgraphs
from treefx.passes.regions.own_results import borrowed_results

pytestmark = pytest.mark.sample(8)

BATCHES = [shared_batch(rows=4, length=12, shared=6), shared_batch(rows=6, length=17, shared=9, seed=1)]


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """What AOTAutograd's cache has never comes to inductor."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


class Seen:
    """What inductor is given: subgraphs of the forward and of the backward, and what they return of others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bodies: list[int] = []
        self.borrowed = 0
        self.results: list[int] = []
        self._compile = compile_inner.compile_fx_inner
        monkeypatch.setattr(compile_inner, "compile_fx_inner", self)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        bodies = subgraphs(gm)
        self.bodies.append(len(bodies))
        self.borrowed += sum(len(borrowed_results(body)) for body in bodies)
        outputs: list[Any] = [next(iter(body.graph.find_nodes(op="output"))).args[0] for body in bodies]
        self.results += [sum(node is not None for node in output) for output in outputs]
        return self._compile(gm, inputs, **options)


def checked(
    model: nn.Module, batches: Sequence[Batch] = BATCHES[:1], dynamic: bool | None = None, regions: bool | str = True
) -> nn.Module:
    """Every batch through one compiled model equals eager; the compiled model."""
    twin = copy.deepcopy(model)
    options: Any = {"min_sharing": 1.0, "regions": regions}
    compiled: Any = torch.compile(twin, backend="treefx", options=options, dynamic=dynamic)
    for batch in batches:
        assert_close(outcome(twin, lambda: loss_of(batch)(compiled)), eager_step(model, batch), FLOAT64)
        stats = stats_of(compiled)
        assert stats["ran"] == "packed", stats["fallback"]
    return compiled


def test_one_body_for_batches_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once for the forward and once for the backward, rows, columns and tokens being symbols."""
    seen = Seen(monkeypatch)
    model = double("llama", num_hidden_layers=4)
    compiled = checked(model, BATCHES, dynamic=True)
    assert seen.bodies == [1, 1] and seen.borrowed == 0
    graphs = treefx.inspect(compiled).graphs
    assert all(not subgraphs(gm) for gm in graphs.values()), "people see layers"
    attention = torch.ops.treefx.tree_attention.default
    assert len(graphs["forward"].graph.find_nodes(op="call_function", target=attention)) == 4
    with torch.no_grad():
        expected, got = (loss_of(BATCHES[0])(run) for run in (model, compiled))
    torch.testing.assert_close(got, expected, rtol=FLOAT64, atol=0)


@pytest.mark.sample(8)
def test_calls_of_a_body_have_equal_strides_where_inductor_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does for GPUs: what the first layer reads was padded and what the next ones read was not."""
    seen = Seen(monkeypatch)
    model = double("llama", num_hidden_layers=4, hidden_size=20, intermediate_size=44, head_dim=10)
    with torch._inductor.config.patch(disable_padding_cpu=False, padding_stride_threshold=0, pad_dynamic_shapes=True):
        checked(model, BATCHES, dynamic=True)
    assert seen.bodies == [1, 1]


@pytest.mark.sample(8)
def test_layers_are_compiled_once_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    model = double("llama", num_hidden_layers=4)
    checked(model, regions="auto")
    torch._dynamo.reset()
    monkeypatch.setattr(find_regions, "LEAST_WEIGHTS", sum(x.numel() for x in model.model.layers[0].parameters()))
    checked(model, regions="auto")
    assert seen.bodies == [0, 0, 1, 1] and seen.borrowed == 0


@pytest.mark.sample(8)
def test_a_body_for_each_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gemma2's layers every second one has a window."""
    seen = Seen(monkeypatch)
    checked(double("gemma2", num_hidden_layers=8))
    assert seen.bodies == [2, 2] and seen.borrowed == 0


@pytest.mark.sample(8)
def test_a_graph_that_is_kept() -> None:
    """Subgraphs are compiled without donated buffers, which AOTAutograd writes down as None."""
    model = double("llama", num_hidden_layers=4)
    compiled: Any = checked(model)
    expected = outcome(model, lambda: 3 * loss_of(BATCHES[0])(model))

    def thrice() -> Tensor:
        loss = loss_of(BATCHES[0])(compiled)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        return loss

    got = outcome(compiled._orig_mod, thrice)
    assert_close(Outcome(3 * got.loss, got.gradients), expected, FLOAT64)


@pytest.mark.sample(8)
def test_checkpointed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body is recomputed in the backward: it keeps what it reads and, of what it computes, nothing."""
    seen = Seen(monkeypatch)
    model = double("llama", num_hidden_layers=4)
    model.gradient_checkpointing_enable()
    checked(model)
    assert seen.bodies == [1, 1] and seen.borrowed == 0
    assert seen.results[0] == 1


@pytest.mark.sample(8)
def test_frozen_weights_and_a_layer_without_a_gradient_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small trained matrices beside frozen ones; the first layer reads nothing that needs a gradient."""
    seen = Seen(monkeypatch)
    model = double("llama", num_hidden_layers=5)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    checked(model)
    assert seen.bodies == [1, 1] and seen.borrowed == 0


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T
