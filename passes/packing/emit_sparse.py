"""Emit an attention to chosen keys as ``treefx::sparse_tree_attention`` on packed tokens, with a list per query.

Keys and values that are matrices times a latent vector are gathered as that vector, once for all heads: the matrices
then multiply the query before, and the output behind the attention (``treefx.passes.scores.latents``).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from treefx.kernels.score import evaluate
from treefx.kernels.sparse import ops as _sparse_ops  # noqa: F401  (registers the operator)
from treefx.passes.labels.facts import Fact, fact_of
from treefx.passes.packing.emit_attention import (
    as_model,
    asked,
    asks_for_sight,
    check_hidden,
    heads_first,
    kernel_form,
    operands,
    sink_logits,
)
from treefx.passes.packing.emitters import SIGHT, Packer, emits
from treefx.passes.packing.layout import tokens_first
from treefx.passes.scores.latents import Expanded, Latents, Shared
from treefx.passes.scores.sparse import SparseAttention

__all__ = ["listed_keys"]


@emits(SparseAttention)
def _sparse_attention(packer: Packer, node: fx.Node, fact: Fact) -> Tensor:
    attention = fact.law
    assert isinstance(attention, SparseAttention)
    latents = attention.latents
    if latents is None:
        query, key, value = operands(packer, attention)
    else:
        query, key, value = _latent_operands(packer, attention.query, latents)
    check_hidden(packer, attention, query, key)
    sinks = None if attention.sinks is None else sink_logits(packer, attention.sinks, query)
    keys = listed_keys(packer, attention)
    if asks_for_sight(attention):
        filler = torch.arange(packer.metadata.tokens, device=keys.device) > packer.metadata.token_of.max()
        packer.proofs.append((SIGHT, ((keys >= 0).any(-1) | filler).all()))
    out, _ = torch.ops.treefx.sparse_tree_attention.default(query[0], key[0], value[0], keys, sinks, attention.scale)
    if latents is not None:
        out = torch.bmm(out, _matrices(packer, latents.value, query.shape[1]).to(out.dtype))
    return as_model(packer, node, out[None])


def listed_keys(packer: Packer, attention: SparseAttention) -> Tensor:
    """The tokens that each query has chosen and may see, int32 [N, K]; -1 for a key that it may not see.

    Those are keys of the future and of padding, where a query has fewer keys than it chooses.
    """
    metadata = packer.metadata
    columns: Tensor = packer.packed(attention.columns)[0].to(torch.int64)
    keys = metadata.token_of[metadata.row[:, None], columns]
    query = torch.arange(metadata.tokens, device=keys.device)[:, None]
    seen, keys = (keys >= 0) & (keys <= query), keys.clamp(min=0)
    seen = seen & (query < metadata.subtree_end[keys])
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    for condition in asked(packer, attention):
        if condition != attention.choice:
            buffers: list[Tensor] = []
            form = kernel_form(packer, condition, buffers)
            value = evaluate(form, dot=zero, q=query, k=keys, head=zero, batch=zero, buffers=buffers)
            seen = seen & value.to(torch.bool)
    return torch.where(seen, keys, -1).to(torch.int32)


def _latent_operands(packer: Packer, of_query: fx.Node, latents: Latents) -> tuple[Tensor, Tensor, Tensor]:
    """Query [1, H, N, R + r], and key [1, 1, N, R + r] and value [1, 1, N, R] of all heads."""
    query = heads_first(packer, of_query)[0]  # [H, N, D]
    latent = packer.packed(latents.value.latent).to(query.dtype)  # [N, R]
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    start = 0
    for part in latents.key:
        own = query[..., start : start + part.width]
        start += part.width
        if isinstance(part, Expanded):
            matrices = _matrices(packer, part, query.shape[0]).to(query.dtype)
            queries.insert(0, torch.bmm(own, matrices.transpose(1, 2)))
        else:
            queries.append(own)
            keys.append(_shared(packer, part).to(query.dtype))
    value = latent[None, None]
    return torch.cat(queries, -1)[None], torch.cat([latent, *keys], -1)[None, None], value


def _matrices(packer: Packer, part: Expanded, heads: int) -> Tensor:
    """The matrix of each head, [H, R, width]."""
    whole: Tensor = packer.full(part.weight)
    by_head = whole.reshape(whole.shape[0], heads, part.stride)
    return by_head[..., part.offset : part.offset + part.width].transpose(0, 1)


def _shared(packer: Packer, part: Shared) -> Tensor:
    """Features of a value without heads, [N, width]."""
    dims = fact_of(part.value).dims
    assert dims is not None
    first = tokens_first(packer.packed(part.value), dims, packer.metadata.tokens)
    return first.reshape(packer.metadata.tokens, -1)[:, part.offset : part.offset + part.width]
