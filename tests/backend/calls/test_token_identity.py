"""What decides how far two rows share: every input that holds values of tokens, as far as the model reads it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.support import Pair, assert_packed, compare, in_case
from tests.batches import Batch, Side, distinct_tokens, left_padded, shared_batch
from tests.oracle import refused
from tests.spellings import PADDED, SPELLINGS
from treefx.runtime.padding import Grid, Padding

WIDTH, VOCAB = 16, 128


@dataclass(frozen=True)
class Kind:
    """An input of tokens: how it is drawn, and how a model reads it into hidden states [B, T, C]."""

    draw: Callable[[int, int], Tensor]
    read: Callable[["Told", Tensor], Tensor]
    tokens_first: bool = True

    def perturbed(self, batch: Batch, seed: int = 0) -> Tensor:
        """The same values in all rows, and others at some column of every second row that shares a prefix."""
        torch.manual_seed(seed)
        rows, columns = batch.input_ids.shape
        common, others = self.draw(1, columns), self.draw(rows, columns)
        common = common.expand_as(others)
        hit = torch.zeros(rows, columns, dtype=torch.bool)
        hit[torch.arange(1, rows, 2), torch.randint(0, columns, (len(range(1, rows, 2)),))] = True
        wide = hit.view(rows, columns, *[1] * (others.dim() - 2)) if self.tokens_first else hit
        return torch.where(wide, bits(others), bits(common)).view(others.dtype) if others.numel() else others

    def at(self, x: Tensor, row: int, column: int) -> bytes:
        found = x[row, column] if self.tokens_first else x[:, row, column]
        return bits(found.contiguous()).contiguous().numpy().tobytes()


def bits(x: Tensor) -> Tensor:
    """Integers of the same bits, which ``where`` knows."""
    if x.dtype.is_complex:
        return x.view(torch.int64 if x.dtype is torch.complex64 else torch.float64)
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


class Told(nn.Module):
    """A layer of attention and a head on embeddings and what an input of tokens adds to these."""

    def __init__(self, kind: Kind, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.embed, self.table = nn.Embedding(VOCAB, WIDTH), nn.Embedding(256, WIDTH)
        self.project = nn.Linear(6, WIDTH)
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.attention, self.head = SPELLINGS["sdpa_is_causal"](), nn.Linear(WIDTH, VOCAB)

    def forward(
        self, input_ids: Tensor, told: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        rows, columns = input_ids.shape
        x = self.embed(input_ids) + self.kind.read(self, told)
        for mix in self.mixes:
            q, k, v = mix(x).view(rows, columns, 12, -1).transpose(1, 2).chunk(3, 1)
            x = x + self.attention(2.0 * q, k, v, attention_mask).transpose(1, 2).flatten(2)
        logits = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def integers(*rest: int, high: int = 7, dtype: torch.dtype = torch.int64) -> Callable[[int, int], Tensor]:
    return lambda rows, columns: torch.randint(0, high, (rows, columns, *rest)).to(dtype)


def planes(rows: int, columns: int) -> Tensor:
    return torch.randint(0, 7, (3, rows, columns))


def of_planes(model: Told, x: Tensor) -> Tensor:
    return model.table(x).sum(0)


def numbers(dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    return lambda rows, columns: torch.randn(rows, columns, 6).to(dtype)


def vectors(model: Told, x: Tensor) -> Tensor:
    return model.project(x.to(torch.float64))


def complex_numbers(rows: int, columns: int) -> Tensor:
    return torch.view_as_complex(torch.randn(rows, columns, 3, 2))


KINDS = {
    "planes": Kind(planes, of_planes, tokens_first=False),
    "types": Kind(integers(high=200), lambda model, x: model.table(x)),
    "routes": Kind(integers(2, 3, dtype=torch.int16), lambda model, x: model.table(x.long()).sum((2, 3))),
    "bytes": Kind(integers(2, 3, dtype=torch.uint8), lambda model, x: model.table(x[:, :, 1].int()).sum(2)),
    "vectors": Kind(numbers(torch.float32), vectors),
    "bfloat16": Kind(numbers(torch.bfloat16), vectors),
    "float8": Kind(numbers(torch.float8_e4m3fn), vectors),
    "complex": Kind(complex_numbers, lambda model, x: model.project(torch.view_as_real(x).flatten(2).double())),
    "nothing": Kind(integers(0), lambda model, x: x.sum(-1, keepdim=True).double()),
}  # fmt: skip


def distinct(batch: Batch, kind: Kind, told: Tensor) -> int:
    """The distinct prefixes of (id, values told), by listing them all."""
    paths = set()
    for row, ids in enumerate(batch.input_ids.tolist()):
        mask = [1] * len(ids) if batch.attention_mask is None else batch.attention_mask[row].tolist()
        kept = [(token, kind.at(told, row, t)) for t, token in enumerate(ids) if mask[t]]
        start = mask.index(1)
        paths.update((start, tuple(kept[: t + 1])) for t in range(len(kept)))
    return len(paths)


def loss(batch: Batch, told: Tensor) -> Callable[[Any], Tensor]:
    """Mean of the losses of the batch's labels."""
    return lambda model: model(told=told, **batch.inputs())


