"""Find in-place changes that autograd misses: under ``no_grad``, ``detach`` or ``.data``.

Such a change gives a value other numbers and leaves its gradient as if nothing had happened. A functional graph has no
words for that (there, the new value is a function of the old one, with a derivative or none), so it is refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["changed_by", "changed_in_place", "check_changes", "memory_of", "seen_by_autograd"]

_IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.iand, operator.ior,
    operator.ixor, operator.ipow, operator.imod, operator.ifloordiv,
}  # fmt: skip


def check_changes(node: fx.Node, grad_enabled: bool) -> None:
    """Check that a node of Dynamo's graph hides no change from autograd.

    Raises:
        NotImplementedError: It changes memory of a value that has a gradient, and the gradient does not see it.
    """
    changed = changed_in_place(node)
    if changed is None or (grad_enabled and changed.requires_grad):
        return
    storage = _storage(changed)
    examples = (_example(other) for other in node.graph.nodes)
    if any(x is not None and x.requires_grad and _storage(x) == storage for x in examples):
        raise NotImplementedError(
            f"{node.format_node()} changes a value in place without its gradient (under torch.no_grad, or through "
            "detach() or .data); compute a new value instead"
        )


def seen_by_autograd(nodes: Iterable[fx.Node]) -> tuple[bool, ...]:
    """Return which values have gradients in Dynamo's trace, which decides about a change."""
    examples = map(_example, nodes)
    return tuple(x is not None and x.requires_grad for x in examples)


def changed_by(gm: fx.GraphModule, positions: Collection[int]) -> tuple[fx.Node, fx.Node] | None:
    """Find the first operator that writes a function of some inputs into an input.

    Sizes of these inputs count as well.

    Args:
        gm: Dynamo's graph.
        positions: Those inputs, among all placeholders.

    Returns:
        The operator and the placeholder it changes, such as a buffer that counts tokens. None if there is none: a
        counter of steps depends on no input.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    changeable = {memory_of(node): node for node in placeholders if memory_of(node) is not None}
    made, memory = {placeholders[i] for i in positions}, set[int | None]()
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if not any(source in made or memory_of(source) in memory for source in node.all_input_nodes):
            continue
        made.add(node)
        changed = changed_in_place(node)
        if changed is not None and _storage(changed) in changeable:
            return node, changeable[_storage(changed)]
        if changed is not None:
            memory.add(_storage(changed))
    return None


def memory_of(node: fx.Node) -> int | None:
    """Return the memory of a node's value, as Dynamo saw it; None if it is no tensor."""
    value = _example(node)
    return None if value is None else _storage(value)


def changed_in_place(node: fx.Node) -> Tensor | None:
    """Return the operand that a node changes in place, as Dynamo saw it."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    in_place = node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if node.op not in ("call_method", "call_function") or not in_place or not node.args:
        return None
    return _example(node.args[0])


def _storage(x: Tensor) -> int:
    """Return the memory of a tensor, also inside of ``torch.vmap``, where it has none."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    memory: int = x.untyped_storage()._cdata
    return memory


def _example(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None
