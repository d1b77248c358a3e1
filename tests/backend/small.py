"""A causal LM of few nodes: what one compilation costs is mostly tracing, so tests with many of them use it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import Block, Output, TinyLM

__all__ = ["Small", "stripped"]


class Small(nn.Module):
    """Embeddings of tokens and columns, one residual attention per given spelling (4 heads), and a head.

    Args:
        attentions: builders of spellings, as ``tests.models.TinyLM`` takes one.
        before, after: modules in front of the first attention and behind the last.
    """

    def __init__(
        self,
        *attentions: Callable[[], nn.Module],
        before: nn.Module | None = None,
        after: nn.Module | None = None,
        width: int = 32,
    ) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(61, width), nn.Embedding(64, width), nn.Linear(width, 61)
        self.before, self.after = before or nn.Identity(), after or nn.Identity()
        self.mixes = nn.ModuleList(nn.Linear(width, 3 * width) for _ in attentions)
        self.attentions = nn.ModuleList(attention() for attention in attentions)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Output:
        rows, columns = input_ids.shape
        places = torch.arange(columns) if position_ids is None else position_ids
        x = self.before(self.embed(input_ids) + self.place(places))
        for mix, attention in zip(self.mixes, self.attentions, strict=True):
            q, k, v = mix(x).view(rows, columns, 12, -1).transpose(1, 2).chunk(3, 1)
            # Sharper than 1 / sqrt(D): which keys are seen must show in the gradients.
            x = x + attention(2.0 * q, k, v, attention_mask).transpose(1, 2).flatten(2)
        hidden = self.after(x)
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits, hidden)


class _Attends(Block):
    """The attention of a block alone."""

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return x + self.out(self.attention(2.0 * q, k, v, attention_mask).transpose(1, 2).flatten(2))


def stripped(model: TinyLM) -> TinyLM:
    """Take norms and MLPs out of a model: what inductor takes is mostly the number of kernels, a second each."""
    model.norm = nn.Identity()
    for block in model.blocks:
        block.__class__ = _Attends
        del block.norm, block.mlp_norm, block.gate, block.up, block.down
    return model
