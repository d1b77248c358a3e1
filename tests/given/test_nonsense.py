"""Arguments that mean nothing are refused by name, all over the public interface; what came is in the message."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import treefx
from tests.planning.costs import linear_cost
from tests.rl.worlds import World, script
from treefx import Config, Forest, TreefxError, data, losses, rl, scale
from treefx.data import Sample
from treefx.planning.cost.analytic import Dimensions, estimate_cost
from treefx.rl.samplers.draw import Drawing

NAN, INF = math.nan, math.inf
FOREST = Forest.from_sequences([[1, 2, 3, 4], [1, 2, 5], [7, 8, 9]])
LOGP = torch.full((len(FOREST.edges),), -0.5, dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5])
PAIRS, GOOD = [(0, 1)], [True, False, True]
TREE = rl.StepTree.from_paths([["a", "b"], ["a", "c"], ["d"]])
SAMPLES = [Sample(np.array(row), np.array(row), "t", 0, 0) for row in ([1, 2, 3], [1, 2])]
COST = linear_cost()
SIZES = Dimensions(
    layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocabulary=32, parameters=100,
    active_parameters=100, bytes_per_number=2,
)  # fmt: skip
ROWS = [[1, 2, 3], [1, 2], [1, 2, 3, 4]]

Call = Callable[..., Any]
CALLS: dict[str, tuple[Call, dict[str, Any]]] = {
    "clipped": (lambda **k: losses.clipped(LOGP, FOREST, LOGP, ADVANTAGES, **k), {"clip": 0.2, "dual_clip": 3.0}),
    "cispo": (lambda **k: losses.cispo(LOGP, FOREST, LOGP, ADVANTAGES, **k), {"clip": 0.2}),
    "dpo": (lambda **k: losses.dpo(LOGP, FOREST, LOGP, PAIRS, **k), {"beta": 0.1, "label_smoothing": 0.1}),
    "ipo": (lambda **k: losses.ipo(LOGP, FOREST, LOGP, PAIRS, **k), {"beta": 0.1}),
    "orpo": (lambda **k: losses.orpo(LOGP, FOREST, PAIRS, **k), {"beta": 0.1}),
    "simpo": (
        lambda **k: losses.simpo(LOGP, FOREST, PAIRS, **k),
        {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.1},
    ),
    "kto": (
        lambda **k: losses.kto(LOGP, FOREST, LOGP, GOOD, **{"kl": 0.0, **k}),
        {"beta": 0.1, "kl": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    ),
    "Constant": (losses.Constant, {"length": 10}),
    "edge_logprobs": (lambda **k: treefx.edge_logprobs(torch.zeros(1, 8, 10), FOREST, **k), {"temperature": 1.0}),
    "edge_logprobs of states": (
        lambda **k: treefx.edge_logprobs(torch.zeros(1, 8, 4), FOREST, weight=torch.zeros(10, 4), **k),
        {"temperature": 1.0, "softcap": 30.0, "chunk": 16},
    ),
    "edge_entropy": (lambda **k: treefx.edge_entropy(torch.zeros(1, 8, 10), FOREST, **k), {"temperature": 1.0}),
    "grpo": (lambda **k: rl.grpo(TREE, [1, 2, 3], **k), {"epsilon": 0.1}),
    "reinforce_plus_plus": (lambda **k: rl.reinforce_plus_plus(TREE, [1, 2, 3], **k), {"epsilon": 0.1}),
    "tree_grpo": (lambda **k: rl.tree_grpo(TREE, [1, 2, 3], **k), {"w_intra": 1.0, "w_inter": 1.0, "epsilon": 0.1}),
    "portool": (lambda **k: rl.portool(TREE, [1, 2, 3], **k), {"gamma": 0.9}),
    "fork_relative": (lambda **k: rl.fork_relative(TREE, [1, 2, 3, 4], **k), {"epsilon": 0.1}),
    "reinforce_plus_plus_tokens": (
        lambda **k: rl.reinforce_plus_plus_tokens(TREE, [1, 2, 3], [torch.ones(2) > 0] * 3, [torch.zeros(2)] * 3, **k),
        {"beta": 0.1, "epsilon": 0.1},
    ),
    "Group": (rl.Group, {"trajectories": 2}),
    "PortoolTree": (
        lambda **k: rl.PortoolTree(**{"trajectories": 2, **k}),
        {"trajectories": 2, "forks": 2, "first_steps": 1},
    ),
    "RandomExpansion": (lambda **k: rl.RandomExpansion(**{"chains": 1, **k}), {"chains": 1, "nodes": 1, "rounds": 1}),
    "rollout": (
        lambda **k: rl.rollout(script, World(), [0], rl.Group(1), **k),
        {"seed": 0, "max_steps": 3, "max_length": 90, "tool_threads": 1},
    ),
    "CompletionsSampler": (
        lambda **k: rl.CompletionsSampler("http://localhost", "m", **{"max_new_tokens": 4, **k}),
        {"max_new_tokens": 4, "temperature": 1.0, "concurrency": 1, "timeout": 1.0, "retries": 1, "pause": 0.1},
    ),
    "Drawing": (Drawing, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}),
    "plan": (lambda **k: treefx.plan(FOREST, COST, **k), {"memory_limit_bytes": 10**12}),
    "estimate_cost": (
        lambda **k: estimate_cost(SIZES, **{"flops_per_second": 1e12, **k}),
        {"flops_per_second": 1e12, "host_bytes_per_second": 1e9},
    ),
    "Dimensions": (
        lambda **k: dataclasses.replace(SIZES, **k),
        {
            "layers": 2,
            "hidden": 8,
            "heads": 2,
            "head_dim": 4,
            "vocabulary": 32,
            "parameters": 100,
            "bytes_per_number": 2,
        },
    ),
    "CostModel": (
        lambda **k: dataclasses.replace(COST, **k),
        {"resident_bytes": 1.0, "kv_bytes_per_token": 1.0, "host_bytes_per_second": 1e9},
    ),
    "assign": (lambda **k: scale.assign(FOREST, **k), {"ranks": 2}),
    "split_tokens": (lambda **k: scale.split_tokens(FOREST, **k), {"ranks": 2}),
    "predict_step": (
        lambda **k: scale.predict_step(FOREST, **{"ranks": 2, "cost": COST, "memory_limit_bytes": 10**12, **k}),
        {"ranks": 2, "memory_limit_bytes": 10**12, "link_bytes_per_second": 1e9},
    ),
    "fingerprint": (lambda **k: scale.fingerprint([1, 2, 3], **k), {"chunk": 2}),
    "collate": (
        lambda **k: data.collate(SAMPLES, **{"pad_id": 0, **k}),
        {"pad_id": 0, "pad_multiple": 8, "length": 4},
    ),
    "batches": (lambda **k: data.batches(SAMPLES, **{"rows": 2, **k}), {"rows": 2, "max_tokens": 90}),
    "first_fit_batches": (lambda **k: data.first_fit_batches(FOREST, **k), {"max_tokens": 90}),
    "packed_batches": (
        lambda **k: data.packed_batches([([1, 2], [1, 2])], **{"rows": 1, "columns": 8, **k}),
        {"rows": 1, "columns": 8},
    ),
    "PrefixSampler": (lambda **k: data.PrefixSampler(ROWS, **{"rows": 2, **k}), {"rows": 2, "seed": 0}),
    "TreeBatchSampler": (
        lambda **k: data.TreeBatchSampler(ROWS, **{"max_tokens": 90, **k}),
        {"max_tokens": 90, "num_replicas": 1, "rank": 0, "seed": 0},
    ),
    "TreeBatchSampler by memory": (
        lambda **k: data.TreeBatchSampler(ROWS, cost=COST, **k),
        {"memory_limit_bytes": 10**12},
    ),
    "group_trials": (lambda **k: data.group_trials([], **k), {"window": 4}),
    "scripted_conversations": (data.scripted_conversations, {"tasks": 1, "trials": 1, "seed": 0}),
    "train_tokenizer": (lambda **k: data.train_tokenizer(["abc"], **k), {"vocab_size": 300}),
    "Config": (Config, {"min_sharing": 1.0, "max_shapes": 8, "max_logits": 1024}),
}
NONSENSE: list[Any] = [NAN, -INF, -1, 1j, "1", True, [], torch.tensor([1.0, 2.0])]
MEANS_SOMETHING = {
    -1: {"tree_grpo.w_intra", "tree_grpo.w_inter", "reinforce_plus_plus_tokens.beta", "simpo.gamma"},
}


@pytest.mark.parametrize("case", [f"{name}.{argument}" for name in CALLS for argument in CALLS[name][1]])
def test_nonsense_is_refused_by_name(case: str) -> None:
    name, argument = case.split(".")
    call, arguments = CALLS[name]
    call(**arguments)
    for wrong in [*NONSENSE, *([1.5] if isinstance(arguments[argument], int) and name not in FRACTIONS else [])]:
        if isinstance(wrong, int) and not isinstance(wrong, bool) and case in MEANS_SOMETHING.get(wrong, ()):
            continue
        with pytest.raises(TreefxError, match=argument if name != "Constant" else "Constant") as refusal:
            call(**{**arguments, argument: wrong})
        told = str(refusal.value)
        assert (
            ("must be" in told or "expected" in told)
            and "got" in told
            and (isinstance(wrong, list | Tensor) or repr(wrong) in told)
        )


FRACTIONS = {"Constant", "plan", "predict_step", "TreeBatchSampler by memory", "CostModel"}
"""Their whole numbers may be fractions."""


@pytest.mark.parametrize(
    "case",
    ["plan.memory_limit_bytes", "predict_step.memory_limit_bytes", "TreeBatchSampler by memory.memory_limit_bytes"]
    + ["dpo.beta", "kto.kl", "Constant.length", "grpo.epsilon", "rollout.max_steps", "Group.trajectories"]
    + ["edge_logprobs.temperature", "estimate_cost.flops_per_second", "CostModel.resident_bytes", "collate.length"],
)
def test_infinite_limits_are_refused(case: str) -> None:
    name, argument = case.split(".")
    call, arguments = CALLS[name]
    with pytest.raises(TreefxError, match="Constant|" + argument):
        call(**{**arguments, argument: INF})


@pytest.mark.parametrize(
    "case",
    ["collate.pad_multiple", "collate.length", "batches.rows", "Config.max_shapes", "Config.max_logits", "assign.ranks"]
    + ["plan.memory_limit_bytes", "fingerprint.chunk", "Dimensions.layers", "CostModel.host_bytes_per_second"]
    + ["first_fit_batches.max_tokens", "packed_batches.columns", "rollout.max_length", "group_trials.window"],
)
def test_nothing_is_no_number_of_things(case: str) -> None:
    name, argument = case.split(".")
    call, arguments = CALLS[name]
    with pytest.raises(TreefxError, match=argument):
        call(**{**arguments, argument: 0})


@pytest.mark.parametrize("value", [np.int64(2), np.float32(2), torch.tensor(2.0), 2])
def test_numbers_of_numpy_and_tensors_of_one_are_numbers(value: Any) -> None:
    expected = losses.dpo(LOGP, FOREST, 2 * LOGP, PAIRS, 2.0)
    assert torch.equal(losses.dpo(LOGP, FOREST, 2 * LOGP, PAIRS, value), expected)
    assert treefx.plan(FOREST, COST, np.int64(10**12)).peak_bytes == treefx.plan(FOREST, COST, 10**12).peak_bytes
    assert losses.clipped(LOGP, FOREST, LOGP, ADVANTAGES, (0.2, INF), dual_clip=INF).isfinite()


# One number per row, edge or token ------------------------------------------------------------------------------------

COMPLEX = torch.ones(3, dtype=torch.complex128)
ROW_VECTORS = [torch.ones(len(row)) for row in FOREST.sequences()]


@pytest.mark.parametrize(
    "values",
    [
        COMPLEX,
        LOGP.to(torch.complex128),
        [row.to(torch.complex64) for row in ROW_VECTORS],
        "abc",
        {"a": 1},
        3,
        [None] * 3,
        ["x"] * 3,
        [1j] * 3,
    ],
    ids=repr,
)
@pytest.mark.parametrize("loss", ["policy_gradient", "clipped", "cispo", "old_logp", "importance", "kl", "groups"])
def test_values_that_are_no_real_numbers_are_refused(loss: str, values: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "policy_gradient": lambda: losses.policy_gradient(LOGP, FOREST, values),
        "clipped": lambda: losses.clipped(LOGP, FOREST, LOGP, values),
        "cispo": lambda: losses.cispo(LOGP, FOREST, LOGP, values),
        "old_logp": lambda: losses.clipped(LOGP, FOREST, values, ADVANTAGES),
        "importance": lambda: losses.policy_gradient(LOGP, FOREST, ADVANTAGES, importance=values),
        "kl": lambda: losses.kl(LOGP, FOREST, values),
        "groups": lambda: losses.clipped(LOGP, FOREST, LOGP, ADVANTAGES, level="sequence", groups=values),
    }
    with pytest.raises(TreefxError, match="must be|must be one|needs"):
        calls[loss]()


@pytest.mark.parametrize("wrong", [NAN, 0.5, INF])
def test_groups_are_whole_numbers(wrong: float) -> None:
    groups = [row.clone() for row in ROW_VECTORS]
    losses.clipped(LOGP, FOREST, LOGP, ADVANTAGES, level="sequence", groups=groups)
    groups[1][1] = wrong
    with pytest.raises(TreefxError, match=f"groups must be whole numbers, got {wrong}"):
        losses.clipped(LOGP, FOREST, LOGP, ADVANTAGES, level="sequence", groups=groups)


def test_groups_of_64_bits_are_told_apart() -> None:
    """As hashes of steps are: in float64 these two are one."""
    old = LOGP + torch.linspace(-1, 1, len(LOGP))

    def value(first: int, second: int) -> Tensor:
        groups = [torch.tensor([first, first, second, second][: len(row)]) for row in ROW_VECTORS]
        return losses.clipped(LOGP, FOREST, old, ADVANTAGES, level="sequence", groups=groups)

    assert torch.equal(value(2**62, 2**62 + 1), value(0, 1))
    assert not torch.allclose(value(0, 1), value(0, 0))


def test_arrays_of_numpy_are_rows() -> None:
    expected = losses.clipped(LOGP, FOREST, LOGP, ADVANTAGES)
    assert torch.equal(losses.clipped(LOGP, FOREST, LOGP, ADVANTAGES.double().numpy()), expected)
    vectors = [np.full(len(row), value) for row, value in zip(ROW_VECTORS, ADVANTAGES.tolist(), strict=True)]
    assert torch.equal(losses.clipped(LOGP, FOREST, LOGP, vectors), expected)


def test_rewards_are_real_numbers() -> None:
    for wrong in (COMPLEX, [1j, 2, 3], ["a", "b", "c"], [NAN, 1, 2]):
        with pytest.raises(TreefxError, match="rewards must be"):
            rl.grpo(TREE, wrong)  # type: ignore[arg-type]
    assert rl.grpo(TREE, torch.tensor([True, False, True])).isfinite().all()


@pytest.mark.parametrize("weights", [[NAN, 1, 1], [INF, 1, 1], [1j, 1, 1], ["a", 1, 1], [1, 1], torch.ones(3) * 1j])
def test_weights_of_rows_are_finite_real_numbers(weights: Any) -> None:
    with pytest.raises(TreefxError, match="weights"):
        Forest.from_sequences(ROWS, weights)
