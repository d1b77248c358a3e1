"""Modes of model and step: accumulation, several models, frozen weights, autocast, generation."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.backend.small import Small
from tests.backend.support import assert_packed
from tests.batches import FIRST_TOKEN, IGNORED, distinct_tokens, shared_batch
from tests.models import TinyLM, double, zoo
from tests.oracle import Step, compare, compile_with, loss_of, outcome, relative_errors, stats_of
from tests.spellings import PADDED
from treefx.runtime.dynamo import reads_cache

STEM = [11, 12, 13, 14, 15, 16]


BATCHES = [shared_batch(rows=4, length=14, shared=6, vocab=61, seed=seed) for seed in range(3)]


def small() -> nn.Module:
    torch.manual_seed(0)
    return Small(PADDED["sdpa_padding"], after=nn.LayerNorm(32)).double()


def test_gradients_of_several_batches() -> None:
    """They accumulate, backward by backward, or in one backward after all forwards."""

    def step(model: nn.Module) -> Tensor:
        losses = [model(**batch.inputs()).loss / len(BATCHES) for batch in BATCHES]
        for loss in losses[:-1]:
            loss.backward()
        return losses[-1] + sum(model(**batch.inputs()).loss for batch in BATCHES)

    compare(small(), step)


def test_policy_and_reference_model_on_one_batch() -> None:
    """Two models of different classes take turns, one of them without gradients."""
    batch = BATCHES[0]
    reference = compile_with(TinyLM(PADDED["additive_padding"], layers=1, width=16).double().eval(), inner="eager")

    def step(model: nn.Module) -> Tensor:
        with torch.no_grad():
            base = reference(**batch.without("labels").inputs()).logits.log_softmax(-1)
        logp = model(**batch.without("labels").inputs()).logits.log_softmax(-1)
        divergence = (logp.exp() * (logp - base)).sum(-1)[:, :-1]
        return (divergence * (batch.labels[:, 1:] != IGNORED)).sum()

    def steps(model: nn.Module) -> Tensor:
        return step(model) + step(model)

    compare(small(), steps)


@pytest.mark.parametrize("trained", [("mixes.0.weight", "after.weight"), ("after.weight",)])
def test_frozen_parameters(trained: tuple[str, ...]) -> None:
    """Some matrices, and everything but one norm."""
    model = small()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    checked = compare(model, BATCHES[0])
    assert_packed(checked, distinct_tokens(BATCHES[0]))
    assert checked.model.embed.weight.grad is None


def test_gradient_checkpointing() -> None:
    model = double("gpt2", num_hidden_layers=1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_packed(compare(model, BATCH), distinct_tokens(BATCH))


def test_eager_attention_of_transformers() -> None:
    model = double("llama", num_hidden_layers=1, attn_implementation="eager")
    assert_packed(compare(model, BATCH, inner="eager"), distinct_tokens(BATCH), layers=1)


def assert_rounds_like_eager(name: str, dtype: torch.dtype, step: Step) -> None:
    """The errors against float64 add up to at most 1.5 times those of eager training in the same dtype.

    Low precision rounds in other places when rows are packed, so neither side is the truth of the other.
    """
    model, truth = zoo(name, num_hidden_layers=1).to(dtype), double(name, num_hidden_layers=1)
    truth.load_state_dict(model.state_dict())
    batch_loss = loss_of(BATCH)
    expected = outcome(truth, lambda: batch_loss(truth))
    eager, twin = copy.deepcopy(model), copy.deepcopy(model)
    compiled = compile_with(twin)
    rounded = relative_errors(outcome(eager, lambda: step(eager)), expected)
    got = relative_errors(outcome(twin, lambda: step(compiled)), expected)
    assert 1e-3 < max(rounded.values()) < 0.2, "the comparison itself is off"
    assert sum(got.values()) <= 1.5 * sum(rounded.values())
    stats = stats_of(compiled)
    assert stats["fallback"] is None
    assert stats["tokens"] == distinct_tokens(BATCH)


BATCH = shared_batch(rows=4, length=14, shared=6)


def test_ambient_autocast() -> None:
    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(BATCH)(model)

    assert_rounds_like_eager("llama", torch.float32, step)


def test_bfloat16_weights() -> None:
    assert_rounds_like_eager("gpt2", torch.bfloat16, loss_of(BATCH))


def test_generation_passes_through() -> None:
    model = zoo("llama", use_cache=True, num_hidden_layers=1).eval()
    ids = torch.tensor([[*STEM, 21], [*STEM, 22]])
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    compiled = copy.deepcopy(model)
    compiled.compile(backend="treefx", options={"inner": "aot_eager", "min_sharing": 1.0})
    assert torch.equal(compiled.generate(ids, max_new_tokens=5, do_sample=False), expected)
    stats = stats_of(compiled)
    assert "continues from a cache" in stats["fallback"] and stats["ran"] == "ordinary"
    assert stats["shapes"] <= 1, "each token of a generation was analysed by itself"


@pytest.mark.parametrize(("role", "is_cache"), [("input", True), ("variable", False), ("parameter", False)])
def test_learned_prefixes_are_no_cache(role: str, is_cache: bool) -> None:
    """PEFT hands prefixes that are trained over by the name of a cache."""
    graph = torch.fx.Graph()
    for name in ("L['input_ids']", "L['kwargs']['past_key_values'].layers[0].keys"):
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node._dynamo_source = SimpleNamespace(name=name)  # type: ignore[attr-defined]
    graph.output(())
    gm = torch.fx.GraphModule({}, graph)
    assert reads_cache(gm, ["input", role]) is is_cache


def test_forward_with_a_cache() -> None:
    model = zoo("llama", use_cache=True, num_hidden_layers=1).eval()
    batch = shared_batch(rows=4, length=14, shared=6, padding=None).without("labels")
    compiled = compile_with(copy.deepcopy(model), inner="eager")
    with torch.no_grad():
        expected, got = model(**batch.inputs(), use_cache=True), compiled(**batch.inputs(), use_cache=True)
        token = torch.full((4, 1), FIRST_TOKEN)
        later = model(input_ids=token, past_key_values=expected.past_key_values).logits
        torch.testing.assert_close(got.logits * 1, expected.logits, rtol=1e-5, atol=1e-5)
        continued = compiled(input_ids=token, past_key_values=got.past_key_values).logits
    torch.testing.assert_close(continued * 1, later, rtol=1e-5, atol=1e-5)
