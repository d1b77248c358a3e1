"""The time line of products and collectives that rates predict, and the page that draws it."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.passes.overlap.test_graphs import WIDTH, gathered, graph_of, reduced
from treefx.errors import ConfigError
from treefx.passes.overlap import OverlapCollectives, Rates
from treefx.passes.overlap.time_line import COMPUTE, LINK, Span

ROWS = 256
SECOND = {"flops_per_second": 2.0 * ROWS * WIDTH * WIDTH, "bytes_per_second": 2.0 * ROWS * WIDTH * 4}
"""Rates by which a product and an all-reduce take a second each."""


def run(rates: Rates) -> OverlapCollectives:
    overlap = OverlapCollectives(rates)
    overlap(graph_of(lambda x, w: torch.relu(reduced(x @ w)), ROWS).graph)
    return overlap


def lane(found: list[Span], name: str) -> list[tuple[float, float]]:
    return [(span.start, span.stop) for span in found if span.lane == name]


def test_a_collective_follows_its_product_and_chunks_overlap() -> None:
    (line,) = run(Rates(**SECOND)).time_lines
    assert lane(line.before, COMPUTE) == [(0.0, 1.0)] and lane(line.before, LINK) == [(1.0, 2.0)]
    assert line.count == 1
    assert lane(line.after, COMPUTE) == [(at / 8, (at + 1) / 8) for at in range(8)]
    assert lane(line.after, LINK) == [((at + 1) / 8, (at + 2) / 8) for at in range(8)]


def test_a_slow_link_is_busy_and_chunks_cost_what_rates_say() -> None:
    """Chunks wait for the link, and each adds to product and collective; the gate's formula gives the same end."""
    rates = Rates(**SECOND | {"bytes_per_second": ROWS * WIDTH * 4.0}, product_seconds=0.01, latency_seconds=0.02)
    (line,) = run(rates).time_lines
    chunks = len(lane(line.after, LINK))
    flops, size = SECOND["flops_per_second"], 2.0 * ROWS * WIDTH * 4
    assert chunks == rates.best(flops, size) > 1
    assert line.before[-1].stop == pytest.approx(rates.seconds(flops, size, 1))
    assert line.after[-1].stop == pytest.approx(rates.seconds(flops, size, chunks))
    starts = [start for start, _ in lane(line.after, LINK)]
    assert starts[1:] == [stop for _, stop in lane(line.after, LINK)][:-1]


def test_who_waits_stands_still() -> None:
    overlap = OverlapCollectives(Rates(**SECOND, gain=1.0))  # nothing can save all: never cut
    overlap(graph_of(lambda x, w: (gathered(x) @ w).t() @ x.repeat(2, 1), ROWS).graph)
    (line,) = overlap.time_lines
    assert lane(line.before, LINK) == [(0.0, 1.0)]
    assert lane(line.before, COMPUTE) == [(1.0, 3.0), (3.0, 5.0)]
    assert line.after == line.before and line.count == 0


def test_the_page_holds_what_the_time_line_says(tmp_path: Path) -> None:
    overlap = run(Rates(**SECOND))
    page = overlap.to_html(tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    assert "as it was: 2000.000 ms, of 1000.000 ms on the link 0.000 ms behind products" in page
    assert "in chunks: 1125.000 ms, of 1000.000 ms on the link 875.000 ms behind products" in page
    before, after = (ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page))
    ends = []
    for svg, found in ((before, overlap.time_lines[0].before), (after, overlap.time_lines[0].after)):
        pieces = svg.findall("rect")
        assert [piece.get("class") for piece in pieces] == [span.lane for span in found]
        assert {piece.get("y") for piece in pieces if piece.get("class") == LINK} == {"28"}
        titles = [piece.findtext("title", "") for piece in pieces]
        assert all(title.startswith(f"{span.name}: ") for title, span in zip(titles, found, strict=True))
        ends.append(max(float(piece.attrib["x"]) + float(piece.attrib["width"]) for piece in pieces))
    start = float(before.findall("rect")[0].attrib["x"])
    assert (ends[1] - start) / (ends[0] - start) == pytest.approx(1.125 / 2, abs=1e-3)


def test_no_page_without_rates_or_graphs(tmp_path: Path) -> None:
    number = OverlapCollectives(2)
    number(graph_of(lambda x, w: torch.relu(reduced(x @ w)), ROWS).graph)
    for overlap in (number, OverlapCollectives(Rates(**SECOND))):
        with pytest.raises(ConfigError, match="expected Rates and a compiled graph with collectives, got"):
            overlap.to_html(tmp_path / "page.html")
    plain = OverlapCollectives(Rates(**SECOND))
    plain(graph_of(lambda x, w: torch.relu(x @ w), ROWS).graph)
    assert plain.time_lines == []
