"""``treefx.distribute`` in one process: exact where it runs, refused by name where a block would be silently wrong."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import treefx
from tests.batches import Batch, shared_batch
from tests.models import double, zoo
from tests.oracle import FLOAT64, assert_close, outcome, refused
from treefx.runtime.blocks.on_tree import on_tree

pytestmark = pytest.mark.filterwarnings("ignore:treefx.distribute is deprecated:DeprecationWarning")


def compiled(model: Any, **options: Any) -> Any:
    for block in model.model.layers:
        block.compile(backend="treefx", options={"inner": "aot_eager", **options})
    return treefx.distribute(model)


def llama(**changes: Any) -> Any:
    return double("llama", hidden_size=32, intermediate_size=32, head_dim=8, **changes)


def check(model: Any, batches: list[Batch], **inputs: Any) -> None:
    """Loss and gradients of the sum over batches, all forwards before the one backward."""
    reference = copy.deepcopy(model)
    distributed = compiled(model)

    def total(run: Any) -> Tensor:
        return torch.stack([run(**batch.inputs(), **inputs).loss for batch in batches]).sum()

    expected = outcome(reference, lambda: total(reference))
    assert_close(outcome(model, lambda: total(distributed)), expected, FLOAT64)
    stats = treefx.inspect(model).stats
    assert stats["fallback"] is None
    # PyTorch 2.11 compiles what a reentrant checkpoint does again as a graph of its own, which sees no tree.
    alone = TorchVersion(torch.__version__) < "2.13" and model.is_gradient_checkpointing
    assert (stats["sharing_ratio"] > 1.2) != alone


def test_trees_of_several_forwards_are_kept_apart() -> None:
    """Checkpointed: the recomputation of the first forward comes after the second has run on another tree."""
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    batches = [shared_batch(rows=4, length=12, shared=n, seed=n) for n in (4, 8, 6)]
    everything = [Batch(b.input_ids, b.attention_mask, b.input_ids) for b in batches]  # padding has labels too
    check(model, everything)


def test_left_padding_takes_positions() -> None:
    batch = shared_batch(rows=4, length=12, shared=6, padding="left")
    assert batch.attention_mask is not None
    model = compiled(llama())
    with refused("position_ids"):
        model(**batch.inputs())


def test_calls_with_a_cache_run_as_they_are() -> None:
    model = llama(use_cache=True).eval()
    ids = shared_batch(rows=4, length=8, shared=4, padding=None).input_ids
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=True)
        got = compiled(model)(input_ids=ids, use_cache=True)
    torch.testing.assert_close(got.logits, expected.logits)
    assert got.past_key_values.get_seq_length() == ids.shape[1]


def test_it_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="treefx.convert"):
        compiled(llama())


def test_blocks_must_be_compiled() -> None:
    model = llama()
    with pytest.raises(treefx.ConfigError, match="blocks are compiled"):
        treefx.distribute(model)
    model.model.layers[1].compile(backend="treefx")
    with pytest.raises(treefx.ConfigError, match=r"model\.layers\.0 is not"):
        treefx.distribute(model)


def test_windows_are_refused() -> None:
    with pytest.raises(treefx.ConfigError, match="sliding"):
        compiled(zoo("mistral"))


def test_other_attention_than_sdpa_is_refused() -> None:
    """The block is causal only by a mask that does not reach it any more."""
    model = llama()
    model.set_attn_implementation("eager")
    model = compiled(model)
    with refused("scaled_dot_product_attention"):
        model(**shared_batch(rows=4, length=12, shared=6, padding=None).inputs())


def test_a_broken_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part with the attention is a graph of its own, which the tree does not enter."""
    model = llama()
    attention = type(model.model.layers[0].self_attn)
    original = attention.forward

    def broken(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", broken)
    with refused("under treefx.distribute"):
        compiled(model)(**shared_batch(rows=4, length=12, shared=6, padding=None).inputs())


def test_attention_in_a_checkpoint_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of the checkpoint is a graph of its own, in which the attention has to be found."""
    model = llama()
    attention = type(model.model.layers[0].self_attn)
    original = attention.forward

    def checkpointed(self: nn.Module, **kwargs: Any) -> Any:
        return checkpoint(lambda: original(self, **kwargs), use_reentrant=False)

    monkeypatch.setattr(attention, "forward", checkpointed)
    check(model, [shared_batch(rows=4, length=12, shared=6)])
    assert "checkpoint" in treefx.inspect(model).graphs["captured"].code
    model = llama()
    model.set_attn_implementation("eager")
    with refused("scaled_dot_product_attention"):
        compiled(model)(**shared_batch(rows=4, length=12, shared=6, padding=None).inputs())


def test_a_graph_beside_the_blocks_is_refused() -> None:
    """It would run on the packed row without a proof; run as it is, it may be compiled."""
    model = llama()
    model.model.norm.compile(backend="treefx", options={"inner": "aot_eager"})
    batch = shared_batch(rows=4, length=12, shared=6, padding=None)
    model = compiled(model, inner="eager")
    with refused("compiled graph must start from the hidden states of a block"):
        model(**batch.inputs())
    unshared = batch.input_ids[:1]
    assert model(input_ids=unshared, labels=unshared).loss.isfinite()


def test_parts_of_blocks_are_refused() -> None:
    model = llama()
    for block in model.model.layers:
        block.self_attn.compile(backend="treefx", options={"inner": "aot_eager"})
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model = treefx.distribute(model)
    with refused("not modules inside of them"):
        model(**shared_batch(rows=4, length=12, shared=6, padding=None).inputs())


def test_an_operator_that_mixes_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    mlp = type(model.model.layers[0].mlp)
    original = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: original(self, x.cumsum(1)))
    with refused("token-wise law", "cumsum"):
        compiled(model)(**shared_batch(rows=4, length=12, shared=6, padding=None).inputs())


def test_marks_outside_of_treefx_are_refused() -> None:
    """What runs when Dynamo gives up on a block, or another backend compiles it: plain causal attention, wrong."""
    with pytest.raises(treefx.UnsupportedError, match="eager mode"):
        on_tree(torch.zeros(1, 3, 4), torch.tensor([3, 2, 3], dtype=torch.int32), None)


class Masked(nn.Module):
    """A block whose causal mask is a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("tri", torch.ones(64, 64).tril().bool())

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        mask = self.tri[: x.shape[1], : x.shape[1]]
        mixed = F.scaled_dot_product_attention(2 * q, k, v, attn_mask=mask)[:, 0]
        return x + mixed


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(128, 8), nn.ModuleList([Masked()])

    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask=attention_mask, **more)
        return x


def test_mask_buffer_that_is_no_longer_causal_is_refused() -> None:
    """The proof of a block goes with the values it has read."""
    model = Blocks().double()
    ids = shared_batch(rows=4, length=12, shared=6, padding=None).input_ids
    expected = model(ids)
    model.layers[0].compile(backend="treefx", options={"inner": "eager"})
    treefx.distribute(model)
    torch.testing.assert_close(model(ids), expected, rtol=1e-10, atol=1e-12)
    model.layers[0].tri.data.fill_(True)
    with refused("causal"):
        model(ids)
    model.layers[0].tri.data.tril_()
    torch.testing.assert_close(model(ids), expected, rtol=1e-10, atol=1e-12)
