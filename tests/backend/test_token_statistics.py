"""Buffers that count or average tokens: exact where padding could be dropped, refused by name on a packed row."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.masked import VOCAB, batch_of, causal, distinct
from tests.backend.support import compile_with, in_case
from tests.models import Output
from tests.oracle import FLOAT64, Outcome, assert_close, outcome, refused, separate_rows, stats_of
from tests.planning.cuts import every_node
from treefx.passes import pipeline
from treefx.passes.causal.contract import leaks
from treefx.runtime.cut import Cut

COPY = torch.ops.aten.copy_.default
WIDTH, EXPERTS = 16, 4


class Counts(nn.Module):
    """A causal LM of one layer that keeps one statistic of its tokens in buffers.

    Args:
        statistic: Changes ``seen`` [E], ``cells`` [B, T], ``table`` [V] or ``steps``; gets the model, hidden states x
            [B, T, C], experts chosen [B, T, 2] and token ids [B, T].
        logits: Whether logits are returned with the loss.
    """

    def __init__(self, statistic: "Statistic", *, logits: bool = False) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 48), nn.Linear(WIDTH, VOCAB)
        self.gate, self.statistic, self.logits = nn.Linear(WIDTH, EXPERTS), statistic, logits
        for name, shape in (("seen", (EXPERTS,)), ("cells", (4, 12)), ("table", (VOCAB,)), ("steps", ())):
            self.register_buffer(name, torch.zeros(shape))

    def forward(
        self, input_ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None, **unused: Any
    ) -> Output:
        x = self.embed(input_ids) * (1 + 0.1 * self.steps)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        seen = causal(q) if mask is None else causal(q) & mask[:, None, None].bool()
        x = x + F.scaled_dot_product_attention(q, k, v, seen)[:, 0]
        weight, chosen = self.gate(x).sigmoid().topk(2, -1)
        with torch.no_grad():
            self.statistic(self, x, chosen, input_ids)
        logits = self.head(x * weight.sum(-1, keepdim=True))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits if self.logits else None, None)  # type: ignore[arg-type]


Statistic = Callable[[Counts, Tensor, Tensor, Tensor], object]


def histogram(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.seen.add_(torch.histc(chosen.reshape(-1).double(), bins=EXPERTS, min=0, max=EXPERTS))


def one_hot_sum(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.seen.add_(F.one_hot(chosen, EXPERTS).sum((0, 1, 2)))


def scattered(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.seen.scatter_add_(0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1), dtype=x.dtype))


def indexed(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.seen.index_add_(0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1), dtype=x.dtype))


def running_mean(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.seen.mul_(0.9).add_(0.1 * x.mean((0, 1))[:EXPERTS])


def running_variance(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.seen.lerp_(x.var((0, 1))[:EXPERTS], 0.1)


def largest(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.seen.copy_(torch.maximum(model.seen, x.abs().amax((0, 1))[:EXPERTS]))


def norm(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.seen[0] = x.norm()


def last_position(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.seen.copy_(x[:, -1].sum(0)[:EXPERTS])


def of_every_token(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.cells.copy_(x[..., 0])


def of_token_ids(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.table.add_(F.one_hot(ids, VOCAB).sum((0, 1)))


def number_of_tokens(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    total = torch.zeros_like(model.seen)
    total += ids.numel()
    model.seen.add_(total)


def steps(model: Counts, x: Tensor, chosen: Tensor, ids: Tensor) -> None:
    model.steps.add_(1)


OF_TOKENS: tuple[Statistic, ...] = (
    histogram, one_hot_sum, scattered, indexed, running_mean, running_variance, largest, norm, last_position,
    of_every_token,
)  # fmt: skip
OF_INPUTS: tuple[Statistic, ...] = (of_token_ids, number_of_tokens)


def named(statistic: Statistic) -> str:
    return statistic.__name__


def made(statistic: Statistic, *, logits: bool = False) -> Counts:
    torch.manual_seed(0)
    return Counts(statistic, logits=logits).double()


def check_rows(statistic: Statistic, *sides: str, logits: bool = False) -> dict[str, Any]:
    """Loss, gradients and buffers after two calls on rows padded on each side are those of the eager model."""
    reference = made(statistic, logits=logits)
    model = copy.deepcopy(reference)
    compiled = compile_with(model)
    for side in sides:
        ids, mask, labels = batch_of(side)
        if side == "holes":
            mask[1, 3:6], labels[1, 2:7] = 0, -100
        with in_case(side):
            for _ in range(2):
                expected = outcome(reference, lambda: reference(ids, mask, labels).loss)
                assert_close(outcome(model, lambda: compiled(ids, mask, labels).loss), expected, FLOAT64)
            for (name, got), want in zip(model.named_buffers(), reference.buffers(), strict=True):
                torch.testing.assert_close(got, want, rtol=FLOAT64, atol=FLOAT64, msg=f"buffer {name} differs")
    return stats_of(compiled)


@pytest.mark.parametrize("statistic", OF_TOKENS, ids=named)
def test_padding_that_a_buffer_reads_runs(statistic: Statistic) -> None:
    """The loss alone is returned, so nothing but the buffer reads padding."""
    stats = check_rows(statistic, "right")
    assert stats["fallback"] is None and stats["expansions"]
    assert not any(item["contracted"] for item in stats["expansions"])


@pytest.mark.parametrize("statistic", [histogram, of_every_token], ids=named)
def test_padding_on_other_sides_and_outputs(statistic: Statistic) -> None:
    check_rows(statistic, "none", "left", "holes")
    check_rows(statistic, "left", "right", logits=True)


@pytest.mark.parametrize("statistic", [steps, *OF_INPUTS], ids=named)
def test_what_depends_on_no_hidden_state_lets_padding_go(statistic: Statistic) -> None:
    stats = check_rows(statistic, "right")
    ids, mask, _ = batch_of("right")
    assert stats["expansions"] == [] and stats["tokens"] == distinct(ids, mask)


@pytest.mark.parametrize("statistic", [histogram, running_mean], ids=named)
def test_dropped_padding_is_noticed(statistic: Statistic, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plausible mistake: only outputs are taken for readers, buffers are not."""
    outputs_only = lambda node, live: leaks(node, {item for item in live if item.target is not COPY})  # noqa: E731
    monkeypatch.setattr(pipeline, "leaks", outputs_only)
    with pytest.raises(AssertionError, match="buffer"):
        check_rows(statistic, "right")


