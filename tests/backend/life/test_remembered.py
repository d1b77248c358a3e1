"""Caches across calls: compiled code, proofs, refusals, tries, and unread outputs.

Each belongs to what it was made with: the mode, the values of the buffers, the weights and inputs of its call.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.small import Small
from tests.batches import IGNORED, Batch, shared_batch
from tests.models import Output
from tests.oracle import FLOAT64, assert_close, compile_with, loss_of, outcome, refused, stats_of
from tests.spellings import SPELLINGS
from treefx.runtime import shapes

BATCH = shared_batch(rows=4, length=12, shared=5, vocab=61)


def mostly_padding() -> Batch:
    """2.5 tokens per distinct one without the padding, which is full of other tokens; with it 1.6."""
    ids = torch.arange(48).view(4, 12) + 10
    ids[:, :6] = torch.arange(6)
    mask = torch.ones_like(ids)
    mask[1:, 6:] = 0
    return Batch(ids, mask, ids.masked_fill(mask == 0, IGNORED))


class Tiny(nn.Module):
    """One layer with one head; the causal mask is the buffer `tri`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(61, width), nn.Embedding(24, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, 61)
        self.register_buffer("tri", torch.ones(24, 24).tril().bool())

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        length = input_ids.shape[1]
        x = self.embed(input_ids) + self.place(torch.arange(length))
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        mask = self.tri[:length, :length]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None].bool()
        logits = self.head(x + F.scaled_dot_product_attention(2 * q, k, v, attn_mask=mask)[:, 0])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits, x)


def tiny() -> nn.Module:
    return Tiny().double()


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model to run eagerly, a twin, and the twin compiled."""
    twin = copy.deepcopy(model)
    return model, twin, compile_with(twin, **options)


def check(model: nn.Module, twin: nn.Module, compiled: Any, batch: Batch = BATCH) -> dict[str, Any]:
    """One step on both sides; the statistics."""
    expected = outcome(model, lambda: loss_of(batch)(model))
    assert_close(outcome(twin, lambda: loss_of(batch)(compiled)), expected, FLOAT64)
    return stats_of(compiled)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-10, atol=1e-12)


# Modes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "after", "inner"),
    [
        (torch.enable_grad, True, "eager"),
        (torch.no_grad, False, "aot_eager"),
        (torch.inference_mode, True, "aot_eager"),
    ],
)
def test_logits_read_in_one_step_and_training_in_the_next(mode: Callable[[], Any], after: bool, inner: str) -> None:
    """A metric, before or after backward: the code that it compiles never serves a training step."""
    model, twin, compiled = pair(tiny(), inner=inner)
    for _ in range(3):
        model.zero_grad(), twin.zero_grad()
        expected, got = model(**BATCH.inputs()), compiled(**BATCH.inputs())
        expected.loss.backward()
        if after:
            got.loss.backward()
        with mode():
            same(got.logits * 1, expected.logits)
        if not after:
            got.loss.backward()
        for left, right in zip(twin.parameters(), model.parameters(), strict=True):
            same(left.grad, right.grad)


def test_gradient_of_logits_that_were_read_under_inference_mode() -> None:
    model, twin, compiled = pair(tiny(), inner="eager")
    got = compiled(**BATCH.inputs())
    with torch.inference_mode():
        got.logits.argmax(-1).sum().item()
    model(**BATCH.inputs()).logits.square().mean().backward()
    got.logits.square().mean().backward()
    same(twin.qkv.weight.grad, model.qkv.weight.grad)


def test_ordinary_graph_under_no_grad_and_with_gradients() -> None:
    """The late read falls below the sharing that pays, as the next training step does."""
    model, twin, compiled = pair(tiny(), min_sharing=2.0)
    batch = mostly_padding()
    got = compiled(**batch.inputs())
    assert stats_of(compiled)["ran"] == "packed"
    same(got.logits * 1, model(**batch.inputs()).logits)
    assert check(model, twin, compiled, batch)["ran"] == "ordinary"


def test_old_probabilities_under_inference_mode_then_training() -> None:
    """The trie, the tiles and the compiled code of the first call serve the second."""
    model, twin, compiled = pair(tiny().float(), inner="eager")
    with torch.inference_mode():
        old = compiled(**BATCH.without("labels").inputs()).logits.log_softmax(-1)
        compiled(**BATCH.inputs())
    assert old.is_inference()
    expected = outcome(model, lambda: loss_of(BATCH)(model))
    assert_close(outcome(twin, lambda: loss_of(BATCH)(compiled)), expected, 1e-5)


def test_old_probabilities_of_a_forest_under_inference_mode() -> None:
    """A forest keeps its edges; so does one that was built under inference mode."""
    model = Small(SPELLINGS["sdpa_is_causal"])
    compiled = compile_with(model, inner="eager")
    with torch.inference_mode():
        forest = treefx.Forest.from_padded(BATCH.input_ids, BATCH.attention_mask)
    inputs = forest.model_inputs()

    def logp() -> Tensor:
        with treefx.use(forest):
            return treefx.edge_logprobs(compiled(**inputs).logits, forest)

    with torch.inference_mode():
        old = treefx.losses.sft(logp(), forest)
    loss = treefx.losses.sft(logp(), forest)
    loss.backward()
    torch.testing.assert_close(loss.detach(), old.clone())
    assert model.head.weight.grad is not None


def test_model_made_under_inference_mode() -> None:
    """Its buffers count no versions, and one that changes is noticed all the same."""
    with torch.inference_mode():
        model = tiny()
    compiled = compile_with(model)
    for full in (False, True):
        if full:
            with torch.inference_mode():
                model.tri.fill_(True)
        with torch.no_grad():
            same(loss_of(BATCH)(compiled), loss_of(BATCH)(model))


# Buffers --------------------------------------------------------------------------------------------------------------


def through_data(model: nn.Module, value: Tensor) -> None:
    model.tri.data.copy_(value)


def through_numpy(model: nn.Module, value: Tensor) -> None:
    model.tri.numpy()[:] = value.numpy()


def under_inference_mode(model: nn.Module, value: Tensor) -> None:
    with torch.inference_mode():
        model.tri.copy_(value)


def by_assignment(model: nn.Module, value: Tensor) -> None:
    model.tri = value.clone()


def by_loading(model: nn.Module, value: Tensor) -> None:
    model.load_state_dict({**model.state_dict(), "tri": value})


def by_set(model: nn.Module, value: Tensor) -> None:
    model.tri.set_(value.clone())


WRITES = [through_data, through_numpy, under_inference_mode, by_set, by_loading, by_assignment]


def test_proof_and_refusal_hold_for_the_values_they_were_made_with() -> None:
    """Causal, not causal, causal again, and a window, however the mask buffer is written."""
    model, twin, compiled = pair(tiny(), inner="eager")
    full = torch.ones(24, 24).bool()
    for write in WRITES:
        ran = []
        for value in (full.tril(), full, full.tril(), full.tril() & full.triu(-3), full):
            write(model, value), write(twin, value)
            stats = check(model, twin, compiled)
            ran.append("rows" if stats["fallback"] else "packed")
        assert ran == ["packed", "rows", "packed", "packed", "rows"], write
        assert stats["shapes"] == 3, f"a value seen before is not analysed again: {write}"


@pytest.mark.parametrize("causal_first", [True, False])
def test_two_models_of_one_class_with_different_buffers(causal_first: bool) -> None:
    """They share Dynamo's graph, and neither proof nor refusal."""
    sides = [pair(tiny(), inner="eager") for _ in range(2)]
    for model in sides[causal_first][:2]:
        model.tri.fill_(True)
    for _ in range(2):
        fallbacks = [check(*side)["fallback"] for side in sides]
        assert [fallback is None for fallback in fallbacks] == [causal_first, not causal_first]


