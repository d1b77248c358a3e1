"""Losses and outputs: what a caller computes from logits and hidden states, compiled or not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.support import Pair, assert_packed, compare, compile_with, in_case, llama
from tests.batches import IGNORED, Batch, Side, distinct_tokens, shared_batch
from tests.models import TinyLM, zoo
from tests.oracle import FLOAT64, Checked, loss_of
from tests.spellings import PADDED


def shifted_logp(logits: Tensor, ids: Tensor) -> Tensor:
    """log p of every token but the first, [B, T - 1]."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def counted(batch: Batch) -> Tensor:
    """1 where the predicted token has a label, [B, T - 1]."""
    assert batch.labels is not None
    return (batch.labels[:, 1:] != IGNORED).double()


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    assert batch.labels is not None
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())


def label_smoothing(logits: Tensor, batch: Batch) -> Tensor:
    assert batch.labels is not None
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), label_smoothing=0.1)


def policy_gradient(logits: Tensor, batch: Batch) -> Tensor:
    """Clipped importance ratio, an advantage per row, mean over the tokens that count."""
    logp, keep = shifted_logp(logits, batch.input_ids), counted(batch)
    advantage = torch.linspace(-1.0, 1.5, len(logp), dtype=logp.dtype)[:, None]
    ratio = (logp - logp.detach() + 0.3 * torch.sin(torch.arange(logp.numel())).view_as(logp)).exp()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(clipped * keep).sum() / keep.sum()


def preference(logits: Tensor, batch: Batch) -> Tensor:
    """DPO: even rows are chosen, odd ones rejected."""
    row = (shifted_logp(logits, batch.input_ids) * counted(batch)).sum(-1)
    return -F.logsigmoid(0.1 * (row[0::2] - row[1::2])).mean()


def row_means(logits: Tensor, batch: Batch) -> Tensor:
    keep = counted(batch)
    return -((shifted_logp(logits, batch.input_ids) * keep).sum(1) / keep.sum(1).clamp(min=1)).mean()


def entropy(logits: Tensor, batch: Batch) -> Tensor:
    probability = logits[:, :-1].softmax(-1)
    return -(probability * probability.log()).sum(-1).mul(counted(batch)).sum()


def z_loss(logits: Tensor, batch: Batch) -> Tensor:
    partition = logits[:, :-1].logsumexp(-1)
    return cross_entropy(logits, batch) + 1e-2 * (partition.square() * counted(batch)).mean()


def last_logits(logits: Tensor, batch: Batch) -> Tensor:
    """A classifier on every row's last real token."""
    last = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    column = last.cumsum(1).argmax(1)
    return logits[torch.arange(len(column)), column].square().mean()


def everywhere(logits: Tensor, batch: Batch) -> Tensor:
    """All logits, those at padding too."""
    return logits.square().mean()


Loss = Callable[[Tensor, Batch], Tensor]
LOSSES: tuple[Loss, ...] = (
    cross_entropy, label_smoothing, policy_gradient, preference, row_means, entropy, z_loss, last_logits,
    everywhere,
)  # fmt: skip


def assert_shared(checked: Checked, batch: Batch) -> None:
    """Packed; padding runs too at most where nothing says that the loss ignores it, each distinct cell once."""
    assert checked.stats["fallback"] is None
    assert distinct_tokens(batch) <= checked.stats["tokens"] <= distinct_tokens(batch.without("attention_mask"))


