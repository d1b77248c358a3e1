"""Ways to write causal attention that differ from transformers' own, each a module for `tests.models.TinyLM`.

All map q [B, H, T, D], k and v [B, Hkv, T, D] and a padding mask [B, T] or None to [B, H, T, D].
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.softmax_spellings import (
    SinkByHand,
    causal,
    differential,
    differential_probabilities,
    half_of_the_gradient,
    normalised_by_their_sum,
    one_beside_shifted_weights,
    probabilities_without_gradient,
    scores_of,
    scores_without_gradient,
    sigmoid_attention,
    softmax_by_hand,
    softmax_of_filled_weights,
    softmax_off_by_one,
    softmax_off_by_one_shifted,
)

__all__ = ["EXPANDED", "GROUPED", "PADDED", "SPELLINGS", "Spelling"]

MOST_TOKENS = 64
CHUNK = 6
WINDOW = 5


class Spelling(nn.Module):
    """Wraps a function of (q, k, v, padding mask) without parameters."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.attend(q, k, v, mask)


class TrilBuffer(nn.Module):
    """nanoGPT: a registered triangle, sliced to T, and masked_fill with -inf."""

    def __init__(self) -> None:
        super().__init__()
        triangle = torch.tril(torch.ones(MOST_TOKENS, MOST_TOKENS))
        self.register_buffer("bias", triangle.view(1, 1, MOST_TOKENS, MOST_TOKENS))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        length = q.size(-2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        att = F.dropout(F.softmax(att, dim=-1), 0.0)
        return att @ v


class BoolBuffer(nn.Module):
    """A registered boolean triangle, where, and the dtype's minimum (GPT-2 as it was)."""

    def __init__(self) -> None:
        super().__init__()
        triangle = torch.ones(MOST_TOKENS, MOST_TOKENS, dtype=torch.bool).tril()
        self.register_buffer("seen", triangle, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        queries, keys = q.size(-2), k.size(-2)
        scores = torch.matmul(q, k.transpose(-1, -2)) / (v.size(-1) ** 0.5)
        lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        scores = torch.where(self.seen[keys - queries : keys, :keys], scores, lowest)
        return torch.matmul(nn.functional.softmax(scores, dim=-1), v)


class RelativeBias(nn.Module):
    """T5: a learned bias by logarithmic bucket of the distance, unscaled scores."""

    def __init__(self, heads: int = 4, buckets: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.buckets = buckets

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(q.size(-2), device=q.device)
        distance = (place[:, None] - place[None, :]).clamp(min=0)
        exact = self.buckets // 2
        far = exact + (torch.log(distance.float().clamp(min=1) / exact) * exact / math.log(4)).to(torch.long)
        bucket = torch.where(distance < exact, distance, far.clamp(max=self.buckets - 1))
        bias = self.table(bucket).permute(2, 0, 1).unsqueeze(0)
        scores = 0.3 * (q @ k.mT) + bias
        return scores.masked_fill(place[None, :] > place[:, None], float("-inf")).softmax(-1) @ v


class QueryKeyNorm(nn.Module):
    """Normalised queries and keys with a learned temperature per head."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.linspace(1.0, 4.0, heads).view(1, heads, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return F.scaled_dot_product_attention(q * self.temperature, k, v, is_causal=True, scale=1.0)


class Sink(nn.Module):
    """GPT-OSS: one learned logit per head takes weight and has no value; here before or behind the keys."""

    def __init__(self, first: bool, of_query: bool = False, heads: int = 4) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.linspace(-1.0, 3.0, heads))
        self.first, self.of_query = first, of_query

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~causal(q), float("-inf"))
        sink = self.sink.reshape(1, -1, 1, 1).expand(q.size(0), -1, q.size(2), 1)
        sink = sink * q[..., :1] if self.of_query else sink
        joined = torch.cat([sink, scores] if self.first else [scores, sink], dim=-1)
        weights = (joined - joined.max(dim=-1, keepdim=True).values).softmax(-1)
        return (weights[..., 1:] if self.first else weights[..., :-1]) @ v


class LearnedKeyBias(nn.Module):
    """Doge: a bias that the model computes from each key's value."""

    def __init__(self, heads: int = 4, dim: int = 8) -> None:
        super().__init__()
        self.decay, self.project = nn.Parameter(torch.linspace(0.5, 1.5, heads)), nn.Linear(heads * dim, heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        bias = self.project(v.transpose(1, 2).flatten(2))
        bias = torch.exp(self.decay * F.softplus(bias)).transpose(-1, -2)[:, :, None, :].expand(-1, -1, q.size(2), -1)
        return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~causal(q), float("-inf")))


class Multihead(nn.Module):
    """torch.nn.MultiheadAttention on values that are projected already."""

    def __init__(self, need_weights: bool, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)
        self.need_weights = need_weights

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, dim = q.shape
        flat = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        mixed, _ = self.inner(*flat, attn_mask=hidden, need_weights=self.need_weights)
        return mixed.view(batch, length, heads, dim).transpose(1, 2)


def einsum_heads_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.size(-1))
    hidden = torch.triu(torch.ones_like(scores, dtype=torch.bool), diagonal=1)
    return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def einsum_tokens_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, T, H, D]
    scores = torch.einsum("bqhd,bkhd->bhqk", q * q.size(-1) ** -0.5, k)
    scores = scores + torch.full((q.size(1), k.size(1)), float("-inf"), dtype=q.dtype).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).transpose(1, 2)


