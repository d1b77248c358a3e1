"""Find padding that no query sees and no result uses, and decide whether it may go.

Padding is proved. A position with a key that fails a condition in every attention (each may have its own) changes no
other position. It may be left out if its own outputs are unused too; a loss marks that by its ignored targets. Any
other condition on keys stays a condition: it is left out of the graph only where all tokens that run meet it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import filterfalse
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from treefx.errors import UnsupportedError
from treefx.inputs.sizes import concrete
from treefx.kernels.memory import host_copies, is_on_device, is_small, on_host, remember, together
from treefx.kernels.score import Expr, evaluate, walk
from treefx.passes.analysis import Analysis
from treefx.passes.causal.contract import mixes
from treefx.passes.labels.facts import Axis, Dims, Kind, ancestors, fact_of
from treefx.passes.labels.laws.losses import Pick
from treefx.passes.labels.laws.reindex import token_index
from treefx.passes.labels.purity import impurity
from treefx.passes.scores.attention_facts import reads_key_alone
from treefx.passes.scores.conditions import compares_one_value, is_learned, may_blind
from treefx.runtime.origins import OTHER_ORIGIN, is_noted, origin_of
from treefx.runtime.places import number_places
from treefx.runtime.token_bits import OF_TOKENS, OWN_NUMBERS, number_tokens

__all__ = ["Grid", "Padding"]


class Padding:
    """Answer questions on padding for the calls of one analysis, from the inputs alone.

    All questions on a call share one ``Grid``, which computes nothing twice.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._mixes = mixes(analysis.gm)
        self._own_positions: dict[frozenset[Expr], list[fx.Node] | None] = {}
        self._identities: dict[frozenset[Expr], list[fx.Node]] = {}
        self.resolved: dict[Expr, _Resolved] = {}
        """Conditions, as grids evaluate them."""
        asking = [item for item in analysis.attentions if not item.zero_if_blind]
        blinding = dict.fromkeys((item.conditions + item.padding, item.heads) for item in asking)
        self._blinding = [item for item in blinding if may_blind(item[0]) and not any(map(is_learned, item[0]))]
        """Conditions and heads of attentions that may give a value without any key.

        Where a parameter decides, a result of the packed graph says (``treefx.passes.packing.emitters.SIGHT``).
        """
        self.may_blind = bool(self._blinding)
        """Whether ``is_defined`` can be False at all."""
        self.ids_may_blind = any(self._reads_ids(item) for conditions, *_ in self._blinding for item in conditions)
        """Whether it depends on the token ids."""

    def seen(self, grid: Grid) -> Tensor | None:
        """Return bool [B, T], False at positions that no attention sees; None without any.

        No query may choose among keys that hold the position, either.

        In a model that only has causal mixers, all positions are that may change what these keep.
        """
        attentions = self._analysis.attentions
        if not attentions and self._mixes:
            blank = self._analysis.blank
            return grid.everywhere() if blank is None else ~grid.equals(blank.node, blank.number)
        readers = {item.padding for item in attentions} | {item.padding for item in self._analysis.choices}
        if not attentions or () in readers:
            return None
        masks = [self._met(grid, conditions) for conditions in readers]
        seen = torch.stack(masks).any(0)
        return None if bool(seen.all()) else seen

    def _met(self, grid: Grid, conditions: Sequence[Expr], heads: int = 1) -> Tensor:
        """Return bool [B, T]: whether a position, as its own key, meets all conditions."""
        met = [grid.keys(condition, heads).all(0).reshape(grid.rows, grid.columns) for condition in conditions]
        return torch.stack(met).all(0)

    def met(self, grid: Grid, conditions: Sequence[Expr]) -> Tensor:
        """bool [B, T], whether a position as a key meets all of some conditions on keys."""
        return self._met(grid, conditions) if conditions else grid.everywhere()

    def needed(self, grid: Grid, seen: Tensor) -> Tensor:
        """Return bool [B, T]: the positions that run, seen or read, also by a mixer."""
        wanted = seen | self.read(grid) if self._analysis.attentions else self.read(grid)
        return self.reached(grid, wanted)

    def reached(self, grid: Grid, wanted: Tensor) -> Tensor:
        """Add all positions before a wanted one, if a mixer may read its row's past.

        Those in front of a row that leave all mixers in the state in which they start are not added.
        """
        if not self._mixes:
            return wanted
        before = wanted.flip(1).to(torch.int8).cummax(1).values.flip(1).to(torch.bool)
        blank = self._analysis.blank
        if blank is None:
            return before
        idle = grid.equals(blank.node, blank.number) & ~wanted
        return before & ~idle.to(torch.int8).cummin(1).values.to(torch.bool)

    def read(self, grid: Grid) -> Tensor:
        """Return bool [B, T]: the positions with outputs that the graph itself reads."""
        if self._readings is None:
            return grid.everywhere()
        read = ~grid.everywhere()
        positions = torch.arange(read.numel(), device=grid.device).reshape(read.shape)
        for source, target, ignored in self._readings:
            wanted = (grid.value(target) != ignored).reshape(-1)
            read.view(-1)[token_index(source, positions, grid.sizes).reshape(-1)[wanted]] = True
        return read

    @cached_property
    def _readings(self) -> list[tuple[fx.Node, fx.Node, int]] | None:
        """Return losses' inputs, targets and ignored targets; None with other readers."""
        if any(not item.contracted for item in self._analysis.expansions) or self._analysis.returns_reindexed:
            return None
        found = []
        for node in self._analysis.picks:
            law, (source, target) = fact_of(node).law, node.args[:2]
            assert isinstance(law, Pick) and isinstance(source, fx.Node)
            if law.ignore_index is None or not isinstance(target, fx.Node):
                return None
            if fact_of(target).learned or impurity(target) is not None:
                return None
            found.append((source, target, law.ignore_index))
        return found

    def check_lookups(self, grid: Grid) -> None:
        """Check that indices of lookups are in range at all positions, padding included.

        Other devices than the CPU are not waited for: they fail there, as a lookup out of range does.

        Raises:
            IndexError: One is not; or RuntimeError, where the operator raises that.
        """
        for item in self._analysis.lookups:
            index = grid.value(item.index)
            outside = (index < item.first) | (index >= item.size)
            if index.device.type != "cpu":
                torch._assert_async(~outside.any())
            elif bool(outside.any()):
                raise item.error(
                    f"index {int(index[outside][0])} is out of bounds for dimension {item.dim} with size {item.size}"
                    f"{'' if item.line is None else f' ({item.line})'}; padding is looked up in eager mode as well"
                )

    def own_positions(self, grid: Grid, redundant: frozenset[Expr]) -> list[Tensor] | None:
        """Return values [B, T] that distinguish tokens of rows in different columns, or None.

        Values that only ``redundant`` conditions read are left out.
        """
        if redundant not in self._own_positions:
            self._own_positions[redundant] = self._analysis.find_own_positions(redundant)
        nodes = self._own_positions[redundant]
        return None if nodes is None else [numbers for node in nodes for numbers in grid.numbers(node)]

    def identity(self, grid: Grid, redundant: frozenset[Expr]) -> list[Tensor]:
        """The values [B, T] that tell tokens apart where some conditions on keys are left out."""
        inputs = self._identities.get(redundant)
        if inputs is None:
            every = self._analysis.gm.graph.find_nodes(op="placeholder")
            inputs = self._identities[redundant] = [every[i] for i in self._analysis.identity_without(redundant)]
        of_tokens = [x for node in inputs for x in grid.numbers(node)]
        placed = [number_places(law, images, grid.value, grid.sizes) for law, images in self._analysis.placed]
        return of_tokens + placed + self.numbers_of_rows(grid)

    def numbers_of_rows(self, grid: Grid) -> list[Tensor]:
        """The values, one number per row, that tell tokens apart, each as [B, T]."""
        values = [grid.value(node).reshape(-1, 1) for node in self._analysis.identity_of_rows]
        return [value.expand(grid.rows, grid.columns) for value in values]

    def redundant(self, grid: Grid, keep: Tensor | None, *, native: bool = False) -> frozenset[Expr]:
        """Return the conditions that hold for all running tokens, and need no mask of pairs.

        Such are conditions on keys that all kept positions meet, and ``x[query] == x[key]`` with the same x at all kept
        positions of a row (one document). In the native level the token ids are packed, not in ``args``.
        """
        kept = grid.everywhere() if keep is None else keep
        of_keys, of_values = self._asked if not native else self._asked_without_ids
        met = set[Expr]()
        for item in of_keys:
            if bool((self._met(grid, [item]) | ~kept).all()):
                met.add(item)
        for item in of_values:
            if grid.is_one(item, kept):
                met.add(item)
        return frozenset(met)

    @cached_property
    def _asked(self) -> tuple[list[Expr], list[Expr]]:
        """Return conditions that inputs alone decide: on keys, and equality of one value."""
        attentions = self._analysis.attentions
        asked = dict.fromkeys(item for attention in attentions for item in attention.conditions + attention.padding)
        known = [item for item in asked if not is_learned(item)]
        return [item for item in known if reads_key_alone(item)], list(filter(compares_one_value, known))

    @cached_property
    def _asked_without_ids(self) -> tuple[list[Expr], list[Expr]]:
        """Those of them that do not read the token ids."""
        of_keys, of_values = self._asked
        return list(filterfalse(self._reads_ids, of_keys)), list(filterfalse(self._reads_ids, of_values))

    @cached_property
    def buffers_decide(self) -> bool:
        """Whether the answer of ``redundant`` in the native level depends on more than inputs of the call."""
        roles = dict(zip(self._analysis.gm.graph.find_nodes(op="placeholder"), self._analysis.roles, strict=True))
        read = [node for asked in self._asked_without_ids for item in asked for node in _read_by(item)]
        return any(node.op == "get_attr" or roles.get(node, "input") in ("parameter", "buffer") for node in read)

    def _reads_ids(self, condition: Expr) -> bool:
        assert self._analysis.tokens is not None
        return self._analysis.tokens.ids in _read_by(condition)

    def is_defined(self, grid: Grid, keep: Tensor | None, starts: Tensor | None = None) -> bool:
        """Return whether tree attention computes the attention of every kept position.

        Kept positions are bool [B, T].

        With ``starts`` of segments, a query only sees keys of its segment.

        A query that sees nothing is a convention of the original: zero for hard masks in
        scaled_dot_product_attention, which tree attention shares; NaN or a mean over past and future elsewhere, which
        only the original graph reproduces. Most queries see themselves; the others are asked key by key.
        """
        for conditions, heads in self._blinding:
            blind = ~self._met(grid, conditions, heads)
            queries = torch.nonzero((blind if keep is None else blind & keep).reshape(-1)).to(torch.int64)
            if not len(queries):
                continue
            visible = grid.past(queries, starts)
            for condition in conditions:
                visible = visible & grid.pairs(condition, queries, heads)
            if not bool(visible.any(-1).all()):
                return False
        return True


