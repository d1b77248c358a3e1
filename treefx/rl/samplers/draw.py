"""Draw tokens from logits by uniform numbers.

A draw depends on its own number and on nothing else in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treefx.arguments import check_number, check_whole

__all__ = ["Drawing", "draw", "uniforms"]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tokens are drawn."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most probable token."""
    top_k: int | None = None
    """Draw from the k most probable tokens only."""
    top_p: float | None = None
    """Draw from the fewest most probable tokens that have this probability together."""

    def __post_init__(self) -> None:
        check_number(self.temperature, "temperature", "at least 0", least=0)
        if self.top_k is not None:
            check_whole(self.top_k, "top_k", least=1, or_none="all")
        if self.top_p is not None:
            check_number(self.top_p, "top_p", "in (0, 1] or None", above=0, most=1)


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """float64 [len(seeds), count]: numbers in [0, 1), row by row those of a seed."""
    return torch.from_numpy(np.stack([np.random.default_rng(seed).random(count) for seed in seeds]))


def draw(logits: Tensor, numbers: Tensor, drawing: Drawing) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inversion of the cumulative distribution.

    Args:
        logits: [B, V].
        numbers: float64 [B], in [0, 1).
        drawing: how.

    Returns:
        Tokens int64 [B], and their log-probabilities [B], float32 or float64 as the logits: those of the tempered
        distribution before `top_k` and `top_p`, as a training step computes them; at temperature 0, of 1.
    """
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    logprobs = torch.log_softmax(wide / (drawing.temperature or 1.0), -1)
    if drawing.temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cumulative = _truncate(logprobs.to(torch.float64).exp(), drawing).cumsum(-1)
        # The first token whose cumulative probability exceeds the number; one of probability 0 never is.
        place = numbers.to(cumulative)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, place, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _truncate(probabilities: Tensor, drawing: Drawing) -> Tensor:
    """Set probabilities to 0 that `top_k` or `top_p` excludes."""
    if drawing.top_k is None and drawing.top_p is None:
        return probabilities
    ordered, token = probabilities.sort(dim=-1, descending=True, stable=True)
    if drawing.top_k is not None:
        ordered[:, drawing.top_k :] = 0.0
    if drawing.top_p is not None:
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.where(before < drawing.top_p * ordered.sum(-1, keepdim=True), 0.0)
    return torch.zeros_like(probabilities).scatter(1, token, ordered)
