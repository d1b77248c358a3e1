"""Ids, positions and labels out of range in a converted model, at padding that it leaves out too: eager's errors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

import treefx
from tests.batches import Side, shared_batch
from tests.models import double
from tests.oracle import FLOAT64, assert_close, outcome
from treefx.runtime.padding import Padding

VOCAB = 128
PLAIN: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def step(model: Any, given: dict[str, Tensor]) -> Any:
    """Loss and gradients, or the error."""
    try:
        return outcome(model, lambda: model(**given, use_cache=False).loss)
    except Exception as error:  # noqa: BLE001
        return error


def given(side: Side, name: str, index: int | None) -> dict[str, Tensor]:
    """A padded batch with positions; ids or positions (``name``) are ``index`` at padding."""
    inputs = shared_batch(rows=4, length=10, shared=6, padding=side).inputs()
    mask = inputs["attention_mask"]
    inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if index is not None:
        inputs[name] = inputs[name].masked_fill(mask == 0, index)
    return inputs


def check(side: Side, *wrong: tuple[str, int], **options: Any) -> None:
    """Invalid padding raises in both models, naming the index; valid padding is packed before and after."""
    model = double("gpt2", num_hidden_layers=1, **PLAIN)
    twin = copy.deepcopy(model)
    treefx.convert(model, **options)
    for name, index in wrong:
        for value in (None, index, None):
            inputs = given(side, name, value)
            expected, got = step(twin, inputs), step(model, inputs)
            if value is None:
                assert_close(got, expected, FLOAT64)
                assert treefx.inspect(model).stats["ran"] == "packed"
            else:
                assert isinstance(expected, IndexError)
                assert isinstance(got, IndexError) and str(index) in str(got), f"eager raises, but treefx has {got!r}"


@pytest.mark.parametrize(
    ("side", "options"),
    [("left", {}), ("right", {"padding": "drop"}), ("left", {"padding": "drop", "pack_lm_head": True})],
    ids=["left", "dropped", "head packed"],
)
def test_padding_out_of_range(side: Side, options: dict[str, Any]) -> None:
    check(side, ("input_ids", -1), ("position_ids", 4000), **options)


def test_padding_that_is_not_looked_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plausible mistake: only the lookups that run are checked."""
    monkeypatch.setattr(Padding, "check_lookups", lambda self, grid: None)
    with pytest.raises(AssertionError, match="eager raises"):
        check("left", ("input_ids", VOCAB))


Loss = Callable[[Tensor, Tensor], Tensor]
"""Logits [B, T, V] and labels [B, T], -100 at padding -> scalar."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gathered(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != -100
    return -(logits.log_softmax(-1).gather(-1, labels.masked_fill(~kept, 0)[..., None])[..., 0] * kept).sum()


def of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """As RL trainers write it: the logit of the label less the logarithm of the sum."""
    kept = labels != -100
    picked = logits.gather(-1, labels.masked_fill(~kept, 0)[..., None])[..., 0]
    return -((picked - logits.logsumexp(-1)) * kept).sum()


@pytest.mark.parametrize("packs_head", [False, True])
def test_labels_out_of_range(packs_head: bool) -> None:
    """At a token and at padding; an error leaves nothing behind for the valid labels that follow."""
    model = double("gpt2", num_hidden_layers=1, **PLAIN)
    twin = copy.deepcopy(model)
    treefx.convert(model, min_sharing=1.0, pack_lm_head=packs_head)
    batch = shared_batch(rows=4, length=10, shared=6, padding="right")
    inputs = batch.without("labels").inputs()

    def run(model: Any, loss: Loss, labels: Tensor) -> Any:
        try:
            return outcome(model, lambda: loss(model(**inputs, use_cache=False).logits[:, :-1], labels[:, 1:]))
        except Exception as error:  # noqa: BLE001
            return error

    for loss in (cross_entropy, gathered, of_logits):
        for place in ((1, 3), (0, 7), tuple((inputs["attention_mask"] == 0).nonzero()[-1].tolist())):
            for label in (None, -1, -99, VOCAB, VOCAB + 400):
                labels = batch.labels.clone()
                if label is not None:
                    labels[place] = label
                expected, got = run(twin, loss, labels), run(model, loss, labels)
                case = f"{loss.__name__}, label {label} at {place}"
                if label is None:
                    assert_close(got, expected, FLOAT64)
                    assert treefx.inspect(model).stats["ran"] == "packed", case
                else:
                    assert isinstance(expected, Exception) and type(got) is type(expected), f"{case}: {got!r}"
                    assert str(label) in str(got), case
