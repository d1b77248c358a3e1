"""The inspector: finding a model's graphs, figures, texts, the page, and what it refuses."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import treefx
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.inspection.situations import compiled, ids_of, train
from tests.mixers import MIXERS
from tests.models import TinyLM, zoo
from tests.oracle import compile_with, loss_of, refused
from tests.spellings import SPELLINGS
from treefx.inspection.graph_diff import OperatorChange, diff_operators
from treefx.inspection.inspector import STAGES, Inspection
from treefx.inspection.score_text import format_expression
from treefx.kernels.score import Expr
from treefx.runtime.records import Reports

VOCAB = 61


def batch_of(shared: int = 6, length: int = 14) -> Batch:
    """For `tiny`, which takes no mask."""
    return shared_batch(rows=4, length=length, shared=shared, vocab=VOCAB, padding=None)


def padded_batch() -> Batch:
    """For the zoo."""
    return shared_batch(rows=4, length=14, shared=6)


def tiny(layers: int = 1, **options: Any) -> TinyLM:
    """Of one layer."""
    return TinyLM(SPELLINGS["sdpa_is_causal"], layers=layers, **options)


def step(compiled: Any, batch: Batch) -> None:
    loss: Tensor = loss_of(batch)(compiled)
    torch.autograd.backward(loss)


def inspected(model: nn.Module, batch: Batch, **options: Any) -> Inspection:
    compiled = compile_with(model, **options)
    step(compiled, batch)
    return treefx.inspect(compiled)


@pytest.fixture(scope="module")
def llama() -> Inspection:
    return inspected(zoo("llama"), padded_batch())


def test_graphs_of_all_stages(llama: Inspection) -> None:
    assert tuple(llama.graphs) == STAGES
    assert all(isinstance(gm, fx.GraphModule) for gm in llama.graphs.values())
    assert len(llama.kernels) == 2
    assert llama.restorations
    assert "outside the graph" not in llama.summary()


def test_graphs_of_inductor_with_and_without_its_cache() -> None:
    """The second time the compiled code comes from a cache, which never sees a graph."""
    found = []
    for _ in range(2):
        torch._dynamo.reset()  # forgets the compiled code, which stays in inductor's cache
        model = compiled(inner="inductor", min_sharing=1.0)
        train(model, ids_of())
        found.append(treefx.inspect(model))
    cold, warm = found
    assert tuple(cold.graphs) == tuple(warm.graphs) == STAGES
    for stage in STAGES:
        assert len(cold.graphs[stage].graph.nodes) == len(warm.graphs[stage].graph.nodes)
    assert len(cold.restorations) == len(warm.restorations) > 0
    assert warm.stats["inner"] == "inductor"


def test_stages_that_do_not_exist_yet() -> None:
    compiled = compile_with(tiny())
    with torch.no_grad():
        loss_of(batch_of())(compiled)
    inspection = treefx.inspect(compiled)
    assert tuple(inspection.graphs) == ("captured", "rewritten", "forward")
    assert inspection.restorations == []
    with refused("stage", "'backward'", "captured, rewritten, forward"):
        inspection.readable("backward")


def test_statistics(llama: Inspection) -> None:
    batch = padded_batch()
    assert batch.attention_mask is not None
    raw, distinct = int(batch.attention_mask.sum()), distinct_tokens(batch)
    stats = llama.stats
    assert (stats["raw_tokens"], stats["tokens"]) == (raw, distinct)
    assert stats["sharing_ratio"] == pytest.approx(raw / distinct)
    assert stats["overlap_ratio"] == pytest.approx(1 - distinct / raw)
    assert (stats["ran"], stats["fallback"], stats["expansions"]) == ("packed", None, [])
    assert (stats["attention_rewritten"], stats["graphs"], stats["shapes"]) == (2, 1, 1)
    assert (stats["calls"], stats["compiles"], stats["min_sharing"]) == (1, 1, 1.0)
    assert all(stats["seconds"][name] > 0 for name in ("trace", "label_tokens", "pack_tokens", "compile_inner"))


def test_summary(llama: Inspection) -> None:
    stats, summary = llama.stats, llama.summary()
    assert f"{stats['raw_tokens']} -> {stats['tokens']} distinct" in summary
    assert f"sharing ratio {stats['sharing_ratio']:.2f}" in summary
    assert "2 layers rewritten" in summary
    assert all(node.name in summary for node in llama.restorations)
    starts = {re.match(r"\w+\s+", line).end() for line in summary.splitlines()}  # type: ignore[union-attr]
    assert len(starts) == 1, "columns are not aligned"
    assert f"{stats['raw_tokens']} -> {stats['tokens']} tokens" in repr(llama)


def test_restorations_are_marked(llama: Inspection) -> None:
    marked = [line for line in llama.readable("backward").splitlines() if "<-- gradient restoration" in line]
    assert [line.split(":")[0].strip() for line in marked] == [node.name for node in llama.restorations]
    assert {node.target for node in llama.restorations} == {
        torch.ops.treefx.restore.default,
        torch.ops.treefx.restore_pick.default,
    }
    assert "gradient restoration" not in llama.readable("forward")


def test_expansion_carries_the_line_of_the_user() -> None:
    inspection = inspected(tiny(after=MIXERS["cumsum"][0]()), batch_of())
    (expansion,) = [item for item in inspection.stats["expansions"] if "cumsum" in item["op"]]
    assert "x + 0.1 * x.cumsum(dim=1)" in expansion["line"]
    assert "tests/mixers.py" in expansion["line"]
    assert expansion["reason"]
    summary = inspection.summary()
    assert f"{expansion['op']}: {expansion['reason']}" in summary
    assert expansion["line"] in summary


def test_fallback_is_told() -> None:
    inspection = inspected(tiny(after=MIXERS["roll"][0]()), batch_of(), on_unsupported="fallback")
    stats = inspection.stats
    assert stats["ran"] == "ordinary"
    assert "roll" in stats["fallback"]
    assert stats["attention_rewritten"] == 0
    assert stats["fallback"] in inspection.summary()
    assert tuple(inspection.graphs) == ("captured",)
    assert inspection.kernels == {}
    assert inspection.operator_changes == []


def test_reports_go_with_their_model() -> None:
    """Another parameter may come to lie where one was: its id must not lead to the old report."""
    reports = Reports(None, {})
    parameter = torch.nn.Parameter(torch.zeros(2))
    reports.of([parameter]).count_call()
    assert reports.of([parameter]).calls == 1
    del parameter
    assert reports.all() == []


def test_low_sharing_is_no_fallback() -> None:
    inspection = inspected(tiny(), batch_of(shared=0), min_sharing=100.0)
    assert inspection.stats["ran"] == "ordinary"
    assert inspection.stats["fallback"] is None
    assert "ordinary" in inspection.summary()


def test_figures_of_the_graph_that_ran_last() -> None:
    """Dynamo compiles again in another mode or for another length, and goes back to what it has."""
    model = tiny()
    compiled = compile_with(model)
    lengths, modes = (14, 14, 14, 17, 14), (True, False, True, True, True)
    for calls, (length, training) in enumerate(zip(lengths, modes), start=1):
        batch = batch_of(shared=12 - calls, length=length)
        model.train(training)
        step(compiled, batch)
        stats = treefx.inspect(compiled).stats
        assert stats["tokens"] == distinct_tokens(batch)
        assert stats["calls"] == calls
        assert stats["attention_rewritten"] == 1
        assert stats["graphs"] == 1


class Interrupted(nn.Module):
    """Two pieces: Dynamo breaks between the model and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.scale = tiny(), nn.Parameter(torch.tensor(2.0))

    def forward(self, **inputs: Tensor) -> Any:
        out = self.model(**inputs)
        torch._dynamo.graph_break()
        return out._replace(loss=out.loss * self.scale)


