"""Accounts of modules: sums over their operators, equal layers of a list folded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from treefx.inspection.report.lines import module_path, modules_around
from treefx.inspection.report.material import Material
from treefx.inspection.report.records import ModuleAccount, OperatorAccount

__all__ = ["account_modules"]

_ITEM = re.compile(r"^(.*?)\.?(\d+)$")


def account_modules(material: Material, operators: Sequence[OperatorAccount]) -> tuple[ModuleAccount, ...]:
    """Every module that an operator stands in, each behind the module around it."""
    kinds = {"": type_of_root(material)}
    inside: dict[str, list[OperatorAccount]] = defaultdict(list)
    around = {node.name: modules_around(node) for node in material.traced.graph.nodes}
    for item in operators:
        paths = dict(around.get(item.name, ()))
        kinds |= {path: kind for path, kind in paths.items() if path}
        for path in {"", *paths, *_lists(paths)}:
            inside[path].append(item)
    added = _added_seconds(material, operators)
    accounts = [_sum(path, kinds.get(path, "ModuleList"), inside[path], added) for path in _in_order(inside)]
    return _folded(accounts)


def _added_seconds(material: Material, operators: Sequence[OperatorAccount]) -> dict[str, float]:
    """By module, the seconds of nodes of the rewritten graph that stand for no operator, such as expansions."""
    gm, seconds = material.graphs.get("rewritten"), material.seconds.get("rewritten", {})
    if gm is None or not seconds:
        return {}
    known = {name for item in operators for name in item.images.get("rewritten", ())}
    found: dict[str, float] = defaultdict(float)
    for node in gm.graph.nodes:
        if node.name not in known:
            found[module_path(node)] += seconds.get(node.name, 0.0)
    return found


def type_of_root(material: Material) -> str:
    """The class of the model, as far as a node names it."""
    for node in material.traced.graph.nodes:
        for path, kind in modules_around(node):
            if not path:
                return kind
    return "model"


def _lists(paths: dict[str, str]) -> set[str]:
    """Lists of modules, which no node names: ``model.layers`` of ``model.layers.3``."""
    return {path.rpartition(".")[0] for path in paths if _ITEM.match(path) and "." in path}


def _in_order(inside: dict[str, list[OperatorAccount]]) -> list[str]:
    """Paths, each behind the one around it, siblings in the order of their first operators."""
    place = {path: i for i, path in enumerate(inside)}
    firsts = {path: [place.get(".".join(path.split(".")[: i + 1]), 0) for i in range(path.count(".") + 1)]
              for path in inside if path}  # fmt: skip
    return ["", *sorted(firsts, key=lambda path: [(first, len(path)) for first in firsts[path]])]


def _sum(path: str, kind: str, items: Sequence[OperatorAccount], added: Mapping[str, float]) -> ModuleAccount:
    ran = [item.ran for item in items]
    more = [seconds for at, seconds in added.items() if not path or f"{at}.".startswith(f"{path}.")]
    return ModuleAccount(
        path, kind, path.count(".") + 1 if path else 0, len(items), ran.count("token"), ran.count("batch"),
        ran.count("row"),
        sum(item.flops_before for item in items), sum(item.flops_after for item in items),
        sum(item.bytes_before for item in items), sum(item.bytes_after for item in items),
        tuple(sorted({item.code for item in items if item.code})),
        seconds_before=sum((item.seconds_before for item in items), 0.0),
        seconds_after=sum([*(item.seconds_after for item in items), *more], 0.0),
    )  # fmt: skip


def _folded(accounts: Sequence[ModuleAccount]) -> tuple[ModuleAccount, ...]:
    """Fold equal layers of a list, whose accounts agree up to path and seconds, into one account."""
    groups: dict[object, list[str]] = defaultdict(list)
    for item in accounts:
        found = _ITEM.match(item.path)
        if found is not None:
            groups[found[1], replace(item, path="", seconds_before=0.0, seconds_after=0.0)].append(item.path)
    of = {path: tuple(paths) for paths in groups.values() if len(paths) > 1 for path in paths}
    return tuple(replace(item, folded=of[item.path]) if item.path in of else item for item in accounts)
