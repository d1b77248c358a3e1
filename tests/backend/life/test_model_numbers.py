"""Numbers of the model that Dynamo passes as tensors, as ``dynamic=True`` makes it, in calls that do not run packed.

Trainers compile so (``torch_compile_backend``), and checkpoint each layer through functions of their own.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.oracle import FLOAT64, assert_close, outcome, stats_of
from treefx.runtime.ways.known_numbers import number_inputs, with_numbers

WIDTH = 16
SHAPES = [(4, 7), (3, 9), (5, 4)]


class Layer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.qkv, self.scale, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), scale, 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, dropout_p=dropout)
        return x + y[:, 0]


def of_the_trainer(run: Callable[..., Tensor], x: Tensor) -> Tensor:
    """LLaMA-Factory has such a function around its checkpoints."""
    result: Tensor = checkpoint(run, x, use_reentrant=False)
    return result


class Checkpointed(nn.Module):
    """Every layer through ``functools.partial``, as transformers hands them to a checkpoint."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.breaks = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50), breaks
        self.layers = nn.ModuleList([Layer(0.25), Layer(0.7)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            x = of_the_trainer(functools.partial(layer.forward), x)
        logits: Tensor = self.head(x)
        return logits


def ids_of(seed: int, rows: int, columns: int, shared: bool) -> Tensor:
    ids = torch.randint(0, 50, (rows, columns), generator=torch.Generator().manual_seed(seed))
    if shared:
        ids[:, :3] = 1
    else:
        ids[:, 0] = torch.arange(rows)
    return ids


def assert_exact(model: nn.Module, call: Callable[[Tensor], Tensor], ids: Tensor) -> None:
    def step(of: Any) -> Tensor:
        return F.cross_entropy(of(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    assert_close(outcome(model, lambda: step(call)), outcome(model, lambda: step(model)), FLOAT64)


@pytest.mark.parametrize(("inner", "breaks"), [("eager", False), ("aot_eager", True)])
def test_checkpointed_layers(inner: str, breaks: bool) -> None:
    model = Checkpointed(breaks).double()
    compiled = torch.compile(model, backend="treefx", dynamic=True, options={"inner": inner})
    for seed, shape in enumerate(SHAPES):
        for shared in (False, True):
            assert_exact(model, compiled, ids_of(seed, *shape, shared=shared))
    assert stats_of(compiled)["ran"] == ("ordinary" if breaks else "packed")


@torch._dynamo.config.patch(recompile_limit=3)
def test_numbers_that_change_are_those_of_the_call() -> None:
    """More of them than are compiled for: the others run as they are."""
    model = Checkpointed(False).double()
    compiled = torch.compile(model, backend="treefx", dynamic=True, options={"inner": "aot_eager"})
    layer: Any = model.layers[0]
    for seed, scale in enumerate([0.25, 0.5, 0.3, 0.9, 0.25, 0.1]):
        layer.scale = scale
        assert_exact(model, compiled, ids_of(seed, 4, 7, shared=False))


def test_a_number_that_code_does_not_belong_to_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plausible mistake: the numbers of the first call, for good."""
    first: dict[int, float] = {}

    def of_the_first(gm: Any, numbers: Any) -> Any:
        return with_numbers(gm, first or first.update(numbers) or numbers)

    monkeypatch.setattr("treefx.runtime.ways.ordinary.with_numbers", of_the_first)
    with pytest.raises(AssertionError):
        test_numbers_that_change_are_those_of_the_call()


def test_parts_that_are_called_twice_know_the_numbers_of_each_call() -> None:
    """Dynamo's graph stays unchanged."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    model = Checkpointed(False).double()
    ids = ids_of(0, 4, 7, shared=False)
    torch.compile(model, backend=backend, dynamic=True)(ids)
    before = copy.deepcopy(graphs[0]).print_readable(print_output=False)
    numbers = {i: 0.1 * (n + 1) for n, i in enumerate(number_inputs(graphs[0]))}
    bodies = [body for body in with_numbers(graphs[0], numbers).modules() if isinstance(body, torch.fx.GraphModule)]
    calls = [node for body in bodies for node in body.graph.nodes if node.target is F.scaled_dot_product_attention]
    assert len(calls) == 2 and not [node for body in bodies for node in body.graph.nodes if node.target == "item"]
    assert {calls[0].kwargs["scale"], calls[1].kwargs["scale"]} < set(numbers.values())
    assert calls[0].kwargs["scale"] != calls[1].kwargs["scale"]
    assert graphs[0].print_readable(print_output=False) == before
