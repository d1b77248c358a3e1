"""Fingerprint a graph's dependencies as short texts: keys of caches."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from treefx import errors, kernels
from treefx.inputs.sizes import tensor_key

__all__ = ["fingerprint", "recompute_tags", "source_fingerprint"]

_LARGEST_CONSTANT = 4096


def fingerprint(gm: fx.GraphModule) -> str:
    """Return equal texts for equal computation from equal lines, for any node names.

    Two graphs with a constant of more than a few thousand numbers, or with a submodule, never have the same.
    """
    number = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    lines = [repr(recompute_tags(gm))]
    for node in gm.graph.nodes:
        operands = tree_map_only(fx.Node, number.__getitem__, (node.args, dict(node.kwargs)))
        lines.append(repr((node.op, str(_target(gm, node)), operands, node.meta.get("stack_trace"))))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _target(gm: fx.GraphModule, node: fx.Node) -> Any:
    if node.op == "get_attr":
        return _constant(gm, node)
    return _value(node) if node.op == "placeholder" else node.target


def _value(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return tensor_key(value)[1:] if isinstance(value, Tensor) else type(value)


def _constant(gm: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if isinstance(value, Tensor) and value.numel() <= _LARGEST_CONSTANT:
        return (tensor_key(value), value.tolist())
    return id(value)


def recompute_tags(gm: fx.GraphModule) -> list[tuple[int, int]]:
    """Return which nodes are recomputed in the backward, and in which group, by place.

    They are no part of the graph's code, which is all that caches of AOTAutograd look at.
    """
    groups: dict[Any, int] = {}
    return [
        (place, groups.setdefault(node.meta.get("ac_graph_id"), len(groups)))
        for place, node in enumerate(node for part in _graphs(gm) for node in part.nodes)
        if "recompute" in node.meta
    ]


def _graphs(gm: fx.GraphModule) -> list[fx.Graph]:
    return [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]


@functools.cache
def source_fingerprint() -> str:
    """Hash all sources of treefx, which decide how a graph is rewritten after a lookup."""
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in (Path(errors.__file__).parent, Path(__file__).parents[1], Path(kernels.__file__).parent):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
