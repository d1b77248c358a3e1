"""LM head and loss in chunks of the vocabulary: the operator, and the graphs it is put into."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.support import llama
from tests.batches import distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.oracle import compare, compile_with, stats_of
from tests.spellings import SPELLINGS
from treefx.kernels import expand
from treefx.kernels.head_loss import eager
from treefx.passes.packing import vocab_tail
from treefx.passes.packing.vocab_tail import surprise
from treefx.runtime.ways import rows


@pytest.mark.parametrize("form", ["picked", "masked"])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 7, 64])
def test_operator_matches_plain_torch(
    chunk: int, biased: bool, softcap: float | None, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows picked twice, the same entry picked twice, padding, and chunks that divide the vocabulary or do not."""
    if form == "masked":  # as on a GPU
        monkeypatch.setattr(eager, "_ENTRIES_PER_CHUNK", {})
    hidden = torch.randn(6, 4, dtype=torch.float64)
    weight, bias = torch.randn(21, 4, dtype=torch.float64), torch.randn(21, dtype=torch.float64)
    slot = torch.tensor([0, 1, 1, 5, -1, 3, 3, 2])
    token = torch.tensor([20, 0, 7, 7, 3, -1, 4, 14])
    slot, token = torch.cat([slot, slot[:2]]), torch.cat([token, token[:2]])
    share = torch.randn(len(slot), dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (hidden, weight, *((bias,) if biased else ()))]

    def plain() -> Tensor:
        z = F.linear(hidden, weight, bias if biased else None)
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        logp = (z * 1.3).log_softmax(-1)
        valid = (slot >= 0) & (token >= 0)
        return torch.where(valid, -logp[slot.clamp(min=0), token.clamp(min=0)], 0)

    expected = plain()
    got, _ = surprise(hidden, weight, bias if biased else None, slot, token, 1.3, softcap, chunk)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected, leaves, share)
    found = torch.autograd.grad(got, leaves, share)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_no_device_is_waited_for() -> None:
    """Tensors of the meta device refuse whatever the host needs a number for, as a GPU would make it wait."""
    hidden, weight = torch.empty(6, 4, device="meta"), torch.empty(21, 4, device="meta")
    slot, token = (torch.empty(9, dtype=torch.int64, device="meta") for _ in range(2))
    _, lse = vocab_tail.surprise._init_fn(hidden, weight, None, slot, token, 1.3, 0.7, 5)
    loss = torch.empty(9, device="meta")
    given = (loss, hidden, weight, None, slot, token, loss, lse, 1.3, 0.7, 5)
    grads = vocab_tail.restore_surprise._init_fn(*given, [True, True, False])
    assert [grad.shape for grad in grads[:2]] == [hidden.shape, weight.shape]
    assert expand.expand._init_fn(hidden, slot).shape == (9, 4)
    with pytest.raises((RuntimeError, NotImplementedError)):  # the mistake: the form of the CPU
        list(eager._picked_chunks([slice(0, 21)], slot, token))


def test_a_target_beyond_the_vocabulary_fails_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.ones(2, 4), torch.ones(8, 4), None, torch.tensor([0, 1]), torch.tensor([3, 8]), 1.0, None, 3
    with pytest.raises(IndexError, match="8 entries"):
        surprise(*given)
    monkeypatch.setattr(eager, "_ENTRIES_PER_CHUNK", {})
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        surprise(*given)


def test_the_bound_on_logits_follows_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_free_bytes", lambda device: 64 * 2**30)
    on_gpu = torch.device("cuda", 0)
    assert rows.most_logits("auto", torch.bfloat16, on_gpu) == 4 * 2**30
    assert rows.most_logits("auto", torch.float32, on_gpu) == 2 * 2**30
    assert rows.most_logits("auto", torch.float32, torch.device("cpu")) == 2**26
    assert rows.most_logits(1000, torch.bfloat16, on_gpu) == 1000
    assert treefx.Config().max_logits == treefx.Config(max_logits="auto").max_logits == "auto"
    with pytest.raises(treefx.ConfigError, match="max_logits"):
        treefx.Config(max_logits="all")  # type: ignore[arg-type]


