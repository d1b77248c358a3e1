"""Rewrite Dynamo's graph of a model with sharded weights to one rank's share.

Dynamo leaves ``DTensor.from_local``, ``redistribute`` and ``to_local`` in its graph, and DTensors between them; which
sums and gatherings ranks do is decided when it runs, and their derivative by autograd. Tracing such a graph takes the
weights of the rank for constants. Here every value is followed by the rank's share of it (``held``), and the sums
become operators that later passes have laws for. Before, with a weight in two ranges::

    x: "DTensor(f64[4, 12, 32], R)" = from_local(hidden, mesh, (Replicate(),))
    up: "DTensor(f64[4, 12, 64], S(2))" = linear(x, weight: "DTensor(f64[64, 32], S(0))")

After::

    own: "f64[4, 12, 32]" = treefx.same_on_ranks(hidden, group)
    up: "f64[4, 12, 32]" = linear(own, weight: "f64[32, 32]")

Values that are shared out along tokens (sequence parallelism) are whole here: packed tokens are another number, and of
those each rank has all between two products. That sends as much as sharing them out does (a sum over ranks is a
scatter and a gather), and keeps more.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from treefx.passes.ranks import collectives as _collectives  # noqa: F401  (registers operators)
from treefx.passes.ranks.held import (
    Form,
    Held,
    Ranks,
    Unfollowed,
    changes_in_place,
    example_of,
    held_example,
    is_shared_out,
    is_tensor,
    placement_of,
    ranks_of,
)
from treefx.passes.ranks.products import embedding, linear

__all__ = ["OwnGraph", "own_graph"]

_LINEAR = {F.linear, torch._C._nn.linear}
_ALONE = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, torch.add, torch.sub,
    torch.mul, torch.div, torch.neg, "to", "float", "double", "bfloat16", "half", "type_as", "contiguous", "add", "mul",
    "sub", "div", "neg", "clone", "detach",
}  # fmt: skip
"""Functions that may read the rank's own tokens (sequence parallelism): elementwise ones."""
_EVEN = {
    F.silu, F.gelu, F.relu, operator.mul, operator.add, torch.mul, torch.add, torch.sigmoid, torch.tanh, "to", "float",
    "contiguous",
}  # fmt: skip
"""Functions that may read pieces of features: elementwise, with only such pieces as operands."""
_DRAWS = ("dropout", "rand", "bernoulli", "multinomial", "normal", "uniform")


@dataclass(frozen=True)
class OwnGraph:
    """A graph of plain tensors, and how its inputs come of those of Dynamo's graph.

    Attributes:
        gm: The graph.
        kept: Which placeholders it has left, by position; the others were meshes.
        ranks: How many share it.
    """

    gm: fx.GraphModule
    kept: tuple[int, ...]
    ranks: int

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """Return the inputs of a call with DTensors replaced by this rank's share.

        Gradients are then like it.
        """
        return [args[i].to_local() if isinstance(args[i], DTensor) else args[i] for i in self.kept]


def own_graph(gm: fx.GraphModule, roles: Sequence[str]) -> OwnGraph | str | None:
    """Return this rank's graph, or why it is unknown.

    None for a graph without DTensors, or without token ids.

    Unchanged parts keep their collectives where passes of inductor find them (``overlap``).

    Args:
        gm: Dynamo's graph, unchanged.
        roles: Role of each placeholder; those that come with the call are not followed in shards.
    """
    if not any(is_shared_out(node) for node in gm.graph.nodes) or not _gets_ids(gm, roles):
        return None
    try:
        return _Rewriting(gm).run(roles)
    except Unfollowed as reason:
        return str(reason)


def _gets_ids(gm: fx.GraphModule, roles: Sequence[str]) -> bool:
    """Whether something that comes with the call can be looked up in an embedding."""
    nodes = zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True)
    given = (example_of(node) for node, role in nodes if role == "input")
    return any(isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64) for x in given)


