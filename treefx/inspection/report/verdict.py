"""Write the verdict: one sentence, advice on the largest loss, and losses by cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from treefx.inspection.report.material import Material
from treefx.inspection.report.operators import NO_LOSS, origins
from treefx.inspection.report.records import Coverage, Loss, OperatorAccount, Verdict
from treefx.reason_codes import LITTLE_SHARING, UNCOMPILED, find, marked

__all__ = ["judge"]


_CONVERTED = (
    "A converted model runs behind hooks and has no rewritten graph: this report has no formulas of attention, no "
    "restorations and no bytes for it."
)


def judge(material: Material, operators: tuple[OperatorAccount, ...]) -> Verdict:
    """Weigh the accounts of all operators."""
    by_ran = {kind: sum(i.flops_before for i in operators if i.ran == kind) for kind in ("token", "batch", "row")}
    coverage = Coverage(**by_ran)
    losses = _losses(material, operators)
    before, after = sum(i.flops_before for i in operators), sum(i.flops_after for i in operators)
    stats = material.stats
    return Verdict(
        _sentence(material, coverage, before, after), _advice(material, losses), stats["ran"],
        stats["raw_tokens"], stats["tokens"], coverage, before, after, losses,
    )  # fmt: skip


def _losses(material: Material, operators: tuple[OperatorAccount, ...]) -> tuple[Loss, ...]:
    found: dict[tuple[str, str | None, str], Loss] = {}
    started = origins(operators)
    for item in operators:
        if item.ran != "row" or item.code in NO_LOSS:
            continue
        origin = started[item.name] if item.code == started[item.name].code else item
        whole = not item.since
        operator, line = ("", None) if whole else (origin.op, origin.line)
        known = found.get((item.code, line, item.reason))
        if known is None:
            row = find(item.code)
            known = Loss(item.code, row.title, item.reason, row.way_out, operator, line, times=0)
        begins = not whole and origin is item
        found[item.code, line, item.reason] = replace(
            known, flops=known.flops + item.flops_before, times=known.times + begins
        )
    _merge_whole(found)
    others = [_loss(code, text) for code, text in _of_call(material) if all(code != x.code for x in found.values())]
    return tuple(sorted([*found.values(), *others], key=lambda loss: -loss.flops))


def _merge_whole(found: dict[tuple[str, str | None, str], Loss]) -> None:
    """Attribute the loss of a whole call to the operator that causes it."""
    for key, loss in list(found.items()):
        own = next((k for k, x in found.items() if x.operator and x.code == loss.code), None)
        if not loss.operator and own is not None:
            found[own] = replace(found[own], flops=found[own].flops + loss.flops)
            del found[key]


def _of_call(material: Material) -> Iterable[tuple[str, str]]:
    """Reasons that no operator of this graph has."""
    yield from material.extra_losses
    if material.code:
        yield material.code, material.reason
    if material.stats["uncompiled"]:
        yield UNCOMPILED, material.stats["uncompiled"]


def _loss(code: str, text: str) -> Loss:
    row = find(code)
    return Loss(code, row.title, text, row.way_out)


def _sentence(material: Material, coverage: Coverage, before: int, after: int) -> str:
    stats = material.stats
    raw, tokens = stats["raw_tokens"], stats["tokens"]
    if stats["ran"] == "nothing":
        return "No call has run."
    if not material.packed:
        found = find(material.code or LITTLE_SHARING)
        possible = stats["possible_ratio"]
        lost = f"; its rows have a sharing ratio of {possible:.2f}" if possible and possible > 1.0 else ""
        return f"{_ran(material)} every row separately ({found.code}, {found.title}){lost}."
    if not stats["attention_layers"] and stats["way"] == "converted":
        return f"The module that takes the ids ran {tokens:,} distinct tokens instead of {raw:,}."
    cost = f" and {_short(after)} FLOPs of the forward instead of {_short(before)}" if after and before != after else ""
    of = " of the graph that the token ids enter" if material.extra_losses else ""
    return (
        f"{_percent(coverage.share)} of the FLOPs{of} run once per distinct token or once for the batch: "
        f"{_ran(material).lower()} {tokens:,} tokens instead of {raw:,} "
        f"(sharing ratio {stats['sharing_ratio']:.2f}){cost}."
    )


def _ran(material: Material) -> str:
    return "This batch would run" if material.is_dry else "The last call ran"


def _advice(material: Material, losses: Sequence[Loss]) -> str:
    """Advise on the largest loss, on rows that came in different calls, or say what runs on rows at no loss."""
    contracted = {(item["code"], item["line"]) for item in material.stats["expansions"] if item["contracted"]}
    worth = [loss for loss in losses if loss.way_out and (loss.flops or (loss.code, loss.line) not in contracted)]
    if worth:
        loss = worth[0]
        what = f"{loss.operator} {loss.reason}" if loss.operator else loss.reason or loss.title
        line = f" ({loss.line})" if loss.line else ""
        return f"Largest loss: {what}{line}. Way out: {loss.way_out} {marked(loss.code)}."
    ratio, possible = material.stats["step_sharing_ratio"], material.stats["sharing_possible"]
    if possible is not None and possible > 1.1 * ratio:
        return (
            f"The calls of the last step shared {ratio:.2f} of {possible:.2f} that is possible with all rows in one "
            f"call. Way out: {find(LITTLE_SHARING).way_out} {marked(LITTLE_SHARING)}."
        )
    alone = next((loss for loss in losses if loss.operator and (loss.code, loss.line) in contracted), None)
    if alone is not None:
        at = f" ({alone.line})" if alone.line else ""
        return (
            f"{alone.operator}{at} is proved causal: it alone runs on rows, and all behind it is packed. Nothing to do."
        )
    return _CONVERTED if material.runs_converted else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share in (0.0, 1.0) else f"{100 * share:.1f} %"


def _short(number: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
