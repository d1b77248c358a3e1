"""Find attentions to a few chosen keys: they read these keys alone, not all ancestors under a mask.

A condition of a lifted attention is a choice where it reads, for each pair, a mask that is filled with one constant and
holds another one at the columns that a top-k has chosen (``choices``). The columns of a query's row are its ancestors
and later keys. So the chosen keys are a list of tokens per query, and all other conditions of the attention are read at
the pairs of this list.

The count of work decides. A masked attention computes all pairs of a query and its ancestors, (T + 1) / 2 on average in
a row of T columns. One to a list computes K pairs, each of which takes as long as several masked ones
(:func:`treefx.kernels.sparse.choose.dense_pairs`), because its key is gathered. A key and value that all heads share as
one latent vector (``latents``) are gathered once for all of them; that form is taken where its pairs cost less.

Before (4 rows of 512 tokens, 3 keys a query)::

    mask: "b8[1, s0, 512]" = scatter(ones, -1, columns, False)
    out = treefx.tree_attention(q, k, v, subtree_end, [mask, column], None, score, "auto")

After (s0 distinct tokens)::

    keys: "i32[s0, 3]" = where(visible, token_of[row, columns], -1)
    out = treefx.sparse_tree_attention(q, k, v, keys, None, scale)
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

from treefx.kernels.score import Expr, linear_in_dot, walk
from treefx.kernels.sparse.choose import dense_pairs
from treefx.passes.labels.dims import extent
from treefx.passes.labels.facts import Axis, fact_of, set_fact, shape_of
from treefx.passes.scores.attention_facts import Attention, digits_of
from treefx.passes.scores.choices import Choice
from treefx.passes.scores.latents import Latents, find_latents
from treefx.passes.scores.lift_mask import lift
from treefx.passes.scores.score_algebra import Tables, const, decide

__all__ = ["SparseAttention", "find_sparse", "pays_off"]

aten = torch.ops.aten
_SAME = (aten._to_copy.default, aten.detach.default, aten.alias.default, aten.clone.default)
_OF_PAIRS_ALONE = ("head", "batch", "b", "dot")
_NO_TABLES = Tables(lambda expr: None)


@dataclass(frozen=True, kw_only=True)
class SparseAttention(Attention):
    """One attention that reads a list of keys per query.

    Attributes:
        columns: The columns of the chosen keys, a value [B, T, K].
        choice: The condition that holds for them alone.
        scale: Of q.k.
        latents: Keys and values by their latent vector, where its pairs take less time than those of each head.
    """

    columns: fx.Node
    choice: Expr
    scale: float
    latents: Latents | None = None

    def reads(self) -> list[fx.Node]:
        """Return query, key, value, the chosen columns and the loads of other conditions."""
        found = [*Attention.reads(replace(self, conditions=self.others())), self.columns]
        return found if self.latents is None else [self.query, *found[3:], *self.latents.reads()]

    def others(self) -> tuple[Expr, ...]:
        """Return the conditions besides the choice, without those of padding."""
        return tuple(item for item in self.conditions if item != self.choice)


def find_sparse(gm: fx.GraphModule) -> int:
    """Give attentions to few chosen keys the law ``SparseAttention``, and return how many.

    Args:
        gm: A labelled graph; its facts are changed.
    """
    found = 0
    for node in gm.graph.nodes:
        law = fact_of(node).law if node.op == "call_function" else None
        sparse = _sparse(node, law) if type(law) is Attention else None
        if sparse is not None:
            set_fact(node, replace(fact_of(node), law=sparse))
            found += 1
    return found


def _sparse(node: fx.Node, law: Attention) -> SparseAttention | None:
    """Return an attention with its list of keys, or None where it has none or the mask takes less time."""
    linear = linear_in_dot(law.score)
    if linear is None or linear[1] is not None or law.blocks is not None:
        return None
    for condition in law.conditions:
        columns = _chosen_columns(condition)
        others = [item for item in (*law.conditions, *law.padding) if item != condition]
        if columns is None or any(part[0] in _OF_PAIRS_ALONE for item in others for part in walk(item)):
            continue
        latents, cost = _cheapest(law, node.meta["val"].device.type)
        length = next(f.size for dim in fact_of(law.value).dims or () for f in dim if f.axis is Axis.TOKEN)
        if pays_off(_number(shape_of(columns)[-1]), _number(length), cost):
            given = {item.name: getattr(law, item.name) for item in fields(Attention)}
            return SparseAttention(**given, columns=columns, choice=condition, scale=linear[0], latents=latents)
    return None


def _cheapest(law: Attention, device: str) -> tuple[Latents | None, float]:
    """Return the form of keys whose pairs cost least, latent or None for expanded, and that cost in masked pairs."""
    expanded = dense_pairs(device, law.heads / _key_heads(law))
    latents = find_latents(law)
    if latents is None:
        return None, expanded
    wider = sum(latents.features) / (_features(law.key) + _features(law.value))
    latent = dense_pairs(device, law.heads) * wider
    return (latents, latent) if latent < expanded else (None, expanded)


def pays_off(chosen: int, columns: int, cost: float) -> bool:
    """Return whether K gathered keys take less time than the ancestors of a query under a mask.

    Args:
        chosen: K.
        columns: T, of the rows.
        cost: Masked pairs that take as long as a gathered one.
    """
    return chosen * cost < (columns + 1) / 2


def _features(node: fx.Node) -> int:
    """Return the features of a head's key or value."""
    *_, first, second = fact_of(node).dims or ()
    dim = first if any(f.axis is Axis.TOKEN for f in second) else second
    return _number(extent(dim))


