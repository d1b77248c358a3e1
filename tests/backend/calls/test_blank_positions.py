"""Padding in front of rows that a model sets to zero: convolutions and recurrences behind it start as without it.

Such rows share with rows of other lengths, and their padding does not run; near misses of such models do not share.
"""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.calls.test_own_positions import scattered, with_places
from tests.backend.models.test_libraries import MODELS, check
from tests.backend.support import Pair, assert_packed, compare, compile_with
from tests.batches import IGNORED, PAD, Batch, distinct_tokens, padded, shared_batch
from tests.libraries import CALLS, double_with_libraries
from tests.models import TinyLM, double
from tests.oracle import stats_of
from tests.recurrences import ChunkedScan
from tests.spellings import PADDED
from tests.strategies import Rows, caterpillars, chains, random_rows, stars
from treefx.passes.causal import blanks
from treefx.passes.packing import emit_scans
from treefx.passes.packing.emitters import Packer
from treefx.passes.trace import library_tree

WIDTH, COLUMNS = 32, 11


def short_rows() -> Batch:
    """Six rows of a common stem, padded on the left, with positions that count each row's own tokens."""
    ids = shared_batch(rows=6, length=COLUMNS, shared=4, padding=None).input_ids.tolist()
    return with_places(padded([row[:length] for row, length in zip(ids, (11, 8, 10, 8, 11, 6), strict=True)], "left"))


BATCH = short_rows()
OWN = distinct_tokens(BATCH, "own")


def times(x: Tensor, mask: Tensor) -> Tensor:
    """As transformers writes ``apply_mask_to_padding_states``."""
    return (x * mask[:, :, None]).to(x.dtype)


def filled(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill((1 - mask).bool()[..., None], 0.0)


def chosen(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool().unsqueeze(-1), x, 0.0)


def softly(x: Tensor, mask: Tensor) -> Tensor:
    return x * (mask + 0.01)[..., None]


def inverted(x: Tensor, mask: Tensor) -> Tensor:
    return x * (1 - mask)[..., None]


def unmasked(x: Tensor, mask: Tensor) -> Tensor:
    return x


Masking = Callable[[Tensor, Tensor], Tensor]


class Convolved(nn.Module):
    """Residual block of one convolution."""

    def __init__(self, before: Masking = times, bias: bool = False) -> None:
        super().__init__()
        self.before = before
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH, bias=bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed = self.conv(self.before(x, mask).transpose(1, 2))[..., : x.size(1)]
        return x + mixed.transpose(1, 2)


class Scanned(nn.Module):
    """Residual block of a projection, a convolution, an activation and a recurrence.

    Args:
        before, between: how padding is set to zero in front of the convolution and behind it.
        bias: of the convolution.
        entering: whether the projection into the recurrence has a bias.
        activation: behind the convolution.
        delta: the gated delta rule, with normalized keys.
        skip: adds each value once more.
    """

    def __init__(
        self,
        before: Masking = times,
        between: Masking = unmasked,
        *,
        bias: bool = False,
        entering: bool = False,
        activation: Callable[[Tensor], Tensor] = F.silu,
        delta: bool = False,
        skip: bool = False,
    ) -> None:
        super().__init__()
        self.before, self.between, self.activation = before, between, activation
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH, bias=bias)
        self.scan = ChunkedScan(delta=delta, skip=skip, width=WIDTH)
        if not entering:
            self.scan.enter.bias = None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed = self.conv(self.before(x, mask).transpose(1, 2))[..., : x.size(1)].transpose(1, 2)
        return x + self.scan(self.between(self.activation(mixed), mask))


def model_of(*mixers: nn.Module, layers: int = 1) -> nn.Module:
    """Attention that masks padding, mixers that get the mask as well, and (of two layers) attention again."""
    torch.manual_seed(0)
    model = TinyLM(PADDED["sdpa_padding"], layers=layers, vocab=128)
    model.blocks = nn.ModuleList([model.blocks[0], *mixers, *model.blocks[1:]])
    return model.double()


