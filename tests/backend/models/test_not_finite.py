"""NaN or infinity in some rows of a batch: the other rows' logits and losses are those of separate rows.

The truth is a one-layer model on the tokens that a position sees, and no other ones: no masked value exists there.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.native import native_loss
from tests.models import Output, double
from tests.planning.cuts import every_node, inside_nodes

BAD = 49
WINDOW = 5
KINDS = ("plain", "grouped", "window", "softcap", "sinks", "alibi")


class Model(nn.Module):
    """One layer of attention without positions, so that a window of tokens may stand alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.kv_heads = kind, 1 if kind == "grouped" else 2
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.query, self.key, self.value = nn.Linear(16, 16), *(nn.Linear(16, 8 * self.kv_heads) for _ in range(2))
        self.sinks = nn.Parameter(torch.randn(2))
        self.double()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        distance = place[:, None] - place[None, :]
        seen = distance >= 0
        if self.kind in ("plain", "grouped"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kind == "grouped")
        if self.kind == "window":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen & (distance < WINDOW))
        scores = q @ k.transpose(2, 3) * 8**-0.5
        if self.kind == "softcap":
            scores = 1.5 * torch.tanh(scores / 1.5)
        if self.kind == "alibi":
            scores = scores - torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None] * distance
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.kind == "sinks":
            sinks = self.sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[2], 1)
            return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (self.query(x), self.key(x), self.value(x)))
        logits = self.head(x + self.attend(q, k, v).transpose(1, 2).flatten(2))
        return logits if labels is None else loss_of(logits, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def batch(length: int, bad: dict[int, int]) -> Tensor:
    """Four rows that differ in their last four tokens; row r holds the bad token at ``bad[r]``."""
    ids = torch.randint(1, 48, (1, length), generator=torch.Generator().manual_seed(0)).expand(4, -1).clone()
    ids[:, -4:] = torch.arange(1, 17).view(4, 4)
    for row, place in bad.items():
        ids[row, place] = BAD
    return ids


def logits_alone(model: Model, row: Tensor, place: int) -> Tensor:
    """The logits of one position from the tokens that it sees."""
    first = max(0, place + 1 - WINDOW) if model.kind == "window" else 0
    return model(row[None, first : place + 1])[0, -1]


def check(model: Model, ids: Tensor, places: range, tolerance: float = 1e-10, **options: Any) -> None:
    compiled = torch.compile(model, backend="treefx", options={"inner": "eager", "min_sharing": 1.0, **options})
    with torch.no_grad():
        got = compiled(ids)
        stats = treefx.inspect(compiled).stats
        assert stats["fallback"] is None and stats["attention_rewritten"] == 1 and stats["tokens"] < ids.numel()
        for number, row in enumerate(ids):
            for place in places:
                wanted = logits_alone(model, row, place)
                assert torch.equal(got[number, place].isfinite(), wanted.isfinite()), (number, place)
                if wanted.isfinite().all():
                    assert (got[number, place] - wanted).abs().max() <= tolerance
        clean = [number for number, row in enumerate(ids) if BAD not in row]
        labels = ids.clone()
        labels[[number for number in range(len(ids)) if number not in clean]] = -100
        if clean:
            wanted = loss_of(model(ids[clean]), ids[clean])
            assert abs(compiled(ids, labels) - wanted) <= tolerance * abs(wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_every_attention(kind: str) -> None:
    model = Model(kind)
    model.embedding.weight.data[BAD] = math.nan
    check(model, batch(14, {3: -4}), range(14))


@pytest.mark.parametrize(
    ("bad", "value"), [({3: -4, 1: -2}, math.nan), (dict.fromkeys(range(4), 6), math.nan), ({2: -4, 3: -4}, math.inf)]
)
def test_two_rows_and_shared_tokens(bad: dict[int, int], value: float) -> None:
    model = Model("window")
    model.embedding.weight.data[BAD] = value
    check(model, batch(14, bad), range(14))


@pytest.mark.parametrize("kind", ["plain", "softcap"])
def test_tiles(kind: str) -> None:
    model = Model(kind).float()
    model.embedding.weight.data[BAD] = math.nan
    check(model, batch(400, {3: -4}), range(394, 400), tolerance=1e-5)


def test_bfloat16() -> None:
    model = Model("plain").bfloat16()
    model.embedding.weight.data[BAD] = math.nan
    check(model, batch(40, {3: -4}), range(30, 40), tolerance=0.05)


# Forests, parts, converted models


class Named(nn.Module):
    """The model, called as one of transformers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Model(kind)

    def forward(self, input_ids: Tensor, **unused: Any) -> Output:
        return Output(None, self.model(input_ids), None)


@pytest.mark.parametrize(("kind", "value"), [("window", math.nan), ("softcap", -math.inf), ("sinks", math.nan)])
def test_forests_and_parts(kind: str, value: float) -> None:
    """A row of weight zero holds the bad token behind a fork: the loss is that of the other rows."""
    named, ids = Named(kind), batch(14, {3: -4})
    named.model.embedding.weight.data[BAD] = value
    rows = ids.tolist()
    wanted = sum(loss_of(named.model(row[None]), row[None]) * 13 for row in ids[:3])
    forest = treefx.Forest.from_sequences(rows, weights=[[float(BAD not in row)] * 14 for row in rows])
    compiled: Any = torch.compile(named, backend="treefx", options={"inner": "eager"})
    torch.testing.assert_close(native_loss(forest)(compiled), wanted, rtol=1e-10, atol=0)
    for plan in (every_node(forest), inside_nodes(forest)):
        assert len(plan.parts) > 3
        got = treefx.backward(compiled, plan, lambda logp, part: treefx.losses.sft(logp, part, reduction="sum"))
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("packs_head", [False, True])
def test_converted_models(packs_head: bool) -> None:
    """Logits of the other rows, and of the tokens in front of the bad one, are those of separate rows."""
    model: Any = double("llama", num_hidden_layers=1)
    model.model.embed_tokens.weight.data[BAD] = math.nan
    ids = batch(14, {3: -3})
    with torch.no_grad():
        clean = ids.clamp(max=BAD - 1)
        alone = torch.cat([model(input_ids=row[None]).logits for row in clean])
        treefx.convert(model, min_sharing=1.0, pack_lm_head=packs_head)
        got = model(input_ids=ids).logits + 0
        assert treefx.inspect(model).stats["ran"] == "packed"
        torch.testing.assert_close(got[:3], alone[:3], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(got[3, :-3], alone[3, :-3], rtol=1e-10, atol=1e-12)
        assert not got[3, -3:].isfinite().any()
        labels = ids.masked_fill((torch.arange(4) == 3)[:, None], -100)
        torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, loss_of(alone[:3], ids[:3]))
