"""Text, page and figures of a report agree with each other, in whatever way the last call ran."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import treefx
from tests.backend.native import TakesCacheFlag
from tests.inspection.situations import compiled, ids_of, train
from tests.models import TinyLM, double
from tests.oracle import compile_with
from tests.planning.cuts import every_node
from tests.spellings import SPELLINGS
from treefx.inspection.inspector import Inspection
from treefx.planning.execution.backward import backward
from treefx.reason_codes import with_code
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import GraphReport

EVERY_ROW = "every row separately"
COLOURS = {"attention": "tree attention", "restore": "gradient restoration", "expand": "packed value read by rows"}


def trained(what: str = "", *shared: int, **options: Any) -> Any:
    model = compiled(what, **options)
    for count in shared or (6, 6):
        train(model, ids_of(count))
    return model


def refused_later() -> Any:
    """Dynamo compiles the model again: another graph of the same function ran before."""
    model = trained()
    model._orig_mod.what = "dropout"
    train(model, ids_of())
    return model


def without_gradients() -> Any:
    model = compiled()
    with torch.no_grad():
        model(input_ids=ids_of())
    return model


def forest() -> treefx.Forest:
    return treefx.Forest.from_sequences([row.tolist() for row in ids_of()])


def tiny(inner: str = "aot_eager") -> Any:
    return compile_with(TakesCacheFlag(TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16)), inner=inner)


def on_a_forest() -> Any:
    model, tree = tiny(), forest()
    with treefx.use(tree):
        logits = model(**tree.model_inputs()).logits
    torch.autograd.backward(treefx.losses.sft(treefx.edge_logprobs(logits, tree), tree))
    return model


def in_parts() -> Any:
    model, tree = tiny(), forest()
    backward(model, every_node(tree), lambda logp, part: treefx.losses.sft(logp, part))
    return model


def converted(*calls: dict[str, Any], compile_too: bool = False) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = treefx.convert(double("llama", num_hidden_layers=1, **sizes))
    if compile_too:
        model.compile(backend="treefx", options={"inner": "eager"})
    for more in calls:
        ids = ids_of()
        torch.autograd.backward(model(input_ids=ids, labels=ids, **{"use_cache": False, **more}).loss)
    return model


SITUATIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "packed": ("packed", lambda: trained(inner="aot_eager")),
    "packed, inner eager": ("packed", trained),
    "rows share nothing": ("ordinary", lambda: trained("", 0)),
    "below min_sharing": ("ordinary", lambda: trained(min_sharing=9.0)),
    "nothing to share after a packed call": ("ordinary", lambda: trained("", 6, 0, inner="aot_eager")),
    "not causal": ("ordinary", lambda: trained("not causal")),
    "refused after a packed call": ("ordinary", refused_later),
    "one layer on rows": ("packed", lambda: trained("mean", inner="aot_eager")),
    "on_unsupported='fallback'": ("ordinary", lambda: trained("mean", on_unsupported="fallback")),
    "break in the loop": ("ordinary", lambda: trained("break in the loop")),
    "break before the blocks": ("ordinary", lambda: trained("break before the blocks")),
    "break behind the blocks": ("packed", lambda: trained("break behind the blocks", inner="aot_eager")),
    "no_grad": ("packed", without_gradients),
    "converted": ("packed", lambda: converted({}, {})),
    "converted, on rows": ("ordinary", lambda: converted({}, {"use_cache": True})),
    "converted, then compiled": ("packed", lambda: converted({}, {}, compile_too=True)),
    "a forest in use": ("packed", on_a_forest),
    "a plan in parts": ("packed", in_parts),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_report_does_not_contradict_itself(name: str, tmp_path: Path) -> None:
    ran, make = SITUATIONS[name]
    inspection = treefx.inspect(make())
    assert inspection.stats["ran"] == ran
    check(inspection, tmp_path)


def check(report: Inspection, folder: Path) -> None:
    """All that must hold of one report."""
    stats, lines = report.stats, lines_of(report.summary())
    check_figures(stats)
    check_lines(stats, lines)
    restored = re.match(r"(\d+) nodes? of", lines["restoration"])
    assert stats["ran"] != "packed" or len(report.restorations) == int(restored[1] if restored else 0)
    check_page(report, report.to_html(folder / "page.html").read_text(encoding="utf-8"))


def lines_of(summary: str) -> dict[str, str]:
    """The text of each label."""
    lines: dict[str, str] = {}
    label = ""
    for line in summary.splitlines():
        label = line[:14].strip() or label
        lines[label] = f"{lines.get(label, '')}\n{line[14:]}".strip()
    return lines


def check_figures(stats: dict[str, Any]) -> None:
    ratio, possible = stats["sharing_ratio"], stats["possible_ratio"]
    assert 0 <= stats["attention_rewritten"] <= stats["attention_layers"]
    assert possible is None or possible >= ratio
    assert (possible is None) == (stats["distinct_tokens"] is None)
    assert stats["step_sharing_ratio"] is None or stats["step_sharing_ratio"] <= stats["sharing_possible"] + 1e-12
    if stats["ran"] == "packed":
        assert stats["distinct_tokens"] == stats["tokens"] > 0
        assert ratio == pytest.approx(stats["raw_tokens"] / stats["tokens"])
        assert stats["attention_rewritten"] == stats["attention_layers"] or stats["expansions"]
        return
    assert stats["tokens"] == stats["raw_tokens"] and ratio == 1.0
    assert (stats["attention_rewritten"], stats["recurrences_rewritten"]) == (0, 0)
    assert not stats["expansions"] or stats["fallback"]  # they are the reasons
    assert not stats["fallback"] or stats["step_calls"] == 0


def check_lines(stats: dict[str, Any], lines: dict[str, str]) -> None:
    packed, layers, rewritten = stats["ran"] == "packed", stats["attention_layers"], stats["attention_rewritten"]
    pattern = r"(\d+)(?: of (\d+))? layers? rewritten to tree attention(?:, (\d+) on rows)?"
    told = re.fullmatch(pattern, lines["attention"])
    assert told is not None, lines["attention"]
    assert (int(told[1]), int(told[2] or told[1]), int(told[3] or 0)) == (rewritten, layers, layers - rewritten)
    once = "runs once per" in lines["expansions"] or "run once per" in lines["expansions"]
    assert once == (packed and not stats["fallback"] and not stats["expansions"])
    assert (EVERY_ROW in lines["expansions"]) == (EVERY_ROW in lines["restoration"]) == (not packed)
    assert lines["fallback"] == with_code(stats["fallback"] or "none", stats["fallback_code"])
    assert bool(stats["fallback"]) == bool(stats["fallback_code"])
    assert ("reason below" in lines["ran"]) == (not packed and stats["fallback"] is not None)
    assert "there was no backward" not in lines["restoration"]
    assert ("inner=" in lines["ran"]) == (packed and stats["way"] in ("rows", "forest"))
    assert ("outside the graph" in lines["restoration"]) <= (stats["way"] == "rows")
    assert ("no call with gradients" in lines["step"]) <= (stats["step_calls"] == 0 and stats["way"] != "forest")
    assert ("recurrences" in lines) == bool(stats["recurrences_rewritten"])
    assert "overlap" not in lines["tokens"] and "0.00" not in lines["seconds"]
    assert (" -> " in lines["tokens"]) == packed


def check_page(report: Inspection, page: str) -> None:
    stats = report.stats
    tiles = {name: value for value, name in re.findall(r"<div><b>([^<]*)</b>([^<]*)</div>", page)}
    shown = len(stats["expansions"]) if stats["ran"] == "packed" else 0
    assert tiles["expansions"] == str(shown) == str(len(rows_of(page, "Expansions")))
    assert tiles["raw tokens"] == f"{stats['raw_tokens']:,}" and tiles["last call ran"] == stats["ran"]
    layers, rewritten = stats["attention_layers"], stats["attention_rewritten"]
    assert tiles["attention layers on the tree"] == (f"{rewritten} of {layers}" if layers != rewritten else f"{layers}")
    earlier = "of an earlier call" in page
    assert earlier == (stats["ran"] != "packed" and "rewritten" in report.graphs)
    for stage, section in re.findall(r'<section class="graph" id="(\w+)"[^>]*>(.*?)</section>', page):
        legend = {kind: int(count) for count, kind in re.findall(r">(\d+) ([a-z ]+)</button>", section)}
        assert legend == {name: n for kind, name in COLOURS.items() if (n := section.count(f'<li class="{kind}"'))}
        assert not any("expansion" in kind for kind in legend)
        if stage == "rewritten" and not earlier:
            assert legend["tree attention"] == rewritten == len(report.kernels)
        if stage == "backward":
            assert legend.get("gradient restoration", 0) == len(report.restorations)


def rows_of(page: str, heading: str) -> list[str]:
    """The rows of the table below a heading, without its head."""
    below = page.split(f"<h2>{heading}</h2>")[1].split("<h2>")[0]
    return re.findall(r"<tr><td>", below)


def test_a_contradiction_is_found(tmp_path: Path) -> None:
    """Each change of one figure alone makes the check fail."""
    inspection = treefx.inspect(trained(inner="aot_eager"))
    check(inspection, tmp_path)
    good = dict(inspection.stats)
    item = {"op": "an operator", "reason": "a reason", "line": None, "code": "TFX104"}
    wrong = {
        "ran": "ordinary", "attention_rewritten": 1, "attention_layers": 3, "expansions": [item], "tokens": 5,
        "distinct_tokens": None, "way": "converted",
    }  # fmt: skip
    for name, value in wrong.items():
        inspection.stats = {**good, name: value}
        if name == "expansions":  # the figures allow it: text and page must follow
            check(inspection, tmp_path)
            assert "an operator: a reason" in inspection.summary()
            continue
        with pytest.raises(AssertionError):
            check(inspection, tmp_path)


def test_the_same_batch_twice_is_no_loss_of_order() -> None:
    """Without an optimizer step in between, the second backward is a call of rows that came before."""
    model, ids = compiled(), ids_of()
    for _ in range(2):
        train(model, ids)
    inspection = treefx.inspect(model)
    stats = inspection.stats
    assert (stats["step_calls"], stats["step_repeats"]) == (2, 1)
    assert stats["step_sharing_ratio"] == stats["sharing_possible"] == stats["sharing_ratio"]
    assert "TreeBatchSampler" not in inspection.summary() and "of rows that came before" in inspection.summary()


def test_a_call_leaves_nothing_of_the_one_before() -> None:
    """Every figure of the last call is reset: packed, then refused, on one report."""
    report = GraphReport(has_tokens=True, raw_tokens=9, tokens=3, distinct_tokens=3, ran="packed", way="forest")
    report.note_rows(Reason(Cause.VALUES, "a reason"))
    left = dataclasses.asdict(dataclasses.replace(report, parameters={}, steps=None))  # type: ignore[arg-type]
    expected = {"raw_tokens": 0, "tokens": 0, "distinct_tokens": None, "ran": "ordinary", "way": "rows"}
    assert expected.items() <= left.items() and report.fallback == "a reason"


def test_operators_are_named_as_the_user_calls_them() -> None:
    """And attention is not blamed for what the embedding's dropout does."""
    reason = treefx.inspect(trained("not causal")).stats["fallback"]
    assert "scaled_dot_product_attention" in reason and "treefx" not in reason.replace("treefx.convert", "")
    dropout = treefx.inspect(trained("dropout")).stats["fallback"]
    assert "attention" not in dropout.split("(")[0] and "dropout" in dropout
