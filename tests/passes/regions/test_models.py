"""Models of equal layers through inductor: gradients of all parameters, and how often their layers are compiled.

Which layers are equal, and which of them pay off, test_regions.py says of graphs; here is what only inductor shows.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import boxed_nop
from torch.utils.checkpoint import checkpoint

import treefx
from tests.batches import Batch, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT64, Outcome, assert_close, eager_step, loss_of, outcome, stats_of
from tests.spellings import SPELLINGS
from treefx.passes.packing import compile_inner
from treefx.passes.regions import find_regions
from treefx.passes.regions.make_regions import subgraphs
from treefx.passes.regions.own_results import borrowed_results

BATCHES = [
    shared_batch(rows=4, length=12, shared=6, vocab=61, padding=None),
    shared_batch(rows=6, length=17, shared=9, vocab=61, padding=None, seed=1),
]


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """What AOTAutograd's cache has never comes to inductor."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


class Seen:
    """What inductor is given: subgraphs of the forward and of the backward, and what they return of others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiles: bool = False) -> None:
        """Inductor writes no code unless it ``compiles``: its graphs run as they are, in a fifth of the time."""
        self.compiles = compiles
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
        return self._compile(gm, inputs, **options) if self.compiles else boxed_nop(gm, inputs)


def stack(layers: int = 4, width: int = 16) -> TinyLM:
    """A hand-written model, whose layers take a half of the time of transformers' to compile."""
    torch.manual_seed(0)
    return TinyLM(SPELLINGS["sdpa_is_causal"], layers=layers, width=width).double()


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
    """Compiled once for the forward and once for the backward, rows, columns and tokens being symbols.

    Also where inductor pads, as it does for GPUs: what the first layer reads was padded and what the next ones read was
    not. A graph may be kept: subgraphs are compiled without donated buffers, which AOTAutograd writes down as None.
    """
    seen, model = Seen(monkeypatch, compiles=True), stack(width=20)
    with torch._inductor.config.patch(disable_padding_cpu=False, padding_stride_threshold=0, pad_dynamic_shapes=True):
        compiled: Any = checked(model, BATCHES, dynamic=True)
    assert seen.bodies == [1, 1] and seen.borrowed == 0
    graphs = treefx.inspect(compiled).graphs
    assert all(not subgraphs(gm) for gm in graphs.values()), "people see layers"
    attention = torch.ops.treefx.tree_attention.default
    assert len(graphs["forward"].graph.find_nodes(op="call_function", target=attention)) == 4

    def thrice() -> Tensor:
        loss: Tensor = loss_of(BATCHES[0])(compiled)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        return loss

    expected = outcome(model, lambda: 3 * loss_of(BATCHES[0])(model))
    got = outcome(compiled._orig_mod, thrice)
    assert_close(Outcome(3 * got.loss, got.gradients), expected, FLOAT64)
    assert seen.bodies == [1, 1]


def test_layers_are_compiled_once_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two kinds of layers in turn the larger one alone pays off."""
    seen, model = Seen(monkeypatch), stack(layers=8)
    for block in model.blocks[1::2]:
        block.query = Adapted(block.query)
    monkeypatch.setattr(find_regions, "LEAST_WEIGHTS", sum(x.numel() for x in model.blocks[1].parameters()))
    checked(model, regions="auto")
    assert seen.bodies == [1, 1] and seen.borrowed == 0


class Checkpointed(nn.Module):
    """A block that is computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *given: Any) -> Tensor:
        return checkpoint(self.block, *given, use_reentrant=False)  # type: ignore[no-any-return]


def test_checkpointed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body is recomputed in the backward: it keeps what it reads and, of what it computes, nothing."""
    seen = Seen(monkeypatch)
    model = stack()
    model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    checked(model)
    assert seen.bodies == [1, 1] and seen.borrowed == 0
    assert seen.results[0] == 1


def test_frozen_weights_and_a_layer_without_a_gradient_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small trained matrices next to frozen ones; the first layer reads nothing that needs a gradient."""
    seen = Seen(monkeypatch)
    model = stack(layers=5)
    model.requires_grad_(False)
    for block in model.blocks:
        block.query = Adapted(block.query)
    checked(model)
    assert seen.bodies == [1, 1] and seen.borrowed == 0


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two small matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + x @ self.down.T @ self.up.T
