"""Return the origin of nodes: the user's line, the module, the type of the value."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx
from torch.utils._dtype_abbrs import dtype_abbrs

__all__ = ["module_of", "path_of_module", "type_of"]

_ROOT = re.compile(r"^L\['\w+'\]\.?|^self\.?")
_ITEM = re.compile(r"\._modules\['(\w+)'\]")


def module_of(node: fx.Node) -> str | None:
    """Path, as in ``named_modules``, of the module that a node or its forward ran in."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    return path_of_module(list(stack.values())[-1][0]) or None


def path_of_module(path: str) -> str:
    """Path, as in ``named_modules``, of a module as fx writes it; "" for the model itself."""
    return _ITEM.sub(r".\1", _ROOT.sub("", path))


def type_of(node: fx.Node) -> str:
    """Return dtype and shape of a node's value, ``f32[4, 12, 64]``; empty without a tensor."""
    return _type_of(node.meta.get("val", node.meta.get("example_value")))


def _type_of(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_type_of, value))})"
    if isinstance(value, torch.Tensor):
        return f"{dtype_abbrs[value.dtype]}[{', '.join(map(str, value.shape))}]"
    return ""