CONVOLUTIONS = [
    Convolved,
    functools.partial(Convolved, filled),
    functools.partial(Convolved, chosen),
    functools.partial(Convolved, bias=True),  # nothing mixes what it adds to padding
]
SCANS = [
    Scanned,
    functools.partial(Scanned, times, times, bias=True),
    functools.partial(Scanned, delta=True),
    functools.partial(Scanned, skip=True, activation=F.gelu),
]


@pytest.mark.parametrize("mixers", [CONVOLUTIONS, SCANS], ids=["convolutions", "scans"])
def test_padding_that_is_zero(mixers: list[Callable[[], nn.Module]]) -> None:
    checked = compare(model_of(*[make() for make in mixers], layers=2), BATCH)
    assert_packed(checked, OWN)
    assert checked.stats["raw_tokens"] == int(BATCH.attention_mask.sum())
    assert checked.stats["expansions"] == []


LEAKING = {
    "no_mask": lambda: Convolved(unmasked),
    "soft_mask": lambda: Convolved(softly),
    "inverted_mask": lambda: Convolved(inverted),
    "bias_of_the_convolution": lambda: Scanned(bias=True),
    "bias_of_the_projection": lambda: Scanned(entering=True),
    "no_zero_of_zero": lambda: Scanned(activation=torch.sigmoid),
    "mask_behind_the_convolution": lambda: Scanned(unmasked, times),
}


@pytest.mark.parametrize("name", LEAKING)
def test_padding_that_leaks(name: str) -> None:
    """One mixer that gets something else than zeros is enough: rows that start together share, and padding runs."""
    stats = compare(model_of(Convolved(), LEAKING[name]()), BATCH).stats
    assert stats["fallback"] is None and stats["tokens"] > distinct_tokens(BATCH)


def without_epsilon(x: Tensor, mask: Tensor) -> Tensor:
    return x * x.square().sum(-1, keepdim=True).rsqrt()


def root_of_zero(x: Tensor, mask: Tensor) -> Tensor:
    return x * x.square().sum(-1, keepdim=True).sqrt()


def scaled_pole(x: Tensor, mask: Tensor) -> Tensor:
    scale = torch.arange(1.0, 1.0 + x.shape[-1], dtype=x.dtype)
    return x * (scale * x.square().sum(-1, keepdim=True).rsqrt())


@pytest.mark.parametrize("between", [without_epsilon, root_of_zero, scaled_pole])
def test_poles_at_zero(between: Masking) -> None:
    """Zero times infinity is none, nor is the gradient of a root at zero: eager mode spreads NaN from padding."""
    compiled = compile_with(model_of(Scanned(times, between)))
    with torch.no_grad():
        compiled(**BATCH.inputs())
    assert stats_of(compiled)["tokens"] > distinct_tokens(BATCH)


def test_a_bias_that_is_overlooked_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blanks._Position, "_reads_zeros", lambda self, law: True)
    with pytest.raises(AssertionError, match="differ by more"):
        compare(model_of(LEAKING["bias_of_the_convolution"]()), BATCH)


def test_parents_by_the_column_of_one_row_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def column(packer: Packer) -> Tensor:
        found: Tensor = packer.metadata.column
        return found

    monkeypatch.setattr(emit_scans, "depths", column)
    with pytest.raises(AssertionError, match="differ by more"):
        compare(model_of(Convolved()), scattered(0))


def test_masks_with_holes() -> None:
    """Padding between tokens is zero too, but a window counts its columns, and states decay there."""
    batch = scattered(1, gap=True)
    stats = compare(model_of(Scanned(delta=True)), batch).stats
    assert stats["fallback"] is None and stats["tokens"] > distinct_tokens(batch, "own")


