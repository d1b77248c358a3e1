"""Modes of model and step: accumulation, several models, frozen weights, autocast, generation."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.backend.support import assert_packed, llama
from tests.batches import FIRST_TOKEN, IGNORED, distinct_tokens, shared_batch
from tests.models import double, zoo
from tests.oracle import FLOAT64, Step, compare, compile_with, loss_of, outcome, relative_errors, stats_of
from treefx.runtime.dynamo import reads_cache

pytestmark = pytest.mark.sample(8)

STEM = [11, 12, 13, 14, 15, 16]


def test_gradients_accumulate_over_batches() -> None:
    batches = [shared_batch(rows=4, length=14, shared=6, seed=seed) for seed in range(3)]

    def step(model: nn.Module) -> Tensor:
        losses = [model(**batch.inputs()).loss / len(batches) for batch in batches]
        for loss in losses[:-1]:
            loss.backward()
        return losses[-1]

    compare(llama(), step)


def test_backward_after_other_forwards() -> None:
    """Losses of several batches are summed before the one backward."""
    batches = [shared_batch(rows=4, length=14, shared=6, seed=seed) for seed in range(3)]
    compare(llama(), lambda model: sum(model(**batch.inputs()).loss for batch in batches))


def test_two_models_of_one_process() -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    models = [llama(), double("qwen3", num_hidden_layers=1)]
    twins = [copy.deepcopy(model) for model in models]
    compiled = [compile_with(twin) for twin in twins]
    for _ in range(2):
        for model, twin, run in zip(models, twins, compiled, strict=True):
            got = outcome(twin, lambda run=run: loss_of(batch)(run))
            expected = outcome(model, lambda model=model: loss_of(batch)(model))
            assert max(relative_errors(got, expected).values()) < FLOAT64


def test_policy_and_reference_model_on_one_batch() -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    reference = compile_with(double("qwen3", num_hidden_layers=1).eval())
    with torch.no_grad():
        base = reference(**batch.without("labels").inputs()).logits.log_softmax(-1)

    def step(model: nn.Module) -> Tensor:
        logp = model(**batch.without("labels").inputs()).logits.log_softmax(-1)
        divergence = (logp.exp() * (logp - base)).sum(-1)[:, :-1]
        return (divergence * (batch.labels[:, 1:] != IGNORED)).sum()

    compare(llama(), step)


def test_frozen_parameters() -> None:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "mlp.up" in name)
    batch = shared_batch(rows=4, length=14, shared=6)
    checked = compare(model, batch)
    assert_packed(checked, distinct_tokens(batch))
    assert checked.model.get_input_embeddings().weight.grad is None


def test_everything_frozen_but_one_norm() -> None:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.norm.weight")
    compare(model, shared_batch(rows=4, length=14, shared=6))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradient_checkpointing(name: str) -> None:
    model = double(name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = shared_batch(rows=4, length=14, shared=6)
    assert_packed(compare(model, batch), distinct_tokens(batch))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_eager_attention_of_transformers(name: str) -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    model = double(name, num_hidden_layers=1, attn_implementation="eager")
    assert_packed(compare(model, batch), distinct_tokens(batch), layers=1)


def assert_rounds_like_eager(name: str, dtype: torch.dtype, step: Step) -> None:
    """The errors against float64 add up to at most 1.5 times those of eager training in the same dtype.

    Low precision rounds in other places when rows are packed, so neither side is the truth of the other.
    """
    model, truth = zoo(name).to(dtype), double(name)
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


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ambient_autocast(name: str) -> None:
    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(BATCH)(model)

    assert_rounds_like_eager(name, torch.float32, step)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_weights(name: str) -> None:
    assert_rounds_like_eager(name, torch.bfloat16, loss_of(BATCH))


def test_generation_passes_through() -> None:
    model = zoo("llama", use_cache=True).eval()
    ids = torch.tensor([[*STEM, 21], [*STEM, 22]])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    compiled = copy.deepcopy(model)
    compiled.compile(backend="treefx", options={"inner": "aot_eager", "min_sharing": 1.0})
    assert torch.equal(compiled.generate(ids, max_new_tokens=6, do_sample=False), expected)
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
    model = zoo("llama", use_cache=True).eval()
    batch = shared_batch(rows=4, length=14, shared=6, padding=None).without("labels")
    compiled = compile_with(copy.deepcopy(model))
    with torch.no_grad():
        expected, got = model(**batch.inputs(), use_cache=True), compiled(**batch.inputs(), use_cache=True)
        token = torch.full((4, 1), FIRST_TOKEN)
        later = model(input_ids=token, past_key_values=expected.past_key_values).logits
        torch.testing.assert_close(got.logits * 1, expected.logits, rtol=1e-5, atol=1e-5)
        continued = compiled(input_ids=token, past_key_values=got.past_key_values).logits
    torch.testing.assert_close(continued * 1, later, rtol=1e-5, atol=1e-5)