class _Rewriting:
    """One walk over a graph. ``env`` maps each node to a node, or to the share of a DTensor.

    Args:
        gm: The graph.
        ranks: Those that are known to share it.
    """

    def __init__(self, gm: fx.GraphModule, ranks: Ranks | None = None) -> None:
        self.gm, self.graph, self.ranks = gm, fx.Graph(), ranks
        self.env: dict[fx.Node, fx.Node | Held] = {}
        self.own_tokens: set[fx.Node] = set()
        """Plain tensors that have this rank's tokens in Dynamo's graph, and all of them here."""
        self.read: dict[fx.Node, fx.Node] = {}
        self.results: dict[fx.Node, list[Any]] = {}
        """Kinds of the results of checkpointed bodies."""
        self.bodies: dict[str, fx.GraphModule] = {}

    def run(self, roles: Sequence[str]) -> OwnGraph:
        """The whole graph, which gives nothing away that ranks share out."""
        placeholders = enumerate(zip(self.gm.graph.find_nodes(op="placeholder"), roles, strict=True))
        kept = tuple([position for position, (node, role) in placeholders if self._placeholder(node, role)])
        self._walk()
        for item in next(iter(self.gm.graph.find_nodes(op="output"))).all_input_nodes:
            if self._kind(item) is not None:
                raise Unfollowed(f"the graph returns {item}, of which each rank has a share")
        made = self._module()
        made.meta = dict(self.gm.meta)
        setattr(made, "compile_subgraph_reason", getattr(self.gm, "compile_subgraph_reason", None))
        return OwnGraph(made, kept, self._group().count)

    def run_body(self, given: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
        """Return a checkpointed body's graph for these kinds of operands, and its results' kinds.

        Kinds are those of ``_kind``, or ``_MESH``.
        """
        for node, kind in zip(self.gm.graph.find_nodes(op="placeholder"), given, strict=True):
            if kind is not _MESH:
                self._take(node, self.graph.node_copy(node), kind)
        self._walk()
        results: Any = next(iter(self.gm.graph.find_nodes(op="output"))).args[0]
        return self._module(), [self._kind(item) for item in results]

    def _walk(self) -> None:
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self.graph.node_copy(node, self._plain)
            elif node.op != "placeholder":
                self._visit(node)
        self.graph.lint()

    def _module(self) -> fx.GraphModule:
        names = [str(node.target) for node in self.graph.nodes if node.op in ("get_attr", "call_module")]
        return fx.GraphModule({name: self.bodies.get(name) or _attribute(self.gm, name) for name in names}, self.graph)

    def _kind(self, node: Any) -> Any:
        """Return how a value is sharded: ``Held``, ``_OWN_TOKENS``, or None for a plain tensor."""
        value = self.env.get(node)
        if isinstance(value, Held):
            return value
        return _OWN_TOKENS if node in self.own_tokens else None

    def _take(self, old: fx.Node, new: fx.Node, kind: Any) -> None:
        """Let a node stand for one of Dynamo's of that kind."""
        self.env[old] = new
        if isinstance(kind, Held):
            self.env[old] = self._made(old, replace(kind, node=new))
        elif kind is _OWN_TOKENS:
            self.own_tokens.add(old)

    def _placeholder(self, node: fx.Node, role: str) -> bool:
        example = example_of(node)
        if _is_mesh(node):
            return False
        copied = self.graph.node_copy(node)
        copied._dynamo_source = getattr(node, "_dynamo_source", None)
        self.env[node] = copied
        if not isinstance(example, DTensor):
            return True
        placement = placement_of(example.placements, example.dim())
        self._join(ranks_of(example))
        form, dim = Form.WHOLE, 0
        if isinstance(placement, Shard):
            form, dim = Form.WEIGHT, placement.dim
        elif isinstance(placement, Partial):
            raise Unfollowed(f"{node.name} comes as summands")
        if form is Form.WEIGHT and role not in ("parameter", "buffer"):
            raise Unfollowed(f"{node.name} comes in shards and is no parameter")
        copied.meta["example_value"] = held_example(example, form)
        self.env[node] = Held(copied, form, dim)
        return True

    def _join(self, ranks: Ranks) -> None:
        if self.ranks not in (None, ranks):
            raise Unfollowed("two meshes share the model out; one is followed")
        self.ranks = ranks

    def _visit(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        if changes_in_place(node):
            # One value stands here for several of Dynamo's that are copies of each other.
            raise Unfollowed(f"{_name(node)} changes a value in place")
        if not is_tensor(node) and node.target is not operator.getitem:
            self.read.clear()  # It may turn gradients off or on: values read without have none.
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            self._checkpoint(node)
        elif node.target is operator.getitem and node.args[0] in self.results:
            kind = self.results[node.args[0]][node.args[1]]  # type: ignore[index]
            self._take(node, self.graph.node_copy(node, self._plain), kind)
        elif _is_from_local(node):
            self.env[node] = self._from_local(node)
        elif node.op == "call_method" and is_shared_out(node.args[0]) and node.target in _MOVES:
            self.env[node] = _MOVES[node.target](self, node)
        elif any(isinstance(self.env.get(item), Held) for item in operands):
            self.env[node] = self._shared(node)
        elif any(item in self.own_tokens for item in operands):
            self.env[node] = self._alone(node)
        else:
            if is_shared_out(node) or any(_is_mesh(item) for item in operands):
                raise Unfollowed(f"{_name(node)} makes a DTensor")
            self.env[node] = self.graph.node_copy(node, self._plain)

    def _plain(self, node: fx.Node) -> fx.Node:
        if node not in self.env:
            raise Unfollowed(f"something else than from_local reads the mesh {node}")
        value = self.env[node]
        return value.node if isinstance(value, Held) else value

    def _held(self, node: Any) -> Held:
        value = self.env[node]
        return value if isinstance(value, Held) else Held(value, Form.WHOLE)

    def _made(self, node: fx.Node, held: Held) -> Held:
        """Return a node's share, with the meta of the node."""
        held.node.meta = {**node.meta, **held.node.meta}
        held.node.meta["example_value"] = held_example(example_of(node), held.form)
        return held

    def _from_local(self, node: fx.Node) -> Held:
        source, example = node.args[0], example_of(node)
        self._join(ranks_of(example))
        placement = placement_of(example.placements, example.dim())
        plain = self._plain(source)  # type: ignore[arg-type]
        own = source in self.own_tokens
        if isinstance(placement, Replicate) and not own:
            return Held(plain, Form.WHOLE)
        if isinstance(placement, Partial) and not own:
            return Held(plain, Form.PARTIAL)
        if isinstance(placement, Shard) and own:
            return Held(plain, Form.WHOLE)
        if isinstance(placement, Shard) and placement.dim == example.dim() - 1:
            return Held(plain, Form.PIECE)
        raise Unfollowed(f"from_local takes {source} for {placement}, which the graph itself did not make of it")

    def _redistribute(self, node: fx.Node) -> Held:
        example = example_of(node)
        held, target = self._held(node.args[0]), placement_of(example.placements, example.dim())
        ranks, last = self._group(), example.dim() - 1
        if held.form is Form.WEIGHT:
            raise Unfollowed("redistribute of a parameter")
        if isinstance(target, Partial):
            if held.form is not Form.PARTIAL:
                raise Unfollowed("redistribute to summands")
            return held
        if held.form is Form.PARTIAL:
            held = self._call(node, torch.ops.treefx.sum_over_ranks.default, held, Form.WHOLE)
        source = placement_of(example_of(node.args[0]).placements, example.dim())
        to_piece = isinstance(target, Shard) and target.dim == last
        if held.form is Form.PIECE and not to_piece:
            self._even(example, last)
            return self._call(node, torch.ops.treefx.gather_pieces.default, held, Form.WHOLE, last, ranks.count)
        if held.form is Form.WHOLE and to_piece and target != source:
            self._even(example, last)
            return self._call(node, torch.ops.treefx.own_piece.default, held, Form.PIECE, last, ranks.count)
        return held

    def _even(self, example: Any, dim: int) -> None:
        if example.shape[dim] % self._group().count:
            raise Unfollowed(f"{example.shape[dim]} features are no multiple of {self._group().count} ranks")

    def _call(self, node: fx.Node, target: Any, held: Held, form: Form, *how: Any) -> Held:
        made = self.graph.call_function(target, (held.node, *how, self._group().group))
        return self._made(node, Held(made, form))

    def _group(self) -> Ranks:
        assert self.ranks is not None
        return self.ranks

    def _to_local(self, node: fx.Node) -> fx.Node:
        held, example = self._held(node.args[0]), example_of(node.args[0])
        placement = placement_of(example.placements, example.dim())
        grads = node.kwargs.get("grad_placements") or (node.args[1] if len(node.args) > 1 else None)
        found = held.node
        if isinstance(placement, Partial) and held.form is not Form.PARTIAL:
            raise Unfollowed(f"{_name(node)} of this rank's summand of {node.args[0]}")
        if grads is not None:
            wanted = placement_of(grads, example.dim())  # type: ignore[arg-type]
            if isinstance(wanted, Partial) and held.form is Form.WHOLE and isinstance(placement, Replicate):
                ranks = self._group()
                found = self.graph.call_function(torch.ops.treefx.same_on_ranks.default, (found, ranks.group))
            elif wanted != placement:
                raise Unfollowed(f"to_local with gradients placed as {wanted} for a value placed as {placement}")
        if held.form is Form.WHOLE and isinstance(placement, Shard):
            self.own_tokens.add(node)
        return found

    def _shared(self, node: fx.Node) -> fx.Node | Held:
        """An operator on DTensors."""
        held = [self._held(item) for item in node.all_input_nodes if is_tensor(item)]
        mixed = [item for item in node.all_input_nodes if is_tensor(item) and not is_shared_out(item)]
        if node.target in _LINEAR and any(item.form is not Form.WHOLE for item in held):
            given = [*node.args, *[None] * (3 - len(node.args))]
            taken = [None if item is None else self._held(item) for item in given]
            return self._made(node, linear(self.graph, self.read, taken, self._group()))
        if node.target is F.embedding and self._held(node.args[1]).form is Form.WEIGHT:
            ids, weight = self._held(node.args[0]), self._held(node.args[1])
            return self._made(node, embedding(self.graph, ids, weight, node, self._group()))
        if any(item in self.own_tokens for item in mixed) or any(name in _name(node) for name in _DRAWS):
            raise Unfollowed(f"{_name(node)} reads tokens of this rank, or draws random numbers")
        forms = {item.form for item in held}
        pieces = forms == {Form.PIECE} and node.target in _EVEN and _same_shapes(node)
        if forms != {Form.WHOLE} and not pieces:
            raise Unfollowed(f"{_name(node)} of values that are {' and '.join(sorted(form.value for form in forms))}")
        copied = self.graph.node_copy(node, self._plain)
        if not is_shared_out(node):
            return copied
        return self._made(node, Held(copied, Form.PIECE if pieces else Form.WHOLE))

    def _alone(self, node: fx.Node) -> fx.Node:
        """An operator on plain tensors that have this rank's tokens."""
        others = [item for item in node.all_input_nodes if is_tensor(item) and item not in self.own_tokens]
        if node.target not in _ALONE or others:
            reads = f", with {others[0]}" if others else ""
            raise Unfollowed(f"{_name(node)} reads the tokens of one rank alone{reads}")
        self.own_tokens.add(node)
        return self.graph.node_copy(node, self._plain)

    def _checkpoint(self, node: fx.Node) -> None:
        """Rewrite a checkpointed body, without the meshes among its operands."""
        name, operands = str(node.args[0].target), node.args[1:]  # type: ignore[union-attr]
        meshes = [isinstance(item, fx.Node) and _is_mesh(item) for item in operands]
        kinds = [_MESH if mesh else self._kind(item) for item, mesh in zip(operands, meshes, strict=True)]
        body, self.results[node] = _Rewriting(_attribute(self.gm, name), self.ranks).run_body(kinds)
        self.bodies[name] = body
        given = [item for item, mesh in zip(operands, meshes, strict=True) if not mesh]
        args: Any = (self.env[node.args[0]], *fx.node.map_arg(given, self._plain))  # type: ignore[index]
        self.env[node] = self.graph.create_node("call_function", node.target, args, dict(node.kwargs), node.name)
        self.env[node].meta = dict(node.meta)  # type: ignore[union-attr]


_MESH, _OWN_TOKENS = object(), object()
_MOVES: dict[Any, Callable[[_Rewriting, fx.Node], Any]] = {
    "redistribute": _Rewriting._redistribute,
    "to_local": _Rewriting._to_local,
}


def _attribute(gm: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), gm)


def _is_mesh(node: fx.Node) -> bool:
    """Whether an input is the mesh that ``from_local`` is given."""
    example = example_of(node)
    return node.op == "placeholder" and "FakeScriptObject" in type(example).__name__


def _is_from_local(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is DTensor.from_local


def _same_shapes(node: fx.Node) -> bool:
    shapes = {tuple(example_of(item).shape) for item in node.all_input_nodes if isinstance(example_of(item), Tensor)}
    return len(shapes) == 1


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
