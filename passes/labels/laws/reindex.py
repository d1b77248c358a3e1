"""Label packed values behind an index: logits that a loss shifts or flattens.

``logits[:, :-1]`` is no function of single tokens on ``[B, T]``, but it is ``entries[index]`` with packed
``entries`` [N, V] and ``index = token_of[:, :-1]``. Slices and views of the token dimensions act on the index,
functions along the classes on the entries, and the ``[B, T, V]`` tensor is only made if something else than a loss
reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treefx.inputs.sizes import concrete
from treefx.passes.labels.dims import has_tokens
from treefx.passes.labels.facts import Axis, Fact, Kind, fact_of, shape_of
from treefx.passes.labels.laws.base import Call

__all__ = ["Reindexed", "find_reindexed", "reindexed_entries", "token_index"]

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_COPIES = {aten.clone.default, aten.alias.default, aten._to_copy.default}
_SCALINGS = {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}


@dataclass(frozen=True)
class Reindexed:
    """Describe a value ``entries[index]``; all dimensions but the last are tokens."""

    on_index: bool


def find_reindexed(call: Call) -> Fact | None:
    """Return the fact of an operator that keeps an index form of logits; else None."""
    source = call.node.args[0] if call.node.args else None
    if not isinstance(source, fx.Node) or not all(node is source or _is_number(node) for node in call.operands):
        return None
    already = isinstance(fact_of(source).law, Reindexed)
    if not (already or _is_logits(fact_of(source))):
        return None
    on_index = _acts_on_index(call.node, source)
    if on_index is None or not (already or on_index):
        return None
    return Fact(Kind.ROW, law=Reindexed(on_index), learned=fact_of(source).learned)


def _is_logits(fact: Fact) -> bool:
    """Whether a packed value is [B, T, V]."""
    dims = fact.dims
    if fact.kind is not Kind.PACKED or dims is None or len(dims) != 3 or has_tokens(dims[2]):
        return False
    return [f.axis for f in dims[0]] == [Axis.ROW] and [f.axis for f in dims[1]] == [Axis.TOKEN]


def _acts_on_index(node: fx.Node, source: fx.Node) -> bool | None:
    """True: on the token dimensions; False: along the classes; None: neither."""
    rank = len(shape_of(source))
    if node.target is aten.slice.Tensor:
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        return True if dim % rank < rank - 1 else None
    if node.target in _VIEWS:
        return True if shape_of(node)[-1:] == shape_of(source)[-1:] and len(shape_of(node)) > 1 else None
    if node.target is aten._log_softmax.default:
        dim = node.args[1]
        return False if dim % rank == rank - 1 else None
    if node.target in _SCALINGS:
        return None if source in node.args[1:] else False
    return False if node.target in _COPIES else None


def _is_number(node: fx.Node) -> bool:
    """Whether a value is one number for all rows."""
    return fact_of(node).kind is Kind.INVARIANT and node.meta["val"].dim() == 0


def token_index(node: fx.Node, start: Tensor, sizes: Mapping[Any, int] | None = None) -> Tensor:
    """Replay the index of a value on a ``[B, T]`` table such as ``token_of``.

    Outside of the graph, for given sizes.
    """
    law = fact_of(node).law
    if not isinstance(law, Reindexed):
        return start
    source: Any = node.args[0]
    index = token_index(source, start, sizes)
    if not law.on_index:
        return index
    if node.target in _VIEWS:
        return index.reshape(concrete(list(shape_of(node)[:-1]), sizes or {}))
    args: Any = concrete(node.args, sizes or {})
    sliced: Tensor = aten.slice.Tensor(index, args[1] % len(shape_of(source)), *args[2:])
    return sliced


def reindexed_entries(node: fx.Node, base: Callable[[fx.Node], Tensor], number: Callable[[Any], Any]) -> Tensor:
    """Return the packed entries [N, V] of a value.

    ``base`` gives those of its logits, ``number`` a factor.
    """
    law = fact_of(node).law
    if not isinstance(law, Reindexed):
        return base(node)
    source: Any = node.args[0]
    entries = reindexed_entries(source, base, number)
    if law.on_index:
        return entries
    if node.target is aten.clone.default:
        return entries
    if node.target is aten._log_softmax.default:
        logprobs: Tensor = aten._log_softmax.default(entries, 1, node.args[2])
        return logprobs
    result: Tensor = node.target(entries, *map(number, node.args[1:]), **node.kwargs)  # type: ignore[operator]
    return result
