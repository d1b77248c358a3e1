"""Hooks on gradients, and weights that change, while a plan runs: one backward of the whole forest, or refused."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.backend.native import Rows
from tests.oracle import FLOAT64, compile_with
from tests.planning.cuts import every_node, random_cuts, uncut
from tests.planning.parts import reproducible as reproducible
from tests.planning.parts import sft, tiny, weighted_forest, whole_forest
from treefx.planning.execution import additive
from treefx.planning.execution.backward import backward
from treefx.planning.execution.gradients import Gradients

Seen = list[tuple[str, Tensor]]
"""What a hook saw, by the name of its parameter."""


def step_inside(model: nn.Module, seen: Seen) -> None:
    """An optimizer that steps as soon as a gradient is accumulated, and frees it."""
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def hook(parameter: Tensor, name: str = name, optimizer: torch.optim.SGD = optimizer) -> None:
            seen.append((name, parameter.grad.clone()))  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)


def clamp(model: nn.Module, seen: Seen) -> None:
    """Gradients are clipped one by one before they are accumulated."""
    for name, parameter in model.named_parameters():

        def hook(gradient: Tensor, name: str = name) -> Tensor:
            seen.append((name, gradient.clone()))
            return gradient.clamp(-0.01, 0.01)

        parameter.register_hook(hook)


def on_the_accumulator(model: nn.Module, seen: Seen) -> None:
    """As libraries for data parallelism reduce: a hook behind the accumulation, which keeps its node alive."""
    for name, parameter in model.named_parameters():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_hook(lambda *_, x=parameter, name=name: seen.append((name, x.grad.clone())))  # type: ignore[misc]
        model.__dict__.setdefault("kept", []).append(node)


def of_all_together(model: nn.Module, seen: Seen) -> None:
    """One hook that gets the gradients of all parameters."""
    names, parameters = zip(*model.named_parameters(), strict=True)

    def hook(gradients: Sequence[Tensor | None]) -> None:
        seen.extend((name, x.clone()) for name, x in zip(names, gradients, strict=True) if x is not None)

    torch.autograd.graph.register_multi_grad_hook(parameters, hook)


HOOKS: dict[str, Callable[[nn.Module, Seen], None]] = {
    "step inside": step_inside,
    "clamp": clamp,
    "on the accumulator": on_the_accumulator,
    "of all together": of_all_together,
}


def twin(layers: int = 1) -> Any:
    """A copy of a small model, to be changed."""
    return copy.deepcopy(tiny(layers=layers)[0])


def trained(install: Callable[[nn.Module, Seen], None], run: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """What a step leaves: the weights, their gradients, and what hooks saw."""
    model, seen = twin(), list[tuple[str, Tensor]]()
    model.zero_grad(set_to_none=True)
    install(model, seen)
    run(model)
    assert seen and len(seen) == len({name for name, _ in seen}), "each hook runs once"
    found = {f"seen {name}": value for name, value in seen}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        found[f"gradient of {name}"] = torch.zeros(()) if parameter.grad is None else parameter.grad
    return found


def on_rows(model: nn.Module, rows: Rows, weights: list[list[float]]) -> None:
    """One backward of the sum over separate rows, by eager PyTorch."""
    terms = []
    for row, weight in zip(rows, weights, strict=True):
        ids = torch.as_tensor(row)
        logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        terms.append(-(logp[torch.arange(len(row) - 1), ids[1:]] * torch.tensor(weight[1:], dtype=logp.dtype)).sum())
    torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]


def in_every_part(gradients: Gradients, roots: Any, given: Any, own: Any = ()) -> list[Tensor | None]:
    """As it was: autograd accumulates the gradients of each part, and runs hooks each time."""
    torch.autograd.backward(roots, given)
    return [leaf.grad for leaf in own]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_run_once_with_the_whole_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forest, rows, weights = weighted_forest()
    expected = trained(HOOKS[name], lambda model: on_rows(model, rows, weights))
    plans = [random_cuts(forest, 3) if name in ("clamp", "of all together") else uncut(forest), every_node(forest)]
    for plan in plans:
        got = trained(HOOKS[name], lambda model, plan=plan: backward(compile_with(model), plan, sft))  # type: ignore[misc]
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=FLOAT64, atol=FLOAT64)
    monkeypatch.setattr(Gradients, "backward", in_every_part)
    with pytest.raises((AssertionError, treefx.UnsupportedError), match="each hook runs once|changed while they ran"):
        trained(HOOKS[name], lambda model: backward(compile_with(model), plans[1], sft))


def test_hooks_stay_as_they_were_and_removed_ones_stay_away() -> None:
    model, (forest, _, _) = twin(), weighted_forest()
    first, *others = model.parameters()
    calls: list[str] = []
    handles = [
        first.register_hook(lambda _: calls.append("removed")),
        first.register_hook(lambda _: calls.append("kept")),
    ]
    hooks = dict(first._backward_hooks)

    def loss(logp: Tensor, part: treefx.Forest) -> Tensor:
        handles[0].remove()
        return sft(logp, part)

    backward(compile_with(model), every_node(forest), loss)
    assert calls == ["kept"]
    assert list(first._backward_hooks.items()) == list(hooks.items())[1:]
    assert not any(parameter._backward_hooks for parameter in others)


# What fails -----------------------------------------------------------------------------------------------------------


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def unwritable(model: nn.Module) -> None:
    """A gradient that autograd cannot add to."""
    norm = next(p for p in model.parameters() if p.ndim == 1)
    norm.grad = torch.ones((), dtype=norm.dtype).expand_as(norm)


def interrupted_hook(model: nn.Module) -> None:
    list(model.parameters())[1].register_post_accumulate_grad_hook(interrupt)


def interrupted_clip(model: nn.Module) -> None:
    list(model.parameters())[1].register_hook(interrupt)


def none_before(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    interrupted_hook(model)


@pytest.mark.parametrize("spoil", [unwritable, interrupted_hook, interrupted_clip, none_before])
def test_a_failure_while_gradients_are_added_leaves_them_alone(
    spoil: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (forest, _, _) = twin(), weighted_forest()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1 / 3)
    spoil(model)
    held = {p: (p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()}

    def unchanged() -> bool:
        same = [p.grad is grad and (grad is None or torch.equal(grad, copy)) for p, (grad, copy) in held.items()]
        return all(same)

    compiled = compile_with(model)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        backward(compiled, every_node(forest), sft)
    assert unchanged()
    monkeypatch.setattr(Gradients, "put_back", lambda gradients: None)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        backward(compiled, every_node(forest), sft)
    assert not unchanged()


def in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(1.5)


def by_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 1.5


@pytest.mark.parametrize("change", [in_place, by_data])
@pytest.mark.parametrize("additive", [None, False])
def test_weights_that_change_between_parts_are_refused(change: Callable[[Any], None], additive: bool | None) -> None:
    model, (forest, _, _) = twin(), weighted_forest()
    compiled, plan, calls = compile_with(model), every_node(forest), list[int]()
    model.zero_grad(set_to_none=True)

    def loss(logp: Tensor, part: treefx.Forest) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            change(model.model.head.weight)
        return sft(logp, part)

    with pytest.raises(treefx.UnsupportedError, match=r"head\.weight changed while they ran.*after treefx"):
        backward(compiled, plan, loss, additive=additive)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_profile_runs_no_hook_and_changes_no_gradient() -> None:
    model, (forest, _, _) = twin(), weighted_forest()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(interrupt)
        parameter.register_hook(interrupt)
    treefx.profile(compile_with(model, inner="aot_eager"), forest, lengths=(2,))
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())


# Losses that are no sums ----------------------------------------------------------------------------------------------


def mean(logp: Tensor, part: treefx.Forest) -> Tensor:
    return -logp.mean()


def weighted_mean(logp: Tensor, part: treefx.Forest) -> Tensor:
    weight = part.edges.weight.to(logp.dtype)
    return -(logp * weight).sum() / weight.sum().clamp(min=1)


def with_a_constant(logp: Tensor, part: treefx.Forest) -> Tensor:
    return sft(logp, part) + 30.0


def of_policy(logp: Tensor, part: treefx.Forest) -> Tensor:
    """Zero in value on policy, where its gradient is not."""
    advantage = torch.linspace(-1, 1, len(logp), dtype=logp.dtype)
    return ((logp - logp.detach()).exp() * (advantage - advantage.mean())).mean()


@pytest.mark.parametrize("loss", [mean, weighted_mean, with_a_constant, of_policy])
def test_a_mean_over_the_edges_of_a_part_is_not_summed(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, compiled), (forest, _, _) = tiny(layers=1), weighted_forest()
    monkeypatch.setattr(additive, "_known", OrderedDict())
    expected, plan = whole_forest(model, forest, loss), every_node(forest)

    def step(**options: Any) -> Tensor:
        model.zero_grad(set_to_none=True)
        value = backward(compiled, plan, loss, **options)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(value, expected.loss, rtol=FLOAT64, atol=FLOAT64)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=FLOAT64, atol=FLOAT64)
        return value

    with pytest.raises(treefx.CoupledLossError, match=r"no sum over edges.*additive=False"):
        step(additive=True)
    additive._known.clear()
    with pytest.warns(UserWarning, match=r"no sum over edges.*additive=False"):
        step()
    step()  # known: without a warning, and without a part in vain
    monkeypatch.setattr(additive.SumCheck, "_check", lambda *_: None)
    additive._known.clear()
    with pytest.raises(AssertionError):
        step()


def test_a_sum_is_checked_once_per_definition_and_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, compiled), (forest, _, _) = tiny(layers=1), weighted_forest()
    monkeypatch.setattr(additive, "_known", OrderedDict())
    plan, calls = every_node(forest), list[int]()
    advantages = torch.zeros(len(forest.edges), dtype=torch.float64)

    def loss_of(reduction: str, scale: float) -> Any:
        def loss(logp: Tensor, part: Any) -> Tensor:
            calls.append(len(logp))
            terms = logp * scale * (1 + advantages[part.edge_index])
            return terms.sum() if reduction == "sum" else terms.mean()

        return loss

    def count(reduction: str, scale: float) -> int:
        calls.clear()
        backward(compiled, plan, loss_of(reduction, scale))
        return len(calls)

    parts = len([part for part in plan.parts if calls.clear() is None])
    first, again = count("sum", 1.0), count("sum", 0.5)
    assert first == again + 1 and again <= parts
    with pytest.warns(UserWarning, match="no sum over edges"):
        count("mean", 0.5)
    assert count("mean", 0.7) == 1  # on all edges


def test_parts_without_weight_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of weight 0, as a part, has the mean 0, and what follows has its own whole mean."""
    (model, compiled), rows = tiny(layers=1), [[5, 6, 7, 8, 9], [5, 6, 7, 11, 12, 13], [5, 6, 7, 14]]
    monkeypatch.setattr(additive, "_known", OrderedDict())
    forest = treefx.Forest.from_sequences(rows, weights=[[0.0] * 3 + [1.0] * (len(row) - 3) for row in rows])
    expected = whole_forest(model, forest, weighted_mean)
    with pytest.warns(UserWarning, match="no sum over edges"):
        value = backward(compiled, every_node(forest), weighted_mean)
    torch.testing.assert_close(value, expected.loss, rtol=FLOAT64, atol=FLOAT64)
