"""Architectures of transformers: equal to eager training, with every layer's attention on distinct tokens."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import XIELUActivation

from tests.backend import support
from tests.backend.support import assert_packed
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.models import zoo
from tests.oracle import FLOAT32, FLOAT64, assert_close, compare, compile_with, outcome, stats_of
from treefx.tools.bench.zoo import run
from treefx.tools.bench.zoo.batches import zoo_batches
from treefx.tools.bench.zoo.run import _spread, check_model

pytestmark = pytest.mark.zoo


@pytest.fixture(autouse=True)
def cached_results() -> Iterator[None]:
    """With PyTorch's cache of results on fake tensors, as users have it; other tests trace without (``conftest``)."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=True):
        yield


BATCH = shared_batch(rows=4, length=20, shared=8)


LAYERS = {
    "llama": 1, "bloom": 1, "qwen3_moe": 1, "deepseek_v2": 1, "deepseek_v3": 2, "doge": 1, "nanochat": 1,
    "diffllama": 1, "gemma3_text": 2, "smollm3": 2, "gpt_neo": 2, "llama4_text": 2, "afmoe": 2,
}  # fmt: skip
"""One architecture of each kind (positions, norms of queries and keys, latent attention, experts, masks that depend on
values, heads with a cap), and how many layers it takes to have all its kinds of layers. Those that compute in float64
throughout are below; GPT-J and CodeGen in ``test_attention_dtypes``, Mixtral and GPT-OSS in ``test_experts``, hybrids
in ``test_mixers`` and ``test_tree_scans``. ``treefx doctor --zoo`` has all."""
THROUGH_AOT = {"llama", "bloom", "deepseek_v2"}
"""Those whose backward AOTAutograd derives and partitions; the others run the rewritten graph directly."""


@pytest.mark.parametrize("name", LAYERS)
def test_architecture(name: str) -> None:
    attentions = LAYERS[name] * (2 if name == "diffllama" else 1)  # two per layer there
    checked = compare(
        zoo(name, num_hidden_layers=LAYERS[name]), BATCH, inner="aot_eager" if name in THROUGH_AOT else "eager"
    )
    assert_packed(checked, distinct_tokens(BATCH), attentions)


def test_architecture_in_batches_of_all_shapes() -> None:
    """The first batch is compiled for its shape, the next for all; a third time where padding changes its side.

    As ``treefx doctor --zoo --batches 5`` does for all of them; here attentions with a window and a cap.
    """
    row = check_model("gemma2", "eager", batches=5)
    assert row.verdict == "packed", row.note
    counts = [batch.compiles for batch in row.batches]
    assert counts[2] <= 3 and counts[2] == counts[-1]


class Losing(XIELUActivation):
    """When compiled, the first of 96 channels does not reach the gradient of `alpha_p`."""

    def _xielu_python(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super()._xielu_python(x)
        positive, negative = nn.functional.softplus(self.alpha_p), self.beta + nn.functional.softplus(self.alpha_n)
        positive = torch.where(torch.arange(x.shape[-1]) == 0, positive.detach(), positive)
        below = (torch.expm1(torch.min(x, self.eps)) - x) * negative
        return torch.where(x > 0, positive * x * x + self.beta * x, below + self.beta * x)


def test_what_a_sum_that_cancels_has_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows contribute 3e-2 to one number of Apertus in the fourth batch, and 1e-4 are left: treefx is off by 4e-5 of
    that, which is rounding: 3e-6 of what the rows contribute. Eager is off by 1.6e-6; the verdict may be either.
    """

    def spread(model: nn.Module) -> nn.Module:
        model.get_submodule("model.layers.1.mlp.act_fn").__class__ = Losing
        return _spread(model)

    monkeypatch.setattr(run, "zoo_batches", lambda count: dict([[*zoo_batches(count).items()][-1]]))
    (right,) = check_model("apertus", "eager", batches=4).batches
    assert right.float64_errors is not None and max(right.float64_errors) <= FLOAT32
    monkeypatch.setattr(run, "_spread", spread)
    (lost,) = check_model("apertus", "eager", batches=4).batches
    assert lost.verdict == "wrong" and lost.loss_error is not None and lost.loss_error < 1e-6
    assert lost.float64_errors is not None and lost.float64_errors[0] > 10 * FLOAT32


IN_FLOAT64 = ("biogpt", "gpt2", "gpt_neox", "opt", "persimmon", "phi", "stablelm", "starcoder2")
"""Architectures whose files cast nothing to float32 on the way to the logits, as that of Falcon."""


@pytest.fixture
def in_double() -> Iterator[None]:
    """Some models make tables of positions in the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


WHOLE = shared_batch(rows=4, length=20, shared=8, padding=None)


def own_loss(model: nn.Module, batch: Batch = WHOLE) -> Tensor:
    """The loss of the models themselves casts the logits to float32."""
    logits = model(**batch.without("labels").inputs()).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("name", IN_FLOAT64)
def test_architecture_in_float64(name: str) -> None:
    checked = support.compare(zoo(name, num_hidden_layers=1).double(), own_loss, FLOAT64)
    assert_packed(checked, distinct_tokens(WHOLE), layers=1)


@pytest.mark.usefixtures("in_double")
def test_shapes_in_float64() -> None:
    """Batches of four shapes through one compiled model."""
    model = zoo("falcon", num_hidden_layers=1).double()
    compiled = compile_with(model, inner="eager")
    for rows, length in [(4, 20), (3, 27), (8, 40), (2, 30)]:
        batch = shared_batch(rows=rows, length=length, shared=length // 3, padding=None)
        expected = outcome(model, lambda batch=batch: own_loss(model, batch))
        assert_close(outcome(model, lambda batch=batch: own_loss(compiled, batch)), expected, FLOAT64)
        stats = stats_of(compiled)
        assert (stats["ran"], stats["tokens"], stats["attention_rewritten"]) == ("packed", distinct_tokens(batch), 1)
    assert stats["compiles"] == 2
