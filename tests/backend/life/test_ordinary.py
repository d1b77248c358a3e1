"""Calls that do not run packed: the inner compiler gets Dynamo's graph unchanged, with Dynamo's symbols."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import SymInt, Tensor, fx, nn
from torch._dynamo.backends.registry import register_backend
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError
from torch.nn.functional import cross_entropy

from tests.backend.small import Small
from tests.batches import shared_batch
from tests.oracle import FLOAT64, assert_close, eager_step, loss_of, outcome, stats_of
from tests.spellings import SPELLINGS
from treefx.passes.packing.compile_inner import Inner
from treefx.runtime.records import Records
from treefx.runtime.ways import ordinary as way
from treefx.runtime.ways.free_sizes import Symbols
from treefx.runtime.ways.ordinary import Ordinary

SHAPES = [(3, 7), (5, 23), (6, 6), (1, 9), (4, 50), (2, 2), (23, 5)]
_asked: list[bool] = []
_META = torch.empty(1, 1, 1, 8, dtype=torch.float64, device="meta")
SDPA_IN_FLOAT64 = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(_META, _META, _META)[1].dtype == _META.dtype
)
"""PyTorch 2.11 traces its log-sum-exp as float32, and the backward that inductor makes of it, with treefx or without,
ends with "expected scalar type Double but found Float"."""


def ordinary(model: nn.Module, inner: str, shapes: Sequence[tuple[int, int]] = SHAPES) -> Any:
    """Exact steps of all shapes, none of them packed."""
    compiled = torch.compile(model, backend="treefx", options={"inner": inner, "min_sharing": 100.0})
    for seed, (rows, columns) in enumerate(shapes):
        batch = shared_batch(rows=rows, length=columns, shared=columns // 2, vocab=61, seed=seed)
        assert_close(outcome(model, lambda batch=batch: loss_of(batch)(compiled)), eager_step(model, batch), FLOAT64)
        assert stats_of(compiled)["ran"] == "ordinary" and stats_of(compiled)["fallback"] is None
    return compiled


def test_steps_of_many_shapes() -> None:
    """One compilation for all, and one each for the first batch and for a single row."""
    compiled = ordinary(with_sdpa("aot_eager"), "aot_eager", SHAPES[:6])
    assert treefx_compiles(compiled) <= 4


def test_sizes_that_inductor_takes_as_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation per shape, as PyTorch 2.13 needs it for Mamba 2; more than ``recompile_limit`` run uncompiled."""
    made: list[torch.Size] = []

    def refuses_symbols(gm: fx.GraphModule, fakes: Sequence[Any], **_: Any) -> Any:
        shapes = [x.shape for x in fakes if isinstance(x, Tensor) and not x.is_floating_point()]
        if any(isinstance(size, SymInt) for shape in shapes for size in shape):
            raise InductorError(TypeError("cannot determine truth value of Relational"), None)
        made.append(shapes[0])
        return gm

    monkeypatch.setattr(way, "lookup_backend", lambda name: refuses_symbols)
    shapes = [(3, 7), (5, 23), (6, 6), (4, 50), (2, 11), (5, 23), (6, 6)]
    with torch._dynamo.config.patch(recompile_limit=2):
        ordinary(with_sdpa("eager"), "eager", shapes)
    assert made == [(3, 7), (5, 23), (6, 6)]


def test_an_error_of_inductor_without_symbols_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(gm: fx.GraphModule, fakes: Sequence[Any], **_: Any) -> Any:
        raise InductorError(TypeError("another error"), None)

    monkeypatch.setattr(way, "lookup_backend", lambda name: fails)
    with pytest.raises(InductorError, match="another error"):
        ordinary(with_sdpa("eager"), "eager", SHAPES[:1])


def with_sdpa(inner: str) -> nn.Module:
    if inner == "inductor" and not SDPA_IN_FLOAT64:
        pytest.skip("this PyTorch's inductor cannot compile the backward of SDPA on the CPU in float64")
    return Small(SPELLINGS["sdpa_is_causal"]).double()


def treefx_compiles(compiled: Any) -> int:
    return int(stats_of(compiled)["compiles"])


def nested(self: Ordinary, *_: Any) -> Callable[..., Any]:
    """Dynamo once more, on a separate graph: it knows not all operators that it writes."""
    return torch.compile(self._gm, backend="aot_eager", dynamic=True)


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()))


