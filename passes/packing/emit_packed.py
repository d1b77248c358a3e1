"""Emit packed forms of operators: sizes of views, constants at tokens, expert slots.

An operator for which no emitter is registered runs as it was traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from treefx.errors import UnsupportedError
from treefx.passes.labels.facts import Dims, Fact, fact_of
from treefx.passes.labels.laws import experts as expert_laws
from treefx.passes.labels.laws import features as feature_laws
from treefx.passes.labels.laws import lookups as lookup_laws
from treefx.passes.labels.laws import matmul as matmul_laws
from treefx.passes.labels.laws import movement as movement_laws
from treefx.passes.labels.laws import placed as placed_laws
from treefx.passes.labels.laws import pointwise as pointwise_laws
from treefx.passes.labels.laws import shape as shape_laws
from treefx.passes.labels.laws.base import LABELLED
from treefx.passes.labels.laws.gradients import overwrites_by_mask
from treefx.passes.packing.emitters import Packer, emits
from treefx.passes.packing.layout import at_columns

aten = torch.ops.aten


@emits(pointwise_laws.pointwise, expert_laws.floor_divide)
def _pointwise(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    return packer.call(node, align=fact.dims)


@emits(pointwise_laws.custom_function)
def _custom_function(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    assert fact.parts is not None
    return packer.call(node, align=fact.parts[0].dims)


@emits(pointwise_laws.lerp)
def _lerp(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    args = [packer.operand(item, fact.dims) for item in node.args]
    given = [x for x in args if isinstance(x, Tensor)]
    tensors = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]  # its meta function cannot
    return node.target(*tensors, *[x for x in args if not isinstance(x, Tensor)])  # type: ignore[operator]


@emits(shape_laws.view)
def _view(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    assert fact.dims is not None
    return packer.packed(node.args[0]).reshape(packer.shape(fact.dims))


@emits(shape_laws.expand)
def _expand(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    assert fact.dims is not None
    return packer.packed(node.args[0]).expand(packer.shape(fact.dims))


@emits(movement_laws.slice_)
def _slice(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    whole = source.meta["val"].shape == node.meta["val"].shape
    return packer.packed(source) if whole else packer.call(node)


@emits(movement_laws.pad)
def _pad(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    """Not ``constant_pad_nd`` itself: its meta function fixes the symbolic number of tokens."""
    source, *given = node.args
    widths: Any = given.pop(0)
    x: Tensor = packer.packed(source)
    for offset, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        d = x.dim() - 1 - offset
        x = x.narrow(d, max(0, -before), x.shape[d] + min(0, before) + min(0, after)) if min(before, after) < 0 else x
        ends = [
            x.new_full([*x.shape[:d], max(0, width), *x.shape[d + 1 :]], given[0] if given else 0)  # type: ignore[arg-type]
            for width in (before, after)
        ]
        x = torch.cat([ends[0], x, ends[1]], d) if max(before, after) > 0 else x
    return x


@emits(movement_laws.cat)
def _cat(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    pieces = movement_laws.nonempty_pieces(node)
    assert fact.dims is not None
    if len(pieces) == 1 and node.target is aten.cat.default:
        return packer.packed(pieces[0])
    stacks = node.target is aten.stack.default
    given: Any = node.args[1] if len(node.args) > 1 else 0
    dim = int(given) % len(fact.dims)
    dims = fact.dims[:dim] + fact.dims[dim + 1 :]
    values = []
    for piece in pieces:
        if fact_of(piece).kind in LABELLED:
            value = packer.packed(piece)
        else:
            value = at_columns(packer.full(piece), dims if stacks else fact.dims, packer.metadata)
        shape = packer.shape(dims)
        values.append(value.expand(shape if stacks else [*shape[:dim], value.shape[dim], *shape[dim:]]))
    return node.target(values, *node.args[1:])  # type: ignore[operator]


@emits(shape_laws.view_as_complex)
def _view_as_complex(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    return torch.view_as_complex(packer.packed(node.args[0]).contiguous())


@emits(feature_laws.complex_)
def _complex(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    """Not ``complex`` itself, for the same reason."""
    assert fact.dims is not None
    real, imaginary = (packer.operand(item, fact.dims).expand(packer.shape(fact.dims)) for item in node.args)
    return torch.view_as_complex(torch.stack([real, imaginary], -1))


@emits(shape_laws.copy)
def _copy(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    assert fact.dims is not None
    return packer.packed(node.args[1]).expand(packer.shape(fact.dims)).to(node.meta["val"].dtype)


@emits(movement_laws.overwrite)
def _overwrite(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    target, piece, *where = node.args
    assert fact.dims is not None and isinstance(target, fx.Node) and isinstance(piece, fx.Node)
    dim = int(where[0] if where else 0) % len(fact.dims)  # type: ignore[arg-type]
    rest = fact.dims[:dim] + fact.dims[dim + 1 :]
    selects = node.target is aten.select_scatter.default

    def whole(item: fx.Node, dims: Dims) -> Tensor:
        labelled = fact_of(item).kind in LABELLED
        value = packer.packed(item) if labelled else at_columns(packer.full(item), dims, packer.metadata)
        shape = packer.shape(rest)
        return value.expand(shape if dims is rest else [*shape[:dim], value.shape[dim], *shape[dim:]])

    values = whole(target, fact.dims), whole(piece, rest if selects else fact.dims)
    return node.target(*values, *where, **node.kwargs)  # type: ignore[operator]


@emits(feature_laws.group_norm)
def _group_norm(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    source, weight, bias, _, *rest = node.args
    x = packer.packed(source).contiguous()
    return node.target(x, packer.full(weight), packer.full(bias), x.shape[0], *rest)  # type: ignore[operator]


@emits(lookup_laws.scatter)
def _scatter(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    assert fact.dims is not None
    source, dim, index, values = node.args
    target = packer.operand(source, fact.dims).expand(packer.shape(fact.dims))
    return node.target(target, dim, packer.packed(index), packer.packed(values), **node.kwargs)  # type: ignore[operator]


@emits(matmul_laws.addmm)
def _first_operand_aligned(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    return packer.call(node, align=fact.dims, only=[0])


@emits(lookup_laws.gather)
def _gather(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    """Read a table unchanged; of its copies for rows, use the first."""
    return packer.call(node) if lookup_laws.reads_table(node) else packer.call(node, align=fact.dims, only=[0])


@emits(matmul_laws.bmm)
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


@emits(expert_laws.index_put)
def _inverse(packer: Packer, node: fx.Node, fact: Fact) -> Any:
    """``empty.index_put([order], arange)``: the arange counts packed slots; a number where a mask holds: the same."""
    if overwrites_by_mask(node):
        return packer.call(node, align=fact.dims)
    target, indices, values = node.args[:3]
    assert isinstance(indices, list | tuple) and isinstance(values, fx.Node)
    order = packer.packed(indices[0])
    count = torch.arange(order.shape[0], dtype=values.meta["val"].dtype, device=order.device)
    return aten.index_put.default(packer.packed(target), [order], count)


@emits(placed_laws.masked_scatter)
def _placed(packer: Packer, node: fx.Node, fact: Fact) -> Tensor:
    """Give a token its representative's vector; its rows' gradients all go into that one."""
    law = fact.law
    assert isinstance(law, placed_laws.Placed)
    if packer.native:
        raise UnsupportedError(
            "vectors of images are given for the rows of a batch, but under treefx.use(forest) token ids are packed; "
            "call the model on a padded batch without treefx.use"
        )
    x, metadata = packer.packed(law.target), packer.metadata
    mask = packer.full(law.mask)[..., 0]
    place = (mask.reshape(-1).cumsum(0).reshape(mask.shape) - 1).clamp_min(0)
    features = x.shape[-1]
    flat = packer.full(law.source).reshape(-1)
    vectors = flat[: flat.shape[0] // features * features].reshape(-1, features)
    at = metadata.row, metadata.column
    return torch.where(mask[at][None, :, None], vectors[place[at]][None], x)
