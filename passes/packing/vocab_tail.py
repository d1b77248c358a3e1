"""The end of a causal LM without its logits: LM head and log-probabilities, a few vocabulary entries at a time.

A loss picks one number out of each row of ``[N, V]`` logits. Where nothing else needs them, and they are large, linear
and loss become one operator that walks over the vocabulary with an online log-sum-exp (Milakov and Gimelshein 2018,
arXiv 1805.02867) and computes the probabilities again in the backward (as in Cut Your Losses, Wijmans et al. 2024,
arXiv 2411.09009). Never more than a chunk of the logits exists, in forward or backward.

Before::

    mm: "f32[s0, V]" = mm(hidden, t(weight));  lse = logsumexp(mm);  picked = pick(mm, token_of, target)
    loss = expand(lse, token_of) - picked

After::

    loss, lse = treefx.surprise(hidden, weight, None, token_of, target, 1.0, None, 0)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.labels.facts import Kind, ancestors, fact_of, shape_of
from treefx.passes.labels.laws.reindex import Reindexed

__all__ = ["LossLogits", "Tail", "find_tail", "logits_of_losses", "surprise"]

aten = torch.ops.aten
_ENTRIES_PER_CHUNK = {"cpu": 2**24}
"""Logits that exist at once: 64 MiB in float32. Other devices take larger chunks, each of which is a few launches."""
_ENTRIES_ON_DEVICE = 2**26


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Chunk:
    """Entries ``part`` of the vocabulary, and picks with the positions of their logits [N, chunk].

    Attributes:
        part: The entries.
        picks: Positions of the picks in this chunk; None for all picks, whether they are in it or not.
        row, column: int64, where the logit of each pick stands.
        inside: bool, which picks are in this chunk; None where ``picks`` says it.
    """

    part: slice
    picks: Tensor | None
    row: Tensor
    column: Tensor
    inside: Tensor | None = None

    def read(self, chosen: Tensor, scores: Tensor) -> Tensor:
        """Return the picked logits [R] with those of this chunk in place."""
        if self.inside is not None:
            return torch.where(self.inside, scores[self.row, self.column], chosen)
        chosen[self.picks] = scores[self.row, self.column]
        return chosen

    def subtract(self, scores: Tensor, grad: Tensor) -> None:
        """Subtract the gradient [R] of each pick from its logit."""
        if self.inside is None:
            scores.index_put_((self.row, self.column), -grad[self.picks], accumulate=True)
        else:
            place = self.row * scores.shape[1] + self.column
            scores.view(-1).index_add_(0, place, torch.where(self.inside, -grad, 0.0))


def _chunks(rows: int, vocabulary: int, size: int, slot: Tensor, token: Tensor) -> Iterator[_Chunk]:
    """Walk over the vocabulary. Picks with a negative row or token are in no chunk.

    On the CPU each chunk gets its own picks. Elsewhere the host would have to wait for their number: each chunk gets
    all picks and leaves out the others, which a few numbers per row of the batch cost.
    """
    entries = _ENTRIES_PER_CHUNK.get(token.device.type, _ENTRIES_ON_DEVICE)
    step = size or max(256, entries // max(1, rows))
    parts = [slice(start, min(start + step, vocabulary)) for start in range(0, vocabulary, step)]
    return (_picked_chunks if token.device.type in _ENTRIES_PER_CHUNK else _masked_chunks)(parts, slot, token)


def _picked_chunks(parts: Sequence[slice], slot: Tensor, token: Tensor) -> Iterator[_Chunk]:
    key = torch.where(slot < 0, -1, token)
    order = key.argsort(stable=True)
    starts = torch.tensor([part.start for part in parts] + [parts[-1].stop], device=token.device)
    bounds = torch.searchsorted(key[order], starts).tolist()
    if bounds[-1] < len(key):
        raise IndexError(f"a target is out of bounds of a vocabulary with {parts[-1].stop} entries")
    for number, part in enumerate(parts):
        picks = order[bounds[number] : bounds[number + 1]]
        yield _Chunk(part, picks, slot[picks], token[picks] - part.start)


def _masked_chunks(parts: Sequence[slice], slot: Tensor, token: Tensor) -> Iterator[_Chunk]:
    torch._assert_async(((slot < 0) | (token < parts[-1].stop)).all())
    row = slot.clamp(min=0)
    for part in parts:
        column = token - part.start
        inside = (slot >= 0) & (column >= 0) & (token < part.stop)
        yield _Chunk(part, None, row, column.clamp(0, part.stop - part.start - 1), inside)


def _scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, part: slice, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Logits [N, chunk] in the accumulation type, and the cap's tanh for the backward."""
    low = weight[part].T
    raw = hidden @ low if bias is None else torch.addmm(bias[part], hidden, low)
    scores = raw.to(_accumulate_dtype(hidden.dtype))
    if softcap is None:
        return (scores if scale == 1.0 else scores * scale), None
    tanh = (scores / softcap).tanh_()
    return tanh * (softcap * scale), tanh


