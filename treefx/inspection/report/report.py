"""Define ``treefx.Report``: treefx's work on a model, as plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from treefx.inspection.report.attention import account_attentions
from treefx.inspection.report.call_records import Call, ForestAccount, Memory
from treefx.inspection.report.calls import account_calls
from treefx.inspection.report.codec import as_plain, from_text, to_text
from treefx.inspection.report.forest import account_forest
from treefx.inspection.report.material import Material
from treefx.inspection.report.memory import account_memory
from treefx.inspection.report.model_explorer import write_model_explorer
from treefx.inspection.report.modules import account_modules
from treefx.inspection.report.nodes import account_nodes
from treefx.inspection.report.operators import account_operators
from treefx.inspection.report.passes import account_passes
from treefx.inspection.report.records import (
    SCHEMA,
    AttentionAccount,
    GraphNode,
    Mask,
    ModuleAccount,
    OperatorAccount,
    PassRun,
    Restoration,
    Verdict,
)
from treefx.inspection.report.restoration import account_restorations
from treefx.inspection.report.traces import perfetto_events
from treefx.inspection.report.verdict import judge
from treefx.inspection.report.why import Asked, explain_place
from treefx.views import find_view

__all__ = ["Report", "made_of", "make_section"]


def _nothing() -> None:
    """Stand for a default that is no class attribute.

    An attribute would hide sections that are made later.
    """


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """Report treefx's work on a model, done or predicted (``treefx.explain``).

    ``treefx.inspect`` returns one whose sections are made when they are first read; it is equal to what
    ``Report.from_json`` reads back.

    Attributes:
        verdict: One sentence, the advice, and the losses by cost.
        operators: How each operator of the captured graph runs.
        modules: Sums over the operators of each module.
        passes: Seconds and changes of each pass.
        attention: Score, mask and kernel of each attention on the tree.
        restoration: Where the backward sums gradients of rows.
        memory: Bytes that the forward keeps for the backward.
        forest: Of the last call; None where its trie is gone.
        calls: The last hundred.
        plan: Of ``treefx.plan``, where ``with_plan`` gave one.
        nodes: The graphs by stage, for drawing.
        sources: Distinct kernel sources, which ``attention`` names by number.
        masks: Distinct masks over the last forest as pictures, which ``attention`` names by number.
        figures: ``stats``.
        text: ``summary()``.
        formulas: ``kernels``: each attention as text, by node.
        schema: Name and version of this form.
    """

    verdict: Verdict
    operators: tuple[OperatorAccount, ...] = field(default_factory=tuple)
    modules: tuple[ModuleAccount, ...] = field(default_factory=tuple)
    passes: tuple[PassRun, ...] = field(default_factory=tuple)
    attention: tuple[AttentionAccount, ...] = field(default_factory=tuple)
    restoration: tuple[Restoration, ...] = field(default_factory=tuple)
    memory: Memory = field(default_factory=Memory)
    forest: ForestAccount | None = field(default_factory=_nothing)
    calls: tuple[Call, ...] = field(default_factory=tuple)
    plan: dict[str, Any] | None = field(default_factory=_nothing)
    nodes: dict[str, tuple[GraphNode, ...]] = field(default_factory=dict)
    sources: tuple[str, ...] = field(default_factory=tuple)
    masks: tuple[Mask, ...] = field(default_factory=tuple)
    figures: dict[str, Any] = field(default_factory=dict)
    text: str = field(default_factory=str)
    formulas: dict[str, str] = field(default_factory=dict)
    schema: str = field(default_factory=lambda: SCHEMA)

    def __repr__(self) -> str:
        return f"Report({self.verdict.sentence!r})"

    def __eq__(self, other: object) -> bool:
        return self.to_json() == other.to_json() if isinstance(other, Report) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def stats(self) -> dict[str, Any]:
        """Return the figures of the last call and of all calls."""
        return dict(self.figures)

    @property
    def kernels(self) -> dict[str, str]:
        """Return the formula and source of each tree attention, by node name."""
        return dict(self.formulas)

    def summary(self) -> str:
        """Format the report as text."""
        return self.text

    def why(self, place: str = "") -> str:
        """Say in one paragraph why something runs as it does.

        Args:
            place: Path of a module ("model.layers.3.mlp"), name of a node, or a line ("model.py:120"); "" for the
                whole model.

        Raises:
            InputError: The report has no such place.
        """
        return explain_place(place, Asked(self.verdict, self.operators, self.modules, self.nodes))

    def with_plan(self, plan: Any, run: Callable[[], Any] | None = None) -> Report:
        """Return the report with the plan of a step (``treefx.plan``) added.

        Args:
            plan: The plan.
            run: Does a step by this plan, such as ``lambda: treefx.forward_backward(model, plan, loss)``. It is called
                once; its seconds and bytes stand under the plan's key ``measured``, next to the predicted ones.

        Raises:
            InputError: ``run`` ran no step of this plan.
        """
        sections = {item.name: getattr(self, item.name) for item in fields(Report)}
        made = json.loads(plan.to_json())
        if run is not None:
            made["measured"] = find_view("measure_plan")(plan, run)
        return Report(**{**sections, "plan": made})

    def to_json(self) -> str:
        """Format the report as JSON, key ``schema`` first."""
        return to_text(Report(**{item.name: getattr(self, item.name) for item in fields(Report)}))

    @staticmethod
    def from_json(text: str) -> Report:
        """Read the text of ``to_json``.

        Raises:
            InputError: The text is no report, or one of another version.
        """
        found: Report = from_text(Report, text, SCHEMA, "report")
        return found

    def to_html(self, path: str | Path, tokenizer: Any = None) -> Path:
        """Write the report as one page that needs nothing else, and return its path.

        Args:
            path: Of the file.
            tokenizer: Decodes the tokens of the rollout tree (``tokenizer.decode(ids)``); ids are shown without one.
        """
        written: Path = find_view("write_report")(self, path, tokenizer)
        return written

    def to_perfetto(self, path: str | Path) -> Path:
        """Write passes, calls and the plan as a trace for ui.perfetto.dev; return its path.

        chrome://tracing reads it as well.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(perfetto_events(self.passes, self.calls, self.plan)), encoding="utf-8")
        return target

    def to_model_explorer(self, path: str | Path) -> Path:
        """Write the graphs for Google's Model Explorer, nested by module, and return the path.

        Three overlays ("node data" there) are written next to it, with ``.flops_before.json``, ``.flops_after.json``
        and ``.verdict.json`` in place of the suffix.
        """
        label = str(self.figures.get("model") or "model")
        return write_model_explorer(path, label, self.nodes, self.operators, self.modules)


