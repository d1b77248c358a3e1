"""Compute attention without treefx: one dense mask over packed tokens, or every row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treefx.tools.bench.attention.sample import Attend

__all__ = ["Scores", "dense", "rows_alone"]


@dataclass(frozen=True)
class Scores:
    """Hold arguments of ``tree_attention`` besides the tree, the same for its rivals.

    Attributes:
        name: as a table shows them.
        window: visible keys along the path, or ``None``.
        softcap: bound of the logits, or ``None``.
        slopes: whether there are ALiBi slopes.
        learned: whether they get a gradient.
        sinks: whether every head has a sink, with a gradient.
    """

    name: str = "plain"
    window: int | None = None
    softcap: float | None = None
    slopes: bool = False
    learned: bool = False
    sinks: bool = False

    def arguments(self, heads: int) -> dict[str, Any]:
        """Return keyword arguments of ``tree_attention``."""
        found: dict[str, Any] = {"window": self.window, "softcap": self.softcap}
        if self.slopes:
            slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
            found["alibi_slopes"] = slopes.requires_grad_(self.learned)
        if self.sinks:
            found["sinks"] = torch.zeros(heads).requires_grad_()
        return {name: value for name, value in found.items() if value is not None}


def dense(ends: Tensor, scores: Scores, given: dict[str, Any], dtype: torch.dtype) -> Attend:
    """Return attention over packed tokens under an N x N mask, made outside of timings."""
    index = torch.arange(len(ends))
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < ends[None, :])
    depth = seen.sum(dim=1)
    return _under_mask(seen, depth[:, None] - depth[None, :], scores, given, dtype)


def rows_alone(rows: Sequence[Tensor], scores: Scores, given: dict[str, Any], dtype: torch.dtype) -> list[Attend]:
    """Return the attention of each row; masks are made here."""
    if scores == Scores():
        return [lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)] * len(rows)
    found = {}
    for length in {len(row) for row in rows}:
        index = torch.arange(length)
        distance = index[:, None] - index[None, :]
        found[length] = _under_mask(distance >= 0, distance, scores, given, dtype)
    return [found[len(row)] for row in rows]


def _under_mask(seen: Tensor, distance: Tensor, scores: Scores, given: dict[str, Any], dtype: torch.dtype) -> Attend:
    if scores.window is not None:
        seen = seen & (distance < scores.window)
    slopes = given.get("alibi_slopes")
    if scores.softcap is not None or scores.sinks or scores.learned:
        return lambda q, k, v: _eager(q, k, v, seen, distance, given)
    mask = seen if slopes is None else (-slopes[:, None, None] * distance).masked_fill(~seen, -torch.inf).to(dtype)
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _eager(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, distance: Tensor, given: dict[str, Any]) -> Tensor:
    """Attend by one product, one softmax and one more product, as models do where SDPA cannot."""
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if "softcap" in given:
        logits = given["softcap"] * torch.tanh(logits / given["softcap"])
    if "alibi_slopes" in given:
        logits = logits - given["alibi_slopes"][:, None, None] * distance
    logits = logits.masked_fill(~seen, -torch.inf)
    if "sinks" in given:
        sink = given["sinks"][None, :, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sink], dim=-1)
    return torch.softmax(logits, dim=-1)[..., : k.shape[2]] @ v