@torch.library.custom_op("treefx::surprise", mutates_args=())
def surprise(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor, token: Tensor,
    scale: float, softcap: float | None, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Minus log-probabilities of picked vocabulary entries.

    With z = scale * cap(hidden weight^T + bias), surprise[r] = logsumexp(z[slot[r]]) - z[slot[r], token[r]].

    Args:
        hidden: [N, H].
        weight: [V, H], of hidden's dtype.
        bias: [V] or None.
        slot: int64 [R], rows of hidden; a negative one gives 0.
        token: int64 [R], entries of the vocabulary; a negative one gives 0.
        scale: one over the temperature.
        softcap: final logit cap, cap(z) = softcap * tanh(z / softcap), or None.
        chunk: entries of the vocabulary per step; 0 for a number that keeps a chunk at 2^24 logits (2^26 off the CPU).

    Returns:
        surprise [R] and the log-sum-exp of every row [N], in float32, or float64 for float64 input.
    """
    dtype = _accumulate_dtype(hidden.dtype)
    lse = torch.full((len(hidden),), -torch.inf, dtype=dtype, device=hidden.device)
    chosen = torch.zeros(len(token), dtype=dtype, device=hidden.device)
    for item in _chunks(len(hidden), len(weight), chunk, slot, token):
        scores, _ = _scores(hidden, weight, bias, item.part, scale, softcap)
        chosen = item.read(chosen, scores)
        # Subtract, exponentiate and sum by hand: logsumexp would hold a second chunk.
        top = scores.amax(dim=1)
        top.masked_fill_(top == -torch.inf, 0.0)  # a chunk of forbidden entries: -inf - (-inf) would be NaN
        total = scores.sub_(top[:, None]).exp_().sum(dim=1)
        lse = torch.logaddexp(lse, top + total.log())
    row = torch.where((slot >= 0) & (token >= 0), slot, len(lse))  # there may be no row at all
    return torch.cat([lse, lse.new_zeros(1)])[row] - chosen, lse


@surprise.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor, token: Tensor,
    scale: float, softcap: float | None, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = _accumulate_dtype(hidden.dtype)
    return hidden.new_empty(token.shape, dtype=dtype), hidden.new_empty(hidden.shape[:1], dtype=dtype)


@torch.library.custom_op("treefx::restore_surprise", mutates_args=())
def restore_surprise(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor, token: Tensor, lse: Tensor,
    scale: float, softcap: float | None, chunk: int, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias; an empty tensor for one that is not ``wanted``.

    The rows of a token are summed here: the gradient of a row of logits is (sum of its picks' grads) * probabilities
    minus each pick's own.
    """
    row = torch.where((slot >= 0) & (token >= 0), slot, len(lse))
    total = lse.new_zeros(len(lse) + 1).index_add_(0, row, grad)[:-1]
    results = [hidden.new_zeros(hidden.shape if wanted[0] else (0,), dtype=lse.dtype)]
    results += [weight.new_empty(weight.shape if wanted[1] else (0,))]
    results += [weight.new_empty(0) if bias is None or not wanted[2] else bias.new_empty(bias.shape)]
    for item in _chunks(len(hidden), len(weight), chunk, slot, token):
        scores, tanh = _scores(hidden, weight, bias, item.part, scale, softcap)
        scores.sub_(lse[:, None]).exp_().mul_(total[:, None])
        item.subtract(scores, grad)
        if scale != 1.0:
            scores.mul_(scale)
        if tanh is not None:
            scores.mul_(1 - tanh * tanh)
        low = scores.to(hidden.dtype)
        if wanted[0]:
            results[0] += low @ weight[item.part]
        if wanted[1]:
            results[1][item.part] = low.T @ hidden
        if wanted[2]:
            results[2][item.part] = scores.sum(dim=0).to(results[2].dtype)
    return [results[0].to(hidden.dtype, copy=False), *results[1:]]


@restore_surprise.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor, token: Tensor, lse: Tensor,
    scale: float, softcap: float | None, chunk: int, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    like = (hidden, weight, bias if bias is not None else weight)
    return [x.new_empty(x.shape if use else (0,)) for x, use in zip(like, wanted, strict=True)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, slot, token, *ctx.numbers = inputs
    ctx.save_for_backward(hidden, weight, bias, slot, token, output[1])
    ctx.mark_non_differentiable(output[1])


def _restore(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, slot, token, lse = ctx.saved_tensors
    wanted = [bool(ctx.needs_input_grad[i]) and x is not None for i, x in enumerate((hidden, weight, bias))]
    found = restore_surprise(grad, hidden, weight, bias, slot, token, lse, *ctx.numbers, wanted)
    grads = [x if use else None for x, use in zip(found, wanted, strict=True)]
    return (*grads, None, None, None, None, None)


surprise.register_autograd(_restore, setup_context=_save)


# Where a graph has one ------------------------------------------------------------------------------------------------

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default, aten.alias.default}


@dataclass(frozen=True)
class Tail:
    """The linear layer behind a loss: logits = scale * (hidden @ weight + bias), as nodes of the labelled graph."""

    product: fx.Node
    hidden: fx.Node
    weight: fx.Node
    """[H, V]"""
    bias: fx.Node | None
    scale: float


def find_tail(logprobs: fx.Node) -> Tail | None:
    """The linear layer under log-probabilities that a loss picks from, or None for any other computation."""
    if logprobs.target is not aten._log_softmax.default or logprobs.args[2]:
        return None
    node: Any = logprobs.args[0]
    width, scale = shape_of(logprobs)[-1], 1.0
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in (aten.mm.default, aten.addmm.default):
            return _linear(node, scale) if shape_of(node)[-1] == width else None
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], int | float):
            scale = scale * node.args[1] if node.target is aten.mul.Tensor else scale / node.args[1]
        elif not _keeps_entries(node):
            return None
        node = node.args[0]
    return None