_SECTIONS: Mapping[str, Callable[[Any, Material], Any]] = {
    "verdict": lambda report, material: judge(material, report.operators),
    "operators": lambda report, material: account_operators(material),
    "modules": lambda report, material: account_modules(material, report.operators),
    "passes": lambda report, material: account_passes(material),
    "attention": lambda report, material: report._attention[0],
    "sources": lambda report, material: report._attention[1],
    "masks": lambda report, material: report._attention[2],
    "_attention": lambda report, material: account_attentions(material),
    "restoration": lambda report, material: account_restorations(material),
    "memory": lambda report, material: account_memory(material),
    "forest": lambda report, material: account_forest(material),
    "calls": lambda report, material: account_calls(material),
    "plan": lambda report, material: None,
    "nodes": lambda report, material: account_nodes(material, report.operators),
    "figures": lambda report, material: as_plain(dict(material.stats)),
    "text": lambda report, material: material.summary,
    "schema": lambda report, material: SCHEMA,
}
"""How each section is made of the material and of other sections of the report."""


def make_section(report: Any, name: str, material: Material) -> Any:
    """Make one section of a report.

    Raises:
        KeyError: There is no such section.
    """
    return _SECTIONS[name](report, material)


_MADE = ("verdict", "operators", "attention", "sources", "masks", "_attention")


def made_of(material: Material, formulas: Mapping[str, str]) -> Report:
    """A report with all sections made."""
    attention, sources, masks = account_attentions(material)
    operators = account_operators(material)
    report = Report(judge(material, operators), operators, attention=attention, sources=sources, masks=masks)
    names = [name for name in _SECTIONS if name not in _MADE]
    return replace(report, formulas=dict(formulas), **{name: make_section(report, name, material) for name in names})
