"""What several files of this folder use."""

import torch
from torch import Tensor, nn

from tests.batches import Batch
from tests.models import double
from tests.oracle import Checked, Step

__all__ = ["assert_packed", "llama", "logits_at_real_tokens"]


def llama() -> nn.Module:
    """Llama of one layer in float64, without the float32 casts of its file."""
    return double("llama", num_hidden_layers=1)


def assert_packed(checked: Checked, tokens: int, layers: int | None = None) -> None:
    """Nothing fell back, the distinct tokens ran, and (where given) each layer's attention ran on them."""
    stats = checked.stats
    assert stats["fallback"] is None
    assert stats["tokens"] == tokens
    assert layers is None or stats["attention_rewritten"] == layers


def logits_at_real_tokens(batch: Batch) -> Step:
    """A loss of the caller's: squared logits of the cells under the mask, each with a weight of its own."""

    def step(model: nn.Module) -> Tensor:
        logits = model(**batch.without("labels").inputs()).logits
        weight = torch.linspace(0.5, 2.0, logits[..., 0].numel(), dtype=logits.dtype).view(logits.shape[:2])
        if batch.attention_mask is not None:
            weight = weight * batch.attention_mask
        return (logits.square().mean(-1) * weight).sum()

    return step
