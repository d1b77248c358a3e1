"""Find values that a forward leaves in objects of the caller.

These are attributes, lists, globals, variables of closures.

Dynamo traces such changes and would apply them after its graph. Here they are read from its record while it calls the
backend: of a tensor that is kept, the node of the graph; of a size, that it is one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

__all__ = ["Kept", "kept_values", "name_of", "outputs_of"]

_MODULE = re.compile(r"(?:\.__dict__\['_(?:parameters|buffers)'\]|\._(?:modules|parameters|buffers))\['([^']+)'\]")
_IMPORT = re.compile(r"G\['__import_([^']+)'\]")


@dataclass(frozen=True)
class Kept:
    """One value that outlives the call.

    Attributes:
        where: The attribute or variable that holds it, as the user knows it.
        node: Its node in Dynamo's graph; None for a size of the batch.
        is_input: Whether it is an input of the call itself.
    """

    where: str
    node: fx.Node | None
    is_input: bool = False


def kept_values(root: str) -> list[Kept]:
    """The values that the traced call keeps; to be called where Dynamo calls a backend.

    Args:
        root: The name of the variable that holds the traced module.
    """
    effects: Any = InstructionTranslator.current_tx().output.side_effects
    found: dict[tuple[str, Any], Kept] = {}
    for variable in list(effects.id_to_variable.values()):
        is_new = isinstance(variable.mutation_type, AttributeMutationNew | ValueMutationNew)
        if is_new or not effects.is_modified(variable):
            continue
        for where, value in _changes(variable, effects, root):
            for item in _kept_in(where, value, effects):
                found[item.where, item.node] = item
    return list(found.values())


def _changes(variable: VariableTracker, effects: Any, root: str) -> Iterator[tuple[str, Any]]:
    """Yield values written to an object, with the names of the places."""
    path = _path(variable.source, root)
    attributes = effects.store_attr_mutations.get(variable, {})
    for name, value in attributes.items():
        yield (path if name == "cell_contents" else f"{path}.{name}"), value
    items = getattr(variable, "items", None)
    if isinstance(items, dict):
        for key, value in items.items():
            named = getattr(getattr(key, "vt", None), "value", "?")
            yield f"{path.removesuffix(_BUFFERS)}.{named}" if path.endswith(_BUFFERS) else f"{path}[{named!r}]", value
    elif not attributes:  # a list, a deque, a set
        yield path, variable


_BUFFERS = ".__dict__['_buffers']"


def _path(source: Any, root: str) -> str:
    """``G['module']._modules['layers']._modules['1'].log`` as ``layers.1.log``."""
    name = "a value" if source is None else source.name() if callable(source.name) else source.name
    name = _MODULE.sub(lambda match: f".{match[1]}", name)
    name = _IMPORT.sub(lambda match: match[1].replace("_dot_", "."), name)
    name = re.sub(r"^[LG]\['([^']+)'\]", r"\1", name)
    return name.removeprefix(root).lstrip(".")


def _kept_in(where: str, value: Any, effects: Any) -> Iterator[Kept]:
    """Tensors and sizes of a value, however deep."""
    waiting, seen = [value], dict[int, Any]()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item  # and so its number passes to no other one
        if isinstance(item, VariableTracker):
            item = item.unwrap()
            if isinstance(item, LazyVariableTracker):
                if isinstance(item.original_value(), torch.Tensor) and _is_input(item.source):
                    yield Kept(where, None, is_input=True)
                continue
            if isinstance(item, TensorVariable):
                if item.source is None or _is_input(item.source):
                    yield Kept(where, item.as_proxy().node, is_input=item.source is not None)
                continue
            if isinstance(item, SymNodeVariable):
                yield Kept(where, None)
                continue
            waiting += [x for name, x in item.__dict__.items() if name not in item._nonvar_fields]
            waiting += effects.store_attr_mutations.get(item, {}).values()
        elif type(item) in (list, tuple, dict, OrderedDict):
            waiting += item.values() if isinstance(item, dict) else item


def name_of(node: fx.Node, root: str = "module") -> str:
    """The name of an input of Dynamo's graph, as the user knows it."""
    return _path(getattr(node, "_dynamo_source", None), root)


def outputs_of(gm: fx.GraphModule) -> Any:
    """Return the results of a graph, position by position."""
    return next(iter(gm.graph.find_nodes(op="output"))).args[0]


def _is_input(source: Any) -> bool:
    """Whether a value is an argument of the call, and no part of the module."""
    name = "" if source is None else source.name() if callable(source.name) else source.name
    return str(name).startswith("L['inputs']")