# A packed row has every token once ------------------------------------------------------------------------------------

ROWS = [[8, 9, 10, 11, 12], [8, 9, 10, 13], [8, 9, 14]]


def forest_and_model(statistic: Statistic) -> tuple[treefx.Forest, Counts, Any]:
    model = made(statistic, logits=True)
    return treefx.Forest.from_sequences(ROWS), model, compile_with(model)


@pytest.mark.parametrize("statistic", [histogram, running_mean, *OF_INPUTS], ids=named)
def test_a_statistic_of_a_forest_is_refused(statistic: Statistic) -> None:
    forest, model, compiled = forest_and_model(statistic)
    before = copy.deepcopy(dict(model.named_buffers()))
    name = "table" if statistic is of_token_ids else "seen"
    with refused("treefx.use", f"changes {name}", __file__), treefx.use(forest):
        compiled(**forest.model_inputs(), use_cache=False)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class BehindTheStep(nn.Module):
    """The model as its first step runs it, on rows."""

    def __init__(self, model: Counts) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Output:
        self.model.steps.zero_()
        out: Output = self.model(input_ids)
        return out


@pytest.mark.parametrize("additive", [True, False])
def test_a_counter_of_steps_is_raised_once_a_plan(additive: bool) -> None:
    """It scales the embedding: all parts have to read what was there before the step."""
    forest, model, compiled = forest_and_model(steps)
    rows = [[1.0] * len(row) for row in ROWS]
    expected = separate_rows(BehindTheStep(copy.deepcopy(model)), ROWS, rows)
    value = treefx.backward(compiled, every_node(forest), treefx.losses.sft, additive=additive)
    got = Outcome(value, {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()})
    assert_close(got, expected, FLOAT64)
    assert float(model.steps) == 1


def test_a_counter_that_every_part_raises_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cut, "_put_back", lambda cut, changed: nullcontext())
    with pytest.raises(AssertionError, match="differ by more than"):
        test_a_counter_of_steps_is_raised_once_a_plan(True)


def test_a_counter_is_as_it_was_after_a_plan_that_failed() -> None:
    forest, model, compiled = forest_and_model(steps)

    def loss(logp: Tensor, part: treefx.Forest) -> Tensor:
        raise KeyError("a loss of the caller")

    with pytest.raises(KeyError):
        treefx.backward(compiled, every_node(forest), loss)
    assert float(model.steps) == 0


def test_a_counter_of_steps_in_a_forest() -> None:
    forest, model, compiled = forest_and_model(steps)
    with treefx.use(forest):
        compiled(**forest.model_inputs(), use_cache=False)
    assert float(model.steps) == 1
