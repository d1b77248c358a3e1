"""Run the labelled graph once per distinct token.

The rewritten graph is traced from an interpreter over the labelled one. Each value has up to two forms, made on demand:
*packed* (the same operator on ``[1, N]``, views resized by their factors) and *full*. Lifted attention becomes
``treefx::tree_attention``; where no law is known the full form is made from expanded operands; losses pick from packed
values; what the caller gets leaves packed and is expanded outside, if at all.

Before::

    view: "f32[48, 64]" = view(hidden, [48, 64]);  mm: "f32[48, 64]" = mm(view, w)          # 4 rows of 12 tokens
    out: "f32[4, 4, 12, 16]" = treefx.attention(q, k, v, mask)

After::

    view: "f32[s0, 64]" = view(hidden, [s0, 64]);  mm: "f32[s0, 64]" = mm(view, w)          # s0 distinct tokens
    out: "f32[1, 4, s0, 16]" = treefx.tree_attention(q, k, v, subtree_end, ...)
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import Tensor, fx

from treefx.errors import UnsupportedError
from treefx.kernels.ops import attend
from treefx.kernels.recurrence.tree_conv import find_depths, find_parents
from treefx.kernels.score import Expr, Score, evaluate
from treefx.passes.causal.contract import Contracted
from treefx.passes.causal.tree_mixers import Operand, TreeConvolution, TreeScan, Vanishing, convolve, scan
from treefx.passes.labels.dims import has_tokens
from treefx.passes.labels.facts import ALONG_ROWS, Axis, Dims, Fact, Factor, Kind, ancestors, fact_of, token_axes
from treefx.passes.labels.label_tokens import DTYPE_ONLY, SHAPE_ONLY, Tokens
from treefx.passes.labels.laws import base as laws
from treefx.passes.labels.laws.losses import Pick
from treefx.passes.labels.laws.reindex import Reindexed, reindexed_entries, token_index
from treefx.passes.labels.liveness import live_nodes
from treefx.passes.labels.purity import changed_inputs
from treefx.passes.labels.rows import rows_in_order
from treefx.passes.packing.emit_packed import find_emitter
from treefx.passes.packing.layout import Metadata, at_columns, expand_rows, gather_tokens, packed_shape, tokens_first
from treefx.passes.packing.restore_gradients import expand, pick
from treefx.passes.packing.vocab_tail import find_tail, surprise
from treefx.passes.scores.attention_facts import Attention
from treefx.passes.scores.hidden import Range, bounded, is_hidden, unknown

__all__ = ["Output", "Packer", "is_packed_output"]

aten = torch.ops.aten
_ROUNDING = 1.05
"""By how much a product computed in the narrowest type may exceed the product of norms."""


@dataclass(frozen=True)
class Output:
    """One output of the graph. ``dims`` is None where it leaves as the caller gets it; else it leaves as [N, ...]."""

    dims: Dims | None = None


class Packer:
    """Interprets a labelled graph on packed tokens.

    Args:
        gm: The labelled graph.
        tokens: Its token axes.
        detached: Positions of outputs that nobody is expected to differentiate (they leave without gradient).
        redundant: Conditions of attentions, on keys or on pairs, that hold for all tokens of the call.
        native: Whether the token ids come packed already, ``[1, N]``; other inputs are functions of the column.
        absent: Positions of logits that are not computed, because only losses read them (``vocab_tail``).
        own_positions: Whether rows start in different columns: only distances along a path are defined then.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        tokens: Tokens,
        *,
        detached: frozenset[int] = frozenset(),
        redundant: frozenset[Expr] = frozenset(),
        native: bool = False,
        absent: frozenset[int] = frozenset(),
        own_positions: bool = False,
    ) -> None:
        self.gm, self.tokens, self.absent = gm, tokens, absent
        self.own_positions = own_positions
        self.detached, self.redundant, self.native = detached, redundant, native
        self.positions = tokens.rows * tokens.columns
        self.outputs: list[Output] = []
        self.hidden: list[Tensor] = []
        """Whether masks hide what they are to hide, for the attentions where only the numbers of the call tell."""
        self._forms: dict[tuple[str, Any], Any] = {}
        self._changed = changed_inputs(gm)
        self._metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        """The trie of the call being traced."""
        assert self._metadata is not None
        return self._metadata

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """The rewritten computation: the graph's inputs, then ``row, column, subtree_end, token_of``.

        Where ``hidden`` is asked, its answer is one more result.
        """
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        self._metadata = Metadata(*inputs[len(placeholders) :])
        self._forms = {("full", node): value for node, value in zip(placeholders, inputs, strict=False)}
        live = live_nodes(self.gm)
        for node in self.gm.graph.nodes:
            if node.op == "call_function" and node in live:
                self._visit(node)
        return self._outputs(next(iter(self.gm.graph.find_nodes(op="output"))))

    def _visit(self, node: fx.Node) -> None:
        """Make the forms that are surely wanted in graph order, so that no recursion is deep."""
        fact = fact_of(node)
        on_rows = fact.kind is Kind.ROW and not isinstance(fact.law, Reindexed)
        if on_rows or isinstance(fact.law, Contracted):
            self.full(node)
        elif fact.kind is Kind.PACKED or (fact.parts and fact.parts[0].kind is Kind.PACKED):
            self.packed(node)

    def _outputs(self, node: fx.Node) -> tuple[Any, ...]:
        results = []
        for position, item in enumerate(node.args[0]):  # type: ignore[arg-type]
            value, output = self._absent(item) if position in self.absent else self._output(item)
            detach = position in self.detached and isinstance(value, Tensor)
            results.append(value.detach() if detach else value)
            self.outputs.append(output)
        return (*results, torch.stack(self.hidden).all()) if self.hidden else tuple(results)

    def _absent(self, item: fx.Node) -> tuple[Any, Output]:
        """A stand-in for logits that nobody has read so far and the loss does without."""
        return self.metadata.column.new_zeros((), dtype=item.meta["val"].dtype), Output(fact_of(item).dims)

    def _output(self, item: Any) -> tuple[Any, Output]:
        if not isinstance(item, fx.Node):
            return item, Output()
        fact = fact_of(item)
        if is_packed_output(fact):
            assert fact.dims is not None
            return tokens_first(self.packed(item), fact.dims, self.metadata.tokens), Output(fact.dims)
        return self.full(item), Output()

    # Forms ------------------------------------------------------------------------------------------------------------

    def full(self, node: Any) -> Any:
        """The value as the traced graph has it."""
        return self._form("full", node, self._make_full)

    def packed(self, node: Any) -> Any:
        """The value once per distinct token."""
        return self._form("packed", node, self._make_packed)

    def _form(self, name: str, node: Any, make: Callable[[fx.Node], Any]) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if (name, node) not in self._forms:
            with fx_traceback.set_current_meta(node):
                self._forms[name, node] = make(node)
        return self._forms[name, node]

    def _make_full(self, node: fx.Node) -> Any:
        fact = fact_of(node) if node.op == "call_function" else None
        contracted = fact is not None and isinstance(fact.law, Contracted)
        if fact is not None and fact.kind is Kind.PACKED and _is_token_wise(fact) and not contracted:
            assert fact.dims is not None
            first = tokens_first(self.packed(node), fact.dims, self.metadata.tokens)
            return expand_rows(first, fact.dims, self.metadata.token_of)
        if node.op == "get_attr":
            return getattr(self.gm, str(node.target))
        if node.target in SHAPE_ONLY and fact is not None and fact.kind is Kind.INVARIANT:
            value = node.meta["val"]
            return torch.full(value.shape, SHAPE_ONLY[node.target], dtype=value.dtype, device=value.device)
        if fact is not None and isinstance(fact.law, Reindexed):
            return expand(self._entries(node), token_index(node, self.metadata.token_of))
        if fact is not None and isinstance(fact.law, Pick):
            return self._picked(node, fact.law)
        if node.target is torch.ops.treefx.attention.default:
            q, k, v, mask, dropout, is_causal, scale, enable_gqa = self._full_args(node)[0]
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
        args, kwargs = self._full_args(node)
        if laws.find_law(node.target) is laws.view:
            return args[0].reshape(args[1])  # an expanded value may lie in memory in another order
        if node.target is aten.copy.default:
            return args[1].expand(args[0].shape).to(args[0].dtype)  # which has a derivative
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _full_args(self, node: fx.Node) -> Any:
        if node.target in DTYPE_ONLY:  # the operand gives dtype and device, never its values
            operand = node.args[0]
            assert isinstance(operand, fx.Node)
            packed = fact_of(operand).kind is Kind.PACKED
            return ((self.packed(operand) if packed else self.full(operand)), *node.args[1:]), node.kwargs
        return fx.node.map_arg((node.args, dict(node.kwargs)), self._dense)

    def _dense(self, node: fx.Node) -> Any:
        """A full value, dense in memory where it was in the trace: an expanded one may lie in another order, and some
        operators (group norm) count on the order they were traced with."""
        value, traced = self.full(node), node.meta.get("val")
        lies_otherwise = isinstance(traced, Tensor) and traced.is_contiguous() and not value.is_contiguous()
        return value.contiguous() if lies_otherwise else value

    def _make_packed(self, node: fx.Node) -> Any:
        if node.op == "placeholder" or not self._runs_packed(node):
            return self._gathered(node)
        fact = fact_of(node)
        if node.target is operator.getitem:
            return self.packed(node.args[0])[node.args[1]]
        if isinstance(fact.law, Attention):
            return self._attention(node, fact)
        if isinstance(fact.law, TreeConvolution):
            return self._convolution(fact.law)
        if isinstance(fact.law, TreeScan | Vanishing):
            return self._scan(node, fact)
        emit = find_emitter(node.target)
        if emit is not None:
            return emit(self, node, fact)
        return self.call(node)

    def _runs_packed(self, node: fx.Node) -> bool:
        """Whether the operator itself runs on packed operands; functions of the inputs alone run in full."""
        fact = fact_of(node)
        if fact.kind is Kind.PACKED:
            return not isinstance(fact.law, Contracted)
        return self.native and fact.law != ALONG_ROWS and self.tokens.ids in ancestors(node)

    def _gathered(self, node: fx.Node) -> Tensor:
        fact = fact_of(node)
        assert fact.dims is not None
        if self.native and node is self.tokens.ids:
            ids: Tensor = self.full(node)
            return ids
        if self.native and self.tokens.ids in ancestors(node):
            raise UnsupportedError(
                f"{node.target} runs along the rows of the token ids, which under treefx.use(forest) are packed; "
                "call the model on a padded batch without treefx.use"
            )
        return gather_tokens(self.full(node), fact.dims, self.metadata)

    def call(self, node: fx.Node, *, align: Dims | None = None, only: Sequence[int] | None = None) -> Any:
        """The node's own operator on packed operands; invariant ones aligned to ``align`` (at positions ``only``)."""

        def aligned(item: fx.Node) -> Any:
            wanted = only is None or any(node.args[i] is item for i in only)
            return self.operand(item, align if wanted else None)

        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), aligned)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def operand(self, item: Any, align: Dims | None = None) -> Any:
        """An operand of a packed operator: packed, or an invariant one aligned to ``align``."""
        if isinstance(item, fx.Node) and fact_of(item).kind in laws.LABELLED:
            return self.packed(item)
        value = self.full(item)
        return at_columns(value, align, self.metadata) if align is not None and isinstance(value, Tensor) else value

    def shape(self, dims: Dims) -> list[Any]:
        """The packed shape of labelled dimensions."""
        return packed_shape(dims, self.metadata.tokens, self.positions)

    # Attention and losses ---------------------------------------------------------------------------------------------

    def _attention(self, node: fx.Node, fact: Fact) -> Tensor:
        attention = fact.law
        assert isinstance(attention, Attention) and fact.dims is not None
        query = self._heads_first(attention.query)
        key, value = self._heads_first(attention.key), self._heads_first(attention.value)
        if key.shape[1] != value.shape[1]:
            key, value = (
                self._heads_first(attention.key, whole=True),
                self._heads_first(attention.value, whole=True),
            )
            heads = max(key.shape[1], value.shape[1])
            key, value = (x.expand(-1, heads, -1, -1) for x in (key, value))
        # Some models form scores in float32 and weigh values in their own type: the operator has one.
        wide = reduce(torch.promote_types, (key.dtype, value.dtype), query.dtype)
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
        buffers: list[Tensor] = []
        conditions = [item for item in (*attention.conditions, *attention.padding) if item not in self.redundant]
        visible = [self._kernel_form(item, buffers) for item in conditions]
        score = Score(self._kernel_form(attention.score, buffers), _all(visible))
        sinks = None if attention.sinks is None else self._sinks(attention.sinks, query)
        if attention.doubt is not None:
            self.hidden.append(is_hidden(*attention.doubt, functools.partial(self._range, query, key)))
        out = attend(query, key, value, self.metadata.subtree_end, score, buffers, sinks)
        out = out.to(node.meta["val"].dtype)
        return out.reshape(self.shape(fact.dims)) if out.dim() != len(fact.dims) else out

    def _range(self, query: Tensor, key: Tensor, expr: Expr) -> Range:
        """The range of what a score reads: of products, |q.k| <= max |q| max |k|."""
        if expr[0] == "dot":
            norms = [torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float64).amax() for x in (query, key)]
            largest = _ROUNDING * norms[0] * norms[1]
            return bounded(-largest, largest)
        if expr[0] != "load":
            return unknown(expr)
        node = expr[1]
        value = self.packed(node) if fact_of(node).kind in laws.LABELLED else self.full(node)
        return bounded(value.amin(), value.amax())

    def _sinks(self, logit: Expr, query: Tensor) -> Tensor:
        """The logits [heads] of attention sinks."""
        buffers: list[Tensor] = []
        expr = self._kernel_form(logit, buffers)
        zero = query.new_zeros(())
        head = torch.arange(query.shape[1], device=query.device)
        index = torch.zeros((), dtype=torch.int64, device=query.device)
        value = evaluate(expr, dot=zero, q=index, k=index, head=head, batch=index, buffers=buffers)
        return value.expand(query.shape[1]).to(query.dtype)

    def _convolution(self, law: TreeConvolution) -> Tensor:
        if ("parents", None) not in self._forms:
            metadata = self.metadata
            self._forms["parents", None] = find_parents(metadata.column, metadata.subtree_end)
        bias = None if law.bias is None else self.full(law.bias)
        return convolve(law, self.packed(law.source), self.full(law.weight), bias, self._forms["parents", None])

    def _scan(self, node: fx.Node, fact: Fact) -> Tensor:
        assert fact.dims is not None
        example = node.meta["val"]
        if not isinstance(fact.law, TreeScan):
            return torch.zeros(self.shape(fact.dims), dtype=example.dtype, device=example.device)
        values = {role: self._of_groups(operand) for role, operand in fact.law.roles.items()}
        out = scan(fact.law, values, self.full(fact.law.weight), self.metadata.subtree_end).to(example.dtype)
        plain = [factor.size for dim in fact.dims for factor in dim if factor.axis is Axis.PLAIN]
        return rows_in_order(out.reshape(1, -1, *plain), fact.dims)

    def _of_groups(self, operand: Operand) -> Tensor:
        """A packed value as [N, groups, features], what was repeated for heads left out."""
        dims = fact_of(operand.source).dims
        assert dims is not None
        repeated = next((factor for dim in dims for factor in dim if factor.repeated), None)
        collapsed = _Collapser(self, repeated).make(operand.source) if repeated and operand.repeats > 1 else None
        if collapsed is not None:
            single = tuple(tuple(factor for factor in dim if not factor.repeated) for dim in dims)
            return tokens_first(collapsed, single, self.metadata.tokens).reshape(-1, operand.groups, operand.features)
        first = tokens_first(self.packed(operand.source), dims, self.metadata.tokens)
        return first.reshape(-1, operand.groups, operand.repeats, operand.features)[:, :, 0]

    def _heads_first(self, node: fx.Node, whole: bool = False) -> Tensor:
        """A query, key or value as [1, heads, N, features], heads it was repeated over left out."""
        dims = fact_of(node).dims
        assert dims is not None
        x, dims = (self.packed(node), dims) if whole else self._without_repeats(node, dims)
        token = next(i for i, dim in enumerate(dims) if any(f.axis is Axis.TOKEN for f in dim))
        if len(dims) == 3:
            x = x if token == 1 else x.transpose(1, 2)
            return x.reshape(1, -1, self.metadata.tokens, x.shape[-1])  # heads may stand before the tokens
        return x if token == 2 else x.transpose(2, 3)

    def _without_repeats(self, node: fx.Node, dims: Dims) -> tuple[Tensor, Dims]:
        """Take one of each group of repeated heads, if the groups are contiguous (``repeat_kv``)."""
        where = next(
            (i for i, dim in enumerate(dims) if dim and dim[-1].repeated and i < len(dims) - 2 + (len(dims) == 3)),
            None,
        )
        if where is None or any(factor.repeated for factor in dims[where][:-1]):
            return self.packed(node), dims
        collapsed = _Collapser(self, dims[where][-1]).make(node)
        if collapsed is not None:
            return collapsed, dims
        group = dims[where][-1].size
        x = self.packed(node).unflatten(where, (-1, group)).select(where + 1, 0)
        return x, dims

    def _kernel_form(self, expr: Expr, buffers: list[Tensor]) -> Expr:
        """A lifted expression in packed indices, its loads numbered."""
        if expr[0] == "dot":
            return ("dot",)
        if expr[0] in ("cq", "ck"):
            return ("load", _number(buffers, self._places()), ("q" if expr[0] == "cq" else "k",))
        if expr[0] == "load":
            return self._kernel_load(expr, buffers)
        return (
            expr[0],
            *[self._kernel_form(item, buffers) if isinstance(item, tuple) else item for item in expr[1:]],
        )

    def _places(self) -> Tensor:
        """Where each token stands, [N]: its column or, where that differs from row to row, its depth."""
        if not self.own_positions:
            return self.metadata.column
        if ("depths", None) not in self._forms:
            self._forms["depths", None] = find_depths(self.metadata.subtree_end)
        depths: Tensor = self._forms["depths", None]
        return depths

    def _kernel_load(self, expr: Expr, buffers: list[Tensor]) -> Expr:
        node, *indices = expr[1:]
        fact = fact_of(node)
        if fact.kind is Kind.INVARIANT:
            value = self.full(node)  # what the graph writes to later must not be saved for the backward
            number = _number(buffers, value.clone() if node in self._changed else value)
            return ("load", number, *[self._kernel_form(item, buffers) for item in indices])
        if fact.kind is Kind.ROW:
            return ("load", _number(buffers, self._of_rows(node)), ("q",))
        assert fact.dims is not None
        key = ("tokens_first", node)
        if key not in self._forms:
            self._forms[key] = tokens_first(self.packed(node), fact.dims, self.metadata.tokens)
        token, *rest = indices
        plain = [dim for dim in fact.dims if not has_tokens(dim)]
        loaded = self._forms[key].reshape([-1, *[math.prod(f.size for f in dim) for dim in plain]])
        place = ("q",) if token == ("cq",) else ("k",)
        return ("load", _number(buffers, loaded), place, *[self._kernel_form(item, buffers) for item in rest])

    def _of_rows(self, node: fx.Node) -> Tensor:
        """One number per row, [N]: that of each token's rows, which agree on it."""
        if self.native and self.tokens.ids in ancestors(node):
            raise UnsupportedError(
                f"a mask depends on whole rows through {node.target}, which under treefx.use(forest) are packed; "
                "call the model on a padded batch without treefx.use"
            )
        key = ("of_rows", node)
        if key not in self._forms:
            self._forms[key] = self.full(node).reshape(-1).expand(self.tokens.rows)[self.metadata.row]
        return self._forms[key]  # type: ignore[no-any-return]

    def _picked(self, node: fx.Node, law: Pick) -> Any:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        token_of = token_index(source, self.metadata.token_of)
        if node.target is aten.gather.default:
            index = self.full(node.args[2])
            repeated = token_of.reshape(-1, 1).expand(-1, index.shape[-1]).reshape(-1)
            if self.absent and find_tail(source) is not None:
                return -self._surprise(source, repeated, index.reshape(-1)).reshape(index.shape)
            return pick(self._entries(source), repeated, index.reshape(-1)).reshape(index.shape)
        target = self.full(node.args[1])
        flat, tokens = target.reshape(-1), token_of.reshape(-1)
        valid = flat != law.ignore_index
        losses = torch.where(valid, self._surprise(source, tokens, torch.where(valid, flat, -1)), 0)
        return _reduced(losses, valid, target.shape, node.args[3])

    def _entries(self, node: fx.Node) -> Tensor:
        """A packed value, or one seen through an index, as [N, V]."""
        if isinstance(fact_of(node).law, Reindexed):
            return reindexed_entries(node, self._entries)
        dims = fact_of(node).dims
        assert dims is not None
        first = tokens_first(self.packed(node), dims, self.metadata.tokens)
        return first.reshape([first.shape[0], -1])

    def _surprise(self, source: fx.Node, token_of: Tensor, target: Tensor) -> Tensor:
        """Minus the picked log-probabilities. Picked from the logits where those are at hand: the [N, V] tensor of all
        log-probabilities is then never written."""
        tail = find_tail(source) if self.absent else None
        if tail is not None:
            hidden, weight, bias = self._entries(tail.hidden), self.full(tail.weight), self.full(tail.bias)
            losses, _ = surprise(hidden, weight.t(), bias, token_of, target, tail.scale, None, 0)
            return losses.to(source.meta["val"].dtype)  # type: ignore[no-any-return]
        logits = source.args[0]
        if source.target is not aten._log_softmax.default or not isinstance(logits, fx.Node) or source.args[2]:
            logprobs: Tensor = pick(self._entries(source), token_of, target)
            return -logprobs
        entries = self._entries(logits)
        normaliser: Tensor = expand(torch.logsumexp(entries, -1), token_of)
        picked: Tensor = pick(entries, token_of, target)
        return normaliser - picked


