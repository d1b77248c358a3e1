"""Generated kernel source where people look for it: in the inspection, and in the folder of dumps."""

import ast
from pathlib import Path

import pytest
import torch
from torch import fx

import treefx
from tests.batches import shared_batch
from tests.models import zoo
from treefx.kernels.score import Score, make_score
from treefx.passes.packing.kernel_sources import kernel_source_of


def test_inspection_and_dumps_hold_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEFX_DUMP_DIR", str(tmp_path))
    torch._dynamo.reset()
    model = zoo("gemma2")
    compiled = torch.compile(model, backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    batch = shared_batch(rows=4, length=14, shared=6)
    compiled(**batch.inputs(), use_cache=False)
    windowed, full = treefx.inspect(compiled).kernels.values()
    assert "def backward_queries(" in windowed and "tanh(0.00125 * dot)" in windowed
    assert windowed.count("modeling_gemma2.py") >= 2, "the line stands in the source, too"
    written = [path.read_text() for path in (tmp_path / "kernels").iterdir()]
    for text in (windowed, full):
        source = text[text.index('"""Tree attention, generated') :]
        ast.parse(source)
        assert source in written


def attention(score: Score, dtype: torch.dtype, trace: str = "") -> fx.Node:
    graph = fx.Graph()
    q, k, v, ends = (graph.placeholder(name) for name in ("q", "k", "v", "ends"))
    for node, width in ((q, 8), (k, 8), (v, 4)):
        node.meta["val"] = torch.empty(1, 2, 3, width, dtype=dtype, device="meta")
    arguments = (q, k, v, ends, [], None, score.to_json(), "auto")
    node = graph.call_function(torch.ops.treefx.tree_attention.default, arguments)
    node.meta["stack_trace"] = trace
    return node


def test_source_is_the_same_every_time_and_but_for_the_line() -> None:
    score = make_score(scale=0.5, softcap=3.0)
    trace = 'File "a\\b.py", line 7, in f\n    x = """y"""'
    plain, again, placed = (kernel_source_of(attention(score, torch.bfloat16, text)) for text in ("", "", trace))
    assert plain == again
    (known,) = set(placed.splitlines()) - set(plain.splitlines())
    assert "b.py:7: x =" in known
    ast.parse(placed)


def test_why_there_is_no_source() -> None:
    floored = Score(("floordiv", ("dot",), ("const", 2.0)))
    assert "differentiable operations" in kernel_source_of(attention(floored, torch.float32))
    assert "dense reference" in kernel_source_of(attention(make_score(scale=1.0), torch.float64))
