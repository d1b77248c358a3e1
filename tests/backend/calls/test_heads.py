"""LM heads that a library scores without logits: one operator, on the distinct pairs of token and target."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.backend.support import compare
from tests.batches import IGNORED, Batch, distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.spellings import PADDED
from treefx.passes.trace import heads
from treefx.passes.trace.heads import UNSCORED, Head, register_head
from treefx.runtime.whole import heads as seam

BATCH = shared_batch(rows=6, length=14, shared=7)
Behind = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of a result [B * T], the mask of labels [B, T] and another mask."""


class Scores(torch.autograd.Function):
    """As TRL's, in float64: log-probabilities, entropies, a mean without a gradient, and whether the target is first.

    It writes into a tile, which Dynamo cannot trace.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.temperature = temperature
        logits = torch.empty(len(hidden), 2 * len(weight), dtype=hidden.dtype)[:, : len(weight)]
        torch.mm(hidden, weight.t(), out=logits)
        logp = ((logits if bias is None else logits + bias) / temperature).log_softmax(-1)
        picked = logp.gather(-1, targets[:, None])[:, 0]
        mean, first = logp.mean(-1), logp.argmax(-1) == targets
        ctx.mark_non_differentiable(mean, first)
        return picked, -(logp.exp() * logp).sum(-1), None, mean, first

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_entropy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
        logp = (logits / ctx.temperature).log_softmax(-1)
        p = logp.exp()
        below = grad[:, None] * (torch.nn.functional.one_hot(targets, len(weight)) - p)
        below -= of_entropy[:, None] * p * (logp - (p * logp).sum(-1, keepdim=True))
        below /= ctx.temperature
        return below @ weight, below.t() @ hidden, None if bias is None else below.sum(0), None, None


def zeroed(found: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    return found.view(mask.shape).masked_fill(~mask, 0)


class Backbone(TinyLM):
    """One block; returns hidden states."""

    def __init__(self) -> None:
        super().__init__(PADDED["sdpa_padding"], layers=1, width=16, vocab=128)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        assert self.place is not None
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1]))
        return self.norm(self.blocks[0](x, attention_mask))  # type: ignore[no-any-return]


class Scored(nn.Module):
    """A model whose results are made as TRL makes them."""

    def __init__(self, *, bias: bool = False, behind: Behind = zeroed, temperature: float = 1.0) -> None:
        super().__init__()
        self.lm, self.behind, self.temperature = Backbone(), behind, temperature
        self.bias = nn.Parameter(torch.randn(self.lm.head.weight.shape[0]).double()) if bias else None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        hidden = self.lm(input_ids, attention_mask)
        hidden, labels, other = hidden[:, :-1], labels[:, 1:], input_ids[:, 1:] > 40
        mask = labels != IGNORED
        found = Scores.apply(
            hidden.reshape(-1, hidden.shape[-1]), self.lm.head.weight, self.bias,
            labels.clamp(min=0).reshape(-1), self.temperature,
        )  # fmt: skip
        results = [None if x is None else self.behind(x, mask, other) for x in found]
        return -results[0].sum() / mask.sum(), results


def step_of(batch: Batch, *, outside: bool = False) -> Any:
    """The loss of the model, or a caller's own loss of the results."""

    def step(model: nn.Module) -> Tensor:
        loss, (log_probs, entropies, _, mean, first) = model(**batch.inputs())
        if not outside:
            return loss  # type: ignore[no-any-return]
        weight = torch.linspace(0.5, 2.0, log_probs.numel(), dtype=torch.float64).view(log_probs.shape)
        logged = (mean * weight).sum() + first.sum()
        return (log_probs * weight).sum() + 0.3 * (entropies * weight.flip(0)).sum() + logged  # type: ignore[no-any-return]

    return step


@pytest.fixture(autouse=True)
def _known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "_MODULE", __name__)
    monkeypatch.setattr(seam, "_NAME", Scores.__name__)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_the_head_runs_on_distinct_tokens(bias: bool, outside: bool) -> None:
    checked = compare(Scored(bias=bias, temperature=0.7), step_of(BATCH, outside=outside))
    stats = checked.stats
    assert stats["tokens"] == distinct_tokens(BATCH) and stats["graphs"] == 1
    assert (stats["fallback"], stats["expansions"]) == (None, [])


def test_batches_of_all_sizes_compile_twice() -> None:
    model = Scored()
    compiled = torch.compile(model, backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    for rows, length in [(6, 14), (5, 12), (4, 17), (7, 9)]:
        batch = shared_batch(rows=rows, length=length, shared=6)
        loss, expected = compiled(**batch.inputs())[0], model(**batch.inputs())[0]
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
        grads, right = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, expected))
        torch.testing.assert_close(grads, right, rtol=1e-9, atol=1e-12)
    assert treefx.inspect(compiled).stats["compiles"] == 2


@pytest.mark.parametrize("options", [{"min_sharing": float("inf")}, {"disable_passes": ("loss_laws",)}])
def test_rows_as_they_are(options: Any) -> None:
    compare(Scored(bias=True), step_of(BATCH, outside=True), **options)


