"""The report: every operator once, costs as PyTorch counts them, twelve causes by name, and back from JSON."""

import dataclasses
import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import treefx
from tests.backend.support import fresh_cache
from tests.batches import shared_batch
from tests.inspection.causes import CAUSES, Cause, Planted
from tests.inspection.situations import LM, compiled, ids_of, train
from tests.models import zoo
from tests.oracle import compile_with, loss_of, refused
from treefx.inspection.inspector import Inspection
from treefx.inspection.report.diff import diff
from treefx.inspection.report.forest import account_forest, visible_pairs
from treefx.inspection.report.records import SCHEMA
from treefx.inspection.report.report import Report
from treefx.runtime.call_log import MOST_CALLS

RAN = ("token", "batch", "row", "none")
IDS = ids_of()


@pytest.fixture(scope="module")
def model() -> Any:
    made = compiled(inner="aot_eager", min_sharing=1.0)
    train(made, IDS)
    train(made, IDS)
    return made


@pytest.fixture(scope="module")
def report(model: Any) -> Inspection:
    return treefx.inspect(model)


def test_every_operator_has_one_account(report: Inspection) -> None:
    sources = report._sources
    assert sources is not None
    calls = [node.name for node in sources.traced.graph.nodes if node.op == "call_function"]
    wanted = [name for name in calls if not name.startswith("getitem")]
    assert [item.name for item in report.operators] == wanted
    assert {item.ran for item in report.operators} <= set(RAN)
    assert all(bool(item.code) == (item.ran == "row") for item in report.operators)
    assert all(item.line for item in report.operators)
    projected = [item for item in report.operators if item.op == "addmm"]
    assert [item.module for item in projected] == ["blocks.0.project", "blocks.1.project", "head"]
    assert all(set(item.images) == {"rewritten", "forward", "backward"} for item in projected)
    assert all(item.captured for item in report.operators if "blocks.1" not in item.module)


def test_images_lead_to_nodes_of_the_same_operator(report: Inspection) -> None:
    """A copied layer has its own images, and gradients of its weights."""
    rewritten = {node.name: node for node in report.graphs["rewritten"].graph.nodes}
    for item in report.operators:
        if item.op == "addmm":
            (image,) = item.images["rewritten"]
            assert "addmm" in str(rewritten[image].target)
            assert sum(name.startswith("mm") for name in item.images["backward"]) == 2
    images = [name for item in report.operators for name in item.images.get("rewritten", ())]
    assert len(images) == len(set(images)), "a node of the rewritten graph stands for two operators"


def test_modules_sum_their_operators_and_fold_equal_layers(report: Inspection) -> None:
    by_path = {item.path: item for item in report.modules}
    assert by_path[""].operators == len(report.operators)
    assert by_path["blocks.0"].folded == ("blocks.0", "blocks.1")
    parts = [item for item in report.modules if item.depth == 1]
    outside = sum(item.flops_before for item in report.operators if not item.module)
    assert sum(item.flops_before for item in parts) + outside == by_path[""].flops_before == report.verdict.flops_before


def _tree_flops(q: Any, k: Any, v: Any, *others: Any, out_val: Any = None, **more: Any) -> int:
    """What the documentation of ``costs`` says: each query counts the columns of a row."""
    return 2 * math.prod(q[:-1]) * IDS.shape[1] * (q[-1] + v[-1])


def test_flops_are_those_of_the_counter_of_pytorch(report: Inspection) -> None:
    plain = LM()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as eager:
        plain(input_ids=IDS, labels=IDS)
    assert report.verdict.flops_before == pytest.approx(eager.get_total_flops(), rel=0.01)
    mapping = {torch.ops.treefx.tree_attention: _tree_flops}
    gm, sizes = report.graphs["rewritten"], report._material.sizes
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with FakeTensorMode(), FlopCounterMode(display=False, custom_mapping=mapping) as packed:
        gm(*[torch.zeros(sizes.shape(x), dtype=x.dtype) if isinstance(x, Tensor) else sizes.number(x) for x in values])
    assert report.verdict.flops_after == pytest.approx(packed.get_total_flops(), rel=0.01)
    assert report.verdict.flops_after < 0.6 * report.verdict.flops_before


