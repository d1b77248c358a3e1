"""List the models of ``treefx doctor --zoo``, of transformers and other libraries.

Every model is tiny, random, and called as ``model(**batch.model_inputs())``, which returns a loss or something with
one. Models of libraries that take token ids alone are wrapped by :class:`WithLoss`.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from treefx.tools.bench.job.models import make_config, make_model, read_configurations

__all__ = ["LONGEST", "VOCABULARY", "ZooModel", "read_configurations", "zoo_models"]

VOCABULARY = 128
LONGEST = 64


@dataclass(frozen=True)
class ZooModel:
    """Describe one row of the table; ``build`` raises ImportError without its library."""

    name: str
    library: str
    build: Callable[[], nn.Module]


def zoo_models() -> list[ZooModel]:
    """All models, transformers' first."""
    names = read_configurations()["models"]
    return [*(ZooModel(name, "transformers", functools.partial(_transformers, name)) for name in names), *_OTHERS]


def _transformers(name: str) -> nn.Module:
    longest = read_configurations()["common"]["max_position_embeddings"]
    return make_model(make_config(name, vocab_size=VOCABULARY, max_positions=longest))


class WithLoss(nn.Module):
    """Wrap a model from ids [B, T] to logits with the mean loss of labelled tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """The loss; such models pad on the right and need no mask."""
        logits = self.model(input_ids)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def _litgpt(**options: Any) -> nn.Module:
    litgpt = importlib.import_module("litgpt")
    config = litgpt.Config(
        block_size=LONGEST, n_layer=2, n_head=4, n_embd=64, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY,
        intermediate_size=96, **options,
    )  # fmt: skip
    return WithLoss(litgpt.GPT(config))


def _torchtune(family: str, **options: Any) -> nn.Module:
    module = importlib.import_module(f"torchtune.models.{family}")
    return WithLoss(
        getattr(module, family)(
            vocab_size=VOCABULARY, num_layers=2, num_heads=4, embed_dim=64, max_seq_len=LONGEST, intermediate_dim=96,
            **options,
        )
    )  # fmt: skip


def _x_transformers(**options: Any) -> nn.Module:
    library = importlib.import_module("x_transformers")
    layers = library.Decoder(dim=64, depth=2, heads=4, attn_dim_head=32, **options)
    return WithLoss(library.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LONGEST, attn_layers=layers))


class NanoGPT(nn.Module):
    """A model as people write it in one file: fused qkv, learned positions, tied head.

    Args:
        flash: ``scaled_dot_product_attention`` or softmax over a registered triangle.
    """

    def __init__(self, flash: bool, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(_NanoBlock(width, flash) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class _NanoBlock(nn.Module):
    bias: Tensor

    def __init__(self, width: int, flash: bool, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.flash = heads, flash
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        if self.flash:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            y = functional.softmax(att, dim=-1) @ v
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


_OTHERS = (
    ZooModel("nanogpt", "one file", lambda: WithLoss(NanoGPT(flash=False))),
    ZooModel("nanogpt-flash", "one file", lambda: WithLoss(NanoGPT(flash=True))),
    ZooModel(
        "litgpt-llama", "litgpt",
        lambda: _litgpt(
            n_query_groups=2, mlp_class_name="LLaMAMLP", norm_class_name="RMSNorm", rotary_percentage=1.0, bias=False
        ),
    ),
    ZooModel("litgpt-pythia", "litgpt", lambda: _litgpt(rotary_percentage=0.25, parallel_residual=True)),
    ZooModel("torchtune-llama3", "torchtune", lambda: _torchtune("llama3", num_kv_heads=2)),
    ZooModel("torchtune-mistral", "torchtune", lambda: _torchtune("mistral", num_kv_heads=2)),
    ZooModel("x-transformers-rotary", "x-transformers", lambda: _x_transformers(rotary_pos_emb=True)),
    ZooModel(
        "x-transformers-alibi", "x-transformers", lambda: _x_transformers(alibi_pos_bias=True, attn_flash=True)
    ),
    ZooModel("x-transformers-sinks", "x-transformers", lambda: _x_transformers(attn_head_learned_sink=True)),
)  # fmt: skip
