"""Context parallelism: one forest on several ranks, losses and gradients of one process on separate rows."""

import datetime
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import treefx
from tests.backend.native import random_weights, rollouts
from tests.models import double, zoo
from tests.oracle import FLOAT64, Outcome, assert_close, outcome, relative_errors, separate_rows
from tests.trainers.test_distributed import run_ranks
from treefx.passes.cuts import exchange as operator
from treefx.planning.cost.model import Seconds
from treefx.scale.pieces import split_tokens

SECONDS = 400
"""After which processes that hang are ended, and the test fails."""
COST = Seconds(0.0, 1.0, 0.05)
STEPS: list[list[list[int]]] = [rollouts(7), [list(range(3, 40))], [[5, 6, 7, 8], [5, 6, 9, 8]], rollouts(3)]
"""Rows of every step: a forest, a chain, next to nothing, another forest."""


def gpt_oss() -> Any:
    model = double("gpt_oss")
    model.set_experts_implementation("batched_mm")  # the grouped product has no float64
    return model


MODELS: dict[str, tuple[Callable[[], Any], str, float]] = {
    "llama": (partial(double, "llama", num_hidden_layers=2), "inductor", FLOAT64),
    "llama, checkpointing": (partial(double, "llama", num_hidden_layers=2), "aot_eager", FLOAT64),
    "mistral, windows": (partial(double, "mistral", sliding_window=5), "aot_eager", FLOAT64),
    "gemma2": (partial(double, "gemma2"), "aot_eager", FLOAT64),
    "gpt_oss": (gpt_oss, "aot_eager", FLOAT64),
    "lfm2, convolutions": (partial(double, "lfm2"), "aot_eager", FLOAT64),
}
"""How to build the model, what compiles it, how exact."""

# On every rank --------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The sums over all ranks."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(total)
        found[name] = total
    return found


def one_step(model: nn.Module, rows: list[list[int]]) -> dict[str, Any]:
    """Loss and gradients of all ranks together, and what travelled."""
    forest = treefx.Forest.from_sequences(rows, weights=random_weights(rows))
    own = treefx.scale.context(forest, cost=COST)
    received: list[int] = []
    send = operator._all_to_all

    def counted(message: Tensor, to: list[int], of: list[int], group: str) -> Tensor:
        received.append(sum(of))
        return send(message, to, of, group)

    setattr(operator, "_all_to_all", counted)
    model.zero_grad()
    with treefx.use(own):
        out = model(**own.model_inputs(), use_cache=False)
    forward = len(received)
    loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, own), own)
    loss.backward()
    setattr(operator, "_all_to_all", send)
    total = loss.detach().clone()
    dist.all_reduce(total)
    plan = split_tokens(forest, dist.get_world_size(), COST)
    return {
        "loss": total, "gradients": gradients(model), "tokens": own.num_tokens, "received": received[:forward],
        "held": len(plan.tokens[dist.get_rank()]),
        "planned": int(plan.received[dist.get_rank()]), "way": plan.way,
    }  # fmt: skip


def train(name: str) -> list[dict[str, Any]]:
    """Every step with one model, which compiles once."""
    build, inner, _ = MODELS[name]
    model = build()
    if "checkpointing" in name:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.compile(backend="treefx", options={"inner": inner})
    found = [one_step(model, rows) for rows in STEPS]
    stats = treefx.inspect(model).stats
    found[-1]["stats"] = stats["ran"], stats["fallback"], stats["compiles"]
    return found