def einsum_grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    batch, heads, length, dim = q.shape
    grouped = q.reshape(batch, k.size(1), heads // k.size(1), length, dim)
    scores = torch.einsum("bgrqd,bgkd->bgrqk", grouped, k) / math.sqrt(dim)
    weights = scores.masked_fill(~causal(q), float("-inf")).softmax(-1)
    return torch.einsum("bgrqk,bgkd->bgrqd", weights, v).reshape(batch, heads, length, dim)


def baddbmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    batch, heads, length, dim = q.shape
    bias = torch.zeros(length, length, dtype=q.dtype).masked_fill(~causal(q), float("-inf"))
    scores = torch.baddbmm(
        bias.expand(batch * heads, length, length),
        q.reshape(batch * heads, length, dim),
        k.reshape(batch * heads, length, dim).transpose(1, 2),
        beta=1.0,
        alpha=dim**-0.5,
    )
    return torch.bmm(scores.softmax(-1), v.reshape(batch * heads, length, dim)).view(batch, heads, length, dim)


def additive_triu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    bias = torch.triu(torch.full((q.size(-2), q.size(-2)), float("-inf"), dtype=q.dtype), diagonal=1)
    return torch.softmax(scores + bias, dim=-1) @ v


def chunked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    place = torch.arange(q.size(-2), device=q.device)
    same_chunk = place[:, None] // CHUNK == place[None, :] // CHUNK
    scores = q @ k.mT * q.size(-1) ** -0.5
    return torch.where(same_chunk & causal(q), scores, float("-inf")).softmax(-1) @ v


def chunked_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    chunk = torch.arange(q.size(-2), device=q.device) // CHUNK
    return F.scaled_dot_product_attention(q, k, v, (chunk[:, None] == chunk[None, :]) & causal(q))


def sliding_softcap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = 3.0 * torch.tanh(q @ k.mT * q.size(-1) ** -0.5 / 3.0)
    seen = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool)
    seen = torch.tril(seen) & ~torch.tril(seen, -WINDOW)
    return (scores + torch.where(seen, 0.0, float("-inf"))).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    place = torch.arange(q.size(-2), device=q.device)
    slopes = 2.0 ** -torch.arange(1, q.size(1) + 1, dtype=q.dtype)
    bias = slopes[:, None, None] * (place[None, :] - place[:, None]).to(q.dtype)
    lowest = torch.finfo(q.dtype).min
    return ((q @ k.mT) / q.size(-1) ** 0.5 + bias).masked_fill(~causal(q), lowest).softmax(-1) @ v


def softmax_in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q @ k.mT / math.sqrt(q.size(-1))).float().masked_fill(~causal(q), float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


def sdpa_is_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_bool(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q), scale=0.5)


