"""The page of a report: its parts, and hostile texts; ``test_screen`` opens it in Chromium."""

import dataclasses
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import treefx
from tests.inspection.browser import HOSTILE, Words
from tests.inspection.causes import CAUSES, Planted
from tests.inspection.situations import compiled, ids_of, train
from treefx.inspection.html import render_page
from treefx.inspection.inspector import STAGES, Inspection
from treefx.inspection.report.report import Report


class Page(HTMLParser):
    """Elements by tag with attributes, and the balance of the tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def data_of(text: str) -> Any:
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


@pytest.fixture(scope="module")
def report() -> Inspection:
    model = compiled(inner="aot_eager", min_sharing=1.0)
    train(model, ids_of())
    return treefx.inspect(model)


@pytest.fixture(scope="module")
def text(report: Inspection, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "deep" / "page.html"
    return report.to_html(path, tokenizer=Words()).read_text(encoding="utf-8")


def test_the_parts_of_the_page(report: Inspection, text: str) -> None:
    page = Page(text)
    assert page.open == []
    assert html.escape(report.verdict.sentence) in text
    made = f"LM, cpu, treefx {treefx.__version__}, PyTorch {torch.__version__}, inner compiler aot_eager"
    assert f'<p class="hint" id="made">{made}</p>' in text and "<title>treefx: what became of LM</title>" in text
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert {"verdict", "tree", "modules", "left", "right", "search", "passes", "calls", "data"} <= ids
    assert "<math" in text and "0.25 * (q·k)" in text and text.count("Triton source") == 1
    assert "<code>treefx.tree_attention: 0 -&gt; 2 (+2)</code>" in text
    data = data_of(text)
    assert tuple(data["nodes"]) == STAGES
    for stage, gm in report.graphs.items():
        if stage != "captured":
            assert len(data["nodes"][stage]) == len(gm.graph.nodes)
    marks = [node[7] for node in data["nodes"]["backward"]]
    assert marks.count("restore") == len(report.restorations) == 2 and marks.count("attention") == 2
    assert [len(run["rows"]) for run in data["forest"]["nodes"]] == [4, 1, 1, 1, 1]


def test_the_page_needs_nothing_else(text: str) -> None:
    without_data = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
    assert not re.search(r"https?://|src=|<link|@import|url\((?!#)|fetch\(|import\(", without_data)


def test_hostile_texts_are_data(report: Inspection, text: str) -> None:
    assert HOSTILE not in text and data_of(text)["forest"]["nodes"][0]["text"].startswith(HOSTILE)
    attention = tuple(dataclasses.replace(item, mathml=HOSTILE, score=HOSTILE) for item in report.attention)
    verdict = dataclasses.replace(report.verdict, sentence=HOSTILE, advice=HOSTILE)
    read = Report.from_json(report.to_json())
    hostile = dataclasses.replace(read, verdict=verdict, attention=attention, text=HOSTILE, sources=(HOSTILE,))
    page = render_page(hostile)
    assert HOSTILE not in page and html.escape(HOSTILE) in page and Page(page).open == []


def test_a_report_from_a_file_and_a_dry_run_have_pages(report: Inspection, tmp_path: Path) -> None:
    again = Report.from_json(report.to_json()).to_html(tmp_path / "again.html").read_text(encoding="utf-8")
    assert (
        data_of(again)["nodes"] == data_of(report.to_html(tmp_path / "page.html").read_text(encoding="utf-8"))["nodes"]
    )
    cause = CAUSES["dropout"]
    dry = treefx.explain(Planted(cause.plant), ids_of(), {"min_sharing": 1.0})
    page = dry.to_html(tmp_path / "dry.html").read_text(encoding="utf-8")
    assert "TFX102" in page and "F.dropout(x, 0.1)" in page and Page(page).open == []


def test_a_report_from_elsewhere_may_lack_or_forge_what_made_it(report: Inspection) -> None:
    plain = json.loads(report.to_json())
    for name in ("model", "devices", "treefx", "torch"):
        del plain["figures"][name]
    read = treefx.Report.from_json(json.dumps(plain))
    assert 'id="made">a model, inner compiler aot_eager</p>' in render_page(read)
    plain["figures"] |= {"model": HOSTILE, "devices": [HOSTILE]}
    page = render_page(treefx.Report.from_json(json.dumps(plain)))
    assert HOSTILE not in page and Page(page).open == []