def batch_of(rows: int = 6, length: int = 12, padding: Side | None = None) -> Batch:
    return shared_batch(rows, length, shared=7, vocab=VOCAB, padding=padding)


@pytest.mark.parametrize("name", KINDS)
def test_distinct_tokens_are_counted_by_all_that_is_read(name: str) -> None:
    kind, batch = KINDS[name], batch_of()
    told = kind.perturbed(batch)
    expected = distinct(batch, kind, told)
    assert_packed(compare(Told(kind).double(), loss(batch, told)), expected, layers=1)
    assert name == "nothing" or distinct_tokens(batch) < expected < batch.input_ids.numel()


@pytest.mark.parametrize("name", ["planes", "routes"])
def test_a_trie_of_ids_alone_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_ids(self: Padding, grid: Grid, redundant: object) -> list[Tensor]:
        tokens = self._analysis.tokens
        assert tokens is not None
        return list(grid.numbers(tokens.ids))

    monkeypatch.setattr(Padding, "identity", of_ids)
    kind, batch = KINDS[name], batch_of()
    with pytest.raises(AssertionError, match="differ by more"):
        compare(Told(kind).double(), loss(batch, kind.perturbed(batch)))


@pytest.mark.parametrize("padding", ["right", "left"])
def test_padding(padding: Side) -> None:
    kind, batch = KINDS["routes"], batch_of(padding=padding)
    told = kind.perturbed(batch)
    assert_packed(compare(with_mask(kind), loss(batch, told)), distinct(batch, kind, told))


def with_mask(kind: Kind) -> Told:
    model = Told(kind).double()
    model.attention = PADDED["sdpa_padding"]()
    return model


@pytest.mark.parametrize("name", ["planes", "vectors"])
def test_rows_that_start_in_different_columns(name: str) -> None:
    """What each token is told goes with it: rows share from their own starts."""
    kind, batch = KINDS[name], left_padded()
    torch.manual_seed(0)
    rows, columns = batch.input_ids.shape
    assert batch.attention_mask is not None
    starts = batch.attention_mask.argmax(1)
    place = (torch.arange(columns) - starts[:, None]).clamp(min=0)
    common = kind.draw(1, columns)
    told = common[0, place] if kind.tokens_first else common[:, 0][:, place]
    expected = distinct_tokens(batch, "own")
    assert expected < distinct_tokens(batch)
    assert_packed(compare(with_mask(kind), loss(batch, told)), expected)


@pytest.mark.parametrize("name", ["planes", "routes"])
def test_one_compilation_serves_all_sizes(name: str) -> None:
    """Three rows are as many as there are planes."""
    kind, pair = KINDS[name], Pair(Told(KINDS[name]).double())
    for rows, length in ((6, 12), (3, 11), (4, 16), (7, 9)):
        batch = batch_of(rows, length)
        told = kind.perturbed(batch, seed=rows)
        with in_case((rows, length)):
            checked = pair.check(loss(batch, told))
            assert_packed(checked, distinct(batch, kind, told))
    assert checked.stats["compiles"] == 2


