"""Tiny models: the zoo of transformers architectures, and a hand-written one with exchangeable parts."""

import functools
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from treefx.tools.bench.zoo.models import read_configurations

__all__ = ["SUITE", "Output", "TinyLM", "config_of", "double", "double_from", "lifted", "zoo"]

ZOO = read_configurations()
SUITE = tuple(
    """llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt_neox gpt2 opt olmo2 olmo3 bloom gptj
    starcoder2 cohere cohere2 glm4 granite smollm3 mixtral qwen3_moe olmoe deepseek_v3 deepseek_v2 gpt_oss
    stablelm mpt codegen gpt_neo nemotron mamba2 qwen3_next jamba llama4_text ernie4_5 hunyuan_v1_dense
    minimax apertus lfm2 seed_oss exaone4 biogpt xglm persimmon recurrent_gemma rwkv bamba glm4_moe arcee
    diffllama helium doge moshi granitemoe phimoe jetmoe nanochat vaultgemma qwen2_moe afmoe falcon""".split()
)
"""Architectures of the table that tests go through; ``treefx doctor --zoo`` goes through all."""
CHOSEN: dict[str, dict[str, Any]] = {"gemma2": {"attn_implementation": "eager"}}
"""transformers 5.17 chooses SDPA for gemma2, which leaves the soft cap out; later ones choose the implementation given
here."""


def config_of(name: str, **changes: Any) -> PretrainedConfig:
    """Configuration of the zoo model called `name`, with `changes` on top."""
    entry = ZOO["models"][name]
    common = {key: value for key, value in ZOO["common"].items() if key not in entry.get("drop", ())}
    return AutoConfig.for_model(
        name.partition(":")[0], **{**common, **entry.get("overrides", {}), **CHOSEN.get(name, {}), **changes}
    )


def zoo(name: str, **changes: Any) -> PreTrainedModel:
    """A zoo model with random float32 weights, in training mode."""
    torch.manual_seed(0)
    return _spread(AutoModelForCausalLM.from_config(config_of(name, **changes)).train())


def double(name: str, **changes: Any) -> PreTrainedModel:
    """A zoo model that computes in float64 throughout.

    The model files of transformers cast norms, softmax and loss to float32 by name, which ends every
    comparison at 1e-7. The class built here comes from the same file with those casts written as float64.
    """
    config = config_of(name, **changes)
    original = AutoModelForCausalLM._model_mapping[type(config)]
    return double_from(getattr(lifted(original.__module__), original.__name__), config)


def double_from(model_class: Any, config: PretrainedConfig) -> PreTrainedModel:
    """A model of a class that `lifted` has loaded."""
    torch.manual_seed(0)
    model: PreTrainedModel = model_class._from_config(config, dtype=torch.float64)
    model.loss_function = _loss_without_casts
    return _spread(model.double().train())


WIDER = {r"torch\.float(32)?\b": "torch.float64", r"\.float\(\)": ".double()"}


@functools.cache
def lifted(module_name: str, environment: str = "", changes: tuple[tuple[str, str], ...] = ()) -> ModuleType:
    """The module again, loaded from a copy of its file in which float32 reads float64.

    Args:
        module_name: of transformers.
        environment: a name for the installed version; under each the file is loaded once.
        changes: patterns, each of which the file must have, and what stands in their place.
    """
    module = sys.modules[module_name]
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    for single, wide in WIDER.items():
        source = re.sub(single, wide, source)
    for pattern, other in changes:
        source, count = re.subn(pattern, other, source)
        assert count, pattern
    # The folders keep their names: transformers derives a model's name from the path of its file.
    path = Path(tempfile.mkdtemp()) / Path(*module_name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(source)
    package, stem = module_name.rsplit(".", 1)
    spec = importlib.util.spec_from_file_location(f"{package}.lifted{environment}_{stem}", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def _loss_without_casts(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """transformers' own shift and mean, in the dtype of the logits."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


def _spread(model: PreTrainedModel) -> PreTrainedModel:
    """Scales matrices up, so that attention is far from uniform and a wrong mask or position shows at once.

    At transformers' initial deviation of 0.02 scores are nearly zero, and so is what attention contributes.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


class Output(NamedTuple):
    """What `TinyLM` returns."""

    loss: Tensor | None
    logits: Tensor  # [B, T, V]
    hidden: Tensor  # [B, T, C]


Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""q [B, H, T, D], k and v [B, Hkv, T, D], padding mask [B, T] or None -> [B, H, T, D]."""


class TinyLM(nn.Module):
    """A pre-norm causal LM of two blocks around a given spelling of attention.

    Args:
        attention: builds the attention of one block.
        kv_heads: Hkv; H is 4.
        positions: adds learned position embeddings (`position_ids` or arange) where true.
        before, after: modules between the embedding and the blocks, and between the blocks and the head.
        tied: one matrix for embedding and head.
        padding_idx: of the embedding.
        layers: number of blocks.
    """

    def __init__(
        self,
        attention: Callable[[], nn.Module],
        *,
        kv_heads: int = 4,
        positions: bool = True,
        before: nn.Module | None = None,
        after: nn.Module | None = None,
        tied: bool = False,
        padding_idx: int | None = None,
        layers: int = 2,
        vocab: int = 61,
        width: int = 32,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=padding_idx)
        self.place = nn.Embedding(64, width) if positions else None
        self.before = before if before is not None else nn.Identity()
        self.blocks = nn.ModuleList(Block(attention(), width, kv_heads) for _ in range(layers))
        self.after = after if after is not None else nn.Identity()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Output:
        x = self.embed(input_ids)
        if self.place is not None:
            columns = torch.arange(input_ids.shape[1], device=input_ids.device)
            x = x + self.place(columns if position_ids is None else position_ids)
        x = self.before(x)
        for block in self.blocks:
            x = block(x, attention_mask)
        hidden = self.norm(self.after(x))
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits, hidden)


class Block(nn.Module):
    """Norm, projections, the given attention, and a gated MLP."""

    def __init__(self, attention: nn.Module, width: int, kv_heads: int, heads: int = 4) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, heads * self.head_dim)
        self.key = nn.Linear(width, kv_heads * self.head_dim)
        self.value = nn.Linear(width, kv_heads * self.head_dim)
        self.attention = attention
        self.out = nn.Linear(heads * self.head_dim, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        normed = self.norm(x)
        q, k, v = (
            project(normed).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        # Sharper than 1 / sqrt(D): which keys are seen must show in the gradients.
        mixed = self.attention(2.0 * q, k, v, attention_mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))
