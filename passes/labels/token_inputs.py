"""The token axes of a graph, and the inputs that hold values of every token.

Such an input distinguishes tokens where an operator reads it that runs once per token: ids, masks, positions and types
of tokens [B, T], recorded expert routes [B, T, layers, k] or [B * T, k], vectors [B, T, D], planes of positions
[k, B, T]. Whichever dimensions are taken for rows and columns, a law that pairs them with others finds out; a wrong
guess costs sharing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymInt, fx

from treefx.inputs.values import InputValues
from treefx.passes.labels.facts import Axis, Dims, Factor, ancestors, plain_dims, shape_of
from treefx.passes.trace.trace import NAME

__all__ = ["Role", "Tokens", "find_tokens"]

aten = torch.ops.aten
_EMBEDDINGS = "inputs_embeds"
Role = str
"""Role of a placeholder: "parameter", "buffer", "input", or "variable" (requires grad)."""


@dataclass(frozen=True)
class Tokens:
    """Hold the token axes of a graph: ``[rows, columns]`` of its embedded inputs."""

    rows: int
    columns: int
    inputs: Mapping[fx.Node, Dims]
    """The dimensions of all user inputs with values of every token; each may enter the identity of a token."""
    ids: fx.Node
    """The token ids [B, T]; in a graph without a lookup the embeddings [B, T, D] that it is given."""
    made: frozenset[fx.Node] = frozenset()
    """Those of the inputs that another graph made of tokens: read once per distinct token, gradient included."""
    vectors: frozenset[fx.Node] = frozenset()
    """Inputs [n, ...] of vectors that are told apart by a number each."""

    def is_same_for_rows(self, node: fx.Node) -> bool:
        """Whether an input has one row while the batch has more: [1, ...], or planes [k, 1, T]."""
        shape = shape_of(node)
        if not shape:
            return True
        planes = len(shape) == 3 and _is_same(shape[1], 1) and _is_same(shape[2], self.columns)
        return (shape[0] == 1 or planes) and self.rows > 1


def find_tokens(gm: fx.GraphModule, roles: Sequence[Role], known: InputValues) -> Tokens | None:
    """Find the token ids: the first two-dimensional input that an embedding looks up.

    Without any lookup it is another graph's value of tokens, or ``inputs_embeds`` [B, T, D], known by Dynamo's name, if
    its gradient is not needed: gradients differ from row to row. Tokens whose vectors have the same bits on all their
    prefix are one then.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    users = [node for node, role in zip(placeholders, roles, strict=True) if role == "input" and _is_tensor(node)]
    tokens = _find_tokens(gm, users, [placeholders[i] for i in sorted(known.tokens)])
    return None if tokens is None else replace(tokens, vectors=frozenset(placeholders[i] for i in known.vectors))


def _find_tokens(gm: fx.GraphModule, users: Sequence[fx.Node], made: Sequence[fx.Node]) -> Tokens | None:
    for node in gm.graph.find_nodes(op="call_function", target=aten.embedding.default):
        index: Any = node.args[1]
        for source in [index, *ancestors(index)]:
            if source in users and len(shape_of(source)) == 2 and not source.meta["val"].is_floating_point():
                return _tokens(users, source, made)
    given = [*made, *filter(_holds_embeddings, users)]
    return _tokens(users, given[0], made) if given else None


def _tokens(users: Sequence[fx.Node], ids: fx.Node, made: Sequence[fx.Node]) -> Tokens:
    """The token axes of a graph by the input that holds its tokens."""
    rows, columns = shape_of(ids)[:2]
    found = {user: _dims_of_tokens(user, rows, columns) for user in users if user not in made}
    others = {node: _made_dims(node, rows, columns) for node in made if not _is_written(node)}
    inputs = {node: dims for node, dims in (found | others).items() if dims is not None}
    return Tokens(rows, columns, inputs, ids, frozenset(inputs.keys() & others.keys()))


def _made_dims(node: fx.Node, rows: int, columns: int) -> Dims | None:
    """Return the dimensions of another graph's value of the tokens [rows, columns]."""
    shape = shape_of(node)
    if not _is_same(shape[0], rows) or not _is_same(shape[1], columns):
        return None
    return ((Factor(Axis.ROW, rows),), (Factor(Axis.TOKEN, columns),), *plain_dims(shape[2:]))


def _is_written(node: fx.Node) -> bool:
    return any(user.target is aten.copy_.default and user.args[0] is node for user in node.users)


def _holds_embeddings(node: fx.Node) -> bool:
    floating = node.meta["val"].is_floating_point() and node.meta["val"].dim() == 3
    return floating and _EMBEDDINGS in node.meta.get(NAME, "")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _dims_of_tokens(node: fx.Node, rows: int, columns: int) -> Dims | None:
    """Return the dimensions of an input [B, T, ...], [k, B, T] or [B * T, k, ...]; else None.

    Masks [.., T, T] give None.
    """
    shape = shape_of(node)
    if len(shape) < 2 or _is_mask(node, columns):
        return None
    row, token = (Factor(Axis.ROW, rows),), (Factor(Axis.TOKEN, columns),)
    if _is_same(shape[0], rows) and _is_same(shape[1], columns):
        return (row, token, *plain_dims(shape[2:]))
    if len(shape) == 3 and _is_same(shape[1], rows) and _is_same(shape[2], columns):
        return (*plain_dims(shape[:1]), row, token)
    if _is_same(shape[0], rows * columns) and not _is_same(shape[1], columns):  # of one row, [T, T] may be a mask
        return ((*row, *token), *plain_dims(shape[1:]))
    return None


def _is_mask(node: fx.Node, columns: int) -> bool:
    """Whether an input may be a mask or a bias: its values of one query are those of all keys."""
    shape, dtype = shape_of(node), node.meta["val"].dtype
    square = len(shape) > 2 and _is_same(shape[-1], columns) and _is_same(shape[-2], columns)
    return square and (dtype is torch.bool or dtype.is_floating_point)


def _is_same(left: Any, right: Any) -> bool:
    """Return whether two sizes are one number, or one symbol.

    A number that a symbol happens to have is another size.
    """
    if isinstance(left, SymInt) or isinstance(right, SymInt):
        return str(left) == str(right)
    return bool(left == right)
