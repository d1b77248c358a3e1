"""How operators differ on packed tokens from the traced ones: sizes of views, constants beside tokens, expert slots.

Called by ``pack_tokens.Packer``; an operator that is not here runs as it was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from treefx.passes import expert_laws, laws, matmul_laws
from treefx.passes.facts import Dims, Fact, fact_of
from treefx.passes.layout import at_columns

if TYPE_CHECKING:
    from treefx.passes.pack_tokens import Packer

__all__ = ["find_emitter"]

aten = torch.ops.aten
Emitter = Callable[["Packer", fx.Node, Fact], Any]


def _pointwise(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    return packer.call(node, align=fact.dims)


def _lerp(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    args = [packer.operand(item, fact.dims) for item in node.args]
    values = [x for x in args if isinstance(x, Tensor)]
    tensors = torch.broadcast_tensors(*values)  # type: ignore[no-untyped-call]  # its meta function cannot
    return node.target(*tensors, *[x for x in args if not isinstance(x, Tensor)])  # type: ignore[operator]


def _view(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    assert fact.dims is not None
    return packer.packed(node.args[0]).reshape(packer.shape(fact.dims))


def _expand(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    assert fact.dims is not None
    return packer.packed(node.args[0]).expand(packer.shape(fact.dims))


def _slice(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    whole = source.meta["val"].shape == node.meta["val"].shape
    return packer.packed(source) if whole else packer.call(node)


def _pad(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    return packer.packed(node.args[0])


def _cat(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    pieces = laws.nonempty_pieces(node)
    assert fact.dims is not None
    if len(pieces) == 1 and node.target is aten.cat.default:
        return packer.packed(pieces[0])
    stacks = node.target is aten.stack.default
    given: Any = node.args[1] if len(node.args) > 1 else 0
    dim = int(given) % len(fact.dims)
    dims = fact.dims[:dim] + fact.dims[dim + 1 :]
    values = []
    for piece in pieces:
        if fact_of(piece).kind in laws.LABELLED:
            value = packer.packed(piece)
        else:
            value = at_columns(packer.full(piece), dims if stacks else fact.dims, packer.metadata)
        shape = packer.shape(dims)
        values.append(value.expand(shape if stacks else [*shape[:dim], value.shape[dim], *shape[dim:]]))
    return node.target(values, *node.args[1:])  # type: ignore[operator]


def _view_as_complex(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    return torch.view_as_complex(packer.packed(node.args[0]).contiguous())


def _copy(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    assert fact.dims is not None
    return packer.packed(node.args[1]).expand(packer.shape(fact.dims)).to(node.meta["val"].dtype)


def _overwrite(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    target, piece, *where = node.args
    assert fact.dims is not None and isinstance(target, fx.Node) and isinstance(piece, fx.Node)
    dim = int(where[0] if where else 0) % len(fact.dims)  # type: ignore[arg-type]
    rest = fact.dims[:dim] + fact.dims[dim + 1 :]
    selects = node.target is aten.select_scatter.default

    def whole(item: fx.Node, dims: Dims) -> Tensor:
        labelled = fact_of(item).kind in laws.LABELLED
        value = packer.packed(item) if labelled else at_columns(packer.full(item), dims, packer.metadata)
        shape = packer.shape(rest)
        return value.expand(shape if dims is rest else [*shape[:dim], value.shape[dim], *shape[dim:]])

    values = whole(target, fact.dims), whole(piece, rest if selects else fact.dims)
    return node.target(*values, *where, **node.kwargs)  # type: ignore[operator]


def _first_operand_aligned(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    return packer.call(node, align=fact.dims, only=[0])


def _bmm(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    assert fact.dims is not None
    batch = (fact.dims[0], (), ())
    if node.target is aten.bmm.default:
        return packer.call(node, align=batch)
    added, left, right = node.args[:3]
    product = aten.bmm.default(packer.operand(left, batch), packer.operand(right, batch))
    bias = packer.operand(added, align=fact.dims)
    # Not baddbmm itself: its meta function cannot broadcast to a symbolic number of tokens.
    return node.kwargs.get("beta", 1) * bias + node.kwargs.get("alpha", 1) * product


def _inverse(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    """``empty.index_put([order], arange)``: the arange counts packed slots."""
    target, indices, values = node.args[:3]
    assert isinstance(indices, list | tuple) and isinstance(values, fx.Node)
    order = packer.packed(indices[0])
    count = torch.arange(order.shape[0], dtype=values.meta["val"].dtype, device=order.device)
    return aten.index_put.default(packer.packed(target), [order], count)


_EMITTERS: dict[Any, Emitter] = {
    laws.pointwise: _pointwise,
    laws.lerp: _lerp,
    laws.view: _view,
    laws.expand: _expand,
    laws.slice_: _slice,
    laws.pad: _pad,
    laws.cat: _cat,
    laws.view_as_complex: _view_as_complex,
    laws.copy: _copy,
    laws.overwrite: _overwrite,
    laws.gather: _first_operand_aligned,
    matmul_laws.addmm: _first_operand_aligned,
    matmul_laws.bmm: _bmm,
    expert_laws.index_put: _inverse,
}


def find_emitter(target: Any) -> Emitter | None:
    """What makes the packed form of an operator's result; None for the operator itself."""
    return _EMITTERS.get(laws.find_law(target))
