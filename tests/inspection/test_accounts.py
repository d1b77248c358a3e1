"""Six architectures: the report's accounts against what PyTorch itself counts, sees and saves."""

import functools
import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import treefx
from tests.batches import shared_batch
from tests.models import zoo
from tests.oracle import compile_with, loss_of
from tests.strategies import Rows, row_batches
from treefx.inspection.inspector import Inspection
from treefx.inspection.report.formulas import visible_of
from treefx.inspection.score_text import attention_formulas

COLUMNS = 14
BATCH = shared_batch(rows=4, length=COLUMNS, shared=6)
MODELS = ("llama", "gemma2", "qwen3_moe", "bloom", "qwen3_next", "own")
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]},
    "gemma2": {},
}


class Own(nn.Module):
    """A running sum over the tokens, and a statistic of the batch, between attention and head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(128, width), nn.BatchNorm1d(width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, 128)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        x = x + 0.1 * x.cumsum(dim=1)
        logits = self.head(self.norm(x.flatten(0, 1)).view_as(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Case(NamedTuple):
    """A model after one training step."""

    model: nn.Module
    report: Inspection
    saved: int
    """Bytes of the distinct storages that autograd kept in a second step, but parameters, inputs and the trie."""


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Own() if name == "own" else zoo(name, **CHANGES.get(name, {"num_hidden_layers": 1}))


@functools.cache
def case(name: str) -> Case:
    torch._dynamo.reset()
    model = made(name)
    compiled = compile_with(model)
    step = (lambda m: m(**BATCH.inputs())) if name == "own" else loss_of(BATCH)
    step(compiled).backward()
    kept: dict[int, tuple[int, Any]] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = (x.untyped_storage().nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = step(compiled)
    report = treefx.inspect(compiled)
    trie = report._first.trie
    assert trie is not None
    batch: Any = trie[0]()
    given = [*model.parameters(), *model.buffers(), *BATCH.inputs().values(), *batch.metadata]
    known = {x.untyped_storage()._cdata for x in given}
    loss.backward()
    return Case(model, report, sum(size for key, (size, _) in kept.items() if key not in known))


@pytest.fixture(params=MODELS)
def at(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


def test_every_operator_has_one_account(at: Case) -> None:
    sources = at.report._sources
    assert sources is not None
    calls = [node for node in sources.traced.graph.nodes if node.op == "call_function"]
    names = [node.name for node in calls if node.target.__name__ != "getitem"]
    assert Counter(item.name for item in at.report.operators) == Counter(names)
    assert {item.ran for item in at.report.operators} <= {"token", "batch", "row", "none"}
    assert all(bool(item.code) == (item.ran == "row") for item in at.report.operators)
    images = [name for item in at.report.operators for name in item.images.get("rewritten", ())]
    assert len(images) == len(set(images)), "a node of the rewritten graph stands for two operators"
    by_ran = at.report.verdict.coverage
    assert by_ran.token + by_ran.batch + by_ran.row == at.report.verdict.flops_before > 0


def _attention_flops(q: Any, k: Any, v: Any, *others: Any, out_val: Any = None, **more: Any) -> int:
    """Every query counts the columns of a row, on rows and on the tree."""
    return 2 * math.prod(q[:-1]) * COLUMNS * (q[-1] + v[-1])


def _grouped_flops(a: Any, b: Any, *others: Any, out_shape: Any = None, **more: Any) -> int:
    """The counter of PyTorch 2.13 has no formula for it: every row meets one matrix."""
    return 2 * math.prod(out_shape) * a[-1]


MAPPING: dict[Any, Any] = {
    torch.ops.treefx.tree_attention: _attention_flops,
    torch.ops.treefx.attention: _attention_flops,
    torch.ops.aten._grouped_mm: _grouped_flops,
    torch.ops.transformers.grouped_mm_fallback: _grouped_flops,
}


def counted(gm: fx.GraphModule, report: Inspection) -> int:
    """FLOPs of a graph as ``torch.utils.flop_counter`` counts them while it runs on fake tensors."""
    sizes = report._material.sizes
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False, custom_mapping=MAPPING) as counter:
        gm(*[torch.zeros(sizes.shape(x), dtype=x.dtype) if isinstance(x, Tensor) else sizes.number(x) for x in values])
    return int(counter.get_total_flops())


def test_flops_are_those_of_the_counter_of_pytorch(at: Case) -> None:
    sources, verdict = at.report._sources, at.report.verdict
    assert sources is not None
    assert verdict.flops_before == pytest.approx(counted(sources.traced, at.report), rel=0.01)
    assert verdict.flops_after == pytest.approx(counted(at.report.graphs["rewritten"], at.report), rel=0.01)
    if hasattr(at.model, "config") and at.model.config.model_type == "qwen3_next":
        return  # its scan is captured with a triangular solve, which PyTorch does not count, for a loop of products
    math_only = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math_only, FlopCounterMode(display=False, custom_mapping=MAPPING) as eager:
        at.model(**BATCH.inputs())
    assert verdict.flops_before == pytest.approx(eager.get_total_flops(), rel=0.01)


def test_bytes_are_those_that_autograd_saves(at: Case) -> None:
    assert at.report.memory.bytes == pytest.approx(at.saved, rel=0.05)


def test_multiplicities_are_those_of_the_forest(at: Case) -> None:
    mask = torch.ones_like(BATCH.input_ids) if isinstance(at.model, Own) else BATCH.attention_mask
    forest = treefx.Forest.from_padded(BATCH.input_ids, mask)
    rows_of_token = np.bincount(np.concatenate([path.numpy() for path in forest.token_of]))
    times = Counter(rows_of_token.tolist())
    assert at.report.restoration and len(times) > 2
    for item in at.report.restoration:
        assert dict((rows, tokens) for tokens, rows in item.multiplicities) == times


@functools.cache
def masks(name: str) -> tuple[tuple[Any, int | None], ...]:
    """Of each attention, the condition of the report as a function of (q, k, functions), and its window."""
    report = case(name).report
    windows = [8, None] if name == "gemma2" else [None]
    found = attention_formulas(report._material.captured, report.graphs["rewritten"]).values()
    conditions = [visible_of(formula.condition, formula.names) for formula in found]
    assert len(conditions) == len(windows) == len(report.attention) and all(x.mathml for x in report.attention)
    return tuple(zip(conditions, windows, strict=True))


def evaluated(condition: Any, forest: Any) -> Any:
    """A condition at every pair of tokens of a forest, [N, N]."""
    k, q = (sympy.Symbol(name, real=True) for name in "kq")
    functions = {"end": lambda k: forest.subtree_end.numpy()[k], "column": lambda k: forest.depth.numpy()[k]}
    known = {str(item.func) for item in condition.atoms(sympy.core.function.AppliedUndef)}
    assert known <= set(functions), known
    at = np.arange(forest.num_tokens)
    return sympy.lambdify([q, k], condition, modules=[functions, "numpy"])(at[:, None], at[None, :])


def dense(forest: Any, window: int | None) -> Any:
    """Every token and the tokens above it on its path, [N, N], by the definition."""
    found = np.zeros((forest.num_tokens, forest.num_tokens), dtype=bool)
    for token in range(forest.num_tokens):
        above, steps = token, 0
        while above >= 0 and (window is None or steps < window):
            found[token, above] = True
            above, steps = int(forest.parent[above]), steps + 1
    return found


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20, deadline=None)
@given(rows=row_batches())
def test_mathematics_of_the_mask_is_the_dense_mask(name: str, rows: Rows) -> None:
    forest = treefx.Forest.from_sequences(rows)
    for condition, window in masks(name):
        assert np.array_equal(evaluated(condition, forest), dense(forest, window))


def test_a_causal_mask_over_packed_tokens_is_another_one() -> None:
    k, q = (sympy.Symbol(name, real=True) for name in "kq")
    forest = treefx.Forest.from_sequences([[1, 2, 3], [1, 4]])
    assert not np.array_equal(evaluated(sympy.Le(k, q), forest), dense(forest, None))


def test_a_converted_model_runs_per_token_and_the_report_names_what_it_lacks() -> None:
    model = made("llama")
    treefx.convert(model)
    loss_of(BATCH)(model).backward()
    report = treefx.inspect(model)
    assert report.operators and {item.ran for item in report.operators} == {"token"}
    assert report.verdict.coverage.share == 1.0 and not report.verdict.losses
    assert report.verdict.flops_after * 4 * COLUMNS == report.verdict.flops_before * report.verdict.tokens > 0
    assert report.calls[0].ran == "packed"
    assert not (report.attention or report.restoration or report.memory.bytes)
    assert "has no rewritten graph" in report.verdict.advice and "TFX001" not in report.why()
    assert treefx.Report.from_json(report.to_json()) == report
