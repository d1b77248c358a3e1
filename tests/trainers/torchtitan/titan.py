"""A decoder and a trainer with the call sites of torchtitan 0.3.0: names, arguments, masks and positions as there."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "BlockMask",
    "Decoder",
    "FlexAttention",
    "PolicyTrainer",
    "ScaledDotProductAttention",
    "Trainer",
    "VarlenAttention",
    "module",
    "parallel_dims",
    "parallelize",
]

VOCABULARY, WIDTH, HEADS, LONGEST = 31, 16, 2, 64


class BlockMask:
    """What torch's ``create_block_mask`` returns, without its lists."""

    def __init__(self, mask_mod: Callable[..., Tensor]) -> None:
        self.mask_mod = mask_mod


class FlexAttention(nn.Module):
    """Computes by the function of its mask."""

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: BlockMask, score_mod: Any = None,
        scale: float | None = None, enable_gqa: bool = False, out_transform: Any = None,
    ) -> Tensor:  # fmt: skip
        assert isinstance(attention_masks, BlockMask)
        row, column = torch.arange(len(q_BLNH))[:, None, None], torch.arange(q_BLNH.shape[1])
        seen = attention_masks.mask_mod(row, row * 0, column[None, :, None], column[None, None])
        out = attend(q_BLNH, k_BLNH, v_BLNH, seen[:, None], scale)
        return out if out_transform is None else out_transform(out)


class VarlenAttention(nn.Module):
    """Computes in bfloat16, by sequence starts of all rows one behind the other."""

    def __init__(self, window_size: tuple[int, int] = (-1, 0)) -> None:
        super().__init__()
        self.window_size = window_size

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        q, k, v = (x.flatten(0, 1)[None].to(torch.bfloat16) for x in (q_BLNH, k_BLNH, v_BLNH))
        document = torch.bucketize(torch.arange(q.shape[1]), attention_masks.cu_seq_q[1:], right=True)
        column = torch.arange(q.shape[1])
        seen = (document[:, None] == document) & (column[:, None] >= column)
        if self.window_size[0] >= 0:
            seen &= column[:, None] - column <= self.window_size[0]
        return attend(q, k, v, seen, scale).view_as(q_BLNH).to(q_BLNH.dtype)


class ScaledDotProductAttention(nn.Module):
    """Causal over the whole row, whatever the positions."""

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any = None,
        scale: float | None = None, enable_gqa: bool = False, is_causal: bool = True,
    ) -> Tensor:  # fmt: skip
        assert attention_masks is None
        return attend(q_BLNH, k_BLNH, v_BLNH, torch.ones(2 * [q_BLNH.shape[1]]).tril().bool(), scale)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=grouped).transpose(1, 2)


def module() -> Any:
    """``torchtitan.models.common.attention``, with unhooked classes."""
    classes = (FlexAttention, VarlenAttention, ScaledDotProductAttention)
    copies = [type(made.__name__, (made,), {"forward": made.forward}) for made in classes]
    return SimpleNamespace(**{made.__name__: made for made in copies})