def test_models_with_equal_buffers_share_what_was_compiled() -> None:
    sides = [pair(tiny(), inner="eager") for _ in range(2)]
    assert [check(*side)["compiles"] for side in sides] == [1, 0]


def test_large_buffers_go_by_address_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content is dear there; writing through ``.data`` is the documented exception."""
    monkeypatch.setattr(shapes, "COMPARED_BYTES", 0)
    model, twin, compiled = pair(tiny(), inner="eager")
    check(model, twin, compiled)
    for write in (by_loading, by_assignment):
        for value in (torch.ones(24, 24).bool(), torch.ones(24, 24).tril().bool()):
            write(model, value), write(twin, value)
            check(model, twin, compiled)


def test_proof_tells_bits_apart() -> None:
    """NaN is itself, and minus zero is not zero."""
    for x, other in (
        (torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 2.0])),
        (torch.zeros(3), -torch.zeros(3)),
    ):
        known = shapes.Proof([x], [0])
        assert known.holds([x.clone()]) and not known.holds([other]) and not known.holds([x.double()])


# Outputs that are read late -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_logits_read_after_the_optimizer(fused: bool) -> None:
    """Refused by name in the step that reads first, exact from then on. Fused optimizers count no versions."""
    model, twin, compiled = pair(tiny(), inner="eager")
    sides = [(m, torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused)) for m in (model, twin)]
    for step in range(2):
        outputs = []
        for run, (_, optimizer) in zip((model, compiled), sides, strict=True):
            outputs.append(run(**BATCH.inputs()))
            outputs[-1].loss.backward()
            optimizer.step()
        if step == 0:
            with refused("embed.weight", "clone", "lazy_outputs"):
                outputs[1].logits.argmax(-1)
        else:
            same(outputs[1].logits * 1, outputs[0].logits)


def test_outputs_that_are_not_lazy() -> None:
    """Every position is there, in the first step too, whatever happens to the weights."""
    model, twin, compiled = pair(tiny(), inner="eager", lazy_outputs=False)
    expected, got = model(**BATCH.inputs()), compiled(**BATCH.inputs())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    same(got.logits, expected.logits)
    same(got.hidden, expected.hidden)


def test_option_lazy_outputs_is_a_truth_value() -> None:
    with refused("lazy_outputs", "True or False"):
        compile_with(tiny(), lazy_outputs="no")(**BATCH.inputs())


@pytest.mark.parametrize("spread", [lambda x: x.clone(), lambda x: torch.stack([x, x], -1)[..., 0]])
def test_batch_overwritten_before_the_logits_are_read(spread: Callable[[Tensor], Tensor]) -> None:
    """Trainers keep one tensor for all batches; value and gradient are those of the call's own."""
    model, twin, compiled = pair(tiny(), inner="eager")
    batch = Batch(*(spread(x) for x in (BATCH.input_ids, BATCH.attention_mask, BATCH.labels)))
    expected, got = model(**BATCH.inputs()), compiled(**batch.inputs())
    for x in (batch.input_ids, batch.attention_mask):
        x.fill_(1)
    (got.logits.square().mean() + got.loss).backward()
    (expected.logits.square().mean() + expected.loss).backward()
    same(got.logits, expected.logits)
    same(twin.embed.weight.grad, model.embed.weight.grad)


