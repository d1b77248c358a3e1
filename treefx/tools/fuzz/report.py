"""What a search found: counts by family and class, and the failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from treefx.tools.fuzz.journal import Finding
from treefx.tools.fuzz.truth import CLASSES, FAILURES

__all__ = ["counts_by_family", "failures_of", "summary"]


def counts_by_family(findings: Sequence[Finding]) -> dict[str, dict[str, int]]:
    """Count programs of each family by class, families in the order of their names."""
    counts = Counter((finding.family, finding.kind) for finding in findings)
    families = sorted({finding.family for finding in findings})
    return {family: {kind: counts[family, kind] for kind in CLASSES} for family in families}


def failures_of(findings: Sequence[Finding]) -> list[Finding]:
    """List programs that are wrong, crashed or hung, the wrong ones first."""
    found = [finding for finding in findings if finding.kind in FAILURES]
    return sorted(found, key=lambda finding: (-FAILURES.index(finding.kind), finding.family, finding.number))


def summary(findings: Sequence[Finding]) -> dict[str, Any]:
    """The report as JSON writes it."""
    total = Counter(finding.kind for finding in findings)
    return {
        "programs": len(findings),
        "seconds": sum(finding.seconds for finding in findings),
        "classes": {kind: total[kind] for kind in CLASSES},
        "families": counts_by_family(findings),
        "failures": [asdict(finding) for finding in failures_of(findings)],
    }