def sdpa_float(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    seen = causal(q)
    bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(seen.logical_not(), float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def sdpa_enable_gqa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_repeat_interleave(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    copies = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_contiguous_layout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    # [B, T, H, D], as flash attention takes them.
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def head_by_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    outs = []
    for q_head, k_head, v_head in zip(q.unbind(1), k.unbind(1), v.unbind(1)):
        scores = torch.bmm(q_head, k_head.transpose(1, 2)) * q.size(-1) ** -0.5
        outs.append(torch.bmm(scores.masked_fill(~causal(q), float("-inf")).softmax(-1), v_head))
    return torch.stack(outs, dim=1)


def sdpa_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return F.scaled_dot_product_attention(q, k, v, causal(q) & mask[:, None, None, :].bool())


def additive_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    lowest = torch.finfo(q.dtype).min
    bias = (1.0 - mask[:, None, None, :].to(q.dtype)) * lowest
    scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~causal(q), lowest)
    return (scores + bias.clamp(min=lowest)).clamp(min=lowest).softmax(-1) @ v


def two_fills(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
    return scores.masked_fill(torch.triu(torch.ones_like(scores[0, 0]), 1) == 1, -1e9).softmax(-1) @ v


def chunked_from_the_first_token(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Llama 4: chunks are counted from each row's first real token."""
    assert mask is not None
    start = (mask.cumsum(-1) == 0).sum(-1)[:, None]
    chunk = (torch.arange(q.size(-2), device=q.device) - start) // CHUNK
    same = chunk[:, None, :, None] == chunk[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, causal(q) & same & mask[:, None, None, :].bool())


def counted_from_the_end(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Indices below zero, into a range and into a part of one."""
    columns = torch.arange(q.size(-2))
    later = torch.arange(200)[10:180:2][-1 - columns].to(q.dtype)
    thinned = (columns[-1 - columns] % 3 == 1) & (columns[:, None] != columns)
    return F.softmax(scores_of(q, k).masked_fill(thinned, float("-inf")) + 0.05 * later % 1.0, dim=-1) @ v


def narrow_integers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Sums, products and casts that wrap around at 256, and at 2^31."""
    columns = torch.arange(q.size(-2))
    few, large = columns.to(torch.uint8) * 40, (columns * 1_000_000_007).to(torch.int32)
    seen = (few[:, None] + few > 60) & ((columns * 77).to(torch.uint8) > 40) & (large % 7 != 1)
    seen = seen & (columns.to(torch.int32) * 1_000_000_007 % 5 != 1) | (columns[:, None] == columns)
    return F.softmax(scores_of(q, k).masked_fill(~seen, float("-inf")), dim=-1) @ v


def masks_of_bytes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The Annotated Transformer: zeros and ones of eight bits, multiplied."""
    columns = torch.arange(q.size(-2))
    near = (columns[:, None] - columns < WINDOW).to(torch.uint8)
    seen = near * torch.tril(torch.ones_like(near))
    return F.softmax(scores_of(q, k).masked_fill(seen == 0, -1e9), dim=-1) @ v


def scaled_differences(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    place = torch.arange(q.size(-2)).to(q.dtype)
    bias = 0.1 * torch.rsub(place, 1.0, alpha=0.3) * torch.rsub(place, 0.1 * place, alpha=0.2)
    return F.softmax(scores_of(q, k) + bias + torch.add(place, 1.0, alpha=0.7), dim=-1) @ v


class ContentToPosition(nn.Module):
    """DeBERTa's half: each query's own logit for a distance, gathered for every key."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.distances = nn.Parameter(torch.randn(dim, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(q.size(-2), device=q.device)
        distance = (place[:, None] - place[None, :]).clamp(0, 5).expand(*q.shape[:2], -1, -1)
        return (scores_of(q, k) + torch.gather(q @ self.distances, -1, distance)).softmax(-1) @ v


class MemoryTokens(nn.Module):
    """Learned keys and values before those of the tokens, as prefix tuning has them."""

    def __init__(self, heads: int = 4, dim: int = 8) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(2, 1, heads, 3, dim, generator=torch.Generator().manual_seed(0)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keys, values = self.memory.expand(-1, q.size(0), -1, -1, -1)
        seen = torch.cat([torch.ones(q.size(-2), 3, dtype=torch.bool), causal(q)], 1)
        return F.scaled_dot_product_attention(q, torch.cat([keys, k], 2), torch.cat([values, v], 2), seen)


class BiasWithoutGradient(RelativeBias):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(q.size(-2), device=q.device)
        distance = (place[:, None] - place[None, :]).clamp(min=0, max=self.buckets - 1)
        frozen, live = self.table(distance).detach(), self.table(distance // 2)
        return (scores_of(q, k) + (frozen + live).permute(2, 0, 1)).softmax(-1) @ v


Builder = Callable[[], nn.Module]


def _builders(*functions: Callable[..., Tensor]) -> dict[str, Builder]:
    return {function.__name__: lambda function=function: Spelling(function) for function in functions}


SPELLINGS: dict[str, Builder] = {
    "tril_buffer": TrilBuffer,
    "bool_buffer": BoolBuffer,
    "relative_bias": RelativeBias,
    "query_key_norm": QueryKeyNorm,
    "sink_behind": lambda: Sink(first=False),
    "sink_before": lambda: Sink(first=True),
    "learned_key_bias": LearnedKeyBias,
    "multihead_sdpa": lambda: Multihead(need_weights=False),
    "multihead_weights": lambda: Multihead(need_weights=True),
    **_builders(einsum_heads_first, einsum_tokens_first, baddbmm, additive_triu, chunked, chunked_sdpa),
    **_builders(sliding_softcap, alibi, softmax_in_float32, sdpa_is_causal, sdpa_bool, sdpa_float),
    **_builders(sdpa_contiguous_layout, head_by_head, softmax_by_hand, softmax_of_filled_weights, softmax_off_by_one),
    **_builders(softmax_off_by_one_shifted, differential, counted_from_the_end, narrow_integers, masks_of_bytes),
    **_builders(scaled_differences),
    "sink_by_hand": SinkByHand,
    "content_to_position": ContentToPosition,
    "bias_without_gradient": BiasWithoutGradient,
}
"""As many key heads as query heads, no padding mask."""
GROUPED: dict[str, Builder] = _builders(sdpa_enable_gqa, sdpa_repeat_interleave, einsum_grouped)
"""Fewer key heads than query heads."""
PADDED: dict[str, Builder] = _builders(sdpa_padding, additive_padding, two_fills, chunked_from_the_first_token)
"""These take the padding mask."""
EXPANDED: dict[str, Builder] = {
    "memory_tokens": MemoryTokens,
    "sink_of_the_query": lambda: Sink(first=False, of_query=True),
    **_builders(normalised_by_their_sum, one_beside_shifted_weights, differential_probabilities, sigmoid_attention),
    **_builders(scores_without_gradient, probabilities_without_gradient, half_of_the_gradient),
}
"""No tree attention computes these: they run on rows."""