def test_pieces_of_a_model() -> None:
    inspection = inspected(Interrupted(), batch_of())
    assert inspection.stats["graphs"] == 2
    assert inspection.stats["tokens"] == distinct_tokens(batch_of())
    assert inspection.stats["calls"] == 2
    assert [tuple(graphs) for graphs in inspection.all_graphs] == [STAGES, ("captured",)]
    assert inspection.graphs == inspection.all_graphs[0]


def test_an_inspection_keeps_the_moment() -> None:
    compiled = compile_with(tiny())
    step(compiled, batch_of())
    before = treefx.inspect(compiled)
    step(compiled, batch_of(shared=11))
    assert before.stats["tokens"] == distinct_tokens(batch_of())
    assert treefx.inspect(compiled).stats["calls"] == before.stats["calls"] + 1


# What can be inspected --------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"inner": "aot_eager", "min_sharing": 1.0}


def in_place(model: nn.Module) -> Any:
    model.compile(backend="treefx", options=OPTIONS)
    return model


def closure(model: nn.Module) -> Any:
    return torch.compile(lambda **inputs: model(**inputs), backend="treefx", options=OPTIONS)


def nested_closure(model: nn.Module) -> Any:
    def forward(**inputs: Tensor) -> Any:
        return model(**inputs)

    return torch.compile(lambda **inputs: forward(**inputs), backend="treefx", options=OPTIONS)


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        return self.model(**inputs)


def method_of_an_owner(model: nn.Module) -> Any:
    return torch.compile(Trainer(model).forward, backend="treefx", options=OPTIONS)


def method_of_the_model(model: nn.Module) -> Any:
    return torch.compile(model.forward, backend="treefx", options=OPTIONS)


WAYS = [in_place, closure, nested_closure, method_of_an_owner, method_of_the_model]


@pytest.mark.parametrize("compile_as", WAYS)
def test_ways_to_compile(compile_as: Callable[[nn.Module], Any]) -> None:
    compiled = compile_as(tiny())
    step(compiled, batch_of())
    assert treefx.inspect(compiled).stats["tokens"] == distinct_tokens(batch_of())


