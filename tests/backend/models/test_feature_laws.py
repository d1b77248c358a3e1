"""Operators that run along features: made once per distinct token, and told apart from those that mix tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.support import assert_packed, compare
from tests.batches import distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.spellings import SPELLINGS

WIDTH, VOCAB = 32, 61
DIFFERENTIATES_AMINMAX = type(torch.aminmax(torch.ones(2, requires_grad=True)).min.grad_fn).__name__ != "NotImplemented"


class Between(nn.Module):
    """A function of hidden states [B, T, C] and of a parameter [C], between the embedding and the blocks."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.linspace(0.1, 0.6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def gates(x: Tensor, weight: Tensor) -> Tensor:
    x = x * torch.exp(F.logsigmoid(x * weight) / 16)
    x = F.prelu(x.flatten(0, 1), weight).view_as(x) + F.hardswish(x)
    return x + F.glu(torch.cat([x, x.roll(1, -1)], -1), -1)


def groups(x: Tensor, weight: Tensor) -> Tensor:
    """RetNet and RWKV: a norm over each head's features, tokens in the place of samples."""
    return x + F.group_norm(x.reshape(-1, WIDTH), 4, weight, weight).view_as(x)


def extrema(x: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest feature; PyTorch 2.11 differentiates no ``aminmax``."""
    if DIFFERENTIATES_AMINMAX:
        return torch.aminmax(x, dim=-1, keepdim=True)
    return x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)


def order_statistics(x: Tensor, weight: Tensor) -> Tensor:
    lowest, highest = extrema(x)
    deviation, mean = torch.std_mean(x, -1, keepdim=True)
    x = (x - mean) / deviation * weight + x.median(-1, keepdim=True).values + highest - lowest
    x = x - x.kthvalue(3, keepdim=True).values + x.cummax(-1).values + x.nanmean(-1, keepdim=True)
    return x * (x > 0).count_nonzero(-1)[..., None] / WIDTH


def places(x: Tensor, weight: Tensor) -> Tensor:
    """Buckets of values, and invariant indices of features."""
    edges, even = torch.linspace(-1, 1, 5, dtype=x.dtype), torch.arange(0, WIDTH, 2)
    x = x + weight * torch.bucketize(x.detach(), edges) + torch.searchsorted(edges, x.detach(), right=True)
    x = x.index_fill(-1, even[:2], 0.5).index_add(-1, even, x[..., :16]).index_copy(-1, even[:3], x[..., 5:8])
    return x.index_select(-1, torch.arange(WIDTH - 1, -1, -1))


def ends(x: Tensor, weight: Tensor) -> Tensor:
    """Features shifted by padding, cut off by negative padding, and a triangle of them."""
    x = x + F.pad(x[..., 1:] * weight[1:], (1, 0)) + F.pad(x, (-3, 3), value=0.5) + F.pad(x[..., :-1], (1, 0))
    return x + x.unflatten(-1, (4, 8)).tril().flatten(-2)


def written(x: Tensor, weight: Tensor) -> Tensor:
    """A router's mask, written into plain zeros."""
    chosen = (x * weight).topk(4, -1)
    zeros = torch.zeros(x.shape, dtype=x.dtype)
    return x + zeros.scatter(-1, chosen.indices, chosen.values) + zeros.scatter(-1, chosen.indices, 1.0)


def complex_numbers(x: Tensor, weight: Tensor) -> Tensor:
    z = torch.complex(x, x * weight)
    return (z * z.conj()).real + (z * z).imag


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """Zamba: a matrix per head, and the heads in front of the rows."""
    split = x.unflatten(-1, (4, 8)).permute(2, 0, 3, 1)
    mixed = (weight.view(4, 8, 1) * weight[:8])[:, None] @ split
    return x + mixed.permute(1, 3, 0, 2).flatten(-2)


FUNCTIONS = (heads, gates, groups, order_statistics, places, ends, written, complex_numbers)


class SideBySide(nn.Module):
    """Every function reads the same hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Between, FUNCTIONS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).mean(0)


def test_functions_of_features_are_packed() -> None:
    """All in one graph; an expansion names the line of its function."""
    batch = shared_batch(rows=4, length=11, shared=5, vocab=VOCAB, seed=2)
    model = TinyLM(SPELLINGS["sdpa_is_causal"], before=SideBySide(), layers=1).double()
    checked = compare(model, batch.without("attention_mask"))
    assert checked.stats["expansions"] == []
    assert_packed(checked, distinct_tokens(batch.without("attention_mask")), layers=1)


def over_tokens(x: Tensor, weight: Tensor) -> Tensor:
    return F.group_norm(x.transpose(1, 2), 4, weight, weight).transpose(1, 2)


def gated_by_the_next(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight + F.glu(torch.cat([x, x.roll(-1, 1)], 1), 1)


def median_of_tokens(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight - x.median(1, keepdim=True).values


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (over_tokens, "native_group_norm"),
        (gated_by_the_next, "roll"),
        (median_of_tokens, "median"),
    ],
    ids=lambda item: getattr(item, "__name__", None),
)
def test_the_same_operators_along_tokens_are_named(function: Callable[..., Tensor], operator: str) -> None:
    batch = shared_batch(rows=4, length=11, shared=5, vocab=VOCAB, padding=None, seed=2)
    model = TinyLM(SPELLINGS["sdpa_is_causal"], before=Between(function), layers=1).double()
    expansions = compare(model, batch).stats["expansions"]
    assert operator in expansions[0]["op"]
    assert "test_feature_laws.py" in expansions[0]["line"]
    assert "along the token axis" in expansions[0]["reason"]


def heads_of_rows(x: Tensor, weight: Tensor) -> Tensor:
    """A matrix per head and row."""
    split = x.unflatten(-1, (4, 8)).permute(2, 0, 3, 1)
    matrices = (weight.view(4, 8, 1) * weight[:8])[:, None] * torch.arange(1, x.shape[0] + 1)[:, None, None]
    return x + (matrices @ split).permute(1, 3, 0, 2).flatten(-2)


def test_matrices_that_differ_by_row_are_not_packed() -> None:
    batch = shared_batch(rows=4, length=11, shared=5, vocab=VOCAB, padding=None, seed=2)
    model = TinyLM(SPELLINGS["sdpa_is_causal"], before=Between(heads_of_rows), layers=1).double()
    (first, *_) = compare(model, batch).stats["expansions"]
    assert first["op"] == "aten.bmm.default" and "varies from token to token" in first["reason"]


class SpecialTokens(nn.Module):
    """Keys of some special tokens are hidden from others: `torch.isin` of the ids."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        hidden = torch.isin(mask, torch.tensor([2, 3]))
        seen = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril()
        seen = seen & ~hidden[:, None, None, :] | torch.eye(q.size(-2), dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, seen)


def test_a_mask_of_special_tokens() -> None:
    batch = shared_batch(rows=4, length=11, shared=5, vocab=VOCAB, padding=None, seed=2)
    marks = batch.input_ids % 5

    def step(model: nn.Module) -> Tensor:
        return model(input_ids=batch.input_ids, attention_mask=marks, labels=batch.labels).loss

    checked = compare(TinyLM(SpecialTokens, layers=1).double(), step)
    assert_packed(checked, distinct_tokens(batch), layers=1)
