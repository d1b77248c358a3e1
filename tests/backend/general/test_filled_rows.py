"""Packed rows that are filled up, as on a GPU: what fills them reaches no loss, gradient, buffer or figure."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._inductor.sizevars import SizeVarAllocator
from torch._subclasses.fake_tensor import FakeTensorMode

import treefx
from tests.backend.native import TakesCacheFlag, native_loss, random_weights, rollouts
from tests.batches import left_padded, shared_batch
from tests.models import TinyLM, double, zoo
from tests.oracle import (
    FLOAT64,
    assert_close,
    compare,
    compile_with,
    eager_step,
    loss_of,
    outcome,
    separate_rows,
    stats_of,
)
from tests.planning.cuts import every_node
from tests.planning.parts import run as run_plan
from tests.spellings import SPELLINGS
from treefx.inputs import token_count
from treefx.inputs.token_count import PackedSize, TokenCount
from treefx.kernels.tiles.tree_blocks import _mean_length
from treefx.runtime import call_plan as batches
from treefx.runtime.call_plan import build_batch
from treefx.runtime.ways import rows
from treefx.runtime.ways.rows import PackedRun

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BATCH = shared_batch(rows=4, length=12, shared=5, vocab=61, padding=None)


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Rows are filled up as on a GPU; tokens and length of each packed row that runs."""
    found: list[tuple[int, int]] = []
    run = PackedRun.run

    def seen(self: PackedRun, shape: Any, variant: Any, tensors: Any, batch: Any, cut: Any = None) -> Any:
        found.append((batch.tokens, batch.size))
        return run(self, shape, variant, tensors, batch, cut)

    monkeypatch.setattr(rows.PackedRun, "run", seen)
    monkeypatch.setitem(token_count._MULTIPLES, "cpu", 64)
    batches._recent.clear()
    yield found
    batches._recent.clear()


def tiny(**more: Any) -> nn.Module:
    return TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16, **more).double()


def sizes(rows: list[tuple[int, int]]) -> set[int]:
    assert rows and all(0 < size - tokens < 64 for tokens, size in rows)
    return {size for _, size in rows}


# Lengths --------------------------------------------------------------------------------------------------------------


def test_few_lengths_on_a_gpu() -> None:
    few, any_of_64 = PackedSize(few=True), PackedSize()
    found: set[int] = set()
    for tokens in (*range(2, 3000), *range(3000, 200_000, 61)):
        size = few(tokens, CUDA)
        assert size % 64 == 0 and tokens <= size < tokens + max(64, tokens / 8)
        assert tokens <= any_of_64(tokens, CUDA) < tokens + 64 and any_of_64(tokens, CUDA) % 64 == 0
        assert few(tokens, CPU) == any_of_64(tokens, CPU) == tokens
        found.add(size)
    for octave in range(9, 17):
        assert sum(2**octave < size <= 2 ** (octave + 1) for size in found) == 8
    assert PackedSize(few=True, ranks=6)(5000, CUDA) % math.lcm(512, 6) == 0 == PackedSize(ranks=3)(65, CPU) % 3


def test_copies_of_the_first_token_fill_a_row(filled: list[Any]) -> None:
    """They are trees of their own that no position names; left padding keeps the first token out of column 0."""
    ids = torch.tensor([[0, 0, 5, 6], [0, 5, 6, 7], [5, 8, 9, 9]])
    keep = ids > 0
    plain, full = (build_batch([ids], keep, size=size) for size in (None, PackedSize()))
    assert (plain.size, full.size) == (plain.tokens, 64) and full.tokens == plain.tokens
    for before, after in zip(plain.metadata, full.metadata, strict=True):
        assert torch.equal(before, after[: len(before)])
    assert build_batch([ids], keep, size=PackedSize()) is full, "another model of the step shares it"
    row, column, end, token_of = full.metadata
    assert not keep[0, 0] and keep[row[0], column[0]] and int(token_of.max()) == full.tokens - 1
    filler = slice(full.tokens, None)
    assert {*row[filler].tolist()} == {int(row[0])} and {*column[filler].tolist()} == {int(column[0])}
    assert torch.equal(end[filler], torch.arange(full.tokens + 1, 65, dtype=end.dtype))


def test_filler_does_not_choose_the_tiles() -> None:
    """Kernels are chosen by the mean length of nodes."""
    forest = treefx.Forest.from_sequences([[1] * 400, [1] * 200 + [2] * 300])
    ends = forest.subtree_end
    filled = torch.cat([ends, torch.arange(len(ends) + 1, len(ends) + 101, dtype=ends.dtype)])
    assert _mean_length(ends) == _mean_length(filled) == 128
    lonely = torch.arange(1, 9)
    assert _mean_length(lonely) == _mean_length(lonely[:1]) == 1


# Results --------------------------------------------------------------------------------------------------------------


def test_loss_and_gradients(filled: list[Any]) -> None:
    stats = compare(double("llama", num_hidden_layers=1), left_padded(), inner="eager").stats
    assert stats["ran"] == "packed" and sizes(filled) == {64} and stats["tokens"] < 64


