"""Twelve causes of rows, each planted at one known line of a small model, with the code that a report must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.inspection.situations import VOCAB, ids_of, outside

__all__ = ["CAUSES", "Cause", "Planted"]

Plant = Callable[["Planted", Tensor, dict[str, Any]], Tensor]


class Square(torch.autograd.Function):
    """Its backward is not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad * grad.sign().abs() + grad.pow(3) * 0


class Planted(nn.Module):
    """Embedding, attention, the planted operator, head, and a loss."""

    seen: Tensor

    def __init__(self, plant: Plant | None, width: int = 16) -> None:
        super().__init__()
        self.plant = plant
        self.embedding, self.norm = nn.Embedding(VOCAB, width), nn.BatchNorm1d(width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, VOCAB)
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Any:
        x = self.embedding(input_ids.long())
        x = x + self.attend(x, others.get("mask"))
        if self.plant is not None:
            x = self.plant(self, x, {**others, "labels": labels})
        logits = self.head(x)
        if labels is not None and "by_label" in others:
            logits = logits * (labels[..., None] >= 0)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().long())

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)[:, 0]


def _cumsum(model: Planted, x: Tensor, given: dict[str, Any]) -> Tensor:
    return x + 0.1 * x.cumsum(dim=1)


def _dropout(model: Planted, x: Tensor, given: dict[str, Any]) -> Tensor:
    return F.dropout(x, 0.1)


def _batch_statistic(model: Planted, x: Tensor, given: dict[str, Any]) -> Tensor:
    return model.norm(x.flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]


def _data_dependent_mask(model: Planted, x: Tensor, given: dict[str, Any]) -> Tensor:
    mask = x[..., :1] > x[..., 0].cummax(1).values.roll(1, 1)[:, None]
    return x + model.attend(x, mask[:, None])


def _in_place(model: Planted, x: Tensor, given: dict[str, Any]) -> Tensor:
    model.seen.add_(x.detach().sum((0, 1)))
    return x + model.seen


def _custom_function(model: Planted, x: Tensor, given: dict[str, Any]) -> Tensor:
    return Square.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def _graph_break(model: Planted, x: Tensor, given: dict[str, Any]) -> Tensor:
    x = outside(x)
    return x + model.attend(x)


def _given_mask(ids: Tensor) -> dict[str, Any]:
    rows, columns = ids.shape
    return {"mask": torch.rand(rows, 1, columns, columns) > 0.2}


@dataclass(frozen=True)
class Cause:
    """A model, its call, and what the report must say.

    Attributes:
        code: of the reason.
        plant: what stands in the model.
        given: further arguments of a call, made from its ids.
        words: that the paragraph must hold.
        ids: of the call.
    """

    code: str
    plant: Plant | None = None
    given: Callable[[Tensor], dict[str, Any]] = lambda ids: {"labels": ids}
    words: tuple[str, ...] = ()
    ids: Callable[[], Tensor] = ids_of
    min_sharing: float = 1.0


def _by_label(ids: Tensor) -> dict[str, Any]:
    """The first two rows have no loss on their prompt."""
    labels = ids.clone()
    labels[:2, :4] = -100
    return {"labels": labels, "by_label": True}


def _with_cache(ids: Tensor) -> dict[str, Any]:
    return {"labels": ids, "past_key_values": torch.zeros(ids.shape[0], 1, 4, 16)}


def _cached(model: Planted, x: Tensor, given: dict[str, Any]) -> Tensor:
    return x + given["past_key_values"].mean()


CAUSES: dict[str, Cause] = {
    "cumsum": Cause("TFX104", _cumsum, words=("cumsum", "x + 0.1 * x.cumsum(dim=1)")),
    "dropout": Cause("TFX102", _dropout, words=("dropout",)),
    "batch statistic": Cause("TFX109", _batch_statistic, words=("batch",)),
    "data-dependent mask": Cause("TFX104", _data_dependent_mask, words=("mask",)),
    "label meets a logit": Cause("TFX113", given=_by_label, words=("logits * (labels[..., None]",)),
    "in-place write": Cause("TFX110", _in_place, words=("model.seen.add_",)),
    "autograd.Function": Cause("TFX111", _custom_function, words=("Square.apply",)),
    "graph break": Cause("TFX003", _graph_break, words=("outside(x)",)),
    "too little sharing": Cause("TFX016", words=("min_sharing",), ids=lambda: ids_of(shared=1), min_sharing=3.0),
    "4-D mask": Cause("TFX122", given=lambda ids: {"labels": ids, **_given_mask(ids)}, words=("mask",)),
    "cache in use": Cause("TFX004", _cached, given=_with_cache, words=("cache",)),
    "unsupported dtype": Cause("TFX001", ids=lambda: ids_of().float(), words=("float32",)),
}
