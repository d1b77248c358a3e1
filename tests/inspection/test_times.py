"""Times of modules: where a forward spends them, and that timing changes nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.inspection.browser import answer_of
from tests.inspection.causes import CAUSES, Planted
from tests.inspection.situations import VOCAB, ids_of
from treefx.inspection.html import render_page
from treefx.inspection.report.report import Report

WIDTH, MOST = 16, 512


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.qkv, self.mlp = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Sequential(nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Uneven(nn.Module):
    """One of three equal layers, and a fourth that takes most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([*(Block(WIDTH) for _ in range(3)), Block(300 * MOST)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    made = treefx.explain(Uneven(), ids_of(rows=6, columns=40, shared=36), {"min_sharing": 1.0}, timed=True)
    return Report.from_json(made.to_json())


def test_the_module_that_takes_the_time_has_it(report: Report) -> None:
    """On rows and on distinct tokens; a sum over modules is that over operators, and equal layers are still folded."""
    at = {item.path: item for item in report.modules}
    slow, root = at["blocks.3.mlp"], at[""]
    assert slow.seconds_before > 0.5 * root.seconds_before and slow.seconds_after > 0.5 * root.seconds_after
    assert slow.seconds_after < slow.seconds_before, "a third of the tokens"
    assert root.seconds_before == pytest.approx(sum(item.seconds_before for item in report.operators))
    assert root.seconds_after > sum(item.seconds_after for item in report.operators), "and what treefx put in"
    assert at["blocks.0"].folded == ("blocks.0", "blocks.1", "blocks.2") and not at["blocks.3"].folded
    assert at["blocks.0"].seconds_after > 0


def test_without_timing_nothing_runs_and_nothing_is_claimed() -> None:
    report = treefx.explain(Planted(None), {"input_ids": ids_of(), "labels": ids_of()}, {"min_sharing": 1.0})
    assert report.verdict.ran == "packed"
    assert not any(item.seconds_before or item.seconds_after for item in (*report.operators, *report.modules))


def test_timing_leaves_buffers_and_random_numbers() -> None:
    """A batch norm writes its statistics in each forward, a dropout draws."""
    for name in ("batch statistic", "dropout", "in-place write"):
        model = Planted(CAUSES[name].plant)
        ids = ids_of()
        before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        report = treefx.explain(model, {"input_ids": ids, "labels": ids}, {"min_sharing": 1.0}, timed=True)
        assert report.verdict.ran == "packed" and report.modules[0].seconds_before > 0, name
        assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items()), name
        assert torch.equal(random, torch.get_rng_state()), name


def test_times_are_an_overlay_of_the_page(report: Report, tmp_path: Any) -> None:
    script = """
        const overlay = byId("overlay"), option = overlay.querySelector("[value=seconds]");
        answer.off = option.disabled;
        overlay.value = "seconds";
        overlay.dispatchEvent(new Event("change"));
        for (const box of document.querySelectorAll("#modules details")) { box.open = true; box.ontoggle(); }
        const rows = [...document.querySelectorAll("#modules .module")];
        answer.rows = Object.fromEntries(rows.map((row) => [row.querySelector("b").textContent,
            [row.textContent, ...[...row.querySelectorAll("i")].map((bar) => bar.getBoundingClientRect().width)]]));
        answer.hint = byId("timed").textContent;
    """
    answer = answer_of(render_page(report), tmp_path, script)
    assert not answer["off"] and "one operator at a time" in answer["hint"]
    text, before, after = answer["rows"]["model"]
    assert " ms -> " in text and before > after > 0
    assert answer["rows"]["3"][1] > 5 * answer["rows"]["0 (x 3)"][1]
    untimed = treefx.explain(Planted(None), {"input_ids": ids_of()}, {"min_sharing": 1.0})
    answer = answer_of(render_page(untimed), tmp_path, script)
    assert answer["off"] and "timed=True" in answer["hint"]