def _reduced(losses: Tensor, valid: Tensor, shape: Sequence[int], reduction: Any) -> tuple[Tensor, Tensor]:
    """What ``nll_loss_forward`` returns without class weights: (loss, total weight)."""
    count = valid.sum().to(losses.dtype)
    if reduction == 0:
        return losses.reshape(shape), torch.zeros_like(count)
    return (losses.sum() / count if reduction == 1 else losses.sum()), count


def _number(buffers: list[Tensor], tensor: Tensor) -> int:
    for number, other in enumerate(buffers):
        if other is tensor:
            return number
    buffers.append(tensor)
    return len(buffers) - 1


def _all(conditions: list[Expr]) -> Expr | None:
    result: Expr | None = None
    for condition in conditions:
        result = condition if result is None else ("and", result, condition)
    return result


def is_packed_output(fact: Fact) -> bool:
    """Whether a value leaves the graph packed."""
    return fact.kind is Kind.PACKED and _is_token_wise(fact)


def _is_token_wise(fact: Fact) -> bool:
    """Whether the value can be expanded: it has rows and tokens, and no slots of experts."""
    return fact.dims is not None and token_axes(fact.dims) == {Axis.ROW, Axis.TOKEN}


class _Collapser:
    """Remakes the movement operators behind a repeated factor with that factor left at one, so nothing is repeated."""

    def __init__(self, packer: Packer, factor: Factor) -> None:
        self.packer, self.factor = packer, factor

    def make(self, node: fx.Node) -> Tensor | None:
        """The packed value without the repeated factor, or None where something else than movement made it."""
        dims = fact_of(node).dims
        assert dims is not None
        if not any(f.repeated and f.size == self.factor.size for dim in dims for f in dim):
            return self.packer.packed(node) if all(not f.repeated for dim in dims for f in dim) else None
        source = node.args[0] if node.args else None
        rule = laws.find_law(node.target)
        if not isinstance(source, fx.Node) or len(node.all_input_nodes) != 1:
            return None
        inner = self.make(source)
        if inner is None:
            return None
        shape = self.packer.shape(tuple(tuple(f for f in dim if not f.repeated) for dim in dims))
        if rule in (laws.view, laws.expand):
            return inner.reshape(shape)
        moves = (laws.permute, laws.unsqueeze, laws.squeeze)
        if rule in moves or node.target in (aten.clone.default, aten.alias.default, aten._to_copy.default):
            result: Tensor = node.target(inner, *node.args[1:], **node.kwargs)  # type: ignore[operator]
            return result
        return None