def mesh(rank: int) -> dict[str, Any]:
    """Two halves of the rows, each on two ranks; DDP over all four, whose mean is multiplied back."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = llama()
    model.compile(backend="treefx", options={"inner": "eager"})
    wrapped = DistributedDataParallel(model)
    rows = STEPS[0]
    forest = treefx.Forest.from_sequences(rows, weights=random_weights(rows))
    half = treefx.scale.assign(forest, 2)[rank // 2]
    own = treefx.scale.context(half, groups[rank // 2])
    with treefx.use(own):
        out = wrapped(**own.model_inputs(), use_cache=False)
    loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, own), own)
    (loss * dist.get_world_size()).backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"loss": total, "gradients": {name: p.grad for name, p in model.named_parameters()}}


def refusals(rank: int) -> list[str]:
    """What is refused, on all ranks alike, so that none waits."""
    found = []
    rows = STEPS[0]
    for wrong in (
        lambda: treefx.scale.context(treefx.Forest.from_sequences(rows[rank:])),
        lambda: treefx.scale.context(treefx.Forest.from_sequences(STEPS[1]), cost=Seconds(0.0, 1.0, rank)),
        lambda: treefx.scale.context(treefx.Forest.from_sequences(rows), cost=lambda size: size.tokens),
        lambda: run(zoo("mamba2"), treefx.scale.context(treefx.Forest.from_sequences(rows))),
        lambda: run(sharded(), treefx.scale.context(treefx.Forest.from_sequences(rows))),
        lambda: treefx.backward(llama(), treefx.Forest.from_sequences(rows), treefx.losses.sft),  # type: ignore[arg-type]
    ):
        with pytest.raises((treefx.InputError, treefx.UnsupportedError)) as error:
            wrong()
        found.append(str(error.value))
    with pytest.raises((ZeroDivisionError, treefx.RankError)) as failed:
        own = treefx.scale.context(treefx.Forest.from_sequences(rows))
        model = sharded()
        model.compile(backend="treefx", options={"inner": "eager"})
        treefx.backward(model, own, lambda logp, forest: logp.sum() * (1 // rank))
    return [*found, str(failed.value)]


def llama() -> Any:
    return double("llama", num_hidden_layers=1)


def sharded() -> nn.Module:
    model = llama()
    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model)  # type: ignore[no-any-return]


def run(model: nn.Module, own: treefx.Forest) -> None:
    model.compile(backend="treefx", options={"inner": "eager"})
    with treefx.use(own):
        model(**own.model_inputs(), use_cache=False)


def keeping_gradients(rank: int) -> dict[str, Any]:
    """The plausible wrong version: the gradients of a boundary stay with who attended to it."""
    del rank
    model = double("llama", num_hidden_layers=2)
    model.compile(backend="treefx", options={"inner": "eager"})
    send, is_forward = operator._all_to_all, [True]

    def keep(message: Tensor, to: list[int], of: list[int], group: str) -> Tensor:
        return send(message, to, of, group) if is_forward else message.new_zeros(sum(of), message.shape[1])

    setattr(operator, "_all_to_all", keep)
    forest = treefx.Forest.from_sequences(STEPS[0], weights=random_weights(STEPS[0]))
    own = treefx.scale.context(forest, cost=COST)
    with treefx.use(own):
        out = model(**own.model_inputs(), use_cache=False)
    loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, own), own)
    is_forward.clear()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"loss": total, "gradients": gradients(model)}


def logprobs(rank: int) -> list[Tensor]:
    """Log-probabilities of all edges without gradients, under no_grad and in inference mode, before any training."""
    del rank
    model = double("llama")
    model.compile(backend="treefx")
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        forest = treefx.Forest.from_sequences(STEPS[0])
        own = treefx.scale.context(forest)
        with mode(), treefx.use(own):
            out = model(**own.model_inputs(), use_cache=False)
            logp = treefx.edge_logprobs(out.logits, own)
        values = torch.zeros(len(forest.edges), dtype=torch.float64)
        values[own.edge_index] = logp
        dist.all_reduce(values)
        found.append(values)
    found.append(one_step(model, STEPS[0])["loss"])
    return found


def coupled(logp: Tensor, forest: treefx.Forest) -> Tensor:
    """No sum over edges; FSDP2 divides by the number of ranks."""
    return dist.get_world_size() * (logp.exp() * forest.edges.weight).sum() ** 2


def weighted(logp: Tensor, forest: treefx.Forest) -> Tensor:
    return dist.get_world_size() * treefx.losses.sft(logp, forest)


def with_backward(rank: int) -> list[dict[str, Any]]:
    """``treefx.backward`` on a sharded model; on four ranks rows are assigned first. In one step a rank has nothing."""
    world = dist.get_world_size()
    groups = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    model: Any = sharded()
    model.compile(backend="treefx", options={"inner": "aot_eager"})
    found = []
    for rows in [STEPS[0], [[5]] if world == 2 else [[5, 6, 7, 8]]]:
        forest = treefx.Forest.from_sequences(rows, weights=random_weights(rows))
        for loss in (weighted, coupled)[: 2 if world == 2 else 1]:
            own = treefx.scale.context(treefx.scale.assign(forest, world // 2)[rank // 2], groups[rank // 2], COST)
            model.zero_grad()
            value = treefx.backward(model, own, loss) / world
            dist.all_reduce(value)
            gradients = {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}
            found.append({"loss": value, "gradients": gradients})
    return found


TASKS: dict[str, Callable[[int], Any]] = {
    **{name: lambda rank, name=name: train(name) for name in MODELS},
    "mesh": mesh,
    "refusals": refusals,
    "keeping gradients": keeping_gradients,
    "logprobs": logprobs,
    "backward": with_backward,
}


def worker(rank: int, port: int, folder: str, world: str, task: str) -> None:
    """One of the processes; writes what came out."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=int(world), timeout=limit)
    torch.save(TASKS[task](rank), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


# Against one process --------------------------------------------------------------------------------------------------


def expected(model: nn.Module, rows: list[list[int]]) -> Outcome:
    return separate_rows(model, rows, random_weights(rows))


def expected_squared(model: nn.Module) -> Outcome:
    """``coupled`` by separate rows, in one process."""
    rows, total = STEPS[0], torch.zeros((), dtype=torch.float64)
    for row, weights in zip(rows, random_weights(rows), strict=True):
        logp = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        picked = logp.gather(-1, torch.tensor(row)[1:, None])[:, 0]
        total = total + (picked.exp() * torch.tensor(weights[1:], dtype=torch.float64)).sum()
    return outcome(model, lambda: total**2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(16)
def test_two_ranks_match_separate_rows(name: str, tmp_path: Path) -> None:
    check(run_ranks(__name__, tmp_path, "2", name, seconds=SECONDS), name)


@pytest.mark.sample(16)
def test_four_ranks_match_separate_rows(tmp_path: Path) -> None:
    check(run_ranks(__name__, tmp_path, "4", "llama", seconds=SECONDS, world=4), "llama")


def check(results: list[list[dict[str, Any]]], name: str) -> None:
    """Loss and gradients of every step, tokens computed once, and what travels as planned, in every layer."""
    build, _, limit = MODELS[name]
    model = build()
    for number, rows in enumerate(STEPS):
        steps = [result[number] for result in results]
        for step in steps:
            assert_close(Outcome(step["loss"], step["gradients"]), expected(model, rows), limit)
            assert set(step["received"]) == {step["planned"]}
        assert sum(step["held"] for step in steps) == treefx.Forest.from_sequences(rows).num_tokens
        assert all(step["tokens"] == max(2, step["held"]) for step in steps)  # a lone token has a companion
        assert sum(step["planned"] for step in steps) > 0
    assert len({step["way"] for step in results[0]}) > 1
    for *ran, compiles in (result[-1]["stats"] for result in results):
        assert ran == ["packed", None]
        assert compiles <= 2  # the chain is deeper than what the first step was compiled for


@pytest.mark.sample(10)
def test_gradients_that_do_not_return_are_missed(tmp_path: Path) -> None:
    model = double("llama", num_hidden_layers=2)
    for found in run_ranks(__name__, tmp_path, "2", "keeping gradients", seconds=SECONDS):
        errors = relative_errors(Outcome(found["loss"], found["gradients"]), expected(model, STEPS[0]))
        assert errors["loss"] < FLOAT64
        assert max(errors.values()) > 0.1


@pytest.mark.sample(10)
def test_log_probabilities_before_training(tmp_path: Path) -> None:
    model, forest = double("llama"), treefx.Forest.from_sequences(STEPS[0])
    rows = [model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1).detach() for row in STEPS[0]]
    want = torch.zeros(len(forest.edges), dtype=torch.float64)
    place = {target: number for number, target in enumerate(forest.edges.target.tolist())}
    for row, values, tokens in zip(STEPS[0], rows, forest.token_of, strict=True):
        for column, token in enumerate(tokens.tolist()[1:]):
            want[place[token]] = values[column, row[column + 1]]
    for *found, loss in run_ranks(__name__, tmp_path, "2", "logprobs", seconds=SECONDS):
        for values in found:
            torch.testing.assert_close(values, want, rtol=FLOAT64, atol=FLOAT64)
        torch.testing.assert_close(loss, expected(model, STEPS[0]).loss, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.sample(16)
def test_a_mesh_of_rows_and_tokens(tmp_path: Path) -> None:
    model = llama()
    for found in run_ranks(__name__, tmp_path, "4", "mesh", seconds=SECONDS, world=4):
        assert_close(Outcome(found["loss"], found["gradients"]), expected(model, STEPS[0]), FLOAT64)


@pytest.mark.sample(10)
def test_backward_on_a_sharded_model(tmp_path: Path) -> None:
    """Also of a loss that reads all edges at once, and where one rank has no token of its own."""
    model = llama()
    for plain, squared, *single in run_ranks(__name__, tmp_path, "2", "backward", seconds=SECONDS):
        assert_close(Outcome(plain["loss"], plain["gradients"]), expected(model, STEPS[0]), FLOAT64)
        assert_close(Outcome(squared["loss"], squared["gradients"]), expected_squared(model), FLOAT64)
        for found in single:
            assert float(found["loss"]) == 0.0
            assert all(g is None or not g.any() for g in found["gradients"].values())


@pytest.mark.sample(12)
def test_backward_on_a_sharded_mesh_of_rows_and_tokens(tmp_path: Path) -> None:
    for plain, chain in run_ranks(__name__, tmp_path, "4", "backward", seconds=SECONDS, world=4):
        assert_close(Outcome(plain["loss"], plain["gradients"]), expected(llama(), STEPS[0]), FLOAT64)
        assert_close(Outcome(chain["loss"], chain["gradients"]), expected(llama(), [[5, 6, 7, 8]]), FLOAT64)


@pytest.mark.sample(20)
def test_the_example_has_the_same_losses_on_any_mesh() -> None:
    example = Path(__file__).parents[2] / "examples" / "many_ranks.py"
    losses = []
    for tokens in ("1", "2"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, str(example), "--tokens", tokens], capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append([float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "loss" in line])
    assert len(losses[0]) == 3
    assert losses[0][-1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.sample(10)
def test_what_cannot_run_on_several_ranks_is_refused_on_all(tmp_path: Path) -> None:
    results = run_ranks(__name__, tmp_path, "2", "refusals", seconds=SECONDS)
    for different, profiles, function, *models, forest, failed in results:
        assert "ranks [1] have others than rank 0" in different
        assert "one rank's profile on all" in profiles
        assert "a row from treefx.scale.context, got Forest" in forest
        assert "the cost of a token and of a pair" in function
        for refused in models:
            assert refused.startswith("under treefx.use(forest)")
        assert "division" in failed or "rank 0 failed" in failed
    assert results[0][-1] != results[1][-1]
