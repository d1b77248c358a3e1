"""State the law of gradients: which backwards allow one run per distinct token.

A token that m rows share gets the sum g = g_1 + ... + g_m of their gradients, and its operator's backward b runs once,
on g. The rows would have run it m times and added up: b(g_1) + ... + b(g_m). Both agree for all gradients if and only
if b is **linear**, and b must not **count**: its divisors may not be numbers of tokens.

The derivatives of PyTorch's own operators are linear by nature, since a derivative is a linear map; one of them counts
(``embedding(scale_grad_by_freq=True)``). A backward that the user wrote may be anything: its operators are read one by
one, and so is the forward, since both have to mean the same on any shape.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from treefx.passes.labels.purity import draws
from treefx.passes.trace.opaque_ops import bodies_of, gradients_of

__all__ = ["counts_tokens", "custom_function_reason", "is_pointwise", "overwrites_by_mask"]

aten = torch.ops.aten
_SAME = {aten._to_copy, aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy, aten.conj, aten._conj}
_FILLED = {
    aten.zeros_like: 0, aten.ones_like: 1, aten.full_like: None, aten.scalar_tensor: None, aten.full: None,
    aten.zeros: 0, aten.ones: 1,
}  # fmt: skip


def is_pointwise(target: Any) -> bool:
    """Return whether PyTorch tags its own operator as a function of single elements.

    An operator of another library may say so too, but nothing is known of its backward.
    """
    known = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    return known and torch.Tag.pointwise in target.tags and not draws(target)


def counts_tokens(node: fx.Node) -> str | None:
    """Why the backward of an embedding counts tokens, or None."""
    scales = node.args[3] if len(node.args) > 3 else node.kwargs.get("scale_grad_by_freq", False)
    return "divides gradients by how often a token occurs in the batch (scale_grad_by_freq)" if scales else None


@functools.lru_cache(1024)
def custom_function_reason(key: str) -> str | None:
    """Return why a user's ``autograd.Function`` cannot run once per distinct token, or None."""
    forward, backward = bodies_of(key)
    if any(draws(node.target) for body in (forward, backward) for node in body.graph.nodes):
        return "is an autograd.Function that draws random numbers for every row"
    if not (_is_pointwise_body(forward) and _is_pointwise_body(backward)):
        return "is an autograd.Function that mixes elements"
    if not _is_linear(backward, gradients_of(key)):
        return "is an autograd.Function whose backward is not linear in the gradient"
    return None


# Bodies that mean the same on any shape ------------------------------------------------------------------------------


def _is_pointwise_body(body: fx.GraphModule) -> bool:
    """Return whether all values have the inputs' shape and read elements at their own place."""
    shapes = [tuple(node.meta["val"].shape) for node in body.graph.find_nodes(op="placeholder")]
    if not shapes or any(shape != shapes[0] for shape in shapes):
        return False
    shape = shapes[0]
    return all(_is_pointwise_node(node, shape) for node in body.graph.nodes if node.op == "call_function")


def _is_pointwise_node(node: fx.Node, shape: tuple[int, ...]) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return False
    packet = _packet(node)
    if value.dim() == 0 and (packet in _FILLED or packet in _SAME):
        return True
    if tuple(value.shape) != shape or packet in (aten.full, aten.zeros, aten.ones):
        return False
    same = is_pointwise(node.target) or packet in _SAME or packet in _FILLED or node.target is aten.where.self
    return same or overwrites_by_mask(node)


def overwrites_by_mask(node: fx.Node) -> bool:
    """``x[mask] = number`` with a mask of the same shape."""
    if node.target is not aten.index_put.default or len(node.args) > 3:
        return False
    source, indices, value = node.args
    mask = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    if not (isinstance(source, fx.Node) and isinstance(mask, fx.Node) and isinstance(value, fx.Node)):
        return False
    of_all = mask.meta["val"].dtype is torch.bool and mask.meta["val"].shape == source.meta["val"].shape
    return of_all and value.meta["val"].dim() == 0


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


# Linearity ------------------------------------------------------------------------------------------------------------


class _Degree(enum.Enum):
    """How a value depends on the gradients."""

    ZERO = "zero, whatever they are"
    CONSTANT = "not at all"
    LINEAR = "linearly in all of them together"
    OTHER = "in some other way, or unknown"


_ZERO, _CONSTANT, _LINEAR, _OTHER = _Degree
_SUM = {_ZERO, _LINEAR}


