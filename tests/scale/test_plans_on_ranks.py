"""``treefx.backward`` under FSDP2 and DDP: a plan per rank, gradients of one process on the whole forest."""

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import treefx
from tests.backend.native import rollouts
from tests.models import double
from tests.oracle import FLOAT32, FLOAT64, Outcome, assert_close, separate_rows
from tests.planning.cuts import every_node, random_cuts, uncut
from tests.scale.ranks import run_ranks
from tests.scale.shared_out import Small
from treefx.planning.cost.model import Seconds
from treefx.planning.execution.gradients import Gradients
from treefx.planning.execution.sharded import Sharded
from treefx.planning.search.plan import Plan

SECONDS = 400
"""After which processes that hang are ended, and the test fails."""
SHORT = 15
"""The same, inside of the processes, where they are meant to hang."""
RATE = 0.3
STEPS: list[list[list[int]]] = [rollouts(7), [[5, 6, 7, 8]], rollouts(3)]
"""Rows of every step; in the second all ranks but one have none."""


CHECKPOINTED = partial(Small, checkpointing=True)


def llama() -> Any:
    return double("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8)


def compiled(model: nn.Module, inner: str = "eager") -> nn.Module:
    model.compile(backend="treefx", options={"inner": inner, "min_sharing": 1.0})
    return model


def sharded(build: Callable[[], Any] = Small, inner: str = "eager") -> nn.Module:
    model = build()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return compiled(model, inner)


def mixed_precision() -> nn.Module:
    """Computes in float32, reduces gradients in float64; norm and head are one group, with their own hooks."""
    model: Any = Small()
    policy = MixedPrecisionPolicy(torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64)
    for modules in ([model.model.norm, model.lm_head], *model.model.layers, model):
        fully_shard(modules, mp_policy=policy)
    return compiled(model)


def replicated() -> nn.Module:
    return DistributedDataParallel(compiled(CHECKPOINTED()))


ON_FOUR = "fsdp2, checkpointing, accumulation"
CASES: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module], bool, float]] = {
    "fsdp2": (llama, partial(sharded, llama), False, FLOAT64),
    ON_FOUR: (CHECKPOINTED, partial(sharded, CHECKPOINTED), True, FLOAT64),
    "fsdp2, mixed precision, accumulation": (Small, mixed_precision, True, FLOAT32),
    "ddp, checkpointing, accumulation": (CHECKPOINTED, replicated, True, FLOAT64),
}
"""The model, how ranks build it, whether gradients of two steps stay where they are until the third, how exact."""

# On every rank --------------------------------------------------------------------------------------------------------


def plan_of(rows: list[list[int]], rank: int) -> Plan:
    """The plan of a rank's share: one part a tree, one a node, or something between."""
    own = treefx.scale.shard_rows(treefx.Forest.from_sequences(rows), dist.get_world_size(), Seconds(0.0, 1.0, 0.01))[
        rank
    ]
    recomputed = every_node(own, keeps=("recompute",))
    return [recomputed, uncut(own), random_cuts(own, 1), every_node(own)][rank]


def step(model: nn.Module, plan: Plan, additive: bool | None = None) -> Tensor:
    """Gradients of the token mean over all ranks' rows; FSDP2 and DDP divide by the number of ranks."""

    def loss(logp: Tensor, part: treefx.Forest) -> Tensor:
        return dist.get_world_size() * treefx.losses.sft(logp, part, reduction="token_mean")

    return treefx.backward(model, plan, loss, additive=additive) / dist.get_world_size()


