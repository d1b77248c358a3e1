"""Replace a forward after ``treefx.convert`` has proved the model: the next call proves the new code."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaModel

import treefx
from tests.batches import shared_batch
from tests.models import double
from tests.oracle import FLOAT64, assert_close, outcome
from treefx.runtime.converted import planner, seam

BATCH = shared_batch(rows=4, length=12, shared=6, padding=None)


def mixing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Add the running sum over tokens to the first result of a forward."""

    def mixed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        if isinstance(found, Tensor):
            return found + found.cumsum(1)
        return found[0] + found[0].cumsum(1), *found[1:]

    return mixed


def bound(module: nn.Module) -> None:
    module.forward = types.MethodType(mixing(type(module).forward), module)


def unbound(module: nn.Module) -> None:
    mixed = mixing(type(module).forward)
    module.forward = lambda *args, **kwargs: mixed(module, *args, **kwargs)


def another_class(module: nn.Module) -> None:
    found = type(module)
    module.__class__ = type(f"Mixing{found.__name__}", (found,), {"forward": mixing(found.forward)})


PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "embedding": lambda model: model.model.embed_tokens,
    "block": lambda model: model.model.layers[0],
    "attention": lambda model: model.model.layers[0].self_attn,
    "mlp": lambda model: model.model.layers[0].mlp,
    "norm": lambda model: model.model.norm,
}


def check(model: Any, twin: Any, *, packed: bool) -> None:
    step = lambda run: lambda: run(**BATCH.inputs(), use_cache=False).loss  # noqa: E731
    assert_close(outcome(model, step(model)), outcome(twin, step(twin)), FLOAT64)
    assert treefx.inspect(model).stats["ran"] == ("packed" if packed else "ordinary")


def pair() -> tuple[Any, Any]:
    """Return a converted model after a packed call, and its twin on rows."""
    model = double("llama", num_hidden_layers=1)
    twin = copy.deepcopy(model)
    check(treefx.convert(model), twin, packed=True)
    return model, twin


@pytest.mark.parametrize(
    ("place", "change"),
    [*((place, bound) for place in PLACES), ("mlp", unbound), ("mlp", another_class), ("attention", another_class)],
)
def test_a_module_is_changed_to_mix_tokens(place: str, change: Callable[[nn.Module], None]) -> None:
    model, twin = pair()
    for each in (model, twin):
        change(PLACES[place](each))
    check(model, twin, packed=False)


@pytest.mark.parametrize("place", ["attention", "mlp"])
def test_a_class_is_patched_and_restored(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = pair()
    found = type(PLACES[place](model))
    with monkeypatch.context() as patch:
        patch.setattr(found, "forward", mixing(found.forward))
        check(model, twin, packed=False)
    check(model, twin, packed=True)


class Placed(LlamaModel):
    """Counts columns in place of the given positions, if a switch is set."""

    by_column = False
    in_training = False

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        by_column: bool | None = None,
        **more: Any,
    ) -> Any:
        columns = self.by_column if by_column is None else by_column
        if columns or self.in_training and self.training:
            position_ids = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, attention_mask, position_ids, **more)  # type: ignore[arg-type]


def placed() -> Any:
    model = double("llama", num_hidden_layers=1)
    model.model.__class__ = Placed
    return model


@pytest.mark.parametrize("switch", ["attribute", "class", "argument"])
def test_code_around_the_blocks_is_tested_again(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = placed()
    twin = copy.deepcopy(model)
    treefx.convert(model)
    for by_column in (False, True, False):
        more = {"by_column": by_column} if switch == "argument" else {}
        if switch == "class":
            monkeypatch.setattr(Placed, "by_column", by_column)
        for each in (model, twin) if switch == "attribute" else ():
            each.model.by_column = by_column
        step = lambda run: lambda: run(**BATCH.inputs(), use_cache=False, **more).loss  # noqa: B023, E731
        assert_close(outcome(model, step(model)), outcome(twin, step(twin)), FLOAT64)
        packs = treefx.inspect(model).stats["ran"] == "packed"
        assert not by_column or not packs
    assert packs or switch == "class"


@pytest.mark.parametrize("first", [True, False])
def test_code_of_training_is_tested_in_training(first: bool) -> None:
    model = placed()
    model.model.in_training = True
    twin = copy.deepcopy(model)
    treefx.convert(model)
    for training in (first, not first):
        for each in (model, twin):
            each.train(training)
        check(model, twin, packed=not training)


def test_unconvert_keeps_a_patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = pair()
    attention = PLACES["attention"](model)
    monkeypatch.setattr(type(attention), "forward", mixing(type(attention).forward))
    treefx.unconvert(model)
    assert "forward" not in attention.__dict__
    step = lambda run: lambda: run(**BATCH.inputs(), use_cache=False).loss  # noqa: E731
    assert_close(outcome(model, step(model)), outcome(twin, step(twin)), FLOAT64)


def test_missed_changes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "codes_of", lambda modules: [])
    with pytest.raises(AssertionError, match="differ"):
        test_a_module_is_changed_to_mix_tokens("mlp", bound)


def test_stale_copies_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treefx.runtime.converted.hooks.drop_stale_forwards", lambda modules: None)
    with pytest.raises(AssertionError, match="differ"):
        test_a_class_is_patched_and_restored("attention", monkeypatch)


def test_a_forward_of_the_user_stays() -> None:
    model, _ = pair()
    attention = PLACES["attention"](model)
    bound(attention)
    mine = attention.forward
    seam.drop_stale_forwards([attention])
    assert attention.__dict__["forward"] == mine
