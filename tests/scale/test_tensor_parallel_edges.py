"""What small compiled models in tensor parallelism do that a graph of one rank can get wrong, on two processes.

Each has gradients equal to one process or to PyTorch's own tensor parallelism; what cannot be followed says why.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import treefx
from tests.oracle import FLOAT64, Outcome, assert_close
from tests.scale.ranks import run_ranks
from tests.scale.shared_out import SECONDS, run_rank, whole_gradients
from tests.trainers.test_distributed import WORLD
from treefx.passes.ranks.held import Unfollowed, changes_in_place, placement_of

IDS = [torch.tensor([[1, 2, 3, 4], [1, 2, 5, 11]]), torch.tensor([[1, 2, 3, 4, 6, 7], [1, 2, 5, 11, 9, 9]])]


class Mlp(nn.Module):
    """Two products that read one value, and one that each rank has a summand of."""

    width = 16
    mesh: Any = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = self.width
        self.table, self.norm = nn.Embedding(12, width), nn.LayerNorm(width)
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        )  # fmt: skip
        self.double()

    def styles(self) -> dict[str, Any]:
        return {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}

    def forward(self, ids: Tensor) -> Any:
        h = self.table(ids)
        return self.down(F.silu(self.gate(h)) * self.up(h))


class Uneven(Mlp):
    """The table and what ``down`` gives have 17 features, no multiple of the ranks."""

    width = 17


class WithoutGradients(Mlp):
    """The first product's read has no gradient, so the second needs its own."""

    def forward(self, ids: Tensor) -> Any:
        h = self.table(ids)
        with torch.no_grad():
            gate = self.gate(h)
        return self.down(F.silu(gate) * self.up(h))


class InPlace(Mlp):
    """What the second product reads is no longer what the first read."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.requires_grad_(False)
        self.up.requires_grad_(False)

    def forward(self, ids: Tensor) -> Any:
        h = self.table(ids) * 1.0
        gate = self.gate(h)
        h.add_(1.0)
        return self.down(F.silu(gate) * self.up(h))


class Adapted(Mlp):
    """Frozen weights with adapters, of which one half is shared out as the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.table.requires_grad_(True)
        self.into, self.out = nn.Linear(16, 4, bias=False), nn.Linear(4, 32, bias=False)
        self.back, self.last = nn.Linear(32, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.double()

    def styles(self) -> dict[str, Any]:
        return {**super().styles(), "out": ColwiseParallel(), "back": RowwiseParallel()}

    def forward(self, ids: Tensor) -> Any:
        h = self.table(ids)
        middle = F.silu(self.gate(h) + self.out(self.into(h))) * self.up(h)
        return self.down(middle) + self.last(self.back(middle))


class Summand(Mlp):
    """A sum over tokens that are shared out is a summand of each rank, and ``to_local`` gives just that."""

    def styles(self) -> dict[str, Any]:
        return {"norm": SequenceParallel(use_local_output=False)}

    def forward(self, ids: Tensor) -> Any:
        h = DTensor.from_local(self.table(ids), self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        return self.norm(h).sum(1).to_local()


EXACT = {"plain": Mlp, "uneven": Uneven, "without gradients": WithoutGradients, "adapted": Adapted}
REFUSED = {"in place": (InPlace, "add_ changes a value in place"), "summand": (Summand, "this rank's summand")}


def steps(model: nn.Module, run: Any) -> list[tuple[Tensor, dict[str, Tensor]]]:
    found = []
    for ids in IDS:
        model.zero_grad()
        out = run(ids)
        loss = (out.cos() * torch.arange(out.numel()).view(out.shape)).sum()
        loss.backward()
        found.append((loss.detach().clone(), whole_gradients(model)))
    return found


def on_ranks(make: Any, compiled: bool) -> tuple[Any, Any]:
    """What a model in tensor parallelism gives, and why it runs on rows."""
    torch.compiler.reset()
    model = make()
    model.mesh = init_device_mesh("cpu", (WORLD,))
    parallelize_module(model, model.mesh, model.styles())
    if not compiled:
        return steps(model, model), None
    run = torch.compile(model, backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    found = steps(model, run)
    return found, treefx.inspect(run).stats["fallback"]


def edges() -> dict[str, Any]:
    found = {name: on_ranks(make, True)[0] for name, make in EXACT.items()}
    refused = {name: (on_ranks(make, True), on_ranks(make, False)[0]) for name, (make, _) in REFUSED.items()}
    return {"exact": found, "refused": refused}


def worker(rank: int, port: int, folder: str) -> None:
    run_rank(rank, port, folder, partial(edges))


def assert_same(found: Any, wanted: Any) -> None:
    for (loss, gradients), want in zip(found, wanted, strict=True):
        assert_close(Outcome(loss, gradients), Outcome(*want), FLOAT64)


@pytest.mark.parametrize("placements", [(Replicate(), Shard(0)), (Partial("avg"),)], ids=str)
def test_other_ways_to_share_out_are_refused(placements: Any) -> None:
    with pytest.raises(Unfollowed, match="mesh of 2 dimensions|placement P"):
        placement_of(placements, 2)


def test_what_changes_in_place() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = (x & x) | x
            y.add_(1)
            return F.relu(torch.relu_(F.silu(y, inplace=True)), True), y.mean(-1, True)

    nodes = [node for node in fx.symbolic_trace(Writes()).graph.nodes if node.op.startswith("call")]
    assert [changes_in_place(node) for node in nodes] == [False, False, True, True, True, True, False]


def test_small_models_are_exact_or_say_why_not(tmp_path: Path) -> None:
    for result in run_ranks(__name__, tmp_path, seconds=SECONDS):
        for name, make in EXACT.items():
            model = make()
            assert_same(result["exact"][name], steps(model, model))
        for name, (_, reason) in REFUSED.items():
            (found, why), wanted = result["refused"][name]
            assert_same(found, wanted)
            assert reason in why