class Activated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Gelu.apply(x)


@pytest.mark.parametrize("breaks", [False, True])
def test_functions_of_the_models_own_stay_in_the_graph(breaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As BLOOM's GELU: Dynamo makes an ``autograd.Function`` an operator of higher order."""
    if breaks:
        monkeypatch.setattr(Ordinary, "_compile", nested)
    counters.clear()
    ordinary(Small(SPELLINGS["sdpa_is_causal"], before=Activated()).double(), "aot_eager", SHAPES[:2])
    assert bool(counters["graph_break"]) == breaks


@register_backend
def asks_of_sizes(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    rows = next(x for x in inputs if isinstance(x, Tensor)).shape[0]
    _asked.append(bool(rows > 8))
    return gm.forward


def captured(function: Callable[[Tensor], Tensor], *examples: Tensor) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph with symbols, and its arguments for each example."""
    graphs: list[fx.GraphModule] = []
    arguments: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)

        def run(*args: Any) -> Any:
            arguments.append(args)
            return gm(*args)

        return run

    compiled = torch.compile(function, backend=backend, dynamic=True)
    for example in examples:
        compiled(example)
    assert len(graphs) == 1
    return graphs[0], arguments


def test_what_a_compiler_asked_of_sizes_is_asked_of_every_call() -> None:
    _asked.clear()
    gm, arguments = captured(lambda x: x * x.shape[0], *[torch.randn(rows, 5) for rows in (4, 9, 6, 12, 3)])
    run = Ordinary(gm, Inner("asks_of_sizes"), Records(gm))
    for args in arguments:
        torch.testing.assert_close(run(*args), gm(*args))
    assert _asked == [False, True]


@register_backend
def knows_all_sizes(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    _asked.append(int(next(x for x in inputs if isinstance(x, Tensor)).shape[0]) > 8)
    return gm.forward


def test_a_compiler_that_knows_all_sizes_is_not_asked_for_ever() -> None:
    """After as many compilations as Dynamo makes of one graph, Dynamo says what runs."""
    _asked.clear()
    gm, arguments = captured(lambda x: x * x.shape[0], *[torch.randn(rows, 5) for rows in range(2, 32)])
    run = Ordinary(gm, Inner("knows_all_sizes"), Records(gm))
    for args in arguments:
        torch.testing.assert_close(run(*args), gm(*args))
    assert len(_asked) <= 2 * torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_strides_and_offsets_are_those_of_the_call(inner: str) -> None:
    views = [
        torch.randn(40, width)[:rows, 2:columns] for rows, columns, width in ((3, 9, 50), (6, 20, 30), (17, 5, 41))
    ]
    gm, arguments = captured(lambda x: (x.sin() + x.as_strided(x.shape, x.stride())).sum(1), *views)
    run = Ordinary(gm, Inner(inner), Records(gm))
    for args in arguments:
        torch.testing.assert_close(run(*args), gm(*args))


def test_a_compiler_changes_a_graph_of_its_own() -> None:
    gm, arguments = captured(lambda x: x.sin(), torch.randn(4, 5))
    code = gm.code

    @register_backend(name="changes_its_graph")
    def changes(own: fx.GraphModule, _: Any) -> Callable[..., Any]:
        for node in own.graph.find_nodes(op="call_method", target="sin"):
            node.target = "cos"
        own.recompile()
        return own.forward

    Ordinary(gm, Inner("changes_its_graph"), Records(gm))(*arguments[0])
    assert gm.code == code


class OfNested(nn.Module):
    """Rows without padding, as a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).values().sin().sum()


def test_nested_tensors() -> None:
    """Inputs of which sizes are Dynamo's own: it looks at them itself."""
    model = OfNested().double()
    compiled = torch.compile(model, backend="treefx", options={"inner": "aot_eager"})
    for lengths in ((3, 5), (4, 1, 2), (7, 2, 2, 6), (1, 1)):
        ids = torch.nested.nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)
        expected = outcome(model, lambda ids=ids: model(ids))
        assert_close(outcome(model, lambda ids=ids: compiled(ids)), expected, FLOAT64)
    assert "nested" in stats_of(compiled)["fallback"]


