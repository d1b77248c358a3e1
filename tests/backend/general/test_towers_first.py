"""A tower that Dynamo traces runs in front of its graph, which stays whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.models.test_images import OWN, batch_of
from tests.backend.models.vision import IMAGE, distinct, draw_images, llava
from tests.backend.support import Pair
from tests.batches import IGNORED
from treefx.runtime.whole import tower_first

BATCH, NAMES = batch_of(OWN)


def step(model: nn.Module, pixels: Tensor | None = None) -> Tensor:
    assert BATCH.labels is not None
    labels = BATCH.labels.masked_fill(BATCH.input_ids == IMAGE, IGNORED)
    inputs: dict[str, Any] = {"input_ids": BATCH.input_ids, "attention_mask": BATCH.attention_mask, "labels": labels}
    inputs["pixel_values"] = draw_images(NAMES) if pixels is None else pixels
    loss: Tensor = model(**inputs, use_cache=False).loss
    return loss


def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(BATCH.input_ids, draw_images(NAMES), BATCH.attention_mask, use_cache=False).logits
    return found


def scaled(factor: float) -> nn.Module:
    model = llava()
    with torch.no_grad():
        for x in model.model.vision_tower.parameters():
            x.mul_(factor)
    return model


def check_two_models() -> None:
    for factor in (1.0, 1.5):
        pair = Pair(scaled(factor))
        assert pair.check(step).stats["images_run"] == len({*NAMES})


def test_two_models_of_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code of one model is not that of another one, whose tower it would not run."""
    check_two_models()
    torch._dynamo.reset()
    monkeypatch.setattr(tower_first, "install_guard", lambda guard: None)
    with pytest.raises(AssertionError, match="differ by more than"):
        check_two_models()


def test_a_hook_of_the_user_sees_each_image() -> None:
    """The tower stays in the graph."""
    model, seen = llava(), []
    model.model.vision_tower.register_forward_hook(lambda module, args, result: seen.append(len(args[0])))
    stats = Pair(model).check(step).stats
    assert seen[0] == len(NAMES)
    assert stats["images_run"] is None and stats["tokens"] == distinct(BATCH, NAMES)


def test_as_trainers_call() -> None:
    """The last layer of the tower is not read, and has no gradient; padding is read, behind the call.

    A graph of the tower that gave all results would give zeros to that layer, which decay its weights.
    """
    pair = Pair(llava(), inner="aot_eager")
    assert pair.check(step).stats["images_run"] == len({*NAMES})
    last = pair.model.model.vision_tower.encoder.layers[-1].mlp.fc1.weight
    assert last.grad is None
    assert pair.check(lambda model: logits(model).pow(2).mean()).stats["images_run"] == len({*NAMES})


def test_autocast() -> None:
    """The weights that autocast keeps for later operators are real ones."""
    model = llava().float()
    compiled = torch.compile(model, backend="treefx", fullgraph=True, options={"inner": "eager", "min_sharing": 1.0})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [step(run, draw_images(NAMES).float()) for run in (compiled, model)]
    torch.testing.assert_close(*losses, rtol=0.02, atol=0)


@pytest.mark.parametrize("mode", ["frozen tower", "no gradients"])
def test_modes(mode: str) -> None:
    """The tower records gradients in front of the graph where it would within."""
    model = llava()
    model.model.vision_tower.requires_grad_(mode != "frozen tower")
    compiled = torch.compile(model, backend="treefx", fullgraph=True, options={"inner": "eager", "min_sharing": 1.0})
    with torch.set_grad_enabled(mode != "no gradients"):
        losses = [step(run) for run in (model, compiled)]
    torch.testing.assert_close(*losses, rtol=1e-10, atol=0)
    assert losses[0].requires_grad == losses[1].requires_grad == (mode != "no gradients")
