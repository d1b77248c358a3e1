"""Token-wise laws: for each operator, how the labelled dimensions of its result follow from those of its operands.

A law is a function ``(call) -> Fact``; its docstring is one sentence of mathematics. It holds for values computed
once per distinct token exactly as for values computed on rows, because no law lets an element depend on another
token. Its backward is linear and counts no tokens (``gradient_laws``). An operator without a law, or one used in a way
its law does not cover (``NoLaw``), reads expanded values instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treefx.passes import dims as algebra
from treefx.passes.dims import NoLaw
from treefx.passes.facts import (
    ALONG_ROWS,
    Axis,
    Dims,
    Fact,
    Factor,
    Kind,
    fact_of,
    plain_dims,
    shape_of,
    token_axes,
)
from treefx.passes.gradient_laws import counts_tokens, custom_function_reason, is_pointwise
from treefx.passes.uniformity import is_uniform

__all__ = ["Call", "Law", "find_law", "law"]

aten = torch.ops.aten
LABELLED = {Kind.PREFIX, Kind.PACKED, Kind.SCORE}
LEARNED = Fact(Kind.INVARIANT, learned=True)


@dataclass(frozen=True)
class Call:
    """One operator call seen by a law."""

    node: fx.Node

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """A positional or keyword argument."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def node_arg(self, index: int) -> fx.Node:
        """A positional argument that is a value of the graph."""
        found = self.node.args[index]
        assert isinstance(found, fx.Node)
        return found

    @property
    def operands(self) -> list[fx.Node]:
        """The tensor operands, each once."""
        return [node for node in self.node.all_input_nodes if "val" in node.meta]

    def labelled(self, node: Any) -> bool:
        """Whether a value carries labelled dimensions."""
        return isinstance(node, fx.Node) and fact_of(node).kind in LABELLED

    def dims(self, node: fx.Node) -> Dims:
        """Dimensions of an operand: labelled, or plain for an invariant one."""
        fact = fact_of(node)
        if fact.dims is not None:
            return fact.dims
        if fact.kind is not Kind.INVARIANT:
            raise NoLaw("reads a value computed per row")
        return plain_dims(shape_of(node))

    def result(self, dims: Dims, law: Any = None) -> Fact:
        """The fact of a single result: packed if an operand is, or if a parameter takes part."""
        facts = [fact_of(node) for node in self.operands]
        learned = any(fact.learned for fact in facts)
        kinds = {fact.kind for fact in facts}
        kind = Kind.PACKED if Kind.PACKED in kinds or learned else Kind.PREFIX
        if Kind.SCORE in kinds or Axis.KEY in token_axes(dims):
            kind = Kind.SCORE  # a function of scores may have lost its keys (their maximum) and is still only lifted
        return Fact(kind, dims, law=law, learned=learned)


Law = Callable[[Call], Fact]
_LAWS: dict[Any, Law] = {}


