"""Let torchtitan's inner attentions read a tree in place of their mask.

They take query, key and value as [B, L, heads, features] and ``attention_masks``: lists of blocks, sequence starts, or
nothing. The tree comes as that argument, because it reaches every attention, is saved by checkpoints with the other
inputs of a block, and is an ordinary input of a compiled one. With anything else they run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treefx.errors import UnsupportedError
from treefx.runtime.converted.seam import reads_trees

__all__ = ["INNER", "read_trees"]

INNER = ("FlexAttention", "VarlenAttention", "ScaledDotProductAttention")
"""The classes, in ``torchtitan.models.common.attention``."""
_IN_BFLOAT16 = "VarlenAttention"
"""Computes in bfloat16 for every input dtype."""


class _Functions:
    """Stand in for the attention functions of transformers; the returned function reads trees."""

    reads_trees = True

    def get_interface(self, name: str, default: Any) -> Callable[..., Any]:
        return reads_trees(_attend_on_rows)


ALL_ATTENTION_FUNCTIONS: Any = _Functions()


def _attend_on_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention on rows, for proofs alone.

    query [B, H, T, D], key, value [B, Hkv, T, D] -> [B, T, H, D].
    """
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def read_trees(module: Any) -> None:
    """Let all inner attentions read trees.

    Args:
        module: ``torchtitan.models.common.attention``.
    """
    for name in INNER:
        found = getattr(module, name)
        if found.forward.__module__ != __name__:
            found.forward = _reading(found.forward, torch.bfloat16 if name == _IN_BFLOAT16 else None)


def _reading(original: Callable[..., Any], computes_in: torch.dtype | None) -> Callable[..., Any]:
    # No functools.wraps: lookups on this function must not reach the original.
    def forward(
        self: nn.Module, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any = None,
        scale: float | None = None, enable_gqa: bool = False, **others: Any,
    ) -> Tensor:  # fmt: skip
        if not isinstance(attention_masks, Tensor):
            given = {"attention_masks": attention_masks, "scale": scale, "enable_gqa": enable_gqa, **others}
            result: Tensor = original(self, q_BLNH, k_BLNH, v_BLNH, **given)
            return result
        asked = [name for name, value in others.items() if value is not None and (name, value) != ("is_causal", True)]
        if asked:
            raise UnsupportedError(_ASKED.format(type(self).__name__, ", ".join(asked)))
        heads = [x.transpose(1, 2).to(computes_in or x.dtype) for x in (q_BLNH, k_BLNH, v_BLNH)]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("torchtitan", None)
        out: Tensor = attend(self, *heads, attention_masks, scaling=scale)[0]
        return out.to(q_BLNH.dtype)

    return forward


_ASKED = (
    "on distinct tokens an inner attention of torchtitan computes causal attention inside of documents, but {} is "
    "asked for {} too; train this model without treefx"
)
