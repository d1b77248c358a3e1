"""Parts of a forest through the compiled model: loss and gradients of every row on its own, wherever it is cut."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.backend.native import TakesCacheFlag, rollouts
from tests.backend.small import Small
from tests.mixers import CumulativeSum
from tests.models import TinyLM, double, zoo
from tests.oracle import FLOAT32, FLOAT64, assert_close, compile_with, outcome, separate_rows, stats_of
from tests.planning.cuts import cut_at, every_node, random_cuts, uncut
from tests.planning.parts import (
    TRAIN_AND_KV,
    Loss,
    check_drawn_forests,
    plans_of,
    run,
    sft,
    tiny,
    weighted_forest,
    whole_forest,
)
from tests.planning.parts import reproducible as reproducible
from tests.spellings import SPELLINGS
from treefx.planning.execution.additive import SumCheck
from treefx.planning.execution.backward import backward
from treefx.runtime import records
from treefx.runtime.cut import EdgeSubset


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_cuts_in_float64(name: str) -> None:
    """Grouped heads and rotary positions; a sliding window shorter than the paths."""
    model, (forest, rows, weights) = double(name, num_hidden_layers=1), weighted_forest()
    compiled = compile_with(model, inner="aot_eager" if name == "llama" else "eager")
    expected, plans = separate_rows(model, rows, weights), plans_of(forest)
    assert max(len(part.ancestors) for plan in plans[:-3] for part in plan.parts) > 3
    for plan in plans:
        assert_close(run(compiled, model, plan), expected, FLOAT64)
    stats = stats_of(compiled)
    assert stats["compiles"] == TRAIN_AND_KV
    assert stats["fallback"] is None


def test_experts_in_float32() -> None:
    """The experts' matmul knows no float64: eager float32 on every row is the judge."""
    model, rows = zoo("mixtral", num_hidden_layers=1), rollouts()
    forest = treefx.Forest.from_sequences(rows)

    def each_row() -> Tensor:
        losses = []
        for row in rows:
            ids = torch.tensor(row)[None]
            logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            losses.append(-logp.gather(-1, ids[0, 1:, None]).sum())
        return sum(losses, torch.zeros(()))

    expected, compiled = outcome(model, each_row), compile_with(model, inner="eager")
    for plan in (every_node(forest), random_cuts(forest, 1)):
        assert_close(run(compiled, model, plan), expected, FLOAT32)


def test_inductor() -> None:
    model, (forest, rows, weights) = TakesCacheFlag(Small(SPELLINGS["sdpa_is_causal"])).double(), weighted_forest()
    compiled, expected = compile_with(model, inner="inductor"), separate_rows(model, rows, weights)
    for plan in (uncut(forest), every_node(forest), random_cuts(forest, 1)):
        assert_close(run(compiled, model, plan), expected, FLOAT64)
    assert stats_of(compiled)["compiles"] == TRAIN_AND_KV


@pytest.mark.parametrize("spelling", ["sliding_softcap", "relative_bias"])
def test_spellings_of_attention(spelling: str) -> None:
    """What a score loads per token is loaded for the boundary too."""
    (model, _), (forest, rows, weights) = tiny(spelling, layers=1), weighted_forest()
    compiled, expected = compile_with(model, inner="eager"), separate_rows(model, rows, weights)
    for plan in (every_node(forest), random_cuts(forest, 3)):
        assert_close(run(compiled, model, plan), expected, FLOAT64)


def test_gradient_checkpointing() -> None:
    model, (forest, rows, weights) = double("llama", num_hidden_layers=1), weighted_forest()
    expected = separate_rows(model, rows, weights)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compiled = compile_with(model)
    for plan in (every_node(forest), random_cuts(forest, 2)):
        assert_close(run(compiled, model, plan), expected, FLOAT64)


def test_random_forests() -> None:
    model, compiled = tiny("sdpa_enable_gqa", kv_heads=2, layers=1)
    check_drawn_forests(model, compiled, 8)