def _is_linear(backward: fx.GraphModule, gradients: int) -> bool:
    """Whether all results are linear in the first ``gradients`` inputs, the others held fixed."""
    degrees: dict[fx.Node, _Degree] = {}
    for i, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        degrees[node] = _LINEAR if i < gradients else _CONSTANT
    for node in backward.graph.nodes:
        if node.op == "get_attr":
            degrees[node] = _degree_of_number(getattr(backward, str(node.target)))
        elif node.op == "call_function":
            degrees[node] = _degree(node, degrees)
    (output,) = backward.graph.find_nodes(op="output")
    return all(degrees[result] in _SUM for result in output.all_input_nodes)


def _degree_of_number(value: Any) -> _Degree:
    if isinstance(value, Tensor):
        known = not isinstance(value, FakeTensor) and bool((value == 0).all())
        return _ZERO if known else _CONSTANT
    return _ZERO if value == 0 else _CONSTANT


def _degree(node: fx.Node, degrees: dict[fx.Node, _Degree]) -> _Degree:
    args = [degrees[item] if isinstance(item, fx.Node) else _degree_of_argument(item, degrees) for item in node.args]
    packet = _packet(node)
    if packet in _FILLED:
        return _filled(node, packet)
    rule = _RULES.get(packet)
    if rule is not None and not node.kwargs.get("rounding_mode") and _is_continuous(node):
        return rule(args)
    if not {_LINEAR, _OTHER} & {*args, *[degrees[item] for item in node.all_input_nodes]}:
        return _CONSTANT
    if str(packet).endswith("_backward") and args[0] is _LINEAR and not {_LINEAR, _OTHER} & set(args[1:]):
        return _LINEAR  # a derivative of PyTorch's own, applied to a gradient
    return _OTHER


def _is_continuous(node: fx.Node) -> bool:
    """Whether a value is not cut to integers."""
    dtype = node.meta["val"].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _degree_of_argument(item: Any, degrees: dict[fx.Node, _Degree]) -> _Degree:
    if isinstance(item, list | tuple):
        inner = [degrees[part] for part in item if isinstance(part, fx.Node)]
        return _OTHER if {_LINEAR, _OTHER} & set(inner) else _CONSTANT
    return _degree_of_number(item) if isinstance(item, int | float | complex) else _CONSTANT


def _filled(node: fx.Node, packet: Any) -> _Degree:
    number: Any = _FILLED[packet]
    if number is None:
        number = node.args[0 if packet is aten.scalar_tensor else 1]
    return _CONSTANT if isinstance(number, fx.Node) else _degree_of_number(number)


def _sum(args: list[_Degree]) -> _Degree:
    """Combine x + y, x - y and choices: linear if both are, or one of them and zero."""
    if _OTHER in args:
        return _OTHER
    if _LINEAR in args:
        return _LINEAR if set(args) <= _SUM else _OTHER
    return _ZERO if set(args) == {_ZERO} else _CONSTANT


def _product(args: list[_Degree]) -> _Degree:
    """x y is linear if one of them is and the other does not depend on the gradients."""
    if _OTHER in args:
        return _OTHER
    if args.count(_LINEAR) > 1:
        return _OTHER
    return _ZERO if _ZERO in args else _LINEAR if _LINEAR in args else _CONSTANT


def _quotient(args: list[_Degree]) -> _Degree:
    """x / y is linear if x is and y does not depend on the gradients."""
    if {_LINEAR, _OTHER} & set(args[1:]) or len(args) > 2:
        return _OTHER
    return _CONSTANT if args[0] is _ZERO else args[0]


def _choice(args: list[_Degree]) -> _Degree:
    """A condition that reads gradients is not linear; the branches are a sum."""
    return _OTHER if args[0] in (_LINEAR, _OTHER) else _sum(args[1:3])


def _overwritten(args: list[_Degree]) -> _Degree:
    """x where a mask that reads no gradient is False, and y elsewhere."""
    return _choice([args[1], args[0], args[2]])


def _first(args: list[_Degree]) -> _Degree:
    return args[0]


_RULES: dict[Any, Callable[[list[_Degree]], _Degree]] = {
    aten.add: lambda args: _sum(args[:2]),
    aten.sub: lambda args: _sum(args[:2]),
    aten.rsub: lambda args: _sum(args[:2]),
    aten.mul: _product,
    aten.div: _quotient,
    aten.where: _choice,
    aten.masked_fill: _overwritten,
    aten.index_put: _overwritten,
    aten.addcmul: lambda args: _sum([args[0], _product(args[1:3])]),
    **dict.fromkeys((*_SAME, aten.neg, aten.positive), _first),
}