def test_refusals() -> None:
    with refused("expects a compiled model", "list"):
        treefx.inspect([1, 2])
    with refused("TinyLM", "not compiled", "torch.compile(model, backend='treefx')"):
        treefx.inspect(tiny())
    with refused("TinyLM", "call it once"):
        treefx.inspect(compile_with(tiny()))
    with refused("call it once"):
        treefx.inspect(closure(tiny()))
    elsewhere = torch.compile(tiny(), backend="eager")
    step(elsewhere, batch_of())
    with refused("TinyLM", "backend='treefx' instead of another"):
        treefx.inspect(elsewhere)


# Expressions and differences --------------------------------------------------------------------------------

DOT, Q, K = ("dot",), ("q",), ("k",)
DEPTH_Q, DEPTH_K = ("load", 0, Q), ("load", 0, K)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (("mul", DOT, ("const", 0.25)), "0.25 * (q·k)"),
        (("mul", ("add", DOT, ("const", 1)), ("const", 2)), "2 * ((q·k) + 1)"),
        (("sub", ("sub", Q, K), ("const", 1)), "q - k - 1"),
        (("sub", Q, ("sub", K, ("const", 1))), "q - (k - 1)"),
        (("div", ("const", 1.0), ("mul", Q, K)), "1 / (q * k)"),
        (("pow", ("pow", Q, ("const", 2)), K), "(q ** 2) ** k"),
        (("neg", ("add", Q, K)), "-(q + k)"),
        (("tanh", ("div", DOT, ("const", 50.0))), "tanh((q·k) / 50)"),
        (("lt", ("sub", DEPTH_Q, DEPTH_K), ("const", 8)), "depth[q] - depth[k] < 8"),
        (("and", ("or", ("eq", Q, K), ("lt", Q, K)), ("not", K)), "(q == k or q < k) and not k"),
        (("where", ("le", K, Q), ("float", DOT), ("const", float("-inf"))), "(q·k) if k <= q else -inf"),
        (("add", ("where", ("le", K, Q), DOT, ("const", 0)), ("load", 1)), "((q·k) if k <= q else 0) + bias"),
        (("max", ("load", 2, ("batch",), K), ("head",)), "max(mask[row, k], head)"),
        (("eq", ("const", True), ("eq", Q, K)), "True == (q == k)"),
    ],
)
def test_expressions_as_mathematics(expression: Expr, text: str) -> None:
    assert format_expression(expression, ["depth", "bias", "mask"]) == text


def test_kernels_of_a_model_with_windows_and_caps() -> None:
    inspection = inspected(zoo("gemma2"), padded_batch())
    windowed, full = inspection.kernels.values()
    assert "50 * tanh(0.0625 * (q·k) / 50)" in windowed
    assert "k <= q < subtree_end[k] and column[q] - column[k] < 8" in windowed
    assert "column" not in full
    assert "modeling_gemma2.py" in windowed and "torch.matmul(attn_weights, value_states)" in windowed
    assert "model.layers.0.self_attn" in windowed and "model.layers.1.self_attn" in full
    assert "[1, 4, N, 16] [1, 2, N, 16] [1, 2, N, 16]" in full


def test_kernels_name_inputs_and_computed_buffers() -> None:
    (first, _) = inspected(zoo("bloom"), padded_batch()).kernels.values()
    assert "attention_mask[k]" in first
    slopes = re.search(r"(\w+)\[head\]", first)
    assert slopes is not None
    assert re.search(rf"with {slopes[1]} +\S+modeling_bloom.py:\d+: slopes = ", first)


def test_operator_changes(llama: Inspection) -> None:
    changes = {change.name: change for change in llama.operator_changes}
    assert str(changes["treefx.tree_attention"]) == "treefx.tree_attention: 0 -> 2 (+2)"
    assert changes["nll_loss_forward"].difference == -1
    assert "mm" not in changes, "the matrix products are the same, on fewer tokens"


def test_difference_of_two_graphs() -> None:
    def before(x: Tensor) -> Tensor:
        return torch.tanh(x) + torch.tanh(x + 1) * x

    def after(x: Tensor) -> Tensor:
        return torch.tanh(x) + torch.exp(x) * x

    changes = diff_operators(fx.symbolic_trace(before), fx.symbolic_trace(after))
    assert changes == [OperatorChange("add", 2, 1), OperatorChange("exp", 0, 1), OperatorChange("tanh", 2, 1)]
    assert str(changes[2]) == "tanh: 2 -> 1 (-1)"


# The page ---------------------------------------------------------------------------------------------------


def test_page_of_a_fallback_escapes_names(tmp_path: Path) -> None:
    inspection = inspected(tiny(after=MIXERS["roll"][0]()), batch_of(), on_unsupported="fallback")
    inspection.stats["fallback"] = "<b> & co"
    text = inspection.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;b&gt; &amp; co" in text and "<b> & co" not in text