@pytest.mark.parametrize(("rows", "length"), [(1, 12), (4, 2), (4, 4)])
def test_few_rows_and_columns(rows: int, length: int) -> None:
    for name in ("planes", "routes"):
        kind, batch = KINDS[name], batch_of(rows, length).without("labels")
        told = kind.perturbed(batch)
        with in_case(name):
            checked = compare(Told(kind).double(), lambda model: model(batch.input_ids, told).square().mean())
            assert_packed(checked, distinct(batch, kind, told))


def test_inductor_and_inference() -> None:
    kind, batch = KINDS["routes"], batch_of()
    told, model = kind.perturbed(batch), Told(kind)
    checked = compare(model, loss(batch, told), inner="inductor")
    assert_packed(checked, distinct(batch, kind, told))
    with torch.inference_mode():
        expected = model(batch.input_ids, told.clone())
        got = checked.compiled(batch.input_ids, told.clone())
    torch.testing.assert_close(got, expected)
    assert checked.stats["tokens"] == distinct(batch, kind, told)


def test_rows_that_hardly_share() -> None:
    kind, batch = KINDS["routes"], batch_of()
    apart = kind.draw(*batch.input_ids.shape)
    stats = compare(Told(kind).double(), loss(batch, apart), min_sharing=1.15).stats
    assert stats["ran"] != "packed" and stats["sharing_ratio"] == 1.0


def test_what_requires_grad_runs_on_rows() -> None:
    kind, batch = KINDS["vectors"], batch_of()
    told = kind.draw(*batch.input_ids.shape).requires_grad_()
    stats = compare(Told(kind).double(), loss(batch, told)).stats
    assert stats["ran"] != "packed" and "requires grad" in stats["fallback"]


def test_under_a_forest_it_is_refused_by_name() -> None:
    batch = batch_of(rows=3)
    forest = treefx.Forest.from_padded(batch.input_ids)
    for name in ("planes", "routes"):
        kind = KINDS[name]
        model = torch.compile(Told(kind).double(), backend="treefx", options={"inner": "eager"})
        with in_case(name), treefx.use(forest), refused("told", "treefx.use(forest)"):
            model(forest.model_inputs()["input_ids"], kind.draw(1, forest.num_tokens))


class Taught(nn.Module):
    """A student whose loss reads values of tokens that differ from row to row."""

    def __init__(self, read: Callable[["Taught", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.student = Told(Kind(integers(), lambda model, x: model.table(x))).double()
        self.read = read

    def forward(self, input_ids: Tensor, types: Tensor, told: Tensor) -> Tensor:
        return self.read(self, self.student(input_ids, types), told)


def of_logits(model: Taught, logits: Tensor, told: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(-1), told.log_softmax(-1), reduction="batchmean", log_target=True)


def of_hidden_states(model: Taught, logits: Tensor, told: Tensor) -> Tensor:
    return of_logits(model, logits, model.student.head(told))


def of_chosen_tokens(model: Taught, logits: Tensor, told: Tensor) -> Tensor:
    return -(logits.log_softmax(-1).gather(-1, told) * torch.tensor([0.5, 0.3, 0.2])).sum(-1).mean()


def of_policy(model: Taught, logits: Tensor, told: Tensor) -> Tensor:
    old, advantages = told.unbind(-1)
    new = logits.log_softmax(-1)[..., 5]
    return -((new - old).exp() * advantages).mean()


@pytest.mark.parametrize(
    ("read", "width", "high"),
    [(of_logits, VOCAB, 0), (of_hidden_states, WIDTH, 0), (of_chosen_tokens, 3, VOCAB), (of_policy, 2, 0)],
    ids=["logits", "hidden_states", "top_tokens", "policy"],
)
def test_what_only_the_loss_reads_splits_nothing(read: Any, width: int, high: int) -> None:
    batch = batch_of()
    rows, columns = batch.input_ids.shape
    torch.manual_seed(2)
    told = torch.randint(0, high, (rows, columns, width)) if high else torch.randn(rows, columns, width).double()
    types = torch.zeros_like(batch.input_ids)
    checked = compare(Taught(read), lambda model: model(batch.input_ids, types, told))
    assert_packed(checked, distinct_tokens(batch), layers=1)
