"""Describe a rank's share of a DTensor in Dynamo's graph."""

from __future__ import annotations

import enum
import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

__all__ = [
    "Form", "Held", "Ranks", "Unfollowed", "changes_in_place", "example_of", "held_example", "is_shared_out",
    "is_tensor", "placement_of", "ranks_of",
]  # fmt: skip


_WRITING = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul, operator.ilshift, operator.irshift,
}  # fmt: skip


class Unfollowed(Exception):
    """Raised when ranks cannot be followed; the message names the operator."""


class Form(enum.Enum):
    """How the plain tensor that a rank holds stands for a DTensor."""

    WHOLE = "whole"
    """All of it, the same on every rank. So is every value that is shared out along its tokens or rows: those are
    packed, and each rank has all that are distinct."""
    PIECE = "piece"
    """A range of its last dimension, the features."""
    PARTIAL = "partial"
    """A summand: the value is the sum over ranks."""
    WEIGHT = "weight"
    """A range of a dimension of a parameter."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a model out: their process group by name, and how many they are."""

    group: str
    count: int
    rank: int


@dataclass(frozen=True)
class Held:
    """Hold a DTensor's node in the new graph, and its form; ``dim`` is a weight's range."""

    node: fx.Node
    form: Form
    dim: int = 0


def example_of(node: Any) -> Any:
    """Dynamo's example of a node's value."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def is_shared_out(node: Any) -> bool:
    """Whether a node of Dynamo's graph is a DTensor."""
    return isinstance(example_of(node), DTensor)


def placement_of(placements: Sequence[Any], dims: int) -> Any:
    """Return the placement along the mesh's one dimension, with a shard's dimension >= 0.

    Raises:
        Unfollowed: It is of a kind that is not followed.
    """
    if len(placements) != 1:
        raise Unfollowed(f"a mesh of {len(placements)} dimensions shares a value out; one dimension is followed")
    (placement,) = placements
    if type(placement) is Shard:
        return Shard(placement.dim % max(dims, 1))
    if type(placement) is Replicate or (isinstance(placement, Partial) and placement.reduce_op == "sum"):
        return placement
    raise Unfollowed(f"the placement {placement} is not followed; Replicate, Shard and Partial sums are")


def ranks_of(value: DTensor) -> Ranks:
    """The ranks of the mesh of a DTensor of one dimension."""
    placement_of(value.placements, value.dim())
    mesh = value.device_mesh
    return Ranks(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def held_example(x: Any, form: Form) -> Any:
    """Return an example of a rank's share of a DTensor; other examples stay."""
    if not isinstance(x, DTensor):
        return x
    own = x._local_tensor
    if form is not Form.WHOLE or not isinstance(own, FakeTensor):
        return own
    with own.fake_mode, torch.no_grad():
        return torch.empty(x.shape, dtype=x.dtype, device=own.device, requires_grad=x.requires_grad)


def changes_in_place(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph writes to one of its operands."""
    name = str(getattr(node.target, "__name__", node.target))
    by_name = name.endswith("_") and not name.endswith("__")
    if node.op == "call_method":
        return by_name
    if node.op != "call_function":
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads: Any = target.overloads
        return any(getattr(target, each)._schema.is_mutable for each in overloads())
    by_name = by_name and getattr(target, "__module__", "") != operator.add.__module__  # and_, or_, not_
    return node.target in _WRITING or by_name or "out" in node.kwargs or _is_asked_to(node)


def _is_asked_to(node: fx.Node) -> bool:
    """As by ``functional.relu(x, True)``."""
    target: Any = node.target
    try:
        return bool(inspect.signature(target).bind(*node.args, **node.kwargs).arguments.get("inplace"))
    except (TypeError, ValueError):  # one written in C, which has another name for it
        return False


def is_tensor(node: Any) -> bool:
    """Whether a node of Dynamo's graph is a tensor."""
    return isinstance(example_of(node), Tensor)
