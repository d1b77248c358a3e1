"""A model that Dynamo cuts in some calls only: the figures are of the last call."""

from typing import Any

import torch
from torch import Tensor, nn

import treefx
from tests.batches import distinct_tokens
from tests.inspection.test_inspector import VOCAB, batch_of


class CutAtTimes(nn.Module):
    """One graph, or one with token ids and another for the head."""

    cut = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        q = hidden[:, None]
        if self.cut:
            torch._dynamo.graph_break()
        hidden = hidden + nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        logits: Tensor = self.head(hidden)
        return logits


def test_figures_are_of_the_last_call() -> None:
    model, ids = CutAtTimes(), batch_of().input_ids
    compiled = torch.compile(model, backend="treefx", options={"inner": "eager", "min_sharing": 1.0})

    def stats(cut: bool, training: bool = True) -> dict[str, Any]:
        model.cut = cut
        with torch.set_grad_enabled(training):
            compiled(ids)
        return treefx.inspect(compiled).stats

    whole = {"tokens": distinct_tokens(batch_of()), "attention_rewritten": 1, "fallback": None, "graphs": 1}
    for _ in range(2):
        assert whole.items() <= stats(cut=False).items()
        for training in (True, False):  # a graph of the cut call that is compiled later stands behind the pieces
            pieces = stats(cut=True, training=training)
            assert (pieces["attention_rewritten"], pieces["graphs"]) == (0, 2)
            assert "nothing runs on distinct tokens" in str(pieces["fallback"])
            assert whole.items() <= stats(cut=False, training=training).items()