def test_first_part_of_one_token() -> None:
    """The sizes of the part that is compiled first are not burnt in, 0 and 1 neither."""
    model, (forest, rows, weights) = copy.deepcopy(tiny(layers=1)[0]), weighted_forest()
    compiled, expected = compile_with(model), separate_rows(model, rows, weights)
    assert_close(run(compiled, model, cut_at(forest, range(forest.num_tokens))), expected, FLOAT64)
    for plan in plans_of(forest):
        assert_close(run(compiled, model, plan), expected, FLOAT64)
    assert stats_of(compiled)["compiles"] == TRAIN_AND_KV


def test_deep_chain_of_parts() -> None:
    """Every part reads all parts above it."""
    (model, compiled), length = tiny(), 20
    row = [5 + i % 50 for i in range(length)]
    forest, expected = treefx.Forest.from_sequences([row]), separate_rows(model, [row], [[1.0] * length])
    for keeps in (("keep",), ("recompute",)):
        assert_close(run(compiled, model, cut_at(forest, range(length), keeps=keeps)), expected, FLOAT64)


# Losses ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["token_mean", "row_mean"])
def test_means(reduction: Any) -> None:
    (model, compiled), (forest, _, _) = tiny(), weighted_forest(1)

    def loss(logp: Tensor, part: treefx.Forest) -> Tensor:
        return treefx.losses.sft(logp, part, reduction=reduction)

    expected = whole_forest(model, forest, loss)
    assert_close(run(compiled, model, random_cuts(forest, 1), loss), expected, FLOAT64)


def clipped(forest: treefx.Forest, per_edge: bool) -> Loss:
    """A clipped policy loss of both signs, old log-probabilities per edge or per row."""
    draw = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(forest), generator=draw, dtype=torch.float64)
    drawn = -4.0 - torch.rand(len(forest.edges), generator=draw, dtype=torch.float64)
    rows = [-4.0 - torch.rand(int(n), generator=draw, dtype=torch.float64) for n in forest.row_lengths]

    def loss(logp: Tensor, part: EdgeSubset) -> Tensor:
        old = drawn[part.edge_index] if per_edge else rows
        return treefx.losses.policy(logp, part, old, advantages)

    return loss


@pytest.mark.parametrize("per_edge", [True, False])
def test_clipped_policy_loss(per_edge: bool) -> None:
    (model, compiled), forest = tiny(), treefx.Forest.from_sequences(rollouts())
    loss = clipped(forest, per_edge)
    expected = whole_forest(model, forest, loss)
    assert_close(run(compiled, model, random_cuts(forest, 4), loss), expected, FLOAT64)


def sequence_losses(logp: Tensor, forest: EdgeSubset) -> Tensor:
    """DPO over neighbouring rows, and the square of every sequence's mean: neither is a sum over edges."""
    edges = forest.edges
    per_row = logp.new_zeros(len(forest)).index_add(0, edges.row_index, logp[edges.edge_of_entry])
    preference = -nn.functional.logsigmoid(0.1 * (per_row[::2] - per_row[1::2])).sum()
    return preference + (per_row / forest.row_lengths).square().sum()


def test_losses_that_are_no_sum_over_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, compiled), forest = tiny(), treefx.Forest.from_sequences(rollouts())
    expected = whole_forest(model, forest, sequence_losses)
    for plan in (every_node(forest), random_cuts(forest, 5)):
        assert_close(run(compiled, model, plan, sequence_losses, additive=False), expected, FLOAT64)
    with pytest.warns(UserWarning, match="no sum over edges"):
        assert_close(run(compiled, model, every_node(forest), sequence_losses), expected, FLOAT64)
    monkeypatch.setattr(SumCheck, "_check", lambda *_: None)
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_close(run(compiled, model, every_node(forest), sequence_losses, additive=True), expected, 1e-3)


def test_hidden_states_instead_of_logits() -> None:
    (model, compiled), (forest, rows, weights) = tiny(), weighted_forest()
    head = model.model.head.weight  # type: ignore[union-attr]

    def logprobs(output: Any, row: treefx.Forest) -> Tensor:
        return treefx.edge_logprobs(output.hidden, row, weight=head)

    got = run(compiled, model, random_cuts(forest, 6), logprobs=logprobs)
    assert_close(got, separate_rows(model, rows, weights), FLOAT64)


# Gradients of the caller ----------------------------------------------------------------------------------------------


