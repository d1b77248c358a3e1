"""The page of a report: its parts, hostile texts, and in Chromium what is on the screen."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import treefx
from tests.inspection.causes import CAUSES, Planted
from tests.inspection.situations import compiled, ids_of, train
from treefx.inspection.html import render_page
from treefx.inspection.inspector import STAGES, Inspection
from treefx.inspection.report.records import GraphNode, ModuleAccount
from treefx.inspection.report.report import Report

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"
MOST_SECONDS = 2.0


class Words:
    """A tokenizer whose texts attack the page."""

    def decode(self, ids: list[int]) -> str:
        return HOSTILE + "".join(f" word{i}" for i in ids)


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
    assert not re.search(r"https?://|src=|<link|@import|url\(|fetch\(|import\(", without_data)


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


def dom_of(text: str, tmp_path: Path, driver: str) -> dict[str, Any]:
    """What a script finds in the opened page."""
    if not CHROMIUM:
        pytest.skip("no Chromium on this machine")
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", f"<script>{driver}</script></body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-answer="([^"]*)"', printed)
    assert found is not None, printed[-500:]
    answer: dict[str, Any] = json.loads(html.unescape(found[1]))
    return answer


DRIVER = """
const answer = {title: document.title, images: document.querySelectorAll("img").length};
const first = document.querySelector("rect.run");
answer.hover = first.querySelector("title").textContent;
const second = document.querySelectorAll("rect.run")[1];
answer.wide = first.getBoundingClientRect().width > second.getBoundingClientRect().width;
first.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
answer.detail = byId("tree-detail").textContent;
for (const box of document.querySelectorAll("#modules details details")) { box.open = true; box.ontoggle(); }
answer.folded = byId("modules").textContent.includes("x 2");
showNode("captured", "addmm");
answer.node = byId("node-detail").textContent;
answer.lit = [...document.querySelectorAll("#right .lit")].map((line) => line.dataset.name);
const started = performance.now();
byId("search").value = "restore";
byId("search").dispatchEvent(new Event("input"));
answer.search = byId("found").textContent;
answer.searched = performance.now() - started;
answer.ready = Number(document.documentElement.dataset.ready);
document.documentElement.dataset.answer = JSON.stringify(answer);
"""


def test_what_is_on_the_screen(text: str, tmp_path: Path) -> None:
    answer = dom_of(text, tmp_path, DRIVER)
    assert (answer["title"], answer["images"]) == ("treefx: what became of LM", 0)
    assert "<script>" in answer["hover"] and "word" in answer["hover"] and answer["wide"]
    assert "rows: 0, 1, 2, 3" in answer["detail"] and "edges out of it" in answer["detail"]
    assert answer["folded"] and answer["lit"] == ["addmm"]
    assert "runs: token" in answer["node"] and "rewritten: addmm" in answer["node"]
    assert answer["search"].endswith("found") and int(answer["search"].split()[0]) >= 2


def test_ten_thousand_nodes_open_quickly(report: Inspection, tmp_path: Path) -> None:
    read = Report.from_json(report.to_json())
    names = [f"addmm_{i}" for i in range(5000)]

    def layer(i: int) -> str:
        return f"model.layers.{i // 157}.mlp"

    captured = tuple(GraphNode(n, "addmm", (), "f32[4, 9]", layer(i), f"a.py:{i}: x") for i, n in enumerate(names))
    rewritten = tuple(dataclasses.replace(node, sources=(node.name,)) for node in captured)
    paths = ["", "model", "model.layers", *(f"model.layers.{i}" for i in range(32))]
    modules = tuple(ModuleAccount(p, "Block", p.count(".") + bool(p), 9, 9, 0, 0, 9, 5, 9, 5) for p in paths)
    large = dataclasses.replace(read, nodes={"captured": captured, "rewritten": rewritten}, modules=modules)
    driver = DRIVER.replace('showNode("captured", "addmm")', 'showNode("captured", "addmm_4000")').replace(
        'value = "restore"', 'value = "layers.31"'
    )
    answer = dom_of(render_page(large), tmp_path, driver)
    print(f"10,000 nodes: open {answer['ready']} ms, search {answer['searched']:.0f} ms")
    assert answer["ready"] < 1000 * MOST_SECONDS
    assert answer["lit"] == ["addmm_4000"]
    assert answer["search"] == "266 found, 100 shown"
