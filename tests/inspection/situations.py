"""A tiny model that shares its prefixes, or loses them for a reason, for the tests of what a report then says."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Block", "LM", "VOCAB", "compiled", "ids_of", "train"]

VOCAB = 31


class Block(nn.Module):
    """Attention over one head."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.project, self.causal = nn.Linear(width, width), causal

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x)[:, None]
        return x + F.scaled_dot_product_attention(q, q, q, is_causal=self.causal)[:, 0]


@torch._dynamo.disable
def outside(x: Tensor) -> Tensor:
    """What Dynamo cannot trace: of its result it is not known by what tokens are told apart."""
    return x.clone()


class LM(nn.Module):
    """Embedding, two blocks, head; ``what`` breaks the graph or mixes positions at one place."""

    def __init__(self, what: str = "", width: int = 16) -> None:
        super().__init__()
        self.what, self.embedding, self.head = what, nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.blocks = nn.ModuleList(Block(width, what != "not causal") for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        if self.what == "dropout":
            x = F.dropout(x, 0.1)
        if self.what == "break before the blocks":
            x = outside(x)
        for number, block in enumerate(self.blocks):
            if self.what == "break in the loop":
                torch._dynamo.graph_break()
            x = block(x)
            if self.what == "mean" and not number:
                x = x + x.mean(1, keepdim=True)
        if self.what == "break behind the blocks":
            x = outside(x)
        logits: Tensor = self.head(x)
        return logits if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def compiled(what: str = "", inner: str = "eager", **options: Any) -> Any:
    """A compiled model; ``min_sharing`` is what users have."""
    return torch.compile(LM(what), backend="treefx", options={"inner": inner, **options})


def ids_of(shared: int = 6, rows: int = 4, columns: int = 9) -> Tensor:
    """[rows, columns]; the first ``shared`` columns agree, and no two rows agree behind them."""
    ids = torch.randint(0, VOCAB, (rows, columns))
    ids[:, :shared] = ids[0, :shared]
    ids[:, shared] = torch.arange(rows)
    return ids


def train(model: Any, ids: Tensor) -> None:
    """One forward and backward."""
    torch.autograd.backward(model(input_ids=ids, labels=ids))