def test_without_gradients() -> None:
    model = Scored()
    compiled = torch.compile(model, backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    with torch.no_grad():
        for got, expected in zip(compiled(**BATCH.inputs())[1], model(**BATCH.inputs())[1]):
            assert (got is None and expected is None) or torch.allclose(got, expected, rtol=1e-10)


def test_nothing_to_score() -> None:
    empty = Batch(BATCH.input_ids, BATCH.attention_mask, torch.full_like(BATCH.input_ids, IGNORED))
    compare(Scored(), lambda model: model(**empty.inputs())[1][0].sum() + model.lm.head.weight.sum())


def test_whatever_stands_where_nothing_is_scored() -> None:
    def filled(found: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        return found.view(mask.shape).masked_fill(~mask, 1) * (1 + other)

    checked = compare(Scored(behind=filled), step_of(BATCH, outside=True))
    assert checked.stats["tokens"] == distinct_tokens(BATCH)


# Where results are read outside of one mask, so is padding ------------------------------------------------------------


def not_masked(found: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    return found.view(mask.shape)


def masked_inside(found: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    return found.view(mask.shape).masked_fill(mask, 0)


def read_before(found: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    return found.view(mask.shape).masked_fill(~mask, 0) + found.view(mask.shape) / 2


def several_masks(found: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    return found.view(mask.shape).masked_fill(~(mask if found.dtype.is_floating_point else other), 0)


def of_another_shape(found: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    return found.view(mask.shape[0], 1, -1).masked_fill(~mask, 0).sum(1)


ALL_READ = [not_masked, masked_inside, read_before, several_masks, of_another_shape]


@pytest.mark.parametrize("behind", ALL_READ, ids=lambda behind: behind.__name__)
def test_what_is_read_is_scored(behind: Behind) -> None:
    checked = compare(Scored(behind=behind), step_of(BATCH, outside=True))
    assert checked.stats["tokens"] > distinct_tokens(BATCH)


def test_a_mask_taken_for_one_of_all_readers_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(node: Any) -> Any:
        masks = [mask for result in node.users for mask in heads._masks_of(result) if mask is not None]
        return masks[0] if masks else None

    monkeypatch.setattr(heads, "_mask_behind", first)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(Scored(behind=read_before), step_of(BATCH, outside=True))


def test_gradients_of_equal_pairs_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(grad: Tensor | None, pairs: Any) -> Tensor | None:
        if grad is None:
            return None
        return grad.new_zeros(len(pairs.row) + 1).index_copy_(0, pairs.place, grad)[:-1]

    monkeypatch.setattr(heads, "_of_pairs", last)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(Scored(), step_of(BATCH))


# The operator ---------------------------------------------------------------------------------------------------------


def test_the_operator_sums_over_rows_of_a_token() -> None:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in [(4, 3), (5, 3), (5,)])
    slot, targets = torch.tensor([0, 0, 3, -1, 1, 0, 3, 2]), torch.tensor([2, 2, 1, 4, UNSCORED, 3, 1, UNSCORED])
    key = register_head(Head(Scores, (0.5,)))
    logp = torch.addmm(bias, hidden, weight.t()).div(0.5).log_softmax(-1)
    scored = (slot >= 0) & (targets >= 0)
    expected = torch.where(scored, logp[slot.clamp(min=0), targets.clamp(min=0)], 0)
    entropies = torch.where(scored, -(logp.exp() * logp).sum(-1)[slot.clamp(min=0)], 0)
    found = torch.ops.treefx.head(hidden, targets, weight, bias, slot, key)
    torch.testing.assert_close(found[:2], [expected, entropies], rtol=1e-12, atol=0)
    factor = torch.randn(2, len(slot), dtype=torch.float64)
    got, right = (
        torch.autograd.grad((torch.stack(list(x)) * factor).sum(), [hidden, weight, bias])
        for x in (found[:2], (expected, entropies))
    )
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-14)
    assert got[0][2].abs().max() == 0  # its target is left out


@pytest.mark.parametrize("target", [-100, -1, 5, 6])
def test_targets_outside_of_the_vocabulary_are_the_functions_own(target: int) -> None:
    """An error here, as without treefx; never the number of another pair, nor zero."""
    key = register_head(Head(Scores, (1.0,)))
    hidden, weight = torch.randn(4, 3).double(), torch.randn(5, 3).double()
    targets = torch.tensor([0, target, 3, 4])
    with pytest.raises(RuntimeError, match="out of bounds"):
        Scores.apply(hidden, weight, None, targets)
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.ops.treefx.head(hidden, targets, weight, None, None, key)


def test_the_head_of_inductor() -> None:
    """Forward and backward of the operator in a graph that inductor compiles."""
    tensors = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in [(4, 3), (5, 3)]]
    slot, targets = torch.tensor([0, 0, 3, -1, 1]), torch.tensor([2, 2, 1, 4, UNSCORED])
    key = register_head(Head(Scores, (0.7,)))

    def scored(hidden: Tensor, weight: Tensor) -> Tensor:
        log_probs, entropies, *_ = torch.ops.treefx.head(2 * hidden, targets, weight, None, slot, key)
        return (log_probs + 0.3 * entropies).sum()

    compiled = torch.compile(scored, backend="inductor", fullgraph=True)
    got, expected = (torch.autograd.grad(run(*tensors), tensors) for run in (compiled, scored))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_the_operator_keeps_to_its_schema() -> None:
    tensors = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in [(4, 3), (5, 3)]]
    targets, key = torch.tensor([0, UNSCORED, 3, 4]), register_head(Head(Scores, (1.0,)))
    torch.library.opcheck(torch.ops.treefx.head.default, (tensors[0], targets, tensors[1], None, None, key))
