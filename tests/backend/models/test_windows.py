"""Attention to pooled windows of keys, chosen by an indexer: causal by the fills of masks and by chosen places."""

import pytest
import torch
from torch import Tensor, nn

from tests.backend.support import compare
from tests.batches import Side, shared_batch
from tests.models import TinyLM

VOCAB = 61


class Windows(nn.Module):
    """Attend to keys and to pooled windows of four keys, as DeepSeek-V4 spells it."""

    size, keys = 4, 2
    ready_from = 1
    """A window is visible from its last token on."""
    has_sink = True

    def __init__(self) -> None:
        super().__init__()
        self.index, self.sinks = nn.Linear(8, 8), nn.Parameter(torch.linspace(-1.0, 1.0, 4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        rows, heads, length, _ = q.shape
        pooled = (self.windows(v) * self.windows(k).softmax(3)).sum(3)
        bias = torch.cat([self.causal(q, mask), self.chosen_windows(q, pooled)], -1)
        logits = q @ torch.cat([k, pooled], 2).mT / 3 + bias
        if self.has_sink:
            logits = torch.cat([logits, self.sinks.view(1, heads, 1, 1).expand(rows, -1, length, -1)], -1)
        logits = logits - logits.max(-1, keepdim=True).values
        return logits.softmax(-1)[..., : length + pooled.shape[2]] @ torch.cat([v, pooled], 2)

    def windows(self, x: Tensor) -> Tensor:
        return x[:, :, : x.shape[2] // self.size * self.size].unflatten(2, (-1, self.size))

    def causal(self, q: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(q.shape[2])
        seen = (place <= place[:, None]).expand(q.shape[0], 1, -1, -1)
        if mask is not None:
            seen = seen & mask.to(torch.bool)[torch.arange(q.shape[0])[:, None, None, None], place]
        return torch.where(seen, q.new_zeros(()), torch.finfo(q.dtype).min)

    def chosen_windows(self, q: Tensor, pooled: Tensor) -> Tensor:
        count = pooled.shape[2]
        ready = ((torch.arange(q.shape[2]) + self.ready_from) // self.size)[:, None]
        scores = (self.index(q[:, 0]) @ pooled[:, 0].mT).relu().masked_fill(torch.arange(count) >= ready, -torch.inf)
        chosen = self.without_hidden(scores.topk(min(self.keys, count), dim=-1), ready)
        place = torch.where(chosen >= 0, chosen, count)
        bias = q.new_full((q.shape[0], 1, q.shape[2], count + 1), -torch.inf)
        return bias.scatter(-1, place.unsqueeze(1), 0.0)[..., :count]

    def without_hidden(self, chosen: torch.return_types.topk, ready: Tensor) -> Tensor:
        return torch.where(chosen.indices >= ready, -1, chosen.indices)


class ByScore(Windows):
    """A hidden choice is known by its score, as MiniMax-M3 spells it."""

    def without_hidden(self, chosen: torch.return_types.topk, ready: Tensor) -> Tensor:
        return chosen.indices.masked_fill(chosen.values == -torch.inf, -1)


class Open(Windows):
    """A window is visible from its first token on."""

    ready_from = 4


class OpenByScore(ByScore):
    ready_from = 4


class Kept(Windows):
    """Choices among hidden windows stay visible."""

    def without_hidden(self, chosen: torch.return_types.topk, ready: Tensor) -> Tensor:
        return chosen.indices


class NoSink(Windows):
    """A query that sees no key attends to all alike, the future included."""

    has_sink = False


@pytest.mark.parametrize("attention", [Windows, ByScore, Open, OpenByScore, Kept, NoSink])
def test_windows(attention: type[Windows]) -> None:
    """Exact always; packed where no token reads its future."""
    packs = attention in (Windows, ByScore)
    torch.manual_seed(3)
    model = TinyLM(attention, layers=1).double()
    sides: list[Side] = ["right", "left"]
    for side in sides if packs else sides[1:]:
        batch = shared_batch(rows=4, length=14, shared=7, vocab=VOCAB, padding=side)
        stats = compare(model, batch).stats
        on_rows = [item for item in stats["expansions"] if not item["contracted"]]
        assert packs == (stats["fallback"] is None and not on_rows)
        assert not packs or stats["tokens"] < stats["raw_tokens"]
