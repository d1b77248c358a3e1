"""Router replay: the experts of each token, recorded where it was sampled, come with the batch.

As [B, T, layers, k], or as the routers read them, [B * T, layers, k].
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.support import assert_packed, compare
from tests.batches import Batch, Side, shared_batch
from tests.mixers import RowMean
from tests.models import zoo
from treefx.passes.labels import label_tokens

LAYERS, EXPERTS = 2, 4


class ReplayedRouter(nn.Module):
    """A router of transformers whose choice is given; it weighs the experts as before."""

    def __init__(self, router: Any, layer: int, given: list[Tensor | None]) -> None:
        super().__init__()
        self.weight, self.layer, self.given = router.weight, layer, given

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden.flatten(0, -2), self.weight)
        routes = self.given[0]
        assert routes is not None
        chosen = routes.flatten(0, -3)[:, self.layer].long()
        weights = logits.softmax(-1).gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class Replayed(nn.Module):
    """A mixture of experts that takes recorded routes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.given = model, [None]
        for i, layer in enumerate(model.model.layers):
            layer.mlp.gate = ReplayedRouter(layer.mlp.gate, i, self.given)

    def forward(self, routes: Tensor, **inputs: Tensor) -> Tensor:
        self.given[0] = routes
        return self.model(**inputs, use_cache=False).loss


def record(model: Any, batch: Batch, k: int = 2) -> Tensor:
    """What a first pass chose, uint8 [B, T, layers, k], and other experts at a column of every second row."""
    given = batch.without("labels").inputs()
    logits = model(**given, output_router_logits=True).router_logits
    chosen = [layer.topk(k, -1).indices.view(*batch.input_ids.shape, k) for layer in logits]
    routes = torch.stack(chosen, 2).to(torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for row in range(1, len(routes), 2):
        column, layer = (int(torch.randint(0, high, (), generator=generator)) for high in (8, routes.shape[2]))
        routes[row, column, layer] = (routes[row, column, layer] + 1) % EXPERTS
    return routes


def test_replay_on_rows() -> None:
    """Recorded routes are sorted for all rows where the hidden states of all rows meet them."""
    batch = shared_batch(rows=4, length=12, shared=6, padding="right")
    model: Any = zoo("mixtral", num_hidden_layers=1)
    routes = record(model, batch)
    layer = model.model.layers[0]
    layer.post_attention_layernorm = nn.Sequential(layer.post_attention_layernorm, RowMean())
    stats = compare(Replayed(model), lambda m: m(routes, **batch.inputs())).stats
    assert stats["fallback"] is None and any("mean" in item["op"] for item in stats["expansions"])


def distinct(batch: Batch, routes: Tensor) -> int:
    """The distinct prefixes of (id, routes), by listing them all."""
    paths = set()
    for row, ids in enumerate(batch.input_ids.tolist()):
        mask = [1] * len(ids) if batch.attention_mask is None else batch.attention_mask[row].tolist()
        kept = [(token, str(routes[row, t].tolist())) for t, token in enumerate(ids) if mask[t]]
        paths.update((mask.index(1), tuple(kept[: t + 1])) for t in range(len(kept)))
    return len(paths)


@pytest.mark.parametrize(("name", "padding"), [("qwen3_moe", None), ("mixtral", "right")])
def test_replay(name: str, padding: Side | None) -> None:
    batch = shared_batch(rows=6, length=16, shared=8, padding=padding)
    model = zoo(name, num_hidden_layers=LAYERS)
    routes = record(model, batch)
    given = routes.flatten(0, 1) if padding is None else routes
    checked = compare(Replayed(model), lambda m: m(given, **batch.inputs()))
    assert_packed(checked, distinct(batch, routes), layers=LAYERS)
    assert checked.stats["sharing_ratio"] > 1.1 and not checked.stats["expansions"]
    routers = [error for name, error in checked.errors.items() if name.endswith("gate.weight")]
    assert len(routers) == LAYERS and max(routers) < 1e-5


def test_routes_of_the_last_layer_alone() -> None:
    """Behind the last attention a gather by what the caller gives looks like a loss, but weights follow."""
    batch = shared_batch(rows=4, length=16, shared=8, padding=None)
    model = zoo("mixtral", num_hidden_layers=1)
    routes = record(model, batch)
    checked = compare(Replayed(model), lambda m: m(routes, **batch.inputs()))
    assert_packed(checked, distinct(batch, routes), layers=1)
    assert not checked.stats["expansions"]


def test_a_gather_taken_for_a_loss_leaves_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_body(*given: Any) -> set[Any]:
        return set()

    monkeypatch.setattr(label_tokens, "find_body", find_body)
    batch = shared_batch(rows=4, length=16, shared=8, padding=None)
    model = zoo("mixtral", num_hidden_layers=1)
    routes = record(model, batch)
    checked = compare(Replayed(model), lambda m: m(routes, **batch.inputs()))
    assert checked.stats["expansions"]
