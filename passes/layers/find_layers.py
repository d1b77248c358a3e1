"""Find layers of a graph, and key them by their computation.

A layer is the set of operators of one numbered module, such as ``model.layers.3``. Two layers compute the same if they
have the same key: the same operators in the same order with the same numbers, on operands with the same facts. Unknown
objects compare by identity, so such layers never match.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

__all__ = ["Layer", "described", "exact", "find_layers", "key_of", "layer_of", "make_layer", "others_in"]

_NUMBERED = re.compile(r"(.*?\.\d+)(?:\.|$)")
_OUTSIDE = "outside"
_PLAIN = (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Layer:
    """A layer of a graph.

    Attributes:
        nodes: Its operators, in the order of the graph.
        operands: Values of others that it reads, in order of the reads.
        results: Those of its operators that others read.
    """

    nodes: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def layer_of(node: fx.Node) -> str | None:
    """Return the outermost numbered module of an operator or constant: ``model.layers.3``."""
    if node.op not in ("call_function", "call_method", "get_attr") or isinstance(node.meta.get("val"), SymInt):
        return None
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        found = _NUMBERED.match(path)
        if found is not None:
            return found[1]
    return None


def make_layer(nodes: Sequence[fx.Node]) -> Layer:
    """The layer that has these operators."""
    inside = set(nodes)
    operands = dict.fromkeys(item for node in nodes for item in node.all_input_nodes if item not in inside)
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    return Layer(tuple(nodes), tuple(operands), tuple(results))


def find_layers(graph: fx.Graph) -> list[Layer]:
    """Return the layers with adjacent operators, in order."""
    runs = [(name, list(nodes)) for name, nodes in itertools.groupby(list(graph.nodes), key=layer_of)]
    times = Counter(name for name, _ in runs)
    return [make_layer(nodes) for name, nodes in runs if name is not None and times[name] == 1]


def key_of(layer: Layer, known: Callable[[fx.Node], Any]) -> tuple[Any, ...]:
    """Equal for layers that compute the same.

    Args:
        layer: Of any graph.
        known: Further facts, outside of the graph, that decide about an operator or the use of an operand.
    """
    number = {node: i for i, node in enumerate((*layer.operands, *layer.nodes))}
    groups: dict[Any, int] = {}
    operators = [(node.op, node.target, node.args, node.kwargs, _tags(node, groups)) for node in layer.nodes]
    everything = (operators, list(map(known, number)), layer.results, len(layer.operands))
    key: tuple[Any, ...] = exact(everything, number)
    return key


def _tags(node: fx.Node, groups: dict[Any, int]) -> tuple[Any, ...]:
    """The line of the user, and how it is checkpointed."""
    tag = node.meta.get("recompute")
    group = None if tag is None else groups.setdefault(node.meta.get("ac_graph_id"), len(groups))
    return node.meta.get("stack_trace"), tag, group


def others_in(key: Any) -> set[fx.Node]:
    """The nodes that a key names and that are neither of the layer nor its operands."""
    if not isinstance(key, tuple):
        return set()
    if len(key) == 2 and key[0] == _OUTSIDE:
        return {key[1]}
    return set().union(*map(others_in, key))


def described(x: Any) -> Any:
    """Describe the properties of a value that operators can see without its numbers."""
    if isinstance(x, tuple | list):
        return tuple(map(described, x))
    if not isinstance(x, Tensor):
        return x
    layout = (x.stride(), x.storage_offset()) if x.layout is torch.strided else x
    return (type(x), x.shape, layout, x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg())


def exact(value: Any, number: Mapping[fx.Node, int]) -> Any:
    """Return a hashable form, equal for equal values alone.

    Nodes of a layer are numbers, all else compares by identity.
    """
    if isinstance(value, fx.Node):
        return ("%", number[value]) if value in number else (_OUTSIDE, value)
    if value is None or isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, float | complex):
        return (type(value), repr(value))  # 0.0 is not -0.0, and nan is nan
    if isinstance(value, SymInt | SymFloat | SymBool):
        return (type(value), value.node.expr)
    if isinstance(value, slice):
        return (slice, exact((value.start, value.stop, value.step), number))
    if isinstance(value, Mapping):
        return (type(value), *(exact(item, number) for item in value.items()))
    if isinstance(value, tuple | list):
        return (type(value), *(exact(item, number) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return (type(value), *(exact(getattr(value, name), number) for name in fields))
    return ("one", _Identity(value))


class _Identity:
    """Compare by identity, and keep the object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