class WithLoss(nn.Module):
    """A model and a loss compiled together."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return self.loss(logits, Batch(input_ids, attention_mask, labels))


def test_loss_of_the_caller() -> None:
    """All losses on one compilation, which returns logits."""
    pair = Pair(llama())
    for loss, side in [*((loss, "right") for loss in LOSSES), (everywhere, "left"), (row_means, "left")]:
        batch = shared_batch(rows=4, length=14, shared=6, padding=side)  # type: ignore[arg-type]
        with in_case(f"{loss.__name__}, {side}"):
            checked = pair.check(lambda model: loss(model(**batch.without("labels").inputs()).logits, batch))
            assert_shared(checked, batch)


def tiny() -> nn.Module:
    return TinyLM(PADDED["sdpa_padding"], layers=1, width=16, vocab=128).double()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_loss_compiled_with_the_model(loss: Loss) -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    checked = compare(WithLoss(tiny(), loss), lambda model: model(**batch.inputs()))
    if loss is cross_entropy:
        assert_packed(checked, distinct_tokens(batch))
    assert_shared(checked, batch)


SHIFTED: dict[str, Callable[[Tensor], Tensor]] = {
    "a product with itself": lambda x: x * x,
    "a sum with itself": lambda x: x + x,
    "a quotient by itself": lambda x: x / (x * x + 1),
    "a power": lambda x: x**2,
    "a choice of itself": lambda x: torch.where(x > 0, x, x),
    "a scale": lambda x: 3 * x / 2,
    "a scale that is a tensor": lambda x: x * torch.tensor(0.5, dtype=x.dtype),
    "every other position": lambda x: x[:, ::1][..., :],
    "twice shifted": lambda x: F.pad(x[:, 1:], (0, 0, 1, 0)),
    "another precision": lambda x: x.to(torch.float32).to(x.dtype) * 0 + x,
    "two uses of log-probabilities": lambda x: x.log_softmax(-1) * x.log_softmax(-1),
}


@pytest.mark.parametrize("name", SHIFTED)
def test_functions_of_shifted_logits(name: str) -> None:
    """A scaling by a number acts on the packed entries; whatever else a shifted value meets is told apart from it."""

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        assert batch.labels is not None
        return F.cross_entropy(SHIFTED[name](logits[:, :-1]).flatten(0, 1), batch.labels[:, 1:].flatten())

    batch = shared_batch(rows=4, length=14, shared=6)
    checked = compare(WithLoss(tiny(), loss), lambda model: model(**batch.inputs()))
    assert_shared(checked, batch)


@pytest.mark.parametrize("counts", [7, torch.tensor(7)], ids=["int", "tensor"])
def test_number_of_items_in_the_batch(counts: Any) -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    checked = compare(zoo("llama", num_hidden_layers=1), loss_of(batch, num_items_in_batch=counts))
    assert_packed(checked, distinct_tokens(batch))


def test_loss_and_logits_together() -> None:
    batch = shared_batch(rows=4, length=14, shared=6)

    def step(model: nn.Module) -> Tensor:
        out = model(**batch.inputs())
        assert batch.attention_mask is not None
        return out.loss + 1e-3 * (out.logits.square().mean(-1) * batch.attention_mask).sum()

    compare(tiny(), step)


def test_hidden_states_of_every_layer() -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    assert batch.attention_mask is not None
    keep = batch.attention_mask[..., None].double()

    def step(model: nn.Module) -> Tensor:
        out = model(**batch.inputs(), output_hidden_states=True)
        assert len(out.hidden_states) == 2
        return out.loss + sum((hidden * keep).square().sum() * 1e-3 for hidden in out.hidden_states)

    compare(llama(), step)


def test_value_head_on_the_last_hidden_state() -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    head = torch.linspace(-1, 1, 64, dtype=torch.float64)
    assert batch.attention_mask is not None

    def step(model: nn.Module) -> Tensor:
        hidden = model(**batch.without("labels").inputs(), output_hidden_states=True).hidden_states[-1]
        return ((hidden @ head).square() * batch.attention_mask).sum()

    compare(llama(), step)


@pytest.mark.parametrize(("training", "padding"), [(True, "right"), (False, "left")])
def test_outputs_without_gradients(training: bool, padding: Side) -> None:
    batch = shared_batch(rows=4, length=14, shared=6, padding=padding)
    model = llama().train(training)
    compiled = compile_with(copy.deepcopy(model))
    with torch.no_grad():
        expected = model(**batch.inputs(), output_hidden_states=True)
        got = compiled(**batch.inputs(), output_hidden_states=True)
    assert not got.logits.requires_grad
    torch.testing.assert_close(got.loss, expected.loss, rtol=FLOAT64, atol=FLOAT64)
    pairs = zip((got.logits, *got.hidden_states), (expected.logits, *expected.hidden_states), strict=True)
    for left, right in pairs:
        assert left.shape == right.shape and left.dtype == right.dtype
        torch.testing.assert_close(left * 1, right, rtol=FLOAT64, atol=FLOAT64)


def test_logits_read_after_the_loss() -> None:
    """A metric reads the logits of a training step, after and outside of its backward."""
    batch = shared_batch(rows=4, length=14, shared=6)
    model = tiny()
    compiled = compile_with(copy.deepcopy(model))
    got, expected = compiled(**batch.inputs()), model(**batch.inputs())
    got.loss.backward()
    with torch.no_grad():
        assert torch.equal(got.logits.argmax(-1), expected.logits.argmax(-1))
        assert torch.equal(torch.cat([got.logits[:1], got.logits[1:]]).argmax(-1), expected.logits.argmax(-1))


class Learned(nn.Module):
    """Logits over a temperature that is learned, behind the shift."""

    def __init__(self) -> None:
        super().__init__()
        self.lm, self.temperature = llama(), nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1] / self.temperature
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def test_a_learned_number_behind_the_shift() -> None:
    batch = shared_batch(rows=4, length=12, shared=6)
    stats = compare(Learned(), lambda model: model(**batch.inputs())).stats
    assert (stats["fallback"], stats["expansions"]) == (None, [])
    assert stats["tokens"] == distinct_tokens(batch)