def _read_by(condition: Expr) -> set[fx.Node]:
    """The values that a condition reads, and all that these are made of."""
    loads = [item[1] for item in walk(condition) if item[0] == "load"]
    return {*loads, *ancestors(*loads)}


class _Read(NamedTuple):
    """A value that a condition reads.

    ``form`` is its index: "whole" has the condition's own, "row" the query's row, "grid" [B, T] and "token" a position.
    "columns" is the number of columns, without an index or a node.
    """

    form: Literal["columns", "whole", "row", "grid", "token"]
    node: fx.Node | None = None
    dims: Dims | None = None
    indices: int = 0


_Resolved: TypeAlias = tuple[Expr, Sequence[_Read]]
"""An expression of flat positions, and the values that its loads read."""


def _resolve(expr: Expr) -> _Resolved:
    reads: list[_Read] = []

    def load(read: _Read, *indices: Expr) -> Expr:
        reads.append(read)
        return ("load", len(reads) - 1, *indices)

    def resolve(item: Expr) -> Expr:
        if item[0] in ("cq", "ck"):
            return ("mod", ("q" if item[0] == "cq" else "k",), load(_Read("columns")))
        if item[0] != "load":
            return (item[0], *[resolve(part) if isinstance(part, tuple) else part for part in item[1:]])
        node, *indices = item[1:]
        fact = fact_of(node)
        if fact.kind is Kind.ROW:
            return load(_Read("row", node, None, len(indices)), ("q",))
        if fact.kind is Kind.INVARIANT:
            return load(_Read("whole", node), *[resolve(index) for index in indices])
        assert fact.dims is not None
        axes = [[factor.axis for factor in dim] for dim in fact.dims]
        form: Literal["grid", "token"] = "grid" if axes == [[Axis.ROW], [Axis.TOKEN]] else "token"
        place = ("q",) if indices[0] == ("cq",) else ("k",)
        return load(_Read(form, node, fact.dims), place, *[resolve(index) for index in indices[1:]])

    return resolve(expr), reads