def fused(compiled: nn.Module) -> bool:
    """Whether the rewritten graph ends in the operator, and holds no [N, V] product."""
    graph = treefx.inspect(compiled).graphs["rewritten"].graph
    return any(node.target is torch.ops.treefx.surprise.default for node in graph.nodes)


@pytest.mark.parametrize(("padding", "inner"), [("right", "eager"), ("left", "aot_eager")])
def test_large_logits_are_never_made(padding: str, inner: str) -> None:
    batch = shared_batch(rows=4, length=12, shared=6, padding=padding)  # type: ignore[arg-type]
    checked = compare(llama(), batch, max_logits=1, inner=inner)
    assert fused(checked.compiled)
    shapes = [node.meta["val"].shape for node in _tensors(treefx.inspect(checked.compiled).graphs["forward"])]
    assert not [shape for shape in shapes if len(shape) > 1 and shape[-1] == 128 and shape[-2] != 64]
    assert checked.stats["tokens"] == distinct_tokens(batch)


def _tensors(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if isinstance(node.meta.get("val"), Tensor)]


UNPADDED = shared_batch(rows=4, length=12, shared=6, vocab=61, padding=None)


def tiny(**options: Any) -> nn.Module:
    return TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16, **options).double()


def test_small_logits_stay_as_they_are() -> None:
    checked = compare(tiny(), UNPADDED, inner="eager")
    assert not fused(checked.compiled)


def test_reading_the_logits_later_is_exact() -> None:
    """The first reader costs a second run; from then on they are computed."""
    model, batch = llama(), shared_batch(rows=4, length=12, shared=6)
    compiled = compile_with(model, max_logits=1)
    expected = model(**batch.inputs())
    for calls in range(2):
        out = compiled(**batch.inputs())
        assert fused(compiled) == (calls == 0)
        real = batch.attention_mask.bool()  # type: ignore[union-attr]
        torch.testing.assert_close(out.logits[real], expected.logits[real], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-10, atol=1e-10)
    assert stats_of(compiled)["fallback"] is None


def test_differentiated_logits_are_exact() -> None:
    def step(model: nn.Module) -> Tensor:
        out = model(**UNPADDED.inputs())
        return out.loss + 0.1 * out.logits.square().mean(-1).sum()

    compare(tiny(), step, max_logits=1)


def test_tied_and_biased_heads() -> None:
    model = tiny(tied=True)
    model.head.bias = nn.Parameter(torch.randn(61, dtype=torch.float64))
    assert fused(compare(model, UNPADDED, max_logits=1).compiled)


class Capped(nn.Module):
    """A head as Gemma 2 has it, and a scale behind it as Cohere's, Granite's and temperatures are."""

    def __init__(self, inner: float, outer: float, scale: float) -> None:
        super().__init__()
        self.lm, self.numbers = tiny(), (inner, outer, scale)
        self.lm.head.bias = nn.Parameter(torch.randn(61, dtype=torch.float64))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        inner, outer, scale = self.numbers
        logits = self.lm(input_ids).logits
        logits = torch.tanh(logits / inner) * outer * scale
        return F.cross_entropy(logits[:, :-1].reshape(-1, 61), labels[:, 1:].reshape(-1)), logits


def _capped_loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(input_ids=UNPADDED.input_ids, labels=UNPADDED.input_ids)[0]
    return loss


@pytest.mark.parametrize("numbers", [(2.0, 2.0, 1.0), (0.5, 1.5, 0.25)])
def test_a_capped_head_has_no_logits(numbers: tuple[float, float, float]) -> None:
    assert fused(compare(Capped(*numbers), _capped_loss, max_logits=1).compiled)


def test_a_cap_read_without_its_scale_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vocab_tail._linear
    monkeypatch.setattr(vocab_tail, "_linear", lambda node, inner, outer: right(node, inner, 1.0))
    with pytest.raises(AssertionError, match="differ"):
        compare(Capped(0.5, 1.5, 0.25), _capped_loss, max_logits=1)