def test_logits_read_outside_of_autocast() -> None:
    """They are computed as in their call, also where that is done by the ordinary graph."""
    model, _, compiled = pair(Tiny(), inner="eager", min_sharing=2.0)
    batch = mostly_padding()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = model(**batch.inputs()).logits, compiled(**batch.inputs()).logits
    assert stats_of(compiled)["ran"] == "packed"
    read = got * 1
    assert stats_of(compiled)["ran"] == "ordinary"
    assert read.dtype is torch.bfloat16
    torch.testing.assert_close(read, expected)


@pytest.mark.parametrize("change", ["buffer", "parameter"])
def test_logits_read_after_a_write(change: str) -> None:
    _, twin, compiled = pair(tiny(), inner="eager")
    got = compiled(**BATCH.inputs())
    if change == "buffer":
        twin.tri.fill_(True)
    else:
        twin.qkv.weight.data = twin.qkv.weight.data * 2
    with refused("tri" if change == "buffer" else "qkv.weight", "has changed"):
        got.logits.sum()


def test_another_models_optimizer_is_none_of_its_business() -> None:
    model, _, compiled = pair(tiny(), inner="eager")
    got, expected = compiled(**BATCH.inputs()), model(**BATCH.inputs())
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    same(got.logits * 1, expected.logits)


# Sequences ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "inner"), [(2, "aot_eager"), (3, "eager")])
def test_calls_in_any_order(seed: int, inner: str) -> None:
    """Train, evaluate, read late, freeze, load, write buffers, take other shapes, and back again."""
    draw = random.Random(seed)
    model, twin, compiled = pair(tiny(), inner=inner)
    batches = [BATCH, shared_batch(rows=3, length=12, shared=4, vocab=61, seed=1), BATCH.without("attention_mask")]

    def evaluate(mode: Callable[[], Any]) -> None:
        with mode():
            expected, got = model(**batch.inputs()), compiled(**batch.inputs())
            same(got.loss, expected.loss)
            same(got.logits * 1, expected.logits)

    def read_late() -> None:
        expected, got = model(**batch.inputs()), compiled(**batch.inputs())
        same(got.hidden * 1, expected.hidden)
        (expected.loss + expected.logits.square().mean()).backward()
        (got.loss + got.logits.square().mean()).backward()
        same(twin.head.weight.grad, model.head.weight.grad)

    def both(change: Callable[[nn.Module], Any]) -> None:
        change(model), change(twin)

    steps: list[Callable[[], Any]] = [
        lambda: check(model, twin, compiled, batch),
        lambda: evaluate(torch.no_grad),
        lambda: evaluate(torch.inference_mode),
        read_late,
        lambda: both(lambda m: m.eval() if m.training else m.train()),
        lambda: both(lambda m: m.place.weight.requires_grad_(not m.place.weight.requires_grad)),
        lambda: both(lambda m: m.load_state_dict({k: v * 0.9 for k, v in m.state_dict().items() if k != "tri"}, False)),
        lambda: both(lambda m: m.tri.data.logical_or_(torch.ones(24, 24).tril(seed).bool())),
        lambda: both(lambda m: setattr(m, "tri", torch.ones(24, 24).tril().bool())),
    ]
    for _ in range(12):
        batch = draw.choice(batches)
        both(lambda m: m.zero_grad())
        draw.choice(steps)()