def law(*targets: Any) -> Callable[[Law], Law]:
    """Register a law for operators; a packet stands for all its overloads."""

    def register(function: Law) -> Law:
        for target in targets:
            overloads = (
                [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
                if isinstance(target, torch._ops.OpOverloadPacket)
                else [target]
            )
            _LAWS.update(dict.fromkeys(overloads, function))
        return function

    return register


def find_law(target: Any) -> Law | None:
    """The law of an operator, or None. Every operator that PyTorch tags as pointwise has one."""
    if target in _LAWS:
        return _LAWS[target]
    return pointwise if is_pointwise(target) else None


def aligned(call: Call, node: fx.Node, dims: Dims) -> None:
    """Check that an invariant operand may take part next to labelled dimensions (right-aligned).

    Along a token axis it is read at the token's column; along a row axis it must not vary.

    Raises:
        NoLaw: It would have to be known per row, per slot or per key.
    """
    shape = shape_of(node)
    for offset in range(1, len(shape) + 1):
        size, dim = shape[-offset], dims[-offset] if offset <= len(dims) else ()
        axes = [factor.axis for factor in dim if factor.axis is not Axis.PLAIN]
        if size == 1 or not axes:
            continue
        if axes == [Axis.TOKEN] and len(dim) == 1:
            continue
        if axes == [Axis.ROW] and len(dim) == 1 and is_uniform(node, len(shape) - offset):
            continue
        raise NoLaw(f"meets a value that varies along the {'/'.join(a.name.lower() for a in axes)} axis")


@law(
    aten._to_copy, aten.clone, aten.detach, aten.alias, aten.contiguous, aten.where, aten.lift_fresh_copy,
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.masked_fill, aten.bitwise_and,
    aten.bitwise_or, aten.bitwise_not, aten.logical_and, aten.logical_or, aten.logical_not, aten.addcmul, aten.addcdiv,
    aten._conj, aten._prelu_kernel, aten.pow, aten.fmod, aten.remainder, aten.floor_divide, aten.polar,
)  # fmt: skip
def pointwise(call: Call) -> Fact:
    """f(x, y)[n] = f(x[n], y[n]); invariant operands are read at the token's column."""
    labelled = [node for node in call.operands if call.labelled(node)]
    if any(fact_of(node).kind is Kind.SCORE for node in labelled):
        return _pointwise_score(call, labelled)
    dims = algebra.broadcast([call.dims(node) for node in labelled])
    others = [node for node in call.operands if not call.labelled(node)]
    for node in others:
        aligned(call, node, dims)
    full = algebra.broadcast([dims, *[_unlabelled(call.dims(node), dims) for node in others]])
    return call.result(full)


@law(aten.lerp)
def lerp(call: Call) -> Fact:
    """x + w (y - x), pointwise."""
    return pointwise(call)


def _unlabelled(dims: Dims, target: Dims) -> Dims:
    """An invariant operand's dimensions, those that run beside tokens taken as size one."""
    rank = len(target)
    kept = []
    for position, dim in enumerate(dims):
        opposite = position - len(dims) + rank
        kept.append(() if opposite >= 0 and algebra.has_tokens(target[opposite]) else dim)
    return tuple(kept)


def _pointwise_score(call: Call, labelled: list[fx.Node]) -> Fact:
    """Scores may meet anything of their own shape: the lifter reads and proves it element by element."""
    scores = [node for node in labelled if fact_of(node).kind is Kind.SCORE]
    own = algebra.broadcast([call.dims(node) for node in scores])
    shape = tuple(call.node.meta["val"].shape)
    if tuple(algebra.extent(dim) for dim in own) != shape:
        raise NoLaw("widens attention scores")
    return call.result(own)


def check_statistic(call: Call) -> None:
    """Check that a statistic of attention scores (their maximum over the keys) goes back to scores alone.

    Raises:
        NoLaw: The operator makes something else of it.
    """
    own = all(fact_of(node).kind in (Kind.SCORE, Kind.INVARIANT) for node in call.operands)
    movement = (view, permute, unsqueeze, squeeze, expand, reduction)
    if not own or find_law(call.node.target) not in (*movement, pointwise):
        raise NoLaw("reads a statistic of attention scores")


@law(aten.view, aten.reshape, aten._unsafe_view, aten._reshape_alias)
def view(call: Call) -> Fact:
    """A view regroups factors in order."""
    source = call.node_arg(0)
    return call.result(algebra.regroup(call.dims(source), shape_of(call.node)))


@law(aten.permute, aten.transpose, aten.t, aten.movedim, aten.numpy_T, aten.mT)
def permute(call: Call) -> Fact:
    """A permutation of dimensions permutes their factors."""
    source = call.node_arg(0)
    dims = call.dims(source)
    labels = torch.empty([2 + i for i in range(len(dims))], device="meta")  # distinct sizes name the dimensions
    moved = call.node.target(labels, *call.node.args[1:], **call.node.kwargs)  # type: ignore[operator]
    return call.result(algebra.move(dims, [size - 2 for size in moved.shape]))


@law(aten.view_as_complex)
def view_as_complex(call: Call) -> Fact:
    """Pairs of a last plain dimension of two become complex numbers."""
    dims = call.dims(call.node_arg(0))
    return call.result(algebra.resize(dims, -1, 1)[:-1])


@law(aten.view_as_real)
def view_as_real(call: Call) -> Fact:
    """Complex numbers become pairs along a new last plain dimension."""
    return call.result((*call.dims(call.node_arg(0)), algebra.plain(2)))


@law(aten.repeat)
def repeat(call: Call) -> Fact:
    """Copies of a dimension one behind the other: a plain factor before its own."""
    source = call.node_arg(0)
    counts: Any = call.node.args[1]
    dims = ((),) * (len(counts) - len(call.dims(source))) + call.dims(source)
    pairs = zip(dims, counts, strict=True)
    return call.result(tuple((*algebra.plain(count), *algebra.unrepeated(dim)) for dim, count in pairs))


@law(aten.copy)
def copy(call: Call) -> Fact:
    """y[n] = x[n] in the shape and dtype of another value, of which nothing else is read."""
    source = call.node_arg(1)
    if not call.labelled(source):
        raise NoLaw("writes a value without token axes over tokens")
    dims, shape = call.dims(source), shape_of(call.node)
    dims = ((),) * (len(shape) - len(dims)) + dims
    if any(algebra.extent(dim) not in (1, size) for dim, size in zip(dims, shape, strict=True)):
        raise NoLaw("copies to another shape")
    return call.result(_expanded(dims, shape))


@law(aten.slice_scatter, aten.select_scatter)
def overwrite(call: Call) -> Fact:
    """x with y written over a part of a plain dimension; an invariant one of them is read at the token's column."""
    target, piece = call.node_arg(0), call.node_arg(1)
    dim = call.arg(2, "dim", 0) % len(shape_of(target))
    selects = call.node.target is aten.select_scatter.default
    given = []
    if call.labelled(target):
        given.append(algebra.resize(call.dims(target), dim, 1))
    if call.labelled(piece):
        dims = call.dims(piece)
        given.append(algebra.insert(dims, dim) if selects else algebra.resize(dims, dim, 1))
    rest = algebra.broadcast(given)
    for node in (target, piece):
        if not call.labelled(node):
            aligned(call, node, rest if node is target or not selects else rest[:dim] + rest[dim + 1 :])
    return call.result(algebra.resize(rest, dim, shape_of(target)[dim]))


@law(aten.unsqueeze)
def unsqueeze(call: Call) -> Fact:
    """A new dimension of size one is an empty product."""
    source = call.node_arg(0)
    return call.result(algebra.insert(call.dims(source), call.arg(1, "dim")))


@law(aten.squeeze)
def squeeze(call: Call) -> Fact:
    """A dimension that is an empty product may go."""
    source = call.node_arg(0)
    dims = call.dims(source)
    given = call.arg(1, "dim")
    where = range(len(dims)) if given is None else [given] if isinstance(given, int) else given
    gone = {d % len(dims) for d in where if shape_of(source)[d] == 1}
    if any(algebra.has_tokens(dims[d]) for d in gone):
        raise NoLaw("squeezes a row or token axis of size one")
    return call.result(tuple(dim for d, dim in enumerate(dims) if d not in gone))


@law(aten.expand)
def expand(call: Call) -> Fact:
    """An expanded dimension is a plain factor along which nothing varies."""
    source = call.node_arg(0)
    dims, shape = call.dims(source), shape_of(call.node)
    return call.result(_expanded(((),) * (len(shape) - len(dims)) + dims, shape))


def _expanded(dims: Dims, shape: Sequence[int]) -> Dims:
    """Dimensions of size one expanded to plain ones along which nothing varies."""
    result = []
    for dim, size in zip(dims, shape, strict=True):
        if algebra.extent(dim) != size and algebra.has_tokens(dim):
            raise NoLaw("expands a row or token axis of size one")
        result.append(dim if algebra.extent(dim) == size else (Factor(Axis.PLAIN, size, repeated=True),))
    return tuple(result)


@law(aten.slice)
def slice_(call: Call) -> Fact:
    """A slice of a plain dimension is a plain dimension; one that keeps everything changes nothing."""
    source = call.node_arg(0)
    dims, dim = call.dims(source), call.arg(1, "dim", 0)
    size = shape_of(call.node)[dim]
    if size == shape_of(source)[dim]:
        return call.result(dims)
    if _is_keys(dims[dim]) and call.arg(4, "step", 1) == 1:
        return call.result(_with_keys(dims, dim, size))  # which ones they are is proved when they are lifted
    return call.result(algebra.resize(dims, dim, size))


def _is_keys(dim: tuple[Factor, ...]) -> bool:
    return [factor.axis for factor in dim] == [Axis.KEY]


def _with_keys(dims: Dims, dim: int, size: int) -> Dims:
    """Scores with another number of entries per query."""
    dim %= len(dims)
    return dims[:dim] + ((Factor(Axis.KEY, size),),) + dims[dim + 1 :]


@law(aten.constant_pad_nd)
def pad(call: Call) -> Fact:
    """A plain dimension grows or shrinks at its ends; padding by nothing changes nothing."""
    dims, widths = call.dims(call.node_arg(0)), call.arg(1, "pad")
    for offset in range(len(widths) // 2):
        if any(widths[2 * offset : 2 * offset + 2]):
            d = len(dims) - 1 - offset
            dims = algebra.resize(dims, d, shape_of(call.node)[d])
    return call.result(dims)


@law(aten.select)
def select(call: Call) -> Fact:
    """One index of a plain dimension."""
    source = call.node_arg(0)
    dim = call.arg(1, "dim") % len(call.dims(source))
    dims = algebra.resize(call.dims(source), dim, 1)
    return call.result(dims[:dim] + dims[dim + 1 :])


@law(aten.split, aten.split_with_sizes, aten.chunk, aten.unbind, aten.tensor_split)
def split(call: Call) -> Fact:
    """Pieces of a plain dimension."""
    source = call.node_arg(0)
    unbinds = call.node.target in {aten.unbind.int}
    dim = call.arg(1, "dim", 0) if unbinds else call.arg(2, "dim", 0)
    dim %= len(call.dims(source))
    parts = []
    for value in call.node.meta["val"]:
        dims = algebra.resize(call.dims(source), dim, 1 if unbinds else value.shape[dim])
        parts.append(call.result(dims[:dim] + dims[dim + 1 :] if unbinds else dims))
    return Fact(parts[0].kind, parts=tuple(parts), learned=parts[0].learned)


def nonempty_pieces(node: fx.Node) -> list[fx.Node]:
    """What ``cat`` or ``stack`` joins, without the empty vectors that ``cat`` skips (a cache with no token yet)."""
    pieces: Any = node.args[0]
    return [piece for piece in pieces if tuple(shape_of(piece)) != (0,)]


@law(aten.cat, aten.stack)
def cat(call: Call) -> Fact:
    """Concatenation along a plain dimension; invariant pieces are read at the token's column."""
    pieces = nonempty_pieces(call.node)
    labelled = [call.dims(node) for node in pieces if call.labelled(node)]
    if len(pieces) == len(labelled) == 1 and call.node.target is aten.cat.default:
        return call.result(labelled[0])
    stacks = call.node.target is aten.stack.default
    dim = call.arg(1, "dim", 0) % (len(labelled[0]) + stacks)
    scores = [dims for dims in labelled if not stacks and _is_keys(dims[dim])]
    if scores:
        return call.result(_with_keys(scores[0], dim, shape_of(call.node)[dim]))  # which is which: proved when lifted
    if not stacks and algebra.has_tokens(labelled[0][dim]) and any(fact_of(node) == LEARNED for node in pieces):
        raise NoLaw("puts learned values before or behind the tokens (prompt or prefix tuning)")
    if stacks:
        result = algebra.insert(algebra.broadcast(labelled), dim, algebra.plain(len(pieces)))
    else:
        sized = [algebra.resize(dims, dim, 1) for dims in labelled]
        result = algebra.resize(algebra.broadcast(sized), dim, shape_of(call.node)[dim])
    for node in pieces:
        if not call.labelled(node):
            aligned(call, node, result if not stacks else result[:dim] + result[dim + 1 :])
    return call.result(result)


@law(
    aten.sum.dim_IntList, aten.mean.dim, aten.amax, aten.amin, aten.var.correction, aten.std.correction,
    aten.prod.dim_int, aten.logsumexp, aten.linalg_vector_norm, aten.norm.ScalarOpt_dim, aten.any.dim, aten.all.dim,
    aten.argmax, aten.argmin, aten.var_mean.correction, aten.max.dim, aten.min.dim, aten.any.dims, aten.all.dims,
)  # fmt: skip
def reduction(call: Call) -> Fact:
    """A reduction over plain dimensions."""
    source = call.node_arg(0)
    dims = call.dims(source)
    vector_norm = call.node.target in {aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim}
    given = call.arg(2 if vector_norm else 1, "dim")
    where = _where(given, len(dims))
    for d in where:
        if not _is_keys(dims[d]):  # a function of scores is lifted or read in full, never run packed
            algebra.resize(dims, d, 1)
    value = call.node.meta["val"]
    first = value if isinstance(value, torch.Tensor) else value[0]
    keeps = first.dim() == len(dims)
    kept = tuple(() if d in where else dim for d, dim in enumerate(dims) if keeps or d not in where)
    if isinstance(value, torch.Tensor):
        return call.result(kept)
    return Fact(call.result(kept).kind, parts=(call.result(kept),) * len(value), learned=call.result(kept).learned)


def _where(given: Any, rank: int) -> set[int]:
    dims: Iterable[int] = range(rank) if given is None or given == [] else [given] if isinstance(given, int) else given
    return {d % rank for d in dims}


@law(
    aten._softmax, aten._log_softmax, aten._safe_softmax, aten.softmax, aten.log_softmax, aten.cumsum, aten.cumprod,
    aten.flip, aten.roll, aten.logcumsumexp,
)  # fmt: skip
def along_dimension(call: Call) -> Fact:
    """A function along plain dimensions that keeps the shape. A softmax over keys is left to the lifter."""
    source = call.node_arg(0)
    dims = call.dims(source)
    given = call.arg(2, "dims") if call.node.target is aten.roll.default else call.arg(1, "dim")
    where = _where(given, len(dims))
    softmax = call.node.target in {aten._softmax.default, aten._safe_softmax.default, aten.softmax.int}
    reach = None
    for d in where:
        if softmax and _is_keys(dims[d]):
            continue
        if call.node.target is aten.cumsum.default and _is_causal_sum(call, dims[d]):
            reach = ALONG_ROWS
            continue
        algebra.resize(dims, d, 1)
    return call.result(tuple(algebra.unrepeated(dim) if d in where else dim for d, dim in enumerate(dims)), reach)


def _is_causal_sum(call: Call, dim: tuple[Factor, ...]) -> bool:
    """A running sum over a row's own tokens reads the past alone: it stays prefix-determined where computed in full."""
    whole = [factor.axis for factor in dim] == [Axis.TOKEN]
    return whole and call.result(()).kind is Kind.PREFIX


@law(aten.topk, aten.sort)
def selection(call: Call) -> Fact:
    """Values and indices of a selection along a plain dimension."""
    source = call.node_arg(0)
    dims = call.dims(source)
    position = 2 if call.node.target is aten.topk.default else 1
    named: Any = call.node.kwargs.get("dim", -1)
    dim = call.arg(position, "dim", -1) if call.node.target is not aten.sort.stable else named
    part = call.result(algebra.resize(dims, dim, call.node.meta["val"][0].shape[dim]))
    return Fact(part.kind, parts=(part, part), learned=part.learned)


@law(aten.native_layer_norm, aten._fused_rms_norm)
def normalisation(call: Call) -> Fact:
    """A normalisation over trailing plain dimensions."""
    source = call.node_arg(0)
    dims = call.dims(source)
    rank = len(call.node.args[1])  # type: ignore[arg-type]
    for d in range(len(dims) - rank, len(dims)):
        algebra.resize(dims, d, 1)
    whole = call.result(dims)
    statistics = call.result(dims[: len(dims) - rank] + ((),) * rank)
    count = len(call.node.meta["val"])
    return Fact(whole.kind, parts=(whole,) + (statistics,) * (count - 1), learned=whole.learned)


@law(aten.embedding)
def embedding(call: Call) -> Fact:
    """A row of an invariant table per token, unless its backward counts tokens."""
    reason = counts_tokens(call.node)
    if reason is not None:
        raise NoLaw(reason)
    table, index = call.node.args[0], call.node.args[1]
    return _lookup(call, table, index)


@law(aten.embedding_renorm)
def renormalised_table(call: Call) -> Fact:
    """The table with the rows that the batch looks up cut to a norm: a parameter changes, by what the batch holds."""
    raise NoLaw("rescales rows of the table in place (max_norm); max_norm=None keeps the table")


def _lookup(call: Call, table: Any, index: Any) -> Fact:
    if call.labelled(table) or not call.labelled(index):
        raise NoLaw("looks tokens up in a table made of tokens")
    dims = call.dims(index) + plain_dims(shape_of(table)[1:])
    return Fact(Kind.PACKED, dims, learned=fact_of(table).learned)


@law(aten.index_select)
def index_select(call: Call) -> Fact:
    """A row of an invariant table per token, along the first dimension; or invariant indices of a plain one."""
    table, dim, index = call.node.args[:3]
    if call.labelled(table) and not call.labelled(index):
        assert isinstance(table, fx.Node) and isinstance(dim, int)
        return call.result(algebra.resize(call.dims(table), dim, shape_of(call.node)[dim]))
    if dim != 0:
        raise NoLaw("selects along another dimension than the first")
    return _lookup(call, table, index)


@law(aten.gather)
def gather(call: Call) -> Fact:
    """y[n, i] = x[n, index[n, i]] along a plain dimension; all other dimensions run together."""
    source, dim, index = call.node.args[:3]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
    dims = call.dims(index)
    dim %= len(dims)
    if call.labelled(source) and not call.labelled(index) and _is_table_of_pairs(call.dims(source), dims, dim):
        return call.result(_with_keys(call.dims(source), dim, shape_of(index)[dim]))  # the lifter reads the index
    if algebra.has_tokens(dims[dim]):
        raise NoLaw("gathers along the tokens")
    if call.labelled(source):
        algebra.resize(call.dims(source), dim, 1)
        _same_elsewhere(call.dims(source), dims, dim)
        if not call.labelled(index):
            raise NoLaw("gathers at indices without token axes")
    else:
        aligned(call, source, dims)
    return call.result(tuple(algebra.unrepeated(d) for d in dims))


def _is_table_of_pairs(source: Dims, index: Dims, dim: int) -> bool:
    """Whether an invariant index [.., T, T] picks a feature of each query for each key (by their distance, say)."""
    shape = [algebra.extent(item) for item in source]
    tokens = [factor.axis for factor in source[-2]] if len(source) > 2 else []
    same = [algebra.extent(item) for item in index[:-1]] == shape[:-1] and not algebra.has_tokens(source[-1])
    return dim == len(source) - 1 and tokens == [Axis.TOKEN] and same and algebra.extent(index[-1]) == shape[-2]


@law(aten.scatter, aten.scatter_add)
def scatter(call: Call) -> Fact:
    """x[n, index[n, i]] = y[n, i] along a plain dimension; an invariant x is read at the token's column."""
    source, dim, index, *values = call.node.args[:4]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
    if not all(call.labelled(item) for item in (index, *values) if isinstance(item, fx.Node)):
        raise NoLaw("scatters between values with and without token axes")
    dims = algebra.resize(call.dims(index), dim, shape_of(source)[dim])
    if call.labelled(source):
        _same_elsewhere(call.dims(source), call.dims(index), dim % len(dims))
        dims = algebra.resize(call.dims(source), dim, shape_of(source)[dim])
    elif shape_of(source) == tuple(map(algebra.extent, dims)):
        aligned(call, source, dims)
    else:
        raise NoLaw("scatters into more than the tokens it reads")
    return call.result(tuple(algebra.unrepeated(d) for d in dims))


def _same_elsewhere(left: Dims, right: Dims, dim: int) -> None:
    """Check that two values run over the same tokens everywhere but along ``dim``."""
    for d, (a, b) in enumerate(zip(left, right, strict=True)):
        if d == dim or algebra.same_tokens(a, b) or not (algebra.has_tokens(a) or algebra.has_tokens(b)):
            continue
        raise NoLaw("pairs different tokens")


@law(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> Fact:
    """Each index of a plain dimension several times."""
    source = call.node_arg(0)
    dims, dim = call.dims(source), call.arg(2, "dim")
    if dim is None:
        raise NoLaw("flattens tokens")
    return call.result(algebra.resize(dims, dim, shape_of(call.node)[dim]))


@law(torch.ops.treefx.custom_function)
def custom_function(call: Call) -> Fact:
    """A user's autograd.Function whose bodies are pointwise, forward and backward, and its backward linear."""
    reason = custom_function_reason(str(call.node.args[1]))
    if reason is not None:
        raise NoLaw(reason)
    part = pointwise(call)
    return Fact(part.kind, parts=(part,) * len(call.node.meta["val"]), learned=part.learned)
