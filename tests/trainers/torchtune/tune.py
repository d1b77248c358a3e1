"""A decoder, a loss and a step with the call sites of torchtune 0.6.1: names, arguments, masks and chunks as there."""

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

__all__ = ["VOCAB", "Decoder", "Fusion", "Loss", "checkpointed", "collate", "compile_module", "decoder", "loss_of_step"]

_WIDTH, _HEADS, _KV_HEADS, _LONGEST = 16, 4, 2, 64
_HEAD = _WIDTH // _HEADS
VOCAB, IGNORED = 23, -100


class _Rope(nn.Module):
    """Cosines and sines of all positions in a table, as torchtune's Qwen2 has them."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(_LONGEST)[:, None] / 100.0 ** (torch.arange(0, _HEAD, 2) / _HEAD)
        twice = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cache", torch.cat([twice.cos(), twice.sin()], dim=-1), persistent=False)

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """[b, s, heads, features]."""
        seq_len, features = x.size(1), x.size(-1)
        table = self.cache[:seq_len] if input_pos is None else self.cache[input_pos]
        table = table.view(-1, seq_len, 1, features * 2)
        cos, sin = table[..., :features].to(x.dtype), table[..., features:].to(x.dtype)
        rotated = torch.cat((-x[..., features // 2 :], x[..., : features // 2]), dim=-1)
        return x * cos + rotated * sin


class _Attention(nn.Module):
    def __init__(self, rope: _Rope) -> None:
        super().__init__()
        self.q_proj = nn.Linear(_WIDTH, _WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(_WIDTH, _KV_HEADS * _HEAD) for _ in range(2))
        self.output_proj, self.pos_embeddings = nn.Linear(_WIDTH, _WIDTH, bias=False), rope
        self.kv_cache: Any = None

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: Tensor | None = None, input_pos: Tensor | None = None
    ) -> Tensor:
        assert y is not None
        b, s, _ = x.shape
        q = self.pos_embeddings(self.q_proj(x).view(b, s, _HEADS, _HEAD), input_pos=input_pos).transpose(1, 2)
        k, v = (project(y).view(b, y.shape[1], -1, _HEAD) for project in (self.k_proj, self.v_proj))
        k, v = self.pos_embeddings(k, input_pos=input_pos).transpose(1, 2), v.transpose(1, 2)
        shape = (b, _KV_HEADS, _HEADS // _KV_HEADS, -1, _HEAD)
        k, v = (heads.unsqueeze(2).expand(shape).flatten(1, 2) for heads in (k, v))
        seen = None if mask is None else mask[:, None, :, :]
        causal = self.kv_cache is None and mask is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=0.0, is_causal=causal)
        return self.output_proj(out.transpose(1, 2).contiguous().view(b, s, -1))


class Layer(nn.Module):
    """``TransformerSelfAttentionLayer``."""

    def __init__(self, rope: _Rope) -> None:
        super().__init__()
        self.attn = _Attention(rope)
        self.sa_norm, self.mlp_norm = nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.SiLU(), nn.Linear(2 * _WIDTH, _WIDTH))

    def caches_are_enabled(self) -> bool:
        """Asked of the first layer at every call, through the wrapper of its checkpoint."""
        return self.attn.kv_cache is not None

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, input_pos: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        h = self.sa_norm(x)
        h = self.attn(h, h, mask=mask, input_pos=input_pos) + x
        return h + self.mlp(self.mlp_norm(h))


class Decoder(nn.Module):
    """``TransformerDecoder``: its head is outside of every graph as soon as its logits are wanted in chunks."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        rope = _Rope()
        self.tok_embeddings = nn.Embedding(VOCAB, _WIDTH)
        self.layers = nn.ModuleList(Layer(rope) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(_WIDTH), nn.Linear(_WIDTH, VOCAB, bias=False)
        self.num_output_chunks, self.output_hidden_states = 0, list[int]()

    def set_num_output_chunks(self, num_output_chunks: int) -> None:
        """Called after the decoder is compiled."""
        self.num_output_chunks = num_output_chunks

    @torch.compiler.disable
    def chunked_output(self, last_hidden_state: Tensor) -> list[Tensor]:
        """Logits of a part of the columns each."""
        return [self.output(chunk) for chunk in last_hidden_state.chunk(self.num_output_chunks, dim=1)]

    def forward(
        self, tokens: Tensor, *, mask: Tensor | None = None, encoder_input: Tensor | None = None,
        encoder_mask: Tensor | None = None, input_pos: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Ids [b, s] -> logits [b, s, vocab], or chunks of them; behind hidden states where these are wanted."""
        if self.layers[0].caches_are_enabled():
            raise ValueError("caches are for inference")
        h = self.tok_embeddings(tokens)
        more = {"encoder_input": encoder_input, "encoder_mask": encoder_mask}
        hidden = []
        for number, layer in enumerate(self.layers):
            if number in self.output_hidden_states:
                hidden.append(h)
            h = layer(h, mask=mask, input_pos=input_pos, **more)
        output = self.unembed(h)
        return [*hidden, output] if hidden else output

    def unembed(self, h: Tensor) -> Tensor | list[Tensor]:
        """Logits of hidden states."""
        h = self.norm(h)
        if self.num_output_chunks > 0:
            return self.chunked_output(h)
        return self.output(h).float()


class Fusion(nn.Module):
    """``DeepFusionModel``, which has the decoder inside."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, **masks: Any) -> Any:
        """Of the decoder."""
        return self.decoder(tokens, **masks)


class Loss(nn.Module):
    """``CEWithChunkedOutputLoss``."""

    ignore_index = IGNORED

    def __init__(self, num_output_chunks: int = 8) -> None:
        super().__init__()
        self.num_output_chunks = num_output_chunks

    def forward(self, logits: list[Tensor], labels: Tensor) -> Tensor:
        """The mean over all labels."""
        parts = zip(logits, labels.chunk(self.num_output_chunks, dim=1), strict=True)
        sums = [F.cross_entropy(part.flatten(0, 1), wanted.reshape(-1), reduction="sum") for part, wanted in parts]
        return torch.stack(sums).sum() / (labels != self.ignore_index).sum()


def decoder(layers: int = 2) -> Decoder:
    """Float64, the same weights every time."""
    torch.manual_seed(0)
    return Decoder(layers).double()


def checkpointed(model: nn.Module) -> nn.Module:
    """Its layers wrapped, as the recipe does after it has compiled them."""
    apply_activation_checkpointing(model, auto_wrap_policy=ModuleWrapPolicy({Layer}))
    return model


def compile_module() -> Any:
    """``torchtune.training._compile``: each layer is compiled."""

    def compile_model(model: Any, verbose: bool = True) -> None:
        for layer in model.modules():
            if isinstance(layer, Layer):
                layer.compile(backend=os.environ.get("TORCH_COMPILE_BACKEND", "inductor"))

    return SimpleNamespace(compile_model=compile_model, DeepFusionModel=Fusion, TransformerDecoder=Decoder)


def collate(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Rows padded on the right with id 0, and no mask that says so; half of each row is learned."""
    labels = [[IGNORED] * (len(row) // 2) + list(row[len(row) // 2 :]) for row in rows]
    return {
        name: pad_sequence([torch.tensor(row) for row in values], batch_first=True, padding_value=fill)
        for name, values, fill in (("tokens", rows, 0), ("labels", labels, IGNORED))
    }


def loss_of_step(model: nn.Module, loss: Any, batch: dict[str, Tensor]) -> Tensor:
    """The recipe's: labels shifted by a column, the mean times the number of labels of the batch as it came."""
    given = dict(batch)
    labels = given.pop("labels")
    count = (labels != IGNORED).sum()
    logits = model(**given)
    labels = torch.hstack((labels[..., 1:], torch.full((len(labels), 1), IGNORED)))
    if not isinstance(logits, list):
        labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
    result: Tensor = loss(logits, labels) * count
    return result