def test_forest_is_that_of_the_rows(report: Inspection) -> None:
    forest = treefx.Forest.from_sequences(list(IDS))
    found = report.forest
    assert found is not None and (found.raw_tokens, found.tokens) == (forest.raw_tokens, forest.num_tokens)
    assert found.nodes[0].ids == tuple(IDS[0, :6].tolist()) and found.nodes[0].rows == (0, 1, 2, 3)
    assert all(node.parent == 0 and node.depth == 6 for node in found.nodes[1:])
    counts = np.bincount(np.concatenate([path.numpy() for path in forest.token_of]))
    times = dict((rows, tokens) for tokens, rows in report.restoration[0].multiplicities)
    assert times == {int(rows): int((counts == rows).sum()) for rows in set(counts.tolist())}
    rows = report._material.rows
    assert rows is not None and account_forest(report._material) == found
    assert visible_pairs(rows)[0] == int(forest.depth.sum()) + forest.num_tokens
    assert rows.depth.tolist() == forest.depth.tolist()


def test_kernels_of_operators_where_inductor_tells(report: Inspection) -> None:
    made = compiled(inner="inductor", min_sharing=1.0)
    with torch._inductor.config.patch({"trace.provenance_tracking_level": 1}), fresh_cache():
        train(made, IDS)
    found = {item.name: item for item in treefx.inspect(made).operators}
    products = [item for item in found.values() if item.op == "addmm" and item.ran == "token"]
    assert products and all(any("mm" in kernel for kernel in item.kernels) for item in products)
    assert f"computed by {products[0].kernels[0]}" in treefx.inspect(made).why(products[0].name)
    silent = [item for item in found.values() if item.ran == "none"]
    assert not any(item.kernels for item in (*silent, *report.operators)), "another inner compiler reports no kernels"


def test_restorations_and_memory(report: Inspection) -> None:
    assert [item.name for item in report.restoration] == [node.name for node in report.restorations]
    assert {item.of for item in report.restoration} == {"pick", "expand"}
    assert report.memory.bytes == sum(item.bytes for item in report.memory.layers) > 0


def test_attention_as_mathematics(report: Inspection) -> None:
    first, second = report.attention
    assert first.score == "0.25 * (q·k)" and first.mathml.startswith("<math") and first.source == second.source == 0
    assert "def " in report.sources[0] or "No kernel" in report.sources[0]


def test_passes_say_what_they_changed(report: Inspection) -> None:
    pack = next(item for item in report.passes if item.name == "pack_tokens")
    assert pack.seconds > 0 and pack.nodes_before < pack.nodes_after
    assert "treefx.tree_attention: 0 -> 2" in pack.changes
    assert not any(" at 0x" in line for item in report.passes for line in item.changes)


def test_calls_are_logged_and_bounded(report: Inspection) -> None:
    assert [(item.ran, item.raw_tokens, item.tokens) for item in report.calls] == [("packed", 36, 18)] * 2
    assert [item.compiles for item in report.calls] == [1, 0]
    assert all(item.seconds is not None and item.seconds > 0 for item in report.calls)
    made = compiled(min_sharing=3.0)
    for _ in range(MOST_CALLS + 5):
        with torch.no_grad():
            made(input_ids=IDS)
    calls = treefx.inspect(made).calls
    assert len(calls) == MOST_CALLS and {item.code for item in calls} == {"TFX016"}


def test_report_comes_back_from_json(report: Inspection) -> None:
    again = treefx.Report.from_json(report.to_json())
    assert type(again) is Report and again == report and report == again
    assert again.stats["tokens"] == report.stats["tokens"] and again.summary() == report.summary()
    assert again.kernels == report.kernels and again.why("addmm") == report.why("addmm")
    value = json.loads(report.to_json())
    assert list(value)[0] == "schema" and value["schema"] == SCHEMA == again.schema
    changed = dataclasses.replace(again, verdict=dataclasses.replace(again.verdict, tokens=1))
    assert changed != again


