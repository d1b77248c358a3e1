"""Context parallelism: one forest on several ranks, losses and gradients of one process on separate rows."""

import datetime
import os
from collections.abc import Callable, Sequence
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
from tests.backend.native import TakesCacheFlag, random_weights, rollouts
from tests.mixers import CausalConvolution, SameConvolution
from tests.models import TinyLM, double
from tests.oracle import FLOAT64, Outcome, assert_close, outcome, relative_errors, separate_rows
from tests.scale.ranks import run_ranks
from tests.scale.shared_out import Small
from tests.spellings import SPELLINGS
from treefx.passes.cuts import exchange as operator
from treefx.planning.cost.model import Seconds
from treefx.scale.pieces import split_tokens

SECONDS = 400
"""After which processes that hang are ended, and the test fails."""
COST = Seconds(0.0, 1.0, 0.05)
STEPS: list[list[list[int]]] = [rollouts(7), [list(range(3, 40))], [[5, 6, 7, 8], [5, 6, 9, 8]], rollouts(3)]
"""Rows of every step: a forest, a chain, next to nothing, another forest."""


def tiny(spelling: str, layers: int = 2, before: Callable[[], nn.Module] = nn.Identity) -> nn.Module:
    torch.manual_seed(0)
    return TakesCacheFlag(TinyLM(SPELLINGS[spelling], layers=layers, before=before())).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], str, list[list[list[int]]]]] = {
    "plain": (Small, "eager", STEPS),
    "checkpointing": (partial(Small, layers=2, checkpointing=True), "aot_eager", STEPS[::3]),
    "windows, soft cap": (partial(tiny, "sliding_softcap"), "eager", STEPS[::3]),
    "sinks": (partial(tiny, "sink_behind", layers=1), "eager", STEPS[::3]),
    "convolutions": (partial(tiny, "sdpa_is_causal", layers=1, before=CausalConvolution), "eager", STEPS[::3]),
}
"""How to build the model, what compiles it, and which steps it takes."""

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
    own = treefx.scale.context_parallel(forest, cost=COST)
    received: list[int] = []
    send = operator.all_to_all

    def counted(message: Tensor, to: list[int], of: list[int], group: str) -> Tensor:
        received.append(sum(of))
        return send(message, to, of, group)

    setattr(operator, "all_to_all", counted)
    model.zero_grad()
    with treefx.use(own):
        out = model(**own.model_inputs(), use_cache=False)
    forward = len(received)
    loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, own), own)
    loss.backward()
    setattr(operator, "all_to_all", send)
    total = loss.detach().clone()
    dist.all_reduce(total)
    plan = split_tokens(forest, dist.get_world_size(), COST)
    return {
        "loss": total, "gradients": gradients(model), "tokens": own.num_tokens, "received": received[:forward],
        "held": len(plan.tokens[dist.get_rank()]),
        "planned": int(plan.received[dist.get_rank()]), "way": plan.way,
    }  # fmt: skip


def train(rank: int, name: str) -> list[dict[str, Any]]:
    """Every step with one model, which compiles once."""
    del rank
    build, inner, steps = MODELS[name]
    model = build()
    model.compile(backend="treefx", options={"inner": inner})
    found = [one_step(model, rows) for rows in steps]
    stats = treefx.inspect(model).stats
    found[-1]["stats"] = stats["ran"], stats["fallback"], stats["compiles"]
    if name == "plain":
        found += [keeping_gradients(model), mesh(model)]
    return found