def whole(x: Tensor | None) -> Tensor | None:
    """A tensor that may be sharded, a copy."""
    return None if x is None else (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def waiting(model: Any, accumulate: bool) -> Any:
    """The context of a step whose gradients are not reduced yet."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync() if accumulate else nullcontext()
    model.set_requires_gradient_sync(not accumulate)
    model.set_reshard_after_backward(not accumulate)
    return nullcontext()


def train(model: Any, rank: int, accumulate: bool) -> Iterator[tuple[Tensor, dict[str, Tensor | None]]]:
    """Loss of all ranks and gradients, step by step, with updates in between."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number, rows in enumerate(STEPS):
        plan, is_last = plan_of(rows, rank), not accumulate or number == len(STEPS) - 1
        with waiting(model, not is_last):
            loss = step(model, plan)
        dist.all_reduce(loss)
        gradients = (
            {key.removeprefix("module."): whole(p.grad) for key, p in model.named_parameters()} if is_last else {}
        )
        yield loss, gradients
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        if not accumulate:
            with torch.no_grad():  # in between the model is what it was
                model(input_ids=torch.tensor([[5, 6, 7]]))


def worker(rank: int, port: int, folder: str, world: str, task: str) -> None:
    """One of the processes; writes what came out."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=SHORT if task in HANGING else SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=int(world), timeout=limit)
    found = TASKS[task](rank)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def train_all(rank: int) -> dict[str, Any]:
    found = {}
    for name, (_, build, accumulate, _) in CASES.items():
        torch._dynamo.reset()
        if (name == ON_FOUR) == (dist.get_world_size() == 4):
            found[name] = list(train(build(), rank, accumulate))
    return found


# Against one process --------------------------------------------------------------------------------------------------


def test_two_ranks_match_one_process(tmp_path: Path) -> None:
    results = run_ranks(__name__, tmp_path, "2", "train", seconds=SECONDS)
    for name in [name for name in CASES if name != ON_FOUR]:
        check(results, name)


def test_four_ranks_match_one_process(tmp_path: Path) -> None:
    check(run_ranks(__name__, tmp_path, "4", "train", seconds=SECONDS, world=4), ON_FOUR)


def check(results: list[dict[str, Any]], name: str) -> None:
    """Losses and gradients of all ranks against separate rows in one process, with the same updates."""
    build, _, accumulate, limit = CASES[name]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    gradients: dict[str, Tensor] = {}
    for number, rows in enumerate(STEPS):
        predicted = sum(len(row) - 1 for row in rows)
        one = separate_rows(model, rows, [[1.0 / predicted] * len(row) for row in rows])
        gradients = {key: gradients.get(key, 0) + g for key, g in one.gradients.items() if g is not None}
        for result in results:
            loss, got = result[name][number]
            assert_close(Outcome(loss, got or dict(gradients)), Outcome(one.loss, dict(gradients)), limit)
        if accumulate and number < len(STEPS) - 1:
            continue
        for key, parameter in model.named_parameters():
            parameter.grad = gradients[key]
        optimizer.step()
        gradients = {}


def planned(rank: int) -> dict[str, Any]:
    """Measured under FSDP2, planned for less memory than one part needs, and told about by the inspector."""
    model: Any = sharded(inner="aot_eager")
    own = plan_of(STEPS[0], rank).forest
    profile = treefx.profile(model, own, lengths=(3, 5))
    left = [whole(p.grad) for p in model.parameters()]
    whole_plan = treefx.plan(own, profile, memory_limit_bytes=2**40)
    resident = int(profile.cost.resident_bytes)
    limit = resident + int((whole_plan.peak_bytes - resident) * 0.8)
    plan = treefx.plan(own, profile, memory_limit_bytes=limit)
    loss = step(model, plan)
    dist.all_reduce(loss)
    gradients = {key: whole(p.grad) for key, p in model.named_parameters()}
    model.zero_grad()
    step(model, plan, additive=False)  # log-probabilities first, then the parts once more
    again = {key: whole(p.grad) for key, p in model.named_parameters()}
    full = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    stats = treefx.inspect(model).stats
    return {
        "left": left, "parts": (len(whole_plan.parts), len(plan.parts)), "loss": loss,
        "gradients": gradients, "again": again,
        "resident": resident - full, "ran": stats["ran"], "fallback": stats["fallback"],
    }  # fmt: skip


def test_measured_and_planned_under_fsdp2(tmp_path: Path) -> None:
    for found in run_ranks(__name__, tmp_path, "2", "planned", seconds=SECONDS):
        assert found["left"] == [None] * len(found["left"])
        assert found["parts"][1] > found["parts"][0]
        assert found["resident"] > 0  # the shards, in addition to the whole parameters
        assert (found["ran"], found["fallback"]) == ("packed", None)
        for gradients in (found["gradients"], found["again"]):
            assert_close(Outcome(found["loss"], gradients), one_step(), FLOAT64)


# What fails -----------------------------------------------------------------------------------------------------------


def failure(rank: int) -> dict[str, Any]:
    """Steps that fail on one rank, then a step on all: in its second part, by Ctrl-C too, and after its last."""
    model = sharded()
    plan, found = plan_of(STEPS[0], rank), dict[str, Any](errors=[])

    def attempt(raised: BaseException | None = None, **changes: Any) -> None:
        calls: list[int] = []

        def loss(logp: Tensor, part: treefx.Forest) -> Tensor:
            calls.append(1)
            if rank == 0 and len(calls) == 2 and raised is not None:
                raise raised
            return treefx.losses.sft(logp, part)

        try:
            treefx.backward(model, changes.get("plan", plan), loss)
        except BaseException as error:
            found["errors"].append((type(error).__name__, str(error)))

    for raised in (ValueError("no reward"), KeyboardInterrupt("stop"), SystemExit("gone")):
        attempt(raised)
    attempt(plan=None if rank == 0 else plan)
    add = Gradients.add
    if rank == 0:
        setattr(Gradients, "add", lambda gradients: os.kill(os.getpid(), signal.SIGINT))
    attempt()
    setattr(Gradients, "add", add)
    if rank == 0:  # reaches this rank while it waits for the other, which is still to fail
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(4.0)
    attempt()
    found["left"] = [whole(p.grad) for p in model.parameters()]
    found["loss"] = step(model, plan)
    found["gradients"] = {key: whole(p.grad) for key, p in model.named_parameters()}
    dist.all_reduce(found["loss"])
    return found


def one_step() -> Outcome:
    """The first step in one process."""
    rows = STEPS[0]
    predicted = sum(len(row) - 1 for row in rows)
    return separate_rows(Small(), rows, [[1.0 / predicted] * len(row) for row in rows])


def test_a_failing_rank_fails_all(tmp_path: Path) -> None:
    failed, other = run_ranks(__name__, tmp_path, "2", "failure", seconds=SECONDS)
    assert [name for name, _ in failed["errors"]] == [
        "ValueError", "KeyboardInterrupt", "SystemExit", "InputError", "KeyboardInterrupt", "KeyboardInterrupt",
    ]  # fmt: skip
    assert failed["errors"][0][1] == "no reward"
    assert [name for name, _ in other["errors"]] == ["RankError"] * 6
    assert all("rank 0 failed" in message for _, message in other["errors"])
    expected = one_step()
    for found in (failed, other):
        assert found["left"] == [None] * len(found["left"])
        assert_close(Outcome(found["loss"], found["gradients"]), expected, FLOAT64)


def as_fsdp2_does(rank: int) -> None:
    """Its own hooks, which gather and reduce in every part: three against one."""
    model: Any = Small()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    for _ in range(3 if rank == 0 else 1):
        model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()


def without_gradients_of_idle_ranks(rank: int) -> None:
    """A rank without rows has no gradients, and takes no part in their reduction."""
    setattr(Sharded, "_fill_up", lambda ranks: None)
    step(sharded(), plan_of(STEPS[1], rank))


HANGING: dict[str, Callable[[int], None]] = {
    "as FSDP2 does": as_fsdp2_does,
    "without gradients of idle ranks": without_gradients_of_idle_ranks,
}

TASKS: dict[str, Callable[[int], Any]] = {
    "train": train_all,
    "planned": planned,
    "failure": failure,
    **HANGING,
}


@pytest.mark.parametrize("task", HANGING)
def test_wrong_versions_do_not_get_through(task: str, tmp_path: Path) -> None:
    """A collective of rank 0 that the other rank is not in: the group's deadline ends it, or the other's end does."""
    with pytest.raises(AssertionError, match="(?s)(all_gather|reduce_scatter).*(imed out|by peer)"):
        run_ranks(__name__, tmp_path, "2", task, seconds=4 * SHORT)
