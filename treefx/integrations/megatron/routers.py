"""Routers that count their tokens: they count those of the rows.

Which experts a token takes follows from its own logits, but load-balancing losses, the z-loss, expert biases and
Sinkhorn routes follow from all tokens of a batch, a shared one as often as rows pass it. The E logits of a token are
few, so such a router gets them on rows, and of its answer the first copy of each token is taken::

    logits [N, 1, E] --expand--> [T, B, E] --routing, losses--> probs, map [T * B, E] --first copies--> [N, E]

Megatron attaches its losses to ``probs`` through a function whose backward adds the loss's own gradient to any incoming
one, so they reach the logits of all rows, and the expansion sums them over the copies of a token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from treefx.integrations.megatron.head import across_ranks, expand_hidden
from treefx.integrations.megatron.tree import Trees

__all__ = ["Routing", "RowRouting", "counts_tokens", "has_losses", "same"]

_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_BY_ALL_TOKENS = ("sinkhorn", "quantile_balancing")


def counts_tokens(router: Any) -> bool:
    """Whether anything that a router computes follows from more than one token."""
    return bool(
        router.is_aux_loss_enabled()
        or router.config.moe_z_loss_coeff is not None
        or router.enable_expert_bias
        or router.routing_type in _BY_ALL_TOKENS
    )


def has_losses(config: Any) -> bool:
    """Whether any router of a model counts tokens, on this pipeline stage or on another."""
    if not config.num_moe_experts:
        return False
    kinds, coefficients = (
        x if isinstance(x, list) else [x] for x in (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff)
    )
    return bool(
        any(kind in _BALANCING and weight for kind, weight in zip(kinds, coefficients, strict=False))
        or config.moe_z_loss_coeff is not None
        or config.moe_router_enable_expert_bias
        or kinds[0] in _BY_ALL_TOKENS
    )


class Routing:
    """Stands for the ``routing`` of a router.

    Args:
        router: A TopKRouter.
        trees: Where the tree of the layer is found.
    """

    def __init__(self, router: Any, trees: Trees) -> None:
        self.router, self.trees, self.own_routing = router, trees, router.routing
        self.is_split = bool(router.config.sequence_parallel)
        self._own = router.__dict__.get("routing")

    def remove(self) -> None:
        """Give the router its own routing back."""
        self.router.__dict__.pop("routing", None)
        if self._own is not None:
            self.router.routing = self._own


class RowRouting(Routing):
    """Stands for the ``routing`` of a router that counts tokens."""

    def __call__(self, logits: Tensor, padding_mask: Tensor | None = None, **others: Any) -> tuple[Tensor, Tensor]:
        tree = self.trees.now
        if tree is None:
            found: tuple[Tensor, Tensor] = self.own_routing(logits, padding_mask=padding_mask, **others)
            return found
        gather, scatter = across_ranks() if self.is_split else (same, same)
        hidden = None if tree.padding_mask is None else scatter(tree.padding_mask.t().contiguous())
        rows = expand_hidden(logits, tree.token_TB, self.is_split)
        probs, chosen = self.own_routing(rows, padding_mask=hidden, **others)
        first_probs = scatter(gather(probs)[tree.first_N])
        return first_probs, scatter(gather(chosen.to(probs.dtype))[tree.first_N]).to(chosen.dtype)


def same(x: Tensor) -> Tensor:
    """Return a value unchanged, where no ranks split it."""
    return x