class Overwrites(nn.Module):
    """Writes into its labels, which may be its ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        labels[:, :2] = 0
        return cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


def overwriting_steps(shapes: Sequence[tuple[int, int]]) -> None:
    """Of every two batches one has ids and labels in one memory, a token apart."""
    model = Overwrites().double()
    compiled = torch.compile(model, backend="treefx", options={"inner": "aot_eager", "min_sharing": 100.0})
    for n, (rows, columns) in enumerate(shapes):
        results = []
        for called in (model, compiled):
            tokens = torch.arange(rows * (columns + 1)).view(rows, -1) % 29 + 1
            ids, labels = tokens[:, :-1], tokens[:, 1:]
            given = (ids, labels) if n % 2 else (ids.clone(), labels.clone())
            results.append(outcome(model, lambda called=called, given=given: called(*given)))
        assert_close(results[1], results[0], FLOAT64)


ONE_SHAPE, SEVERAL = [(3, 7)] * 4, [(3, 7), (4, 9), (5, 11), (2, 6), (6, 8), (3, 5)]


@pytest.mark.parametrize("shapes", [ONE_SHAPE, SEVERAL])
def test_inputs_in_one_memory(shapes: Sequence[tuple[int, int]]) -> None:
    overwriting_steps(shapes)


def test_inputs_in_one_memory_would_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way, "share_memory", lambda args: False)
    with pytest.raises(AssertionError, match="differ by more than"):
        overwriting_steps(SEVERAL)


def test_sizes_that_are_no_numbers_among_the_inputs_are_left_to_dynamo() -> None:
    gm, _ = captured(lambda x: x * x.shape[0], torch.randn(4, 5))
    assert Symbols(gm).are_known
    number = next(
        node for node in gm.graph.find_nodes(op="placeholder") if isinstance(node.meta["example_value"], SymInt)
    )
    number.replace_all_uses_with(3)
    gm.graph.erase_node(number)
    assert not Symbols(gm).are_known


def kept_graphs(inner: str, shapes: Sequence[tuple[int, int]]) -> None:
    """Each backward runs twice; nothing is shared."""
    model = with_sdpa(inner)
    options = {"inner": inner, "min_sharing": 100.0}
    compiled = torch.compile(model, backend="treefx", options=options, dynamic=len(shapes) > 1 or None)
    for rows, columns in shapes:
        batch = shared_batch(rows=rows, length=columns, shared=min(3, columns), vocab=61, padding=None)

        def step(call: Any, batch: Any = batch) -> Tensor:
            loss = loss_of(batch)(call)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            return loss

        expected = outcome(model, lambda step=step: step(model))
        assert_close(outcome(model, lambda step=step: step(compiled)), expected, FLOAT64)
    assert stats_of(compiled)["ran"] == "ordinary"


@pytest.mark.parametrize(
    ("inner", "shapes"),
    [
        ("eager", [(3, 7), (5, 9)]),
        ("aot_eager", [(1, 2)]),
        ("aot_eager", [(3, 7), (5, 9), (4, 12)]),
        ("inductor", [(3, 7), (5, 9), (4, 12)]),
    ],
)
def test_graphs_may_be_kept(inner: str, shapes: Sequence[tuple[int, int]]) -> None:
    kept_graphs(inner, shapes)


def test_graphs_kept_of_what_a_backward_may_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way, "keeping_graphs", lambda compiled: compiled)
    with pytest.raises(RuntimeError, match="donated buffers"):
        kept_graphs("aot_eager", [(1, 2)])


def test_numbers_that_a_graph_reads() -> None:
    """Dynamo may put ``x.item()`` in its graph, with a symbol that no trace of another compiler has."""

    def rotated(x: Tensor, places: Tensor) -> Tensor:
        table = torch.arange(max(int(places.max().item()) + 1, places.shape[1])).cos()
        return table[places] * x

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(rotated, backend="treefx", options={"inner": "aot_eager"}, fullgraph=True)
        for last in (3, 9, 4):
            given = torch.rand(2, 4, requires_grad=True), torch.tensor([[0, 1, 2, last]])
            found, expected = compiled(*given), rotated(*given)
            assert torch.equal(found, expected)
            assert torch.equal(*(torch.autograd.grad(x.sum(), given[0])[0] for x in (found, expected)))
