"""Linear recurrences of models run along the tree, recognised by value and exact at forks; near misses stay on rows."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import treefx
from tests import oracle
from tests.backend.native import native_loss, random_weights, rollouts
from tests.backend.support import compare, compile_with
from tests.batches import Batch, distinct_tokens, padded, shared_batch
from tests.models import TinyLM, double
from tests.oracle import FLOAT64, assert_close, eager_step, loss_of, outcome, separate_rows, stats_of
from tests.recurrences import DEFECTS, SCANS_AS_SUMS, ChunkedScan
from tests.spellings import SPELLINGS
from treefx.kernels.recurrence import tree_scan as kernel
from treefx.kernels.recurrence.tree_chunks import ChunkPlan, plan_chunks
from treefx.passes.causal import tree_mixers

ROWS, LENGTH, CHUNK = 3, 10, 4
"""The length is no multiple of the chunk, neither the model's nor the tree's."""
BATCH = shared_batch(rows=ROWS, length=LENGTH, shared=4, vocab=61)
ONE_ROW = padded([list(range(3, 3 + LENGTH))])

MODELS = {
    "mamba2": {"num_hidden_layers": 1, "chunk_size": CHUNK, "n_groups": 2},
    "qwen3_next": {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "mlp_only_layers": [0]},
}  # fmt: skip


def forked_at(position: int) -> Batch:
    """Two rows that part after ``position`` tokens, and one that parts from the second a token later."""
    stem, tail = list(range(3, 3 + position)), range(LENGTH - position)
    second = [*stem, *(30 + t for t in tail)]
    return padded([[*stem, *(50 + t for t in tail)], second, [*second[: position + 1], 70, 71][:LENGTH]])


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks then fall on every place of a chunk, and states pass through several."""
    monkeypatch.setattr(tree_mixers, "tree_scan", functools.partial(kernel.tree_scan, chunk=CHUNK))


@pytest.mark.zoo
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("name", MODELS)
def test_fork_at_every_position(name: str) -> None:
    """Of a window of the convolution and of a chunk; then any forests. Nothing is compiled for another N."""
    model = double(name, **MODELS[name])
    compiled = compile_with(model)
    batches = [forked_at(position) for position in range(1, LENGTH - 1)]
    batches += [shared_batch(ROWS, LENGTH, shared, seed=shared, padding="right") for shared in (2, 5, 8)]
    for batch in batches:
        expected = eager_step(model, batch)
        assert_close(outcome(model, lambda: loss_of(batch)(compiled)), expected, FLOAT64)  # noqa: B023
        stats = stats_of(compiled)
        on_rows = SCANS_AS_SUMS and name == "mamba2"
        assert (stats["recurrences_rewritten"], stats["expansions"] == []) == (int(not on_rows), not on_rows)
        assert stats["fallback"] is None
        assert stats["tokens"] <= distinct_tokens(batch) or on_rows
        assert stats["compiles"] == 1


@pytest.mark.skipif(SCANS_AS_SUMS, reason="this version of transformers writes the recurrence as sums")
def test_forest_as_one_row() -> None:
    """Where a batch has one row, a size of one says nothing about which dimension holds it."""
    rows = rollouts()
    forest = treefx.Forest.from_sequences(rows, weights=random_weights(rows))
    model = double("mamba2", **{**MODELS["mamba2"], "chunk_size": 64})
    expected = separate_rows(model, rows, random_weights(rows))
    compiled = compile_with(model, inner="eager")
    assert_close(outcome(model, lambda: native_loss(forest)(compiled)), expected, FLOAT64)
    stats = stats_of(compiled)
    assert (stats["recurrences_rewritten"], stats["expansions"]) == (1, [])


@pytest.mark.parametrize("length", [CHUNK, 2 * CHUNK])
def test_whole_chunks(length: int) -> None:
    """Without padding parts of the recurrence are contracted on the way; with one chunk no state comes in."""
    scans = nn.Sequential(ChunkedScan(), ChunkedScan(True))
    stats = compare(small(scans), shared_batch(ROWS, length, 3, vocab=61, padding=None)).stats
    assert (stats["recurrences_rewritten"], stats["expansions"]) == (len(scans), [])


@pytest.mark.parametrize("batch", [BATCH, ONE_ROW], ids=["rows", "one row"])
def test_spellings(batch: Batch) -> None:
    """One after the other in one model: each is recognised, and none is wrong."""
    scans = nn.Sequential(
        ChunkedScan(grouped=True), ChunkedScan(decays=False), ChunkedScan(skip=True), ChunkedScan(True, decays=False),
        ChunkedScan(True, skip=True, grouped=True), ChunkedScan(by_feature=True), ChunkedScan(True, by_feature=True),
    )  # fmt: skip
    stats = compare(small(scans), batch, min_sharing=1.0).stats
    assert (stats["recurrences_rewritten"], stats["expansions"]) == (len(scans), [])


class SideBySide(nn.Module):
    """Mixers that all read the same distinct tokens: one that runs on rows hides no other."""

    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(mixers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([mixer(x) for mixer in self.mixers]).sum(0)


@pytest.mark.parametrize(
    ("causal", "batch"), [(True, BATCH), (False, BATCH), (True, ONE_ROW)], ids=["causal", "not causal", "one row"]
)
def test_near_misses_stay_on_rows(causal: bool, batch: Batch) -> None:
    """Each is another function, or another derivative: not recognised, and exact."""
    chosen = [defect for defect in DEFECTS if causal == (defect not in ("reversed", "ahead"))]
    mixers = [ChunkedScan(name == "step", name) for name in chosen]
    mixers += [ChunkedScan(True, "border", by_feature=True)] if causal else []
    stats = compare(small(SideBySide(*mixers)), batch, min_sharing=1.0).stats
    assert stats["recurrences_rewritten"] == 0 and stats["expansions"]
    assert all(item["contracted"] for item in stats["expansions"]) == causal


@pytest.fixture
def wrong_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_packed_order(subtree_end: torch.Tensor, length: int) -> ChunkPlan:
        return plan_chunks(torch.full_like(subtree_end, len(subtree_end)), length)

    monkeypatch.setattr(kernel, "find_chunk_plan", in_packed_order)


@pytest.mark.usefixtures("wrong_parents")
def test_state_from_the_token_before_is_wrong() -> None:
    """In packed order, instead of the parent's."""
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(small(ChunkedScan()), BATCH)


def test_recurrences_can_be_left_on_rows() -> None:
    stats = compare(small(ChunkedScan()), BATCH, disable_passes=["tree_scans"]).stats
    assert stats["recurrences_rewritten"] == 0 and stats["expansions"]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointed_on_aot() -> None:
    stats = oracle.compare(small(Checkpointed(ChunkedScan(True))), BATCH).stats
    assert (stats["recurrences_rewritten"], stats["expansions"]) == (1, [])


def test_autocast() -> None:
    """At most half as far again from float64 as the original under autocast."""
    model = small(ChunkedScan(grouped=True)).float()
    exact = eager_step(model, BATCH, torch.float64)
    compiled = compile_with(model)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = eager_step(model, BATCH)
        got = outcome(model, lambda: loss_of(BATCH)(compiled))
    assert stats_of(compiled)["recurrences_rewritten"] == 1
    ours, original = (max(oracle.relative_errors(side, exact).values()) for side in (got, wanted))
    assert ours <= 1.5 * original


def small(mixer: nn.Module) -> nn.Module:
    """An embedding, the mixer, and a head."""
    torch.manual_seed(0)
    return TinyLM(SPELLINGS["sdpa_is_causal"], layers=0, positions=False, after=mixer).double()