def _chosen_columns(condition: Expr) -> fx.Node | None:
    """Return the columns [B, T, K], for each query all distinct, where alone a condition on pairs holds."""
    masks = dict.fromkeys(item[1] for item in walk(condition) if item[0] == "load")
    if len(masks) != 1:
        return None
    (mask,) = masks
    if mask.target is not aten.scatter.value or len(mask.args) != 4 or mask.kwargs:
        return None
    source, dim, columns, value = mask.args
    dims = fact_of(mask).dims
    if dims is None or len(dims) != 3 or dim not in (-1, 2) or not isinstance(source, fx.Node):
        return None
    base = lift(source, digits_of(dims))
    if base[0] != "const" or not isinstance(value, bool | int | float):
        return None
    read = ("load", mask, ("cq",), ("ck",))
    elsewhere, there = (
        decide(_with(condition, read, const(item)), "past", _NO_TABLES) for item in (base[1], type(base[1])(value))
    )
    return columns if elsewhere is False and there is True and _is_choice(columns, extent(dims[2])) else None


def _with(expr: Expr, part: Expr, other: Expr) -> Expr:
    """Return an expression with one of its parts replaced; other loads and indices decide nothing."""
    if expr == part:
        return other
    return (expr[0], *[_with(item, part, other) if isinstance(item, tuple) else item for item in expr[1:]])


def _is_choice(columns: Any, length: Any) -> bool:
    """Return whether a value is the columns of a choice, in any integer type."""
    while isinstance(columns, fx.Node) and columns.target in _SAME:
        if columns.meta["val"].dtype not in (torch.int32, torch.int64):
            return False
        columns = columns.args[0]
    if not isinstance(columns, fx.Node) or columns.target is not operator.getitem or columns.args[1] != 1:
        return False
    law = fact_of(columns.args[0]).law  # type: ignore[arg-type]
    return isinstance(law, Choice) and shape_of(law.scores)[-1] == length


def _key_heads(law: Attention) -> int:
    """Return the number of key heads, of which the others are repetitions."""
    found = [fact_of(node).dims or () for node in (law.key, law.value)]
    heads = [[f for dim in dims[: len(dims) - 1] for f in dim if f.axis is Axis.PLAIN] for dims in found]
    return max(math.prod(f.size for f in item if not f.repeated) for item in heads)


def _number(size: Any) -> int:
    """Return a size; of a symbol the one that the graph was traced with, for both forms are exact."""
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)
