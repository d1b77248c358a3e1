"""Answer in one paragraph why something runs as it does: a module, a node, a line."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treefx.errors import InputError
from treefx.inspection.report.lines import place_of
from treefx.inspection.report.operators import NO_LOSS, origins
from treefx.inspection.report.records import GraphNode, ModuleAccount, OperatorAccount, Verdict
from treefx.reason_codes import find, link_to

__all__ = ["Asked", "explain_place"]

_PLACE = re.compile(r"^(.*\.py):(\d+)$")
_RAN = {
    "token": "once per distinct token",
    "batch": "once for the batch",
    "row": "once per row",
    "none": "not at all, because nothing reads its result",
}


@dataclass(frozen=True)
class Asked:
    """Hold the source data of an answer."""

    verdict: Verdict
    operators: tuple[OperatorAccount, ...]
    modules: Sequence[ModuleAccount]
    nodes: Mapping[str, Sequence[GraphNode]]


def explain_place(place: str, asked: Asked) -> str:
    """One paragraph about a place.

    Args:
        place: Path of a module ("" is the model), name of a node of any stage, or ``file.py:120``.
        asked: The sections of a report.

    Raises:
        InputError: There is no such place; the message names similar ones.
    """
    line = _PLACE.match(place)
    if line is not None:
        return _about_line(line[1], int(line[2]), asked)
    module = next((item for item in asked.modules if item.path == place), None)
    if module is not None:
        return _about_module(module, asked)
    if place == "":
        return " ".join(filter(None, [asked.verdict.sentence, asked.verdict.advice]))
    found = _operators_of_node(place, asked)
    if found:
        return " ".join([*map(_about_operator, found[:3]), *_causes(found, asked)])
    added = [node for nodes in asked.nodes.values() for node in nodes if node.name == place]
    if added:
        return f"{place} ({added[0].op}) stands for no operator of the model: treefx put it in to find tokens or rows."
    raise _unknown(place, asked)


def _unknown(place: str, asked: Asked) -> InputError:
    line = _PLACE.match(place)
    modules = [item.path for item in asked.modules if item.path]
    if line is not None:
        similar = _lines_near(line[1], int(line[2]), asked)
    else:
        names = modules + [node.name for nodes in asked.nodes.values() for node in nodes]
        close = difflib.get_close_matches(place, dict.fromkeys(names), n=3, cutoff=0.5)
        similar = [name for name in modules if name.endswith(f".{place}")][:3] or close
    known = f"similar ones are {', '.join(similar)}" if similar else "report.modules and report.operators list them"
    return InputError(
        f"why expects the path of a module, the name of a node, or a line such as model.py:120, got {place!r}, which "
        f"the report does not have; {known}"
    )


def _lines_near(file: str, number: int, asked: Asked) -> list[str]:
    """The lines of a file that have operators, the nearest three first."""
    places = {place_of(item.line) for item in asked.operators}
    numbers = {found[1] for found in places if found is not None and found[0].replace("\\", "/").endswith(file)}
    return [f"{file}:{near}" for near in sorted(numbers, key=lambda n: (abs(n - number), n))[:3]]


def _operators_of_node(name: str, asked: Asked) -> list[OperatorAccount]:
    """The operators that a node of any stage stands for."""
    own = [item for item in asked.operators if item.name == name]
    if own:
        return own
    of_dynamo = [item for item in asked.operators if name in item.captured]
    return of_dynamo or [item for item in asked.operators if any(name in names for names in item.images.values())]


def _about_line(file: str, number: int, asked: Asked) -> str:
    found = []
    for item in asked.operators:
        place = place_of(item.line)
        if place is not None and place[1] == number and place[0].replace("\\", "/").endswith(file):
            found.append(item)
    losses = [loss for loss in asked.verdict.losses if f"{file}:{number}" in f"{loss.line} {loss.reason}"]
    if not found and not losses:
        raise _unknown(f"{file}:{number}", asked)
    if not found:
        return " ".join(_about_loss(loss.code, loss.reason) for loss in losses)
    code = next((item.line.split(": ", 1)[-1] for item in found if item.line), "")
    counted = Counter(item.ran for item in found)
    ran = ", ".join(f"{count} {_RAN[kind]}" for kind, count in counted.items())
    more = [_about_loss(loss.code, loss.reason) for loss in losses if loss.code not in {x.code for x in found}]
    return " ".join([f"{file}:{number} (`{code}`) makes {_plural(found)}: {ran}.", *_causes(found, asked), *more])


def _about_module(module: ModuleAccount, asked: Asked) -> str:
    name = module.path or "The model"
    inside = [
        item
        for item in asked.operators
        if not module.path or item.module == module.path or item.module.startswith(f"{module.path}.")
    ]
    counted = Counter(item.ran for item in inside)
    ran = ", ".join(f"{counted[kind]} {_RAN[kind]}" for kind in _RAN if counted[kind])
    cost = ""
    if module.flops_before and module.flops_after:  # unknown for operators on rows within a packed graph
        before = f" instead of {module.flops_before:,}" if module.flops_after != module.flops_before else ""
        cost = f" Its forward takes {module.flops_after:,} FLOPs{before}."
    folded = f" {len(module.folded)} equal layers have the same account." if module.folded else ""
    causes = _causes(inside, asked)
    if not module.path:
        known = " ".join(causes)
        causes += [_about_loss(x.code, x.reason) for x in asked.verdict.losses if x.code not in known]
    first = f"{name} ({module.kind}) has {_plural(inside)}: {ran}.{cost}{folded}"
    return " ".join([first, *causes])


def _about_operator(item: OperatorAccount) -> str:
    became = ", ".join(f"{len(names)} in the {stage} graph" for stage, names in item.images.items())
    parts = [f"{item.name} ({item.op}, {item.shape}) runs {_RAN.get(item.ran, item.ran)}"]
    if item.module:
        parts.append(f"in {item.module}")
    if item.line:
        parts.append(f"from {item.line}")
    if item.kernels:
        parts.append(f"computed by {', '.join(item.kernels[:3])}")
    text = ", ".join(parts)
    return f"{text}; it became {became}." if became else f"{text}."


def _causes(found: Sequence[OperatorAccount], asked: Asked) -> list[str]:
    """List each distinct reason of operators on rows once, with its origin and way out."""
    started, texts = origins(asked.operators), dict[tuple[str, str], str]()
    rows = [item for item in found if item.ran == "row"]
    rows.sort(key=lambda item: not item.since)
    hard = [item for item in rows if item.code not in NO_LOSS] or (rows if len(found) < 9 else [])
    for item in hard:
        origin = started.get(item.name, item)
        about = f"{origin.op}: " if origin.since and (origin.code, origin.reason) == (item.code, item.reason) else ""
        line = f" ({origin.line})" if about and origin in found and origin.line else ""
        here = line if origin in found or not about else f" (it began at {origin.name}, {origin.line})"
        if not item.since and any(code == item.code for code, _ in texts):
            continue
        texts.setdefault((item.code, item.reason), _about_loss(item.code, f"{about}{item.reason}{here}"))
    return list(texts.values())[:4]


def _about_loss(code: str, reason: str) -> str:
    row = find(code)
    way = f" Way out: {row.way_out}." if row.way_out else ""
    return f"[{code}] {row.title}: {reason}. Why: {row.why}.{way} See {link_to(code)}."


def _plural(found: Sequence[OperatorAccount]) -> str:
    return "1 operator" if len(found) == 1 else f"{len(found)} operators"
