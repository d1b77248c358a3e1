"""Two reports side by side: versions, options, models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from treefx.inspection.report.records import OperatorAccount
from treefx.inspection.report.report import Report

__all__ = ["Change", "ReportDiff", "diff"]

_SETTINGS = ("torch", "inner", "min_sharing", "on_unsupported")
_FIGURES = ("ran", "way", "raw_tokens", "tokens", "sharing_ratio", "attention_rewritten", "recurrences_rewritten",
            "fallback", "graphs", "compiles")  # fmt: skip
_MOST_LINES = 20


@dataclass(frozen=True)
class Change:
    """Hold one difference.

    ``before`` and ``after`` are values of both reports; None where one has no such entry.
    """

    what: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.what}: {_written(self.before)} -> {_written(self.after)}"


@dataclass(frozen=True)
class ReportDiff:
    """Hold the differences of two reports.

    Attributes:
        settings: Versions and options.
        verdict: Sentence, coverage, FLOPs and figures of the last call.
        losses: By code and line, the FLOPs that run on rows for it.
        operators: By module, operator and place in it, how often it runs and why.
        modules: By path, FLOPs after the rewriting.
        passes: Nodes that each pass left.
        kernels: Attentions with another formula or source.
    """

    settings: tuple[Change, ...]
    verdict: tuple[Change, ...]
    losses: tuple[Change, ...]
    operators: tuple[Change, ...]
    modules: tuple[Change, ...]
    passes: tuple[Change, ...]
    kernels: tuple[Change, ...]

    def __bool__(self) -> bool:
        return any(getattr(self, item.name) for item in fields(self))

    def __str__(self) -> str:
        if not self:
            return "no difference"
        return "\n".join(line for item in fields(self) for line in _section(item.name, getattr(self, item.name)))


def diff(before: Report, after: Report) -> ReportDiff:
    """Compare two reports, without seconds, which differ from run to run.

    Args:
        before: The earlier report.
        after: The later report.

    Returns:
        The differences, empty for equal reports.
    """
    kernels: Callable[[Report], Mapping[str, Any]] = lambda r: {  # noqa: E731
        item.name: (item.score, item.visible, r.sources[item.source] if item.source >= 0 else "")
        for item in r.attention
    }
    return ReportDiff(
        _changes(*({name: r.figures.get(name) for name in _SETTINGS} for r in (before, after))),
        _changes(*map(_of_verdict, (before, after))),
        _changes(*({f"{x.code} {x.line or x.title}": x.flops for x in r.verdict.losses} for r in (before, after))),
        _changes(*(dict(_named(r.operators)) for r in (before, after))),
        _changes(*({m.path or "model": m.flops_after for m in r.modules} for r in (before, after))),
        _changes(*({p.name: p.nodes_after for p in r.passes} for r in (before, after))),
        tuple(Change(c.what, _formula(c.before), _formula(c.after)) for c in _changes(kernels(before), kernels(after))),
    )


def _of_verdict(report: Report) -> dict[str, Any]:
    verdict = report.verdict
    shares = {"coverage": f"{100 * verdict.coverage.share:.1f} %", "FLOPs on rows": verdict.flops_before}
    figures = {name: report.figures.get(name) for name in _FIGURES}
    return {**shares, "FLOPs after": verdict.flops_after, **figures, "bytes kept": report.memory.bytes}


def _named(operators: Iterable[OperatorAccount]) -> Iterable[tuple[str, str]]:
    """Operators by module and count, as names of nodes shift when one is added."""
    counts: dict[tuple[str, str], int] = {}
    for item in operators:
        key = item.module, item.op
        counts[key] = counts.get(key, -1) + 1
        place = f"{item.module or 'model'}: {item.op}" + (f" ({counts[key] + 1})" if counts[key] else "")
        yield place, f"{item.ran} {item.code}".strip()


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    names = dict.fromkeys([*before, *after])
    return tuple(Change(n, before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n))


def _formula(value: Any) -> str | None:
    return None if value is None else f"{value[0]} where {value[1]}"


def _written(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _section(name: str, changes: tuple[Change, ...]) -> Iterable[str]:
    if changes:
        yield f"{name}:"
        yield from (f"    {change}" for change in changes[:_MOST_LINES])
        if len(changes) > _MOST_LINES:
            yield f"    and {len(changes) - _MOST_LINES} more"