def test_positions_by_column() -> None:
    """Rows that start in different columns do not share, but none of their padding runs."""
    batch = BATCH.without("position_ids")
    assert_packed(compare(model_of(Convolved()), batch), distinct_tokens(batch))


FOREST, WIDE = 5, 12


def placed(rows: Rows, starts: list[int]) -> Batch:
    """Rows of at most as many tokens as there are columns, each at its start or as near as it fits."""
    ids, mask = torch.full((FOREST, WIDE), PAD), torch.zeros(FOREST, WIDE, dtype=torch.int64)
    for b, start in enumerate(starts):
        row = [token + 3 for token in rows[b % len(rows)][:WIDE]]
        first = min(start, WIDE - len(row))
        ids[b, first : first + len(row)] = torch.tensor(row)
        mask[b, first : first + len(row)] = 1
    return with_places(Batch(ids, mask, ids.masked_fill((mask == 0) | (mask.cumsum(1) <= 1), IGNORED)))


def test_any_forest() -> None:
    """Rows of any forest that start anywhere: what ran is counted by listing all prefixes."""
    mixers = Convolved(), Scanned(times, times, bias=True), Scanned(delta=True)
    pair = Pair(model_of(*mixers, layers=2))

    @settings(max_examples=15, deadline=None, database=None)
    @given(st.one_of(chains(), stars(), caterpillars(), random_rows()), st.lists(st.integers(0, WIDE), min_size=FOREST))
    def check(rows: Rows, starts: list[int]) -> None:
        batch = placed(rows, starts[:FOREST])
        assume(bool((batch.labels != IGNORED).any()))
        assert_packed(pair.check(batch), distinct_tokens(batch, "own"))

    check()


HYBRIDS = {
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "olmo_hybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}


@pytest.mark.zoo
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_of_transformers(name: str) -> None:
    changes = HYBRIDS[name] | ({"mlp_only_layers": [0, 1]} if name == "qwen3_next" else {})
    assert_packed(compare(double(name, **changes), BATCH), OWN)


@pytest.mark.zoo
def test_recurrence_alone() -> None:
    """Nothing but the mixer says what padding is. Positions do not matter to Mamba 2, nor where a row starts."""
    checked = compare(double("mamba2", num_hidden_layers=2, chunk_size=4, n_groups=2), BATCH.without("position_ids"))
    stats = checked.stats
    assert stats["fallback"] is None and stats["expansions"] == [] and stats["tokens"] <= OWN


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "whole"), [("qwen3_next", False), ("qwen3_next", True), ("kimi_linear", True)])
def test_kernels_of_libraries(name: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's own calls along the tree, as on a GPU, and the operators that they are read as."""
    monkeypatch.setattr(library_tree, "_KEPT_WHOLE", {"cpu"} if whole else set())
    model = double_with_libraries(name, num_hidden_layers=1, **MODELS[name])
    stats = check(model, compile_with(model), BATCH)
    assert stats["fallback"] is None and stats["expansions"] == [] and bool(CALLS) == whole
    assert stats["tokens"] <= OWN


@pytest.mark.zoo
def test_bias_within_a_kernel_of_a_library() -> None:
    """Mamba 2's fused function adds the bias of its convolution to padding, and sets nothing to zero behind it."""
    model = double_with_libraries("falcon_h1", num_hidden_layers=1, **MODELS["falcon_h1"])
    assert check(model, compile_with(model), BATCH)["tokens"] > distinct_tokens(BATCH)


def test_first_tokens_that_padding_predicts() -> None:
    """Padding with an output that the loss reads runs, and starts a row."""
    labels = BATCH.input_ids.masked_fill(BATCH.attention_mask == 0, IGNORED)
    batch = dataclasses.replace(BATCH, labels=labels)
    stats = compare(model_of(Convolved(), Scanned()), batch).stats
    assert stats["fallback"] is None and OWN < stats["tokens"] < distinct_tokens(batch)
