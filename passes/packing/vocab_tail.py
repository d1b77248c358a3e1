"""Compute LM head and log-probabilities without logits, in chunks of the vocabulary.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treefx.kernels.head_loss import choose as head_loss
from treefx.kernels.head_loss.problem import HeadLoss, accumulate_dtype
from treefx.passes.labels.facts import Kind, ancestors, fact_of, shape_of
from treefx.passes.labels.laws.reindex import Reindexed

__all__ = ["LossLogits", "Tail", "find_tail", "logits_of_losses", "surprise"]

aten = torch.ops.aten


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

    On CUDA devices Triton kernels compute it where they are right (``treefx.kernels.head_loss.choose``).

    Returns:
        surprise [R] and the log-sum-exp of every row [N], in float32, or float64 for float64 input.
    """
    return head_loss.forward(HeadLoss(hidden, weight, bias, slot, token, scale, softcap, chunk))


@surprise.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor, token: Tensor,
    scale: float, softcap: float | None, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = accumulate_dtype(hidden.dtype)
    return hidden.new_empty(token.shape, dtype=dtype), hidden.new_empty(hidden.shape[:1], dtype=dtype)


@torch.library.custom_op("treefx::restore_surprise", mutates_args=())
def restore_surprise(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor, token: Tensor, loss: Tensor,
    lse: Tensor, scale: float, softcap: float | None, chunk: int, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias; an empty tensor for one that is not ``wanted``.

    The rows of a token are summed here: the gradient of a row of logits is (sum of its picks' grads) * probabilities
    minus each pick's own.
    """
    problem = HeadLoss(hidden, weight, bias, slot, token, scale, softcap, chunk)
    return head_loss.backward(problem, grad, loss, lse, wanted)


@restore_surprise.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor, token: Tensor, loss: Tensor,
    lse: Tensor, scale: float, softcap: float | None, chunk: int, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    like = (hidden, weight, bias if bias is not None else weight)
    return [x.new_empty(x.shape if use else (0,)) for x, use in zip(like, wanted, strict=True)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, slot, token, *ctx.numbers = inputs
    ctx.save_for_backward(hidden, weight, bias, slot, token, *output)
    ctx.mark_non_differentiable(output[1])


def _restore(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, slot, token, loss, lse = ctx.saved_tensors
    wanted = [bool(ctx.needs_input_grad[i]) and x is not None for i, x in enumerate((hidden, weight, bias))]
    found = restore_surprise(grad, hidden, weight, bias, slot, token, loss, lse, *ctx.numbers, wanted)
    grads = [x if use else None for x, use in zip(found, wanted, strict=True)]
    return (*grads, None, None, None, None, None)


surprise.register_autograd(_restore, setup_context=_save)


# Where a graph has one ------------------------------------------------------------------------------------------------

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default, aten.alias.default}


@dataclass(frozen=True)
class Tail:
    """The linear layer behind a loss, as nodes of the labelled graph.

    logits = scale * cap(hidden @ weight + bias), cap(x) = softcap * tanh(x / softcap), or x where softcap is None.
    """

    product: fx.Node
    hidden: fx.Node
    weight: fx.Node
    """[H, V]"""
    bias: fx.Node | None
    scale: float
    softcap: float | None = None


def find_tail(logprobs: fx.Node) -> Tail | None:
    """Find the linear layer under log-probabilities that a loss picks from; else None.

    Read from the loss down: factors before a tanh are outside of it, those after it inside.
    """
    if logprobs.target is not aten._log_softmax.default or logprobs.args[2]:
        return None
    node: Any = logprobs.args[0]
    width, inner, outer = shape_of(logprobs)[-1], 1.0, None
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in (aten.mm.default, aten.addmm.default):
            return _linear(node, inner, outer) if shape_of(node)[-1] == width else None
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], int | float):
            inner = inner * node.args[1] if node.target is aten.mul.Tensor else inner / node.args[1]
        elif node.target is aten.tanh.default and outer is None:
            inner, outer = 1.0, inner
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


def _linear(node: fx.Node, inner: float, outer: float | None) -> Tail | None:
    """The layer under outer * tanh(inner * logits), or inner * logits where outer is None."""
    bias, hidden, weight = node.args[:3] if node.target is aten.addmm.default else (None, *node.args[:2])
    if node.kwargs or not isinstance(hidden, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if fact_of(hidden).kind is not Kind.PACKED or fact_of(weight).kind is not Kind.INVARIANT:
        return None
    if isinstance(bias, fx.Node) and (fact_of(bias).kind is not Kind.INVARIANT or bias.meta["val"].dim() != 1):
        return None
    if outer is not None and not inner > 0:
        return None
    scale, softcap = (inner, None) if outer is None else (outer * inner, 1 / inner)
    return Tail(node, hidden, weight, bias if isinstance(bias, fx.Node) else None, scale, softcap)


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
    """Return the logits behind a graph's losses, if all pick from one linear layer's."""
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
