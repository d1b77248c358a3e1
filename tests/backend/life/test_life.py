"""The life of a compiled model: other batches, shapes, options and weights, and reports of the inspector."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.backend.small import Small
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.oracle import FLOAT64, assert_close, compare, compile_with, eager_step, loss_of, outcome, stats_of
from tests.spellings import PADDED, SPELLINGS


def padded() -> nn.Module:
    return Small(PADDED["sdpa_padding"]).double()


def batch_of(rows: int = 4, length: int = 14, shared: int = 6, **more: Any) -> Batch:
    return shared_batch(rows=rows, length=length, shared=shared, vocab=61, **more)


def check(compiled: Any, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """One exact step of a model compiled before; its statistics."""
    expected = eager_step(model, batch)
    assert_close(outcome(model, lambda: loss_of(batch)(compiled)), expected, FLOAT64)
    return stats_of(compiled)


def test_other_sharing_compiles_nothing() -> None:
    """Tokens are counted under the mask; the last batch is nothing but padding."""
    model = padded()
    compiled = compile_with(model, inner="eager")
    batches = [batch_of(shared=n, seed=n) for n in (8, 0, 14, 3, 10)]
    for batch in batches:
        stats, raw = check(compiled, model, batch), int(batch.attention_mask.sum())
        assert (stats["raw_tokens"], stats["tokens"]) == (raw, distinct_tokens(batch))
        assert stats["sharing_ratio"] == pytest.approx(raw / distinct_tokens(batch))
        assert stats["compiles"] == 1
    assert len({distinct_tokens(batch) for batch in batches}) > 3
    compiled(batch.input_ids, attention_mask=torch.zeros_like(batch.input_ids))
    stats = stats_of(compiled)
    assert (stats["raw_tokens"], stats["sharing_ratio"], stats["overlap_ratio"]) == (0, 1.0, 0.0)


def test_other_shapes() -> None:
    """New lengths and numbers of rows are exact, and shapes seen before compile nothing.

    Dynamo captures the first with constants, and the second with rows and columns as symbols.
    """
    model = padded()
    compiled = compile_with(model)
    shapes = [(4, 12), (4, 17), (3, 17), (5, 13)]
    batches = [batch_of(rows=rows, length=length, shared=5) for rows, length in shapes]
    for batch in batches:
        assert check(compiled, model, batch)["tokens"] == distinct_tokens(batch)
    compiles = stats_of(compiled)["compiles"]
    assert compiles == 2
    for batch in reversed(batches):
        assert check(compiled, model, batch)["compiles"] == compiles


def unshared() -> Batch:
    """Four rows without a common prefix."""
    batch = batch_of(padding=None)
    batch.input_ids[:, 0] = torch.arange(4) + 20
    return Batch(batch.input_ids, torch.ones_like(batch.input_ids), batch.input_ids)


class Cut(nn.Module):
    """Where Dynamo ends a graph, and nothing is known of what the next one gets."""

    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_model_in_several_graphs_says_so(place: str) -> None:
    """Only the first one gets token ids; the others run every row, exactly and not in silence."""
    model = Small(SPELLINGS["sdpa_is_causal"], **{place: Cut()}).double()
    stats = compare(model, batch_of(padding=None), inner="eager").stats
    assert "Dynamo cut the model" in stats["fallback"]
    assert stats["attention_rewritten"] == (1 if place == "after" else 0)


def test_low_sharing_runs_the_ordinary_graph() -> None:
    """By default packing has to pay; whether it does is decided at every call, both ways."""
    model = padded()
    compiled = torch.compile(model, backend="treefx", options={"inner": "aot_eager"})
    ids = batch_of(shared=9, padding=None).input_ids
    shared = Batch(ids, torch.ones_like(ids), ids)
    for batch in (unshared(), shared, unshared()):
        ratio = check(compiled, model, batch)["sharing_ratio"]
        assert ratio == pytest.approx(56 / distinct_tokens(batch))


def test_training_and_evaluation_take_turns() -> None:
    """Three steps of SGD, each compared, and each in front of an evaluation: no weight is baked in."""
    model = padded()
    compiled, batch = compile_with(model), batch_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed, training in enumerate((True, False, True)):
        model.train(training)
        check(compiled, model, batch_of(seed=seed))
        optimizer.step()
        with torch.no_grad():
            losses.append(loss_of(batch)(model))
            torch.testing.assert_close(loss_of(batch)(compiled), losses[-1], rtol=1e-10, atol=0)
    assert len({float(loss) for loss in losses}) == 3


def test_buffer_that_changes_between_calls() -> None:
    """A mask buffer is data: when its values change, so does what a token sees."""
    model = Small(SPELLINGS["tril_buffer"]).double()
    compiled, batch = compile_with(model, inner="eager"), batch_of(padding=None)
    check(compiled, model, batch)
    model.attentions[0].bias[..., 3, 1] = 0.0
    check(compiled, model, batch)
    model.attentions[0].bias[..., 2, 5] = 1.0  # no longer causal
    check(compiled, model, batch)


def test_compiled_in_place() -> None:
    model = padded()
    keys = list(model.state_dict())
    twin = copy.deepcopy(model)
    twin.compile(backend="treefx", options={"inner": "aot_eager", "min_sharing": 1.0})
    batch = batch_of()
    assert_close(outcome(twin, lambda: loss_of(batch)(twin)), eager_step(model, batch), FLOAT64)
    assert stats_of(twin)["tokens"] == distinct_tokens(batch)
    assert list(twin.state_dict()) == keys


def test_graphs_of_all_stages() -> None:
    batch = batch_of()
    inspected = treefx.inspect(compare(padded(), batch).compiled)
    assert set(inspected.graphs) == {"captured", "rewritten", "forward", "backward"}
    code = {stage: graph.print_readable(print_output=False) for stage, graph in inspected.graphs.items()}
    assert "treefx.tree_attention" in code["rewritten"]
    assert "treefx.tree_attention" not in code["captured"]
    assert "treefx.restore" in code["backward"]
    summary = inspected.summary()
    assert str(distinct_tokens(batch)) in summary


def test_model_without_attention() -> None:
    class Tokenwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(input_ids))

    batch = batch_of(padding=None)
    compare(Tokenwise().double(), lambda model: model(batch.input_ids).square().mean())


def test_model_without_tokens() -> None:
    """A graph without token ids is compiled unchanged."""
    pixels = torch.randn(4, 14, 8, dtype=torch.float64)
    checked = compare(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double(), lambda model: model(pixels).sum())
    assert checked.stats["attention_rewritten"] == 0


def test_statistics_of_two_models_are_apart() -> None:
    batches = [batch_of(shared=n) for n in (2, 10)]
    checked = [compare(padded(), batch, inner="eager") for batch in batches]
    assert [c.stats["tokens"] for c in checked] == [distinct_tokens(batch) for batch in batches]