def _keeps_entries(node: fx.Node) -> bool:
    """Whether a value has the entries of its operand, in rows of the same width."""
    source: Any = node.args[0]
    if node.target is aten._to_copy.default:
        return node.meta["val"].dtype in (torch.float32, torch.float64)
    if node.target in _VIEWS:
        return shape_of(node)[-1] == shape_of(source)[-1]
    law = fact_of(node).law
    return isinstance(law, Reindexed) and law.on_index


def _linear(node: fx.Node, scale: float) -> Tail | None:
    bias, hidden, weight = node.args[:3] if node.target is aten.addmm.default else (None, *node.args[:2])
    if node.kwargs or not isinstance(hidden, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if fact_of(hidden).kind is not Kind.PACKED or fact_of(weight).kind is not Kind.INVARIANT:
        return None
    if isinstance(bias, fx.Node) and (fact_of(bias).kind is not Kind.INVARIANT or bias.meta["val"].dim() != 1):
        return None
    return Tail(node, hidden, weight, bias if isinstance(bias, fx.Node) else None, scale)


@dataclass(frozen=True)
class LossLogits:
    """Logits that losses pick from.

    Attributes:
        width: V.
        outputs: The positions of the outputs that need the logits otherwise.
        dtype, device: Of the logits.
    """

    width: int
    outputs: frozenset[int]
    dtype: torch.dtype
    device: torch.device


def logits_of_losses(picks: Sequence[fx.Node]) -> LossLogits | None:
    """The logits behind a graph's losses, if each picks from those of one linear layer; None otherwise."""
    sources = [node.args[0] for node in picks]
    tails = [find_tail(source) if isinstance(source, fx.Node) else None for source in sources]
    products = {tail.product for tail in tails if tail is not None}
    if None in tails or len(products) != 1:
        return None
    (product,) = products
    outputs: Any = next(iter(product.graph.find_nodes(op="output"))).args[0]
    need = [
        position
        for position, item in enumerate(outputs)
        if isinstance(item, fx.Node)
        and fact_of(item).kind is Kind.PACKED
        and (item is product or product in ancestors(item))
    ]
    logits: Tensor = product.meta["val"]
    return LossLogits(shape_of(product)[-1], frozenset(need), logits.dtype, logits.device)
