"""The JSON for Model Explorer: what its front end demands of a file, against the report that it was made from."""

import json
from pathlib import Path
from typing import Any

import pytest

import treefx
from tests.inspection.browser import HOSTILE
from tests.inspection.situations import compiled, ids_of, train
from treefx.inspection.report.model_explorer import collection_of, overlays_of
from treefx.inspection.report.records import GraphNode, OperatorAccount
from treefx.inspection.report.report import Report

NODE = {"id", "label", "namespace", "attrs", "incomingEdges", "outputsMetadata"}
COLORS = {"#cfe0fb": "once per distinct token", "#f7c6b5": "once per row", "#e3e6ec": "once for the batch"}


@pytest.fixture(scope="module")
def report() -> Report:
    model = compiled("mean", inner="aot_eager", min_sharing=1.0)
    train(model, ids_of())
    return treefx.inspect(model)


@pytest.fixture(scope="module")
def folder(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explorer")
    assert report.to_model_explorer(folder / "deep" / "report.json") == folder / "deep" / "report.json"
    return folder / "deep"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def check_pairs(pairs: list[dict[str, str]]) -> None:
    assert all(set(pair) == {"key", "value"} and all(isinstance(x, str) and x for x in pair.values()) for pair in pairs)


def check_collection(collection: Any) -> None:
    """A file is read if it has ``label`` and ``graphs``; an edge from a node that is not there ends the drawing."""
    assert set(collection) == {"label", "graphs"} and isinstance(collection["label"], str)
    ids = [graph["id"] for graph in collection["graphs"]]
    assert len(ids) == len(set(ids))
    for graph in collection["graphs"]:
        assert set(graph) <= {"id", "nodes", "groupNodeAttributes"}
        names = [node["id"] for node in graph["nodes"]]
        assert len(names) == len(set(names))
        for node in graph["nodes"]:
            assert set(node) == NODE
            assert all(isinstance(node[key], str) for key in ("id", "label", "namespace"))
            check_pairs(node["attrs"])
            for edge in node["incomingEdges"]:
                assert set(edge) == {"sourceNodeId", "sourceNodeOutputId", "targetNodeInputId"}
                assert edge["sourceNodeId"] in names and all(isinstance(x, str) for x in edge.values())
            for output in node["outputsMetadata"]:
                assert set(output) == {"id", "attrs"}
                check_pairs(output["attrs"])
        for figures in graph.get("groupNodeAttributes", {}).values():
            assert all(isinstance(value, str) for value in figures.values())


def test_graphs_are_those_of_the_report(report: Report, folder: Path) -> None:
    collection = read(folder / "report.json")
    check_collection(collection)
    assert collection["label"] == "LM" and [graph["id"] for graph in collection["graphs"]] == list(report.nodes)
    for graph in collection["graphs"]:
        edges = {(x["sourceNodeId"], node["id"]) for node in graph["nodes"] for x in node["incomingEdges"]}
        assert edges == {(name, node.name) for node in report.nodes[graph["id"]] for name in node.inputs}
    captured = {node["id"]: node for node in collection["graphs"][0]["nodes"]}
    assert [captured[item.name]["namespace"] for item in report.operators if item.op == "addmm"] == [
        "blocks/0/project", "blocks/1/project", "head"
    ]  # fmt: skip
    groups = collection["graphs"][0]["groupNodeAttributes"]
    assert groups["blocks/0"]["class"] == "Block"
    assert {node["namespace"] for node in captured.values()} <= set(groups)


def test_overlays_are_the_accounts_of_the_operators(report: Report, folder: Path) -> None:
    graphs = read(folder / "report.json")["graphs"]
    collection = {graph["id"]: {node["id"] for node in graph["nodes"]} for graph in graphs}
    for name in ("flops_before", "flops_after"):
        (overlay,) = read(folder / f"report.{name}.json").values()
        assert {key: item["value"] for key, item in overlay["results"].items()} == {
            item.name: getattr(item, name) for item in report.operators
        }
        assert [stop["stop"] for stop in overlay["gradient"]] == [0, 1]
    verdict = read(folder / "report.verdict.json")
    assert set(verdict) == set(collection)
    for stage, overlay in verdict.items():
        assert set(overlay["results"]) <= collection[stage]
        for item in overlay["results"].values():
            assert item["value"].startswith(COLORS.get(item["bgColor"], "not at all"))
    mean = next(item for item in report.operators if item.op == "mean")
    assert verdict["captured"]["results"][mean.name]["value"] == "once per row [TFX104]"


def test_an_edge_from_a_node_that_is_not_there_is_left_out() -> None:
    """A report may have been read from a file; names are texts like others."""
    nodes = {"captured": (GraphNode(HOSTILE, HOSTILE, ("gone", HOSTILE), module=HOSTILE),)}
    accounts = (OperatorAccount(HOSTILE, "mm", "of another kind", images={"rewritten": ("gone",)}),)
    check_collection(collection_of("", nodes, accounts, ()))
    assert overlays_of(nodes, accounts)["verdict"]["captured"]["results"][HOSTILE]["value"] == "of another kind"