def test_other_forms_are_refused_by_name(report: Inspection) -> None:
    value = json.loads(report.to_json())
    with refused("treefx.report/0", SCHEMA):
        Report.from_json(json.dumps({**value, "schema": "treefx.report/0"}))
    with refused("verdict.tokens", "int"):
        Report.from_json(json.dumps({**value, "verdict": {**value["verdict"], "tokens": "many"}}))
    with refused("nonsense"):
        Report.from_json(json.dumps({**value, "nonsense": 1}))
    for text in ("", "[]", "{}"):
        with refused("report"):
            Report.from_json(text)


def test_sections_are_made_when_they_are_read() -> None:
    made = compiled()
    train(made, IDS)
    fresh = treefx.inspect(made)
    assert "operators" not in vars(fresh) and "_material" not in vars(fresh)
    assert fresh.operators and "operators" in vars(fresh)
    with pytest.raises(AttributeError, match="nonsense"):
        fresh.nonsense  # noqa: B018


def test_a_model_of_the_zoo_in_a_padded_batch() -> None:
    compiled_model = compile_with(zoo("llama"), inner="aot_eager")
    loss_of(shared_batch(rows=4, length=14, shared=6))(compiled_model).backward()
    report = treefx.inspect(compiled_model)
    assert report.verdict.coverage.share == 1.0 and not report.verdict.losses
    assert "model.layers.0.mlp" in {item.path for item in report.modules}
    assert "once per distinct token" in report.why("model.layers.1.mlp")
    assert Report.from_json(report.to_json()) == report


def reported(cause: Cause) -> Inspection:
    torch.manual_seed(0)
    model = torch.compile(
        Planted(cause.plant), backend="treefx", options={"inner": "eager", "min_sharing": cause.min_sharing}
    )
    ids = cause.ids()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", treefx.SharingWarning)
        model(input_ids=ids, **cause.given(ids))
    return treefx.inspect(model)


def test_twelve_causes_are_planted() -> None:
    assert len(CAUSES) == 12 and len({(cause.code, cause.plant) for cause in CAUSES.values()}) == 12


@pytest.mark.parametrize("name", CAUSES)
def test_why_names_a_planted_cause(name: str) -> None:
    cause = CAUSES[name]
    found = reported(cause)
    answer = found.why()
    assert f"[{cause.code}]" in answer, answer
    assert all(word in answer for word in cause.words), answer
    assert "Way out: " in answer and "\n" not in answer
    assert cause.code in {loss.code for loss in found.verdict.losses}
    assert ("proved causal" in found.verdict.advice) == (name == "cumsum") and found.verdict.advice
    assert sum(item.ran in RAN for item in found.operators) == len(found.operators) > 0
    assert Report.from_json(found.to_json()).why() == answer


def test_why_of_a_line_a_module_and_a_node() -> None:
    found = reported(CAUSES["cumsum"])
    planted = next(item for item in found.operators if item.op == "cumsum")
    place = (planted.line or "").split(": ")[0].rpartition("/")[2]
    assert "[TFX104]" in found.why(place) and "x.cumsum(dim=1)" in found.why(place)
    assert "cumsum" in found.why(planted.name) and "once per row" in found.why(planted.name)
    assert "TFX104" not in found.why("qkv") and "once per distinct token" in found.why("qkv")
    with refused("'qkw'", "similar ones are", "qkv"):
        found.why("qkw")
    with refused("causes.py:1", f"similar ones are {place.partition('.')[0]}"):
        found.why("causes.py:1")
    with refused("report.modules and report.operators list them"):
        found.why("no such thing")


def test_diff_of_two_reports() -> None:
    plain, planted = reported(Cause("")), reported(CAUSES["dropout"])
    assert not diff(plain, plain) and str(diff(plain, plain)) == "no difference"
    found = diff(plain, planted)
    assert [change.what for change in found.losses][0].startswith("TFX102 ")
    assert ("model: native_dropout", None, "row TFX102") in {(c.what, c.before, c.after) for c in found.operators}
    assert {"coverage", "FLOPs after"} <= {change.what for change in found.verdict}
    assert "head: addmm: token -> row TFX102" in str(found)
    options = diff(plain, reported(dataclasses.replace(Cause(""), min_sharing=1.5)))
    assert [change.what for change in options.settings] == ["min_sharing"] and not options.losses