class CosSinRoPE(nn.Module):
    """Sines and cosines gathered for each row, or for all rows where there is one row of positions."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(LONGEST), 10.0 ** -torch.arange(0, 1, 2 * HEADS / WIDTH)).repeat(1, 2)
        self.register_buffer("cache", torch.cat([angles.cos(), angles.sin()], -1), persistent=False)

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, columns, _, features = query.shape
        if positions is None:
            found = self.cache[:columns].view(1, columns, 1, -1)
        elif positions.shape[0] == 1:
            found = self.cache[positions.squeeze(0)].view(1, columns, 1, -1)
        else:
            index = positions.view(rows, columns, 1, 1).expand(rows, columns, 1, self.cache.shape[-1])
            found = torch.gather(self.cache[None, :, None, :].expand(rows, -1, -1, -1), dim=1, index=index)
        cos, sin = found[..., :features], found[..., features:]

        def rotated(x: Tensor) -> Tensor:
            first, second = x[..., : features // 2], x[..., features // 2 :]
            return x * cos + torch.cat([-second, first], -1) * sin

        return rotated(query), rotated(key)


class GQAttention(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.wqkv, self.wo = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.rope, self.inner_attention = CosSinRoPE(), inner

    def forward(self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        parts = self.wqkv(x_BLD).unflatten(-1, (-1, WIDTH // HEADS))
        xq, xk, xv = parts.split([HEADS, HEADS // 2, HEADS // 2], -2)
        xq, xk = self.rope(xq, xk, positions)
        out = self.inner_attention(xq, xk, xv, attention_masks=attention_masks, scale=None, enable_gqa=True)
        result: Tensor = self.wo(out.contiguous().flatten(2))
        return result


class TransformerBlock(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = GQAttention(inner), nn.Linear(WIDTH, WIDTH)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), attention_masks, positions)
        return h + self.feed_forward(self.ffn_norm(h)).relu()


class Decoder(nn.Module):
    """Tokens and positions [B, L]."""

    _skip_lm_head = True
    """As a loss in chunks sets it: hidden states come out, and logits otherwise."""

    def __init__(self, make_inner: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(make_inner()) for i in range(layers)})
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Any = None) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, attention_masks, positions)
        h = self.norm(h)
        return h if self._skip_lm_head else self.lm_head(h)

    def get_attention_masks(self, positions: Tensor) -> Any:
        if any("VarlenAttention" in type(part).__name__ for part in self.modules()):
            starts = (positions.flatten() == 0).nonzero().flatten()
            ends = torch.cat([starts, torch.tensor([positions.numel()])]).int()
            return SimpleNamespace(cu_seq_q=ends, cu_seq_k=ends)
        document = (positions == 0).cumsum(1)
        return BlockMask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (document[b, q_idx] == document[b, kv_idx]))


def parallel_dims(**more: bool) -> Any:
    """``ParallelDims``: nothing but data parallelism, and `more`."""
    degrees = dict.fromkeys(("pp_enabled", "cp_enabled", "tp_enabled", "ep_enabled"), False)
    return SimpleNamespace(**(degrees | more))


def parallelize(model: nn.Module, parallel_dims: Any) -> None:
    """``Module.parallelize``: a function around the forward of each module, and around that of each inside of it."""

    def around(module: nn.Module, fn: Callable[..., Any]) -> None:
        def forward_with_redistribution(*args: Any, **kwargs: Any) -> Any:
            assert not parallel_dims.tp_enabled
            return fn(*args, **kwargs)

        module.forward = forward_with_redistribution

    for module in model.modules():
        if type(module) not in (nn.ModuleDict, nn.ModuleList):
            around(module, module.forward)


class Trainer:
    """What of a trainer is hooked: it is made of a configuration, holds models, and logs."""

    def __init__(self, config: Any) -> None:
        self.config, self.logged = config, list[dict[str, Any]]()
        self.parallel_dims = parallel_dims(**config.dims)
        self.model_parts = [config.model]
        self.metrics_processor = SimpleNamespace(log=lambda step, extra_metrics=None: self.logged.append(extra_metrics))


class PolicyTrainer:
    """What of ``experiments/rl/actors/trainer.py`` is hooked: its calls of the model, and the metrics it returns."""

    def __init__(self, config: Any) -> None:
        self.compile_config, self.parallel_dims = config.compile, parallel_dims(**config.dims)
        self.model_parts = [config.model]
        config.model._skip_lm_head = False

    def reduce_forward_backward_metrics(
        self, *, sum_reduced_metrics: dict[str, Tensor], max_reduced_metrics: dict[str, Tensor]
    ) -> dict[str, float]:
        return {name: float(value.detach()) for name, value in (sum_reduced_metrics | max_reduced_metrics).items()}

    def forward_backward(self, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
        token_ids, positions, labels = batch
        model = self.model_parts[0]
        attention_masks = model.get_attention_masks(positions)
        pred = model(token_ids, attention_masks=attention_masks, positions=positions)
        loss = F.cross_entropy(pred.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        return self.reduce_forward_backward_metrics(sum_reduced_metrics={"loss/mean": loss}, max_reduced_metrics={})
