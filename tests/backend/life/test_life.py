"""The life of a compiled model: other batches, shapes, options and weights, and what the inspector tells."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.backend.support import assert_packed, llama
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.models import TinyLM, double, zoo
from tests.oracle import FLOAT64, assert_close, compare, compile_with, eager_step, loss_of, outcome, stats_of
from tests.spellings import SPELLINGS

pytestmark = pytest.mark.sample(8)


def check(compiled: Any, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """One exact step of a model compiled before; its statistics."""
    expected = eager_step(model, batch)
    assert_close(outcome(model, lambda: loss_of(batch)(compiled)), expected, FLOAT64)
    return stats_of(compiled)


def test_other_sharing_compiles_nothing() -> None:
    model = llama()
    compiled = compile_with(model)
    batches = [shared_batch(rows=4, length=16, shared=n, seed=n) for n in (8, 0, 14, 3, 10)]
    seen = [check(compiled, model, batch) for batch in batches]
    assert [stats["tokens"] for stats in seen] == [distinct_tokens(batch) for batch in batches]
    assert len({stats["tokens"] for stats in seen}) > 3
    assert {stats["compiles"] for stats in seen} == {seen[0]["compiles"]}
    assert seen[0]["compiles"] >= 1


def test_other_shapes() -> None:
    """New lengths and numbers of rows are exact, and shapes seen before compile nothing.

    Dynamo captures the first as it is, and the second with rows and columns as symbols.
    """
    model = llama()
    compiled = compile_with(model)
    shapes = [(4, 12), (4, 17), (3, 17), (5, 13)]
    batches = [shared_batch(rows=rows, length=length, shared=5) for rows, length in shapes]
    for batch in batches:
        assert check(compiled, model, batch)["tokens"] == distinct_tokens(batch)
    compiles = stats_of(compiled)["compiles"]
    assert compiles == 2
    for batch in reversed(batches):
        assert check(compiled, model, batch)["compiles"] == compiles


def test_dynamic_shapes_asked_for() -> None:
    model = llama()
    options = {"inner": "aot_eager", "min_sharing": 1.0}
    compiled = torch.compile(model, backend="treefx", options=options, dynamic=True)
    for length in (12, 17, 12):
        batch = shared_batch(rows=4, length=length, shared=5)
        stats = check(compiled, model, batch)
        assert stats["ran"] == "packed" and stats["tokens"] == distinct_tokens(batch)
        assert stats["compiles"] == 1


def test_raw_tokens_and_ratio() -> None:
    batch = shared_batch(rows=4, length=16, shared=8)
    assert batch.attention_mask is not None
    stats = compare(llama(), batch).stats
    raw = int(batch.attention_mask.sum())
    assert stats["raw_tokens"] == raw
    assert stats["sharing_ratio"] == pytest.approx(raw / distinct_tokens(batch))


def test_a_batch_of_nothing_but_padding() -> None:
    compiled = compile_with(llama())
    ids = torch.ones(2, 5, dtype=torch.long)
    compiled(ids, attention_mask=torch.zeros_like(ids))
    stats = stats_of(compiled)
    assert (stats["raw_tokens"], stats["sharing_ratio"], stats["overlap_ratio"]) == (0, 1.0, 0.0)


def unshared() -> Batch:
    """Four rows without a common prefix."""
    batch = shared_batch(rows=4, length=14, shared=6, padding=None)
    batch.input_ids[:, 0] = torch.arange(4) + 20
    return Batch(batch.input_ids, None, batch.input_ids)


def default_compile(model: nn.Module) -> Any:
    return torch.compile(model, backend="treefx", options={"inner": "aot_eager"})


class Cut(nn.Module):
    """Where Dynamo ends a graph."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_model_in_several_graphs_says_so(place: str) -> None:
    """Only the first one gets token ids; the others run every row, exactly and not in silence."""
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16, **{place: Cut()}).double()
    stats = compare(model, shared_batch(rows=4, length=12, shared=5, vocab=61, padding=None)).stats
    assert "Dynamo cut the model" in stats["fallback"]
    assert stats["attention_rewritten"] == (1 if place == "after" else 0)