class Counting(nn.Module):
    """Counts, averages and normalises over what it is given, into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(16, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        self.seen += flat.shape[0]
        self.mean.copy_(flat.detach().mean(0))
        return x + self.norm(flat).view_as(x) * flat.std() + flat.max()


def test_statistics_over_tokens_and_their_buffers(filled: list[Any]) -> None:
    model, twin = tiny(after=Counting()), tiny(after=Counting())
    twin.load_state_dict(model.state_dict())
    compiled = compile_with(model, inner="eager")
    for _ in range(2):
        got = outcome(model, lambda: loss_of(BATCH)(compiled))
        assert_close(got, outcome(twin, lambda: loss_of(BATCH)(twin)), FLOAT64)
    assert sizes(filled) == {64} and stats_of(compiled)["ran"] == "packed"
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-10, atol=1e-12)


def test_experts_and_their_balance(filled: list[Any]) -> None:
    """Filler takes a place among an expert's tokens, and none in the loss that counts them."""
    model = zoo("mixtral", num_hidden_layers=1, output_router_logits=True, router_aux_loss_coef=0.5)
    compare(model, shared_batch(rows=4, length=16, shared=8), inner="eager")
    assert sizes(filled) == {64}


def test_filler_is_finite_where_padding_is_not(filled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding of a token that stands at dropped padding may be NaN: a copy of that position would spread it."""
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [0, 5, 6, 7, 9, 3], [0, 0, 5, 6, 9, 9]])
    labels, positions = ids.masked_fill(ids == 0, -100), ((ids != 0).cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "position_ids": positions, "labels": labels}
    model = double("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan
    compiled = compile_with(model, inner="eager", padding="drop")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        compiled(**inputs, use_cache=False).loss.backward()
        assert stats_of(compiled)["ran"] == "packed"
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(bool(grad.isfinite().all()) for grad in gradients())
    pad = batches.np.pad
    monkeypatch.setattr(batches.np, "pad", lambda x, width, constant_values=0: pad(x, width))  # position (0, 0)
    batches._recent.clear()
    assert not all(bool(grad.isfinite().all()) for grad in gradients())


def test_filler_that_a_row_names_is_found(filled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else can read it: it stands behind all tokens, and no token sees a later one."""
    tensors = batches._tensors

    def wrong(*given: Any) -> Any:
        made = tensors(*given)
        *rest, token_of = made.metadata
        named = token_of.index_put((torch.tensor(0), torch.tensor(5)), torch.tensor(made.tokens))
        return replace(made, metadata=(*rest, named))

    monkeypatch.setattr(batches, "_tensors", wrong)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(tiny(), BATCH, inner="eager")


def test_packed_row_of_a_forest(filled: list[Any]) -> None:
    """Logits have a row per token of the forest, and none for filler; parts of a plan are not filled up."""
    model, rows = TakesCacheFlag(tiny()), rollouts()
    weights = random_weights(rows)
    forest = treefx.Forest.from_sequences(rows, weights=weights)
    compiled = compile_with(model, inner="eager")
    with treefx.use(forest):
        assert compiled(**forest.model_inputs(), use_cache=False).logits.shape[1] == forest.num_tokens
    expected = separate_rows(model, rows, weights)
    assert_close(outcome(model, lambda: native_loss(forest)(compiled)), expected, FLOAT64)
    assert sizes(filled) == {64}
    filled.clear()
    assert_close(run_plan(compiled, model, every_node(forest)), expected, FLOAT64)
    assert len(filled) > 2 and all(size == max(2, tokens) for tokens, size in filled)


# What compilers are told ----------------------------------------------------------------------------------------------


def count_of(multiple: int, largest: int = 500) -> TokenCount:
    count = TokenCount(largest, multiple)
    count.vectors([torch.int64], CPU, FakeTensorMode(shape_env=count))
    return count


@pytest.mark.parametrize("multiple", [64, 1])
def test_inductor_knows_what_divides_the_length(multiple: int) -> None:
    count = count_of(multiple)
    known, n = SizeVarAllocator(count).statically_known_multiple_of, count.count.node.expr
    assert [known(n, power) for power in (2, 16, 64)] == [multiple == 64] * 3
    assert known(24 * n, 16) == (multiple == 64) and not known(n, 128)
    assert count.hint % multiple == 0 and sympy.isprime(count.hint // multiple) and count.hint > 500
    assert count.admits(128) and count.admits(192) and count.admits(130) == (multiple == 1)


def test_a_promise_is_no_condition_to_evaluate() -> None:
    count = count_of(64)
    assert len(count.guards) == 6 and not [g for g in count.guards if g.expr not in count._promised]
    assert count.evaluate_expr(sympy.Gt(count.count.node.expr, 90))
    assert count.admits(128) and not count.admits(64)


def test_one_compilation_serves_every_length(filled: list[Any]) -> None:
    """The promise holds for each of them, so that none is compiled again for it."""
    model, compiles = tiny(), []
    compiled = compile_with(model, inner="eager")
    for length in (20, 60, 33):
        batch = shared_batch(rows=2, length=length, shared=length - 10, vocab=61, padding=None)
        assert_close(outcome(model, lambda b=batch: loss_of(b)(compiled)), eager_step(model, batch), FLOAT64)
        compiles.append(stats_of(compiled)["compiles"])
    assert sizes(filled) == {64, 128} and compiles[-1] == compiles[1] <= 2
