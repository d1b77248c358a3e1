"""Compiled models in tensor and sequence parallelism: rows, packed rows and plans, on two to four processes.

Every step starts from weights that the step before has changed: a graph that took the weights of the first call for
constants is found out. Forests and parts are of all sizes; test_tensor_parallel_edges.py has rows of two.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion

import treefx
from tests.backend.native import rollouts
from tests.oracle import FLOAT64, Outcome, assert_close, relative_errors, separate_rows, stats_of
from tests.planning.cuts import every_node, uncut
from tests.planning.parts import sft
from tests.scale.ranks import run_ranks
from tests.scale.shared_out import (
    SECONDS,
    Small,
    parallel,
    run_rank,
    sequence_parallel,
    steps,
    vocabulary,
    whole_gradients,
)
from tests.trainers.test_distributed import WORLD, batches
from treefx.passes.ranks import products
from treefx.planning.search.plan import Plan

MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "tensor": parallel,
    "tensor, head": partial(parallel, head=True),
    "vocabulary": vocabulary,
    "sequence": sequence_parallel,
}
ROWS_CASES = [
    (2, "tensor, head", "eager", False),
    (2, "sequence", "aot_eager", True),
    (4, "vocabulary", "eager", True),
]
FOREST_CASES = [(2, "tensor", "eager", False), (3, "sequence", "eager", False)]
"""How many ranks, which model, which inner compiler, and whether its blocks are checkpointed."""
ROWS = [[row % 29 + 3 for row in tokens] for tokens in rollouts(7)]
"""An odd number of distinct tokens, of which no two to four ranks can have equally many."""

CUT = TorchVersion(torch.__version__) < "2.13"
"""Dynamo of PyTorch 2.11 cuts such a model behind the embedding: it is exact, on rows."""


def llama(checkpointing: bool = False, ranks: int = WORLD) -> Any:
    """One that so many ranks can share out: each has one head of keys and values."""
    return Small(ranks, checkpointing=checkpointing)


def compiled(name: str, inner: str, checkpointing: bool = False) -> tuple[Any, Any]:
    torch.compiler.reset()
    model = MODELS[name](llama(checkpointing, dist.get_world_size()))
    return model, torch.compile(model, backend="treefx", options={"inner": inner, "min_sharing": 1.0})


def plain(found: list[Outcome]) -> list[Any]:
    """As files keep them."""
    return [(x.loss, x.gradients) for x in found]


def worker(rank: int, port: int, folder: str, task: str, *case: Any) -> None:
    run_rank(rank, port, folder, partial(TASKS[task], *case))


def one_of_three(rank: int, port: int, folder: str, task: str, *case: Any) -> None:
    run_rank(rank, port, folder, partial(TASKS[task], *case), 3)


def one_of_four(rank: int, port: int, folder: str, task: str, *case: Any) -> None:
    run_rank(rank, port, folder, partial(TASKS[task], *case), 4)


WORKERS = {2: worker, 3: one_of_three, 4: one_of_four}


def on_ranks(world: int, folder: Path, *task: Any) -> list[Any]:
    """What every rank of so many gives."""
    return run_ranks(__name__, folder, *task, seconds=SECONDS, world=world, worker=WORKERS[world].__name__)


def of_rows(*case: Any) -> Any:
    model, run = compiled(*case)
    return plain(steps(model, run)), kept_stats(run)


def kept_stats(run: Any) -> dict[str, Any]:
    stats = stats_of(run)
    return {key: stats[key] for key in ("fallback", "ran", "tokens", "raw_tokens", "expansions", "compiles")}


def of_forest(*case: Any) -> list[Any]:
    """A packed row, then plans with and without cuts, whose parts are of all sizes."""
    model, run = compiled(*case)
    forest = treefx.Forest.from_sequences(ROWS)
    return plain([of_row(model, run, forest), *[of_plan(model, run, plan) for plan in plans(forest)]])


def plans(forest: treefx.Forest) -> list[Plan]:
    return [uncut(forest), every_node(forest)]


def of_row(model: Any, run: Any, forest: treefx.Forest) -> Outcome:
    model.zero_grad()
    row = treefx.scale.pad_row(forest, run)
    with treefx.use(row):
        out = run(**row.model_inputs(), use_cache=False)
    loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, row), row)
    loss.backward()
    return Outcome(loss.detach().clone(), whole_gradients(model))


def of_plan(model: Any, run: Any, plan: Plan) -> Outcome:
    model.zero_grad()
    value = treefx.backward(run, plan, sft)
    return Outcome(value.detach().clone(), whole_gradients(model))


def without_sums() -> list[Any]:
    """Each rank keeps its own summand of the gradient of what all of them read."""
    products.read_by_each = lambda graph, known, value, ranks: value
    return plain(steps(*compiled("tensor", "eager"), batches(0)[:1]))


def with_plain_norms() -> Any:
    """Norms with replicated weights, on this rank's tokens: a gradient is this rank's, and so it must stay."""
    torch.compiler.reset()
    batch, found = batches(0)[:1], []
    for run_with in (lambda model: model, lambda model: torch.compile(model, backend="treefx", options=EAGER)):
        model = sequence_parallel(llama(), norms=())
        run: Any = run_with(model)
        found += plain(steps(model, run, batch))
    return found, treefx.inspect(run).stats["fallback"]


EAGER = {"inner": "eager", "min_sharing": 1.0}
TASKS: dict[str, Callable[..., Any]] = {
    "rows": of_rows,
    "forest": of_forest,
    "wrong": without_sums,
    "plain": with_plain_norms,
}


def expected(ranks: int = WORLD) -> list[Outcome]:
    model = llama(ranks=ranks)
    return steps(model, model)


@pytest.mark.parametrize(("world", "name", "inner", "checkpointing"), ROWS_CASES)
def test_rows_run_on_distinct_tokens(world: int, name: str, inner: str, checkpointing: bool, tmp_path: Path) -> None:
    wanted = expected(world)
    for found, stats in on_ranks(world, tmp_path, "rows", name, inner, checkpointing):
        for (loss, gradients), want in zip(found, wanted, strict=True):
            assert_close(Outcome(loss, gradients), want, FLOAT64)
        if CUT:
            assert "runs on rows when it is compiled" in stats["fallback"]
            continue
        assert (stats["fallback"], stats["ran"], stats["expansions"]) == (None, "packed", [])
        assert stats["tokens"] < stats["raw_tokens"]
        assert stats["compiles"] == 1


@pytest.mark.parametrize(("world", "name", "inner", "checkpointing"), FOREST_CASES)
def test_forests_and_plans(world: int, name: str, inner: str, checkpointing: bool, tmp_path: Path) -> None:
    want = separate_rows(llama(ranks=world), ROWS, [[1.0] * len(row) for row in ROWS])
    for found in on_ranks(world, tmp_path, "forest", name, inner, checkpointing):
        for loss, gradients in found:
            assert_close(Outcome(loss, gradients), want, FLOAT64)


@pytest.mark.skipif(CUT, reason="the mistake is made where such a model runs on distinct tokens")
def test_a_summand_of_a_gradient_is_no_gradient(tmp_path: Path) -> None:
    ((loss, gradients),) = run_ranks(__name__, tmp_path, "wrong", seconds=SECONDS)[0]
    right = expected()[0]
    assert float(loss) == pytest.approx(float(right.loss), rel=FLOAT64)  # nothing else shows it
    assert max(relative_errors(Outcome(loss, gradients), right).values()) > 0.1


def test_what_a_rank_does_with_its_own_tokens_runs_on_rows(tmp_path: Path) -> None:
    for ((loss, gradients), compiled), why in run_ranks(__name__, tmp_path, "plain", seconds=SECONDS):
        assert_close(Outcome(*compiled), Outcome(loss, gradients), FLOAT64)
        assert "DTensor" in why and "reads the tokens of one rank alone" in why and "treefx.convert" in why
