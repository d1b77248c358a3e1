"""Architectures of transformers: equal to eager training, with every layer's attention on distinct tokens."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import XIELUActivation

from tests.backend import support
from tests.backend.support import assert_packed
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.models import PACKED_ZOO, zoo
from tests.oracle import FLOAT64, assert_close, compare, compile_with, outcome, stats_of
from treefx.bench.zoo import run
from treefx.bench.zoo.run import _spread, check_model

pytestmark = pytest.mark.zoo

BATCH = shared_batch(rows=4, length=20, shared=8)


THROUGH_AOT = {
    "bloom", "deepseek_v3", "diffllama", "gemma2", "gpt2", "gpt_oss", "llama", "mixtral", "mpt", "olmo2", "qwen3_moe",
}  # fmt: skip
"""One of each kind whose backward AOTAutograd derives and partitions; the others run the rewritten graph as it is."""


@pytest.mark.sample(80)
@pytest.mark.parametrize("name", PACKED_ZOO)
def test_architecture(name: str) -> None:
    attentions = 4 if name == "diffllama" else 2  # two per layer there
    inner = "aot_eager" if name in THROUGH_AOT else "eager"
    assert_packed(compare(zoo(name), BATCH, inner=inner), distinct_tokens(BATCH), attentions)


SHAPES_OF_THEIR_OWN = {
    "bamba", "jamba", "jetmoe", "mamba2", "minimax", "qwen3_next", "recurrent_gemma", "rwkv",
}  # fmt: skip
"""Recurrences are analysed for each number of columns; JetMoE is cut by Dynamo."""


@pytest.mark.sample(64)
@pytest.mark.parametrize("name", sorted({*PACKED_ZOO, "lfm2"} - SHAPES_OF_THEIR_OWN - {"opt"}))
def test_architecture_in_batches_of_all_shapes(name: str) -> None:
    """The first batch is compiled for its shape, the next for all; a third time where padding changes its side.

    Not OPT: the gradients of its key biases are zero but for rounding (1e-17 of the largest), of which treefx has up to
    twice what eager has. `test_shapes_in_float64` has it.
    """
    row = check_model(name, "eager", batches=5)
    assert row.verdict == "packed", row.note
    counts = [batch.compiles for batch in row.batches]
    assert counts[2] <= 3 and counts[2] == counts[4]


class Losing(XIELUActivation):
    """When compiled, the first of 96 channels does not reach the gradient of `alpha_p`."""

    def _xielu_python(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super()._xielu_python(x)
        positive, negative = nn.functional.softplus(self.alpha_p), self.beta + nn.functional.softplus(self.alpha_n)
        positive = torch.where(torch.arange(x.shape[-1]) == 0, positive.detach(), positive)
        below = (torch.expm1(torch.min(x, self.eps)) - x) * negative
        return torch.where(x > 0, positive * x * x + self.beta * x, below + self.beta * x)


@pytest.mark.sample(16)
def test_what_a_sum_that_cancels_has_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows contribute 3e-2 to one number of Apertus in the fourth batch, and 1e-4 are left: treefx is off by 4e-5 of
    that, which is rounding.
    """

    def spread(model: nn.Module) -> nn.Module:
        model.get_submodule("model.layers.1.mlp.act_fn").__class__ = Losing
        return _spread(model)

    assert check_model("apertus", "eager", batches=4).verdict == "packed"
    monkeypatch.setattr(run, "_spread", spread)
    lost = check_model("apertus", "eager", batches=4).batches[3]
    assert lost.verdict == "wrong" and lost.loss_error is not None and lost.loss_error < 1e-6


@pytest.mark.sample(128)
@pytest.mark.parametrize("name", sorted({*PACKED_ZOO, "lfm2"} - SHAPES_OF_THEIR_OWN))
def test_architecture_in_batches_of_all_shapes_on_inductor(name: str) -> None:
    """As `treefx doctor --zoo --batches 3` does for all of them."""
    row = check_model(name, "inductor", batches=3)
    assert row.verdict == "packed", row.note
    assert row.compiles <= 3


DOUBLE_THROUGHOUT = (
    "biogpt", "falcon", "gpt2", "gpt_neox", "nemotron", "opt", "persimmon", "phi", "stablelm", "starcoder2", "xglm",
)  # fmt: skip
"""Architectures whose files cast nothing to float32 on the way to the logits."""


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
@pytest.mark.parametrize("name", DOUBLE_THROUGHOUT)
def test_architecture_in_float64(name: str) -> None:
    checked = support.compare(zoo(name, num_hidden_layers=1).double(), own_loss, FLOAT64)
    assert_packed(checked, distinct_tokens(WHOLE), layers=1)


@pytest.mark.sample(64)
@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("name", DOUBLE_THROUGHOUT)
def test_shapes_in_float64(name: str) -> None:
    """Batches of five shapes through one compiled model."""
    model = zoo(name, num_hidden_layers=1).double()
    compiled = compile_with(model, inner="eager")
    for rows, length in [(4, 20), (3, 27), (8, 40), (2, 30), (9, 39)]:
        batch = shared_batch(rows=rows, length=length, shared=length // 3, padding=None)
        expected = outcome(model, lambda batch=batch: own_loss(model, batch))
        assert_close(outcome(model, lambda batch=batch: own_loss(compiled, batch)), expected, FLOAT64)
    stats = stats_of(compiled)
    assert stats["ran"] == "packed" and stats["compiles"] == 2
