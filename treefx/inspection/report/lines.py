"""Modules and lines of nodes, as reports name them."""

from __future__ import annotations

import re

from torch import fx

from treefx.inspection.source_lines import module_of, path_of_module
from treefx.passes.labels.label_tokens import user_line

__all__ = ["line_of", "module_path", "modules_around", "place_of"]

_LINE = re.compile(r"^(.*?):(\d+): ")


def module_path(node: fx.Node) -> str:
    """Path of the module of a node; "" for the model itself."""
    return module_of(node) or ""


def modules_around(node: fx.Node) -> list[tuple[str, str]]:
    """Return path and class of every module around a node, the outermost first.

    The model itself has the path "".
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [(path_of_module(str(path)), _class_name(kind)) for path, kind in stack.values()]


def _class_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]


def line_of(node: fx.Node) -> str | None:
    """``file:line: code``, of the user's line."""
    return user_line(node)


def place_of(line: str | None) -> tuple[str, int] | None:
    """File and number of a line."""
    found = _LINE.match(line or "")
    return None if found is None else (found[1], int(found[2]))