class Grid:
    """Evaluate conditions and functions of inputs on the inputs of one call, each once.

    Positions are flat, row * T + column.

    Args:
        analysis: Of the graph that is called.
        args: The tensors of the call, with the parts of masks.
        on_host: Compute all of it on the host, from copies of small tensors; a function of large ones is computed where
            these are, and copied if a condition reads it.
        resolved: Conditions resolved in earlier calls; None for this call alone.
    """

    def __init__(
        self,
        analysis: Analysis,
        args: Sequence[Any],
        *,
        on_host: bool = False,
        resolved: dict[Expr, _Resolved] | None = None,
    ) -> None:
        self._resolved = {} if resolved is None else resolved
        batch, tokens = analysis.batch, analysis.tokens
        assert tokens is not None
        self._gm, self._tokens, self.sizes = analysis.gm, tokens, {} if batch is None else batch.values(args)
        self.rows: int = concrete(tokens.rows, self.sizes)
        self.columns: int = concrete(tokens.columns, self.sizes)
        first, *_ = [x for x in args if isinstance(x, Tensor)]
        self._on_host, self.placed_on = on_host and is_on_device(first), first.device
        self.device = torch.device("cpu") if self._on_host else self.placed_on
        self._inputs = dict(zip(analysis.gm.graph.find_nodes(op="placeholder"), args, strict=True))
        self._values: dict[fx.Node, Any] = {}
        self._numbers: dict[fx.Node, Sequence[Tensor]] = {}
        self._keys: dict[tuple[Expr, int], Tensor] = {}

    def _at_hand(self, x: Any, *, is_constant: bool) -> Any:
        """Return the host's copy of a small value; a constant of the graph is copied once for all calls.

        A tensor that another graph of the model has made stays, as its copy would have no origin.
        """
        if not isinstance(x, Tensor) or not is_on_device(x) or not is_small(x) or is_noted(x):
            return x
        if is_constant and host_copies([x]) is None:
            remember(on_host(x), x)
        return on_host(x)

    def everywhere(self) -> Tensor:
        """True at all positions, bool [B, T]."""
        return torch.ones(self.rows, self.columns, dtype=torch.bool, device=self.device)

    def value(self, node: Any) -> Any:
        """Return the full value of a node without parameters, the same as in the graph (``purity``)."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self._values:
            if node.op in ("placeholder", "get_attr"):
                is_constant = node.op == "get_attr"
                x = getattr(self._gm, str(node.target)) if is_constant else self._inputs[node]
                self._values[node] = self._at_hand(x, is_constant=is_constant) if self._on_host else x
            else:
                args, kwargs = fx.node.map_arg(concrete((node.args, dict(node.kwargs)), self.sizes), self.value)
                if self._on_host:
                    args, kwargs = together((args, kwargs))
                with torch.no_grad():
                    self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._values[node]

    def at_positions(self, node: fx.Node) -> Tensor:
        """A labelled value as [B * T, ...], one dimension per plain dimension."""
        dims = fact_of(node).dims
        assert dims is not None
        return _positions_first(self.value(node), dims, self.sizes)

    def numbers(self, node: fx.Node) -> Sequence[Tensor]:
        """Return numbers [B, T] that are equal where an input's tokens are, by their bits or by their origin."""
        if node not in self._numbers:
            self._numbers[node] = self._find_numbers(node)
        return self._numbers[node]

    def _find_numbers(self, node: fx.Node) -> Sequence[Tensor]:
        value = self.value(node)
        assert self._tokens is not None
        if node in self._tokens.made:
            origin = origin_of(value)
            found = None if origin is None else origin.find()
            if found is None:
                raise UnsupportedError(OTHER_ORIGIN)
            return found
        dims = self._tokens.inputs.get(node, OF_TOKENS)
        if dims[0] and len(dims[0]) > 1:  # [B * T, k]
            value, dims = value.unflatten(0, (self.rows, self.columns)), (*OF_TOKENS, *dims[1:])
        in_order = value.dim() == 2 and bool(dims[0]) and dims[0][0].axis is Axis.ROW
        own = in_order and value.dtype in OWN_NUMBERS
        return [value.detach() if own else number_tokens(value, dims)]

    def keys(self, condition: Expr, heads: int = 1) -> Tensor:
        """Evaluate a condition with query = key, bool [heads, B * T], or [1, B * T]."""
        heads = heads if heads > 1 and _asks_of_heads(condition) else 1
        if (condition, heads) not in self._keys:
            flat = torch.arange(self.rows * self.columns, device=self.device)
            self._keys[condition, heads] = self._evaluate(condition, flat, flat, heads)[:, 0]
        return self._keys[condition, heads]

    def at_tokens(self, expr: Expr) -> Tensor:
        """An expression of the key's token at each position, [B, T]."""
        flat = torch.arange(self.rows * self.columns, device=self.device)
        zero, (resolved, buffers) = torch.zeros_like(flat), self._resolve(expr)
        value = evaluate(resolved, dot=zero, q=flat, k=flat, head=zero, batch=zero, buffers=buffers)
        return value.expand(len(flat)).reshape(self.rows, self.columns)

    def equals(self, node: fx.Node, number: int) -> Tensor:
        """Where a value of the inputs has a number, bool [B, T]."""
        found: Tensor = self.value(node)
        return (on_host(found) if self._on_host else found) == number

    def is_one(self, condition: Expr, kept: Tensor) -> bool:
        """Whether ``x[query] == x[key]`` at all kept positions of each row."""
        found: Tensor = self.value(condition[1][1])
        value = (on_host(found) if self._on_host else found).expand(kept.shape)
        first = value.gather(1, kept.to(torch.int64).argmax(1, keepdim=True))
        return bool(((value == first) | ~kept).all())

    def past(self, queries: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return bool [queries, T]: whether each column is not after the query's.

        Nor of another segment; ``queries`` is [queries, 1].
        """
        past = torch.arange(self.columns, device=self.device) <= queries % self.columns
        if starts is None:
            return past
        segment = starts.cumsum(1)
        return past & (segment[queries[:, 0] // self.columns] == segment.reshape(-1)[queries])

    def pairs(self, condition: Expr, queries: Tensor, heads: int) -> Tensor:
        """A condition on the query's row, bool broadcastable to [heads, queries, T]."""
        keys = queries // self.columns * self.columns + torch.arange(self.columns, device=self.device)
        return self._evaluate(condition, queries, keys, heads)

    def _evaluate(self, condition: Expr, queries: Tensor, keys: Tensor, heads: int) -> Tensor:
        """Return bool [heads, Q, K], or [1, Q, K] where all heads agree.

        Q = 1 where ``queries`` is a vector.
        """
        resolved, buffers = self._resolve(condition)
        count = heads if heads > 1 and _asks_of_heads(condition) else 1
        head = torch.arange(count, device=self.device).reshape(-1, 1, 1)
        zero = torch.zeros((), device=self.device)
        value = evaluate(resolved, dot=zero, q=queries, k=keys, head=head, batch=head[:1], buffers=buffers)
        pairs = (1, *keys.shape) if queries.dim() == 1 else (queries.shape[0], keys.shape[-1])
        return value.to(torch.bool).expand(count, *pairs)

    def _resolve(self, expr: Expr) -> tuple[Expr, list[Tensor]]:
        """Return an expression of flat positions, and what its loads read."""
        found = self._resolved.get(expr)
        if found is None:
            found = self._resolved[expr] = _resolve(expr)
        resolved, reads = found
        buffers = []
        for read in reads:
            if read.form == "columns":
                buffers.append(torch.full((), self.columns, device=self.device))
                continue
            value = self.value(read.node)
            if read.form == "grid":
                value = value.reshape(-1)
            elif read.form == "token":
                assert read.dims is not None
                value = _positions_first(value, read.dims, self.sizes)
            elif read.form == "row":
                value = value if read.indices == 2 else value.reshape(-1, 1).expand(self.rows, self.columns)
                value = value.reshape(-1)
            buffers.append(on_host(value) if self._on_host else value)
        return resolved, buffers


def _asks_of_heads(condition: Expr) -> bool:
    return any(item == ("head",) for item in walk(condition))


def _positions_first(x: Tensor, dims: Dims, sizes: Mapping[Any, int]) -> Tensor:
    """A full labelled value as [B * T, ...], one dimension per plain dimension."""
    factors = [factor for dim in dims for factor in dim]
    split = x.reshape(concrete([factor.size for factor in factors], sizes))
    axes = [factor.axis for factor in factors]
    front = split.movedim((axes.index(Axis.ROW), axes.index(Axis.TOKEN)), (0, 1))
    plain = [int(math.prod(f.size for f in dim)) for dim in dims if all([f.axis is Axis.PLAIN for f in dim])]
    return front.reshape([front.shape[0] * front.shape[1], *plain])