def mesh(model: nn.Module) -> dict[str, Any]:
    """Two halves of the rows, each on two ranks; DDP over all four, whose mean is multiplied back."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model.zero_grad()
    wrapped = DistributedDataParallel(model)
    rows = STEPS[0]
    forest = treefx.Forest.from_sequences(rows, weights=random_weights(rows))
    half = treefx.scale.shard_rows(forest, 2)[rank // 2]
    own = treefx.scale.context_parallel(half, groups[rank // 2])
    with treefx.use(own):
        out = wrapped(**own.model_inputs(), use_cache=False)
    loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, own), own)
    (loss * dist.get_world_size()).backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"loss": total, "gradients": {name: p.grad for name, p in model.named_parameters()}}


def refusals(rank: int) -> list[str]:
    """Refusals, on all ranks alike, so that none waits."""
    found = []
    rows = STEPS[0]
    for wrong in (
        lambda: treefx.scale.context_parallel(treefx.Forest.from_sequences(rows[rank:])),
        lambda: treefx.scale.context_parallel(treefx.Forest.from_sequences(STEPS[1]), cost=Seconds(0.0, 1.0, rank)),
        lambda: treefx.scale.context_parallel(treefx.Forest.from_sequences(rows), cost=lambda size: size.tokens),
        lambda: run(
            tiny("sdpa_is_causal", layers=1, before=SameConvolution),
            treefx.scale.context_parallel(treefx.Forest.from_sequences(rows)),
        ),
        lambda: run(sharded(), treefx.scale.context_parallel(treefx.Forest.from_sequences(rows))),
        lambda: treefx.backward(Small(), treefx.Forest.from_sequences(rows), treefx.losses.sft),  # type: ignore[arg-type]
    ):
        with pytest.raises((treefx.InputError, treefx.UnsupportedError)) as error:
            wrong()
        found.append(str(error.value))
    with pytest.raises((ZeroDivisionError, treefx.RankError)) as failed:
        own = treefx.scale.context_parallel(treefx.Forest.from_sequences(rows))
        model = sharded(llama())
        model.compile(backend="treefx", options={"inner": "eager"})
        treefx.backward(model, own, lambda logp, forest: logp.sum() * (1 // rank))
    return [*found, str(failed.value)]


def llama() -> Any:
    return double("llama", num_hidden_layers=1)


def sharded(model: Any = None) -> nn.Module:
    model = model or Small()
    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model)  # type: ignore[no-any-return]


def run(model: nn.Module, own: treefx.Forest) -> None:
    model.compile(backend="treefx", options={"inner": "eager"})
    with treefx.use(own):
        model(**own.model_inputs(), use_cache=False)


def keeping_gradients(model: nn.Module) -> dict[str, Any]:
    """The plausible wrong version: the gradients of a boundary stay with who attended to it."""
    model.zero_grad()
    send, is_forward = operator.all_to_all, [True]

    def keep(message: Tensor, to: list[int], of: list[int], group: str) -> Tensor:
        return send(message, to, of, group) if is_forward else message.new_zeros(sum(of), message.shape[1])

    setattr(operator, "all_to_all", keep)
    forest = treefx.Forest.from_sequences(STEPS[0], weights=random_weights(STEPS[0]))
    own = treefx.scale.context_parallel(forest, cost=COST)
    with treefx.use(own):
        out = model(**own.model_inputs(), use_cache=False)
    loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, own), own)
    is_forward.clear()
    loss.backward()
    setattr(operator, "all_to_all", send)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"loss": total, "gradients": gradients(model)}


def logprobs(rank: int) -> list[Any]:
    """Log-probabilities of all edges, under no_grad and in inference mode, then a step, which inductor compiles."""
    del rank
    model = Small()
    model.compile(backend="treefx", options={"inner": "eager"})
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        forest = treefx.Forest.from_sequences(STEPS[0])
        own = treefx.scale.context_parallel(forest)
        with mode(), treefx.use(own):
            out = model(**own.model_inputs(), use_cache=False)
            logp = treefx.edge_logprobs(out.logits, own)
        values = torch.zeros(len(forest.edges), dtype=torch.float64)
        values[own.edge_index] = logp
        dist.all_reduce(values)
        found.append(values)
    model.compile(backend="treefx")
    found.append(one_step(model, STEPS[0]))
    return found


def coupled(logp: Tensor, forest: treefx.Forest) -> Tensor:
    """No sum over edges; FSDP2 divides by the number of ranks."""
    return dist.get_world_size() * (logp.exp() * forest.edges.weight).sum() ** 2


def weighted(logp: Tensor, forest: treefx.Forest) -> Tensor:
    return dist.get_world_size() * treefx.losses.sft(logp, forest)


def with_backward(rank: int) -> list[dict[str, Any]]:
    """``treefx.backward`` on a sharded model. In one step a rank has nothing."""
    del rank
    model: Any = sharded()
    model.compile(backend="treefx", options={"inner": "eager"})
    found = []
    for rows in [STEPS[0], [[5]]]:
        forest = treefx.Forest.from_sequences(rows, weights=random_weights(rows))
        for loss in (weighted, coupled):
            own = treefx.scale.context_parallel(forest, cost=COST)
            model.zero_grad()
            value = treefx.backward(model, own, loss) / dist.get_world_size()
            dist.all_reduce(value)
            gradients = {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}
            found.append({"loss": value, "gradients": gradients})
    return found


TASKS: dict[str, Callable[[int], Any]] = {
    **{name: partial(train, name=name) for name in MODELS},
    "refusals": refusals,
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


@pytest.mark.parametrize("name", list(MODELS)[1:])
def test_two_ranks_match_separate_rows(name: str, tmp_path: Path) -> None:
    check(run_ranks(__name__, tmp_path, "2", name, seconds=SECONDS), name)


def test_four_ranks_match_separate_rows(tmp_path: Path) -> None:
    """Then the plausible mistake with the same model, and a mesh of rows and tokens."""
    results = run_ranks(__name__, tmp_path, "4", "plain", seconds=SECONDS, world=4)
    *right, wrong, meshed = zip(*results, strict=True)
    check(list(zip(*right, strict=True)), "plain")
    want = expected(Small(), STEPS[0])
    for found in wrong:
        errors = relative_errors(Outcome(found["loss"], found["gradients"]), want)
        assert errors["loss"] < FLOAT64
        assert max(errors.values()) > 0.1
    for found in meshed:
        assert_close(Outcome(found["loss"], found["gradients"]), want, FLOAT64)


def check(results: Sequence[Sequence[dict[str, Any]]], name: str) -> None:
    """Loss and gradients of every step, tokens computed once, and what travels as planned, in every layer."""
    build, _, taken = MODELS[name]
    model = build()
    for number, rows in enumerate(taken):
        steps = [result[number] for result in results]
        for step in steps:
            assert_close(Outcome(step["loss"], step["gradients"]), expected(model, rows), FLOAT64)
            assert set(step["received"]) == {step["planned"]}
        assert sum(step["held"] for step in steps) == treefx.Forest.from_sequences(rows).num_tokens
        assert all(step["tokens"] == max(2, step["held"]) for step in steps)  # a lone token has a companion
        assert sum(step["planned"] for step in steps) > 0
    assert len({step["way"] for step in results[0]}) > 1 or taken is not STEPS
    for *ran, compiles in (result[-1]["stats"] for result in results):
        assert ran == ["packed", None]
        assert compiles <= 2  # the chain is deeper than what the first step was compiled for


def test_log_probabilities_before_training(tmp_path: Path) -> None:
    model, forest = Small(), treefx.Forest.from_sequences(STEPS[0])
    rows = [model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1).detach() for row in STEPS[0]]
    want = torch.zeros(len(forest.edges), dtype=torch.float64)
    place = {target: number for number, target in enumerate(forest.edges.target.tolist())}
    for row, values, tokens in zip(STEPS[0], rows, forest.token_of, strict=True):
        for column, token in enumerate(tokens.tolist()[1:]):
            want[place[token]] = values[column, row[column + 1]]
    for *found, step in run_ranks(__name__, tmp_path, "2", "logprobs", seconds=SECONDS):
        for values in found:
            torch.testing.assert_close(values, want, rtol=FLOAT64, atol=FLOAT64)
        assert_close(Outcome(step["loss"], step["gradients"]), expected(model, STEPS[0]), FLOAT64)


def test_backward_on_a_sharded_model(tmp_path: Path) -> None:
    """Also of a loss that reads all edges at once, and where one rank has no token."""
    model = Small()
    for plain, squared, *single in run_ranks(__name__, tmp_path, "2", "backward", seconds=SECONDS):
        assert_close(Outcome(plain["loss"], plain["gradients"]), expected(model, STEPS[0]), FLOAT64)
        assert_close(Outcome(squared["loss"], squared["gradients"]), expected_squared(model), FLOAT64)
        for found in single:
            assert float(found["loss"]) == 0.0
            assert all(g is None or not g.any() for g in found["gradients"].values())


def test_what_cannot_run_on_several_ranks_is_refused_on_all(tmp_path: Path) -> None:
    results = run_ranks(__name__, tmp_path, "2", "refusals", seconds=SECONDS)
    for different, profiles, function, *models, forest, failed in results:
        assert "ranks [1] have others than rank 0" in different
        assert "one rank's profile on all" in profiles
        assert "a row from treefx.scale.context_parallel, got Forest" in forest
        assert "the cost of a token and of a pair" in function
        for refused in models:
            assert refused.startswith("under treefx.use(forest)")
        assert "division" in failed or "rank 0 failed" in failed
    assert results[0][-1] != results[1][-1]
