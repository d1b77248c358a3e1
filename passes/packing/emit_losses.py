"""Emit picks of losses from packed values, and values behind a shift of positions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treefx.kernels.expand import entries, expand, pick
from treefx.passes.labels.facts import Fact, fact_of, shape_of
from treefx.passes.labels.laws.losses import Pick
from treefx.passes.labels.laws.reindex import Reindexed, reindexed_entries, token_index
from treefx.passes.packing.emitters import Packer, emits_full
from treefx.passes.packing.layout import tokens_first
from treefx.passes.packing.vocab_tail import find_tail, surprise
from treefx.passes.trace.heads import head

aten = torch.ops.aten


@emits_full(Reindexed)
def _expanded(packer: Packer, node: fx.Node, fact: Fact) -> Tensor:
    entries: Tensor = expand(_entries(packer, node), token_index(node, packer.metadata.token_of))
    return entries


@emits_full(Pick)
def _picked(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    law = fact.law
    assert isinstance(law, Pick)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    token_of = token_index(source, packer.metadata.token_of)
    if node.target is torch.ops.treefx.head.default:
        targets, weight, bias = map(packer.full, node.args[1:4])
        return head(_entries(packer, source), targets, weight, bias, token_of.reshape(-1), node.args[5])
    if node.target is aten.gather.default:
        index = entries(packer.full(node.args[2]), shape_of(source)[-1], None)
        repeated = token_of.reshape(-1, 1).expand(-1, index.shape[-1]).reshape(-1)
        if packer.absent and find_tail(source) is not None:
            return -_surprise(packer, source, repeated, index.reshape(-1)).reshape(index.shape)
        return pick(_entries(packer, source), repeated, index.reshape(-1)).reshape(index.shape)
    target = packer.full(node.args[1])
    flat, tokens = target.reshape(-1), token_of.reshape(-1)
    chosen = entries(flat, shape_of(source)[1], law.ignore_index)
    valid = flat != law.ignore_index
    losses = torch.where(valid, _surprise(packer, source, tokens, chosen), 0)
    return _reduced(losses, valid, target.shape, node.args[3])


def _entries(packer: Packer, node: fx.Node) -> Tensor:
    """A packed value, or one seen through an index, as [N, V]."""
    if isinstance(fact_of(node).law, Reindexed):
        return reindexed_entries(node, functools.partial(_entries, packer), packer.full)
    dims = fact_of(node).dims
    assert dims is not None
    first = tokens_first(packer.packed(node), dims, packer.metadata.tokens)
    return first.reshape([first.shape[0], -1])


def _surprise(packer: Packer, source: fx.Node, token_of: Tensor, target: Tensor) -> Tensor:
    """Return minus the picked log-probabilities, from logits where available.

    The [N, V] tensor of all log-probabilities is then never written.
    """
    tail = find_tail(source) if packer.absent else None
    if tail is not None:
        hidden, weight, bias = _entries(packer, tail.hidden), packer.full(tail.weight), packer.full(tail.bias)
        losses, _ = surprise(hidden, weight.t(), bias, token_of, target, tail.scale, tail.softcap, 0)
        return losses.to(source.meta["val"].dtype)  # type: ignore[no-any-return]
    logits = source.args[0]
    if source.target is not aten._log_softmax.default or not isinstance(logits, fx.Node) or source.args[2]:
        logprobs: Tensor = pick(_entries(packer, source), token_of, target)
        return -logprobs
    entries = _entries(packer, logits)
    normaliser: Tensor = expand(torch.logsumexp(entries, -1), token_of)
    picked: Tensor = pick(entries, token_of, target)
    return normaliser - picked


def _reduced(losses: Tensor, valid: Tensor, shape: Sequence[int], reduction: Any) -> tuple[Tensor, Tensor]:
    """Return the results of ``nll_loss_forward`` without class weights: (loss, total weight)."""
    count = valid.sum().to(losses.dtype)
    if reduction == 0:
        return losses.reshape(shape), torch.zeros_like(count)
    return (losses.sum() / count if reduction == 1 else losses.sum()), count