def test_low_sharing_runs_the_ordinary_graph() -> None:
    """By default packing has to pay; whether it does is decided at every call, both ways."""
    model = llama()
    compiled = default_compile(model)
    shared = shared_batch(rows=4, length=14, shared=9, padding=None)
    shared = Batch(shared.input_ids, None, shared.input_ids)
    for batch in (unshared(), shared, unshared()):
        ratio = check(compiled, model, batch)["sharing_ratio"]
        assert ratio == pytest.approx(56 / distinct_tokens(batch))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_inner_compiler_eager(name: str) -> None:
    """The others run in nearly all tests, and in the examples."""
    batch = shared_batch(rows=4, length=14, shared=6)
    assert_packed(compare(double(name), batch, inner="eager"), distinct_tokens(batch), layers=2)


def test_weights_that_change_between_steps() -> None:
    """Three steps of SGD, each compared: no weight is baked in."""
    model = llama()
    compiled = compile_with(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed in range(3):
        check(compiled, model, shared_batch(rows=4, length=14, shared=6, seed=seed))
        optimizer.step()
        losses.append(float(loss_of(shared_batch(rows=4, length=14, shared=6))(model)))
    assert len(set(losses)) == 3


def test_buffer_that_changes_between_calls() -> None:
    """A mask buffer is data: when its values change, so does what a token sees."""
    model = TinyLM(SPELLINGS["tril_buffer"]).double()
    compiled, batch = compile_with(model), shared_batch(rows=4, length=14, shared=6, vocab=61, padding=None)
    check(compiled, model, batch)
    for block in model.blocks:
        block.attention.bias[..., 3, 1] = 0.0
    check(compiled, model, batch)
    for block in model.blocks:
        block.attention.bias[..., 2, 5] = 1.0  # no longer causal
    check(compiled, model, batch)


def test_training_and_evaluation_take_turns() -> None:
    model = llama()
    compiled, batch = compile_with(model), shared_batch(rows=4, length=14, shared=6)
    for training in (True, False, True):
        model.train(training)
        check(compiled, model, batch)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(batch)(compiled), loss_of(batch)(model), rtol=1e-10, atol=0)


def test_compiled_in_place() -> None:
    model = llama()
    keys = list(model.state_dict())
    twin = copy.deepcopy(model)
    twin.compile(backend="treefx", options={"inner": "aot_eager", "min_sharing": 1.0})
    batch = shared_batch(rows=4, length=14, shared=6)
    assert_close(outcome(twin, lambda: loss_of(batch)(twin)), eager_step(model, batch), FLOAT64)
    assert stats_of(twin)["tokens"] == distinct_tokens(batch)
    assert list(twin.state_dict()) == keys


def test_graphs_of_all_stages() -> None:
    batch = shared_batch(rows=4, length=14, shared=6)
    inspected = treefx.inspect(compare(llama(), batch).compiled)
    assert set(inspected.graphs) == {"captured", "rewritten", "forward", "backward"}
    code = {stage: graph.print_readable(print_output=False) for stage, graph in inspected.graphs.items()}
    assert "treefx.tree_attention" in code["rewritten"]
    assert "treefx.tree_attention" not in code["captured"]
    assert "treefx.restore" in code["backward"]
    summary = inspected.summary()
    assert str(distinct_tokens(batch)) in summary


def test_found_without_importing_treefx() -> None:
    program = (
        "import sys, torch\n"
        "layer = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))\n"
        "assert 'treefx' not in sys.modules\n"
        "compiled = torch.compile(layer, backend='treefx', options={'inner': 'eager'})\n"
        "ids = torch.tensor([[1, 2, 3], [1, 2, 4]])\n"
        "torch.testing.assert_close(compiled(ids) * 1, layer(ids))\n"
        "assert 'treefx' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_model_without_attention() -> None:
    class Tokenwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(input_ids))

    batch = shared_batch(rows=4, length=14, shared=6, vocab=61, padding=None)
    compare(Tokenwise().double(), lambda model: model(batch.input_ids).square().mean())


def test_model_without_tokens() -> None:
    """A graph that no token ids enter is compiled as it is."""
    pixels = torch.randn(4, 14, 8, dtype=torch.float64)
    checked = compare(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double(), lambda model: model(pixels).sum())
    assert checked.stats["attention_rewritten"] == 0


def test_statistics_of_two_models_are_apart() -> None:
    batches = [shared_batch(rows=4, length=14, shared=n) for n in (2, 10)]
    checked = [compare(zoo("llama", num_hidden_layers=1), batch, inner="eager") for batch in batches]
    assert [c.stats["tokens"] for c in checked] == [distinct_tokens(batch) for batch in batches]