def test_gradients_add_to_those_that_are_there() -> None:
    (model, compiled), (forest, rows, weights) = tiny(), weighted_forest()
    expected = separate_rows(model, rows, weights)
    held = {}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        held[name] = parameter.grad
    for _ in range(2):
        backward(compiled, every_node(forest), sft)
    for name, parameter in model.named_parameters():
        wanted = expected.gradients[name]
        assert parameter.grad is held[name]
        torch.testing.assert_close(parameter.grad, 1.0 + (0.0 if wanted is None else 2.0 * wanted))


@pytest.mark.parametrize("additive", [True, False])
def test_exception_leaves_gradients_alone(additive: bool) -> None:
    (model, compiled), (forest, rows, weights) = tiny(), weighted_forest()
    plan = every_node(forest)
    model.zero_grad(set_to_none=True)
    first, *others = list(model.parameters())
    first.grad = torch.ones_like(first)
    version = first.grad._version
    calls = []

    def failing(logp: Tensor, part: treefx.Forest) -> Tensor:
        calls.append(part)
        if len(calls) > (4 if additive else 0):
            raise KeyboardInterrupt
        return sft(logp, part)

    with pytest.raises(KeyboardInterrupt):
        backward(compiled, plan, failing, additive=additive)
    assert first.grad is not None and bool((first.grad == 1).all()) and first.grad._version == version
    assert all(parameter.grad is None for parameter in others)
    assert_close(run(compiled, model, plan), separate_rows(model, rows, weights), FLOAT64)


def test_frozen_parameters_and_no_grad_outside() -> None:
    model, (forest, rows, weights) = copy.deepcopy(tiny(layers=1)[0]), weighted_forest()
    for parameter in model.model.blocks[0].parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    expected = separate_rows(model, rows, weights)
    with torch.no_grad():
        got = run(compile_with(model), model, random_cuts(forest, 7))
    assert_close(got, expected, FLOAT64)


# Outputs that a run for K/V leaves out, and refusals
# ---------------------------------------------------------------------


def test_run_for_keys_and_values_computes_no_logits() -> None:
    (model, compiled), (forest, _, _) = tiny(), weighted_forest()
    run(compiled, model, every_node(forest, keeps=("recompute",)))
    vocabulary = model.model.head.weight.shape[0]  # type: ignore[union-attr]
    rewrites = [item for found in records.find(model.parameters()) for item in found.graph.rewrites]
    by_run = {item.cut.run: item.gm for item in rewrites if item.cut is not None and item.cut.run != "infer"}
    sizes = {
        name: [tuple(node.meta["val"].shape) for node in gm.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
        for name, gm in by_run.items()
    }
    width = {name: sum(shape[-1:] == (vocabulary,) for shape in shapes) for name, shapes in sizes.items()}
    attentions = {
        name: len(gm.graph.find_nodes(op="call_function", target=torch.ops.treefx.tree_attention.default))
        for name, gm in by_run.items()
    }
    assert width["train"] > 0 and width["kv"] == 0
    assert attentions == {"train": 2, "kv": 1}


def test_refusals() -> None:
    (model, compiled), (forest, _, _) = tiny(), weighted_forest()
    plan = every_node(forest)
    model.zero_grad(set_to_none=True)
    with pytest.raises(treefx.UnsupportedError, match="compiled by treefx"):
        backward(model, plan, sft)
    with pytest.raises(treefx.InputError, match=r"treefx\.plan"):
        backward(compiled, forest, sft)  # type: ignore[arg-type]
    with pytest.raises(treefx.InputError, match="scalar"):
        backward(compiled, plan, lambda logp, part: logp)
    with pytest.raises(treefx.InputError, match="scalar"):
        backward(compiled, plan, lambda logp, part: logp, additive=False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_state_that_does_not_cross_cuts_is_refused() -> None:
    """A running sum would restart at the cut, and the gradients be wrong."""
    torch.manual_seed(0)
    model = TakesCacheFlag(TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, before=CumulativeSum())).double()
    forest, _, _ = weighted_forest()
    with pytest.raises(treefx.UnsupportedError, match="cumsum"):
        backward(compile_with(model), every_node(forest), sft)
