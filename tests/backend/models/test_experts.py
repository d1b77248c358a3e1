"""Mixtures of experts whose losses and limits look at the whole batch: each token counts as often as its rows do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import treefx
from tests.backend.support import compare
from tests.batches import Side, shared_batch
from tests.models import TinyLM, zoo
from tests.oracle import loss_of
from tests.spellings import SPELLINGS


@pytest.mark.parametrize(("name", "layers", "padding"), [("mixtral", 2, "right"), ("gpt_oss", 1, None)])
def test_load_balancing_loss(name: str, layers: int, padding: Side | None) -> None:
    batch = shared_batch(rows=4, length=16, shared=8, padding=padding)
    model = zoo(name, num_hidden_layers=layers, output_router_logits=True, router_aux_loss_coef=0.5)
    stats = compare(model, batch).stats
    assert stats["fallback"] is None and stats["attention_rewritten"] == layers
    assert stats["tokens"] < stats["raw_tokens"]


def test_counting_distinct_tokens_once_is_another_balancing_loss() -> None:
    batch = shared_batch(rows=4, length=16, shared=8, padding=None)
    logits = zoo("mixtral")(**batch.inputs(), output_router_logits=True).router_logits
    forest = treefx.Forest.from_padded(batch.input_ids)
    flat = torch.cat([torch.as_tensor(tokens) for tokens in forest.token_of])
    first = torch.tensor([int((flat == token).nonzero()[0]) for token in range(forest.num_tokens)])
    right = load_balancing_loss_func(logits, 4, 2)
    wrong = load_balancing_loss_func(tuple(layer[first] for layer in logits), 4, 2)
    assert abs(float(wrong / right) - 1) > 1e-3


def test_router_z_loss_of_the_caller() -> None:
    batch = shared_batch(rows=4, length=16, shared=8)

    def step(model: nn.Module) -> Tensor:
        out = model(**batch.inputs(), output_router_logits=True)
        assert batch.attention_mask is not None
        partition = torch.stack([layer.logsumexp(-1).square() for layer in out.router_logits])
        return out.loss + 1e-2 * (partition * batch.attention_mask.flatten()).mean()

    assert compare(zoo("mixtral", num_hidden_layers=1), step).stats["fallback"] is None


class LimitedExperts(nn.Module):
    """A switch layer: each expert takes the first `capacity` tokens of the batch that choose it, others pass by."""

    def __init__(self, capacity: int = 9, experts: int = 3, width: int = 32) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        chosen = (choice[:, None] == torch.arange(len(self.experts), device=x.device)).to(x.dtype)
        admitted = chosen * (chosen.cumsum(0) <= self.capacity)
        outputs = torch.stack([expert(flat) for expert in self.experts], 1)
        return (flat + weight[:, None] * (admitted[..., None] * outputs).sum(1)).view_as(x)


def test_capacity_counts_the_tokens_of_all_rows() -> None:
    batch = shared_batch(rows=4, length=16, shared=8, vocab=61, padding=None)
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, after=LimitedExperts()).double()
    stats = compare(model, batch).stats
    assert stats["fallback"] is None and stats["attention_rewritten"] == 1
    assert any("cumsum" in item["op"] for item in stats["expansions"])


def test_router_jitter_is_drawn_for_every_row() -> None:
    batch = shared_batch(rows=4, length=16, shared=8)

    def step(model: Any) -> Tensor:
        torch.manual_seed(5)
        return loss_of(batch)(model)

    stats = compare(zoo("mixtral", num_hidden_layers=1, router_jitter_noise=0.3), step).stats
    assert any("uniform" in item["op"] for item in stats["expansions"])
