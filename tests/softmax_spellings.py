"""Softmaxes written by hand, and near misses; see ``tests.spellings``."""

import math

import torch
from torch import Tensor, nn

__all__ = [
    "SinkByHand",
    "causal",
    "differential",
    "differential_probabilities",
    "half_of_the_gradient",
    "normalised_by_their_sum",
    "one_beside_shifted_weights",
    "probabilities_without_gradient",
    "scores_of",
    "scores_without_gradient",
    "sigmoid_attention",
    "softmax_by_hand",
    "softmax_of_filled_weights",
    "softmax_off_by_one",
    "softmax_off_by_one_shifted",
]


def causal(q: Tensor) -> Tensor:
    """Boolean [T, T], true where the key is seen."""
    place = torch.arange(q.size(-2), device=q.device)
    return place[:, None] >= place[None, :]


def normalised_by_their_sum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention weights are also summed up, and the sum multiplies the output."""
    scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~causal(q), float("-inf"))
    return scores.softmax(-1) @ v * scores.logsumexp(-1, keepdim=True)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~causal(q), float("-inf"))


def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = scores_of(q, k)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def softmax_of_filled_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The mask behind the exponential; the maximum is that of all keys, and without gradient."""
    scores = q @ k.mT / math.sqrt(q.size(-1))
    weights = (scores - scores.max(-1, keepdim=True).values.detach()).exp().masked_fill(~causal(q), 0.0)
    return weights / weights.sum(dim=-1, keepdim=True) @ v


def softmax_off_by_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weights = scores_of(q, k).exp()
    return weights / (1 + weights.sum(-1, keepdim=True)) @ v


def softmax_off_by_one_shifted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = scores_of(q, k)
    largest = scores.max(-1, keepdim=True).values.clamp(min=0)
    weights = torch.exp(scores - largest)
    return weights / (torch.exp(-largest) + weights.sum(-1, keepdim=True)) @ v


class SinkByHand(nn.Module):
    """A learned logit per head in the denominator, shifted like the scores."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.linspace(-1.0, 3.0, heads).view(heads, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores_of(q, k)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        return weights / (weights.sum(-1, keepdim=True) + (self.sink - largest).exp()) @ v


def one_beside_shifted_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Not off by one: next to weights relative to the largest, 1 is a logit of its size."""
    scores = scores_of(q, k)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / (1 + weights.sum(-1, keepdim=True)) @ v


def differential(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return scores_of(q, k).softmax(-1) @ v - 0.3 * (scores_of(k, q).softmax(-1) @ v)


def differential_probabilities(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return (scores_of(q, k).softmax(-1) - 0.3 * scores_of(k, q).softmax(-1)) @ v


def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return scores_of(q, k).sigmoid() @ v


def scores_without_gradient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return scores_of(q, k).detach().softmax(-1) @ v


def probabilities_without_gradient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return scores_of(q, k).softmax(-1).detach() @ v


def half_of_the_gradient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = scores_of(q, k)
    return (0.5 * scores + 0.5 * scores.detach()).softmax(-1) @ v
