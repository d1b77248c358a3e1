"""Run the labelled graph once per distinct token.

The rewritten graph is traced from an interpreter over the labelled one. Each value has up to two forms, made on demand:
*packed* (the same operator on ``[1, N]``, views resized by their factors) and *full*. Lifted attention becomes
``treefx::tree_attention``; where no law is known the full form is made from expanded operands; losses pick from packed
values; results for the caller leave packed and are expanded outside, if at all.

Before::

    view: "f32[48, 64]" = view(hidden, [48, 64]);  mm: "f32[48, 64]" = mm(view, w)          # 4 rows of 12 tokens
    out: "f32[4, 4, 12, 16]" = treefx.attention(q, k, v, mask)

After::

    view: "f32[s0, 64]" = view(hidden, [s0, 64]);  mm: "f32[s0, 64]" = mm(view, w)          # s0 distinct tokens
    out: "f32[1, 4, s0, 16]" = treefx.tree_attention(q, k, v, subtree_end, ...)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from treefx.errors import UnsupportedError
from treefx.kernels.score import Expr
from treefx.passes.causal.contract import Contracted
from treefx.passes.causal.domain import HAS_KNOWN
from treefx.passes.labels.facts import ALONG_ROWS, FACT, Axis, Dims, Fact, Kind, ancestors, fact_of, token_axes
from treefx.passes.labels.label_tokens import DTYPE_ONLY, SHAPE_ONLY
from treefx.passes.labels.laws import experts as expert_laws
from treefx.passes.labels.laws import shape as shape_laws
from treefx.passes.labels.laws.base import LABELLED, find_law
from treefx.passes.labels.laws.losses import Pick
from treefx.passes.labels.laws.reindex import Reindexed
from treefx.passes.labels.liveness import input_checks, live_nodes
from treefx.passes.labels.purity import changed_inputs
from treefx.passes.labels.token_inputs import Tokens
from treefx.passes.layers.find_layers import described, find_layers
from treefx.passes.packing import emit_attention as _emit_attention  # noqa: F401  (registers emitters)
from treefx.passes.packing import emit_choices as _emit_choices  # noqa: F401  (registers emitters)
from treefx.passes.packing import emit_losses as _emit_losses  # noqa: F401  (registers emitters)
from treefx.passes.packing import emit_packed as _emit_packed  # noqa: F401  (registers emitters)
from treefx.passes.packing import emit_scans as _emit_scans  # noqa: F401  (registers emitters)
from treefx.passes.packing import emit_sparse as _emit_sparse  # noqa: F401  (registers emitters)
from treefx.passes.packing.emitters import find_emitter, find_full_emitter
from treefx.passes.packing.layout import (
    Metadata,
    at_columns,
    at_own_row,
    expand_rows,
    gather_tokens,
    packed_shape,
    tokens_first,
)
from treefx.passes.packing.packed_layers import Forms, PackedLayers
from treefx.passes.scores.attention_facts import Attention

__all__ = ["Output", "PackingInterpreter", "is_packed_output"]

aten = torch.ops.aten
T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """Describe one output; ``dims`` is None for the caller's form, else it leaves as [N, ...]."""

    dims: Dims | None = None


class PackingInterpreter:
    """Interprets a labelled graph on packed tokens.

    Args:
        gm: The labelled graph.
        tokens: Its token axes.
        detached: Positions of outputs that leave without gradient.
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
        self.proofs: list[tuple[str, Tensor]] = []
        """Facts that only the numbers of a call prove, as in ``Packer``."""
        self._forms = Forms()
        self.changed = changed_inputs(gm)
        self._live = live_nodes(gm, checks=not native)
        self._checks = [] if native else input_checks(gm)
        self._of_ids = _made_of(tokens.ids) if native else set[fx.Node]()
        self._metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        """The trie of the call being traced."""
        assert self._metadata is not None
        return self._metadata

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the rewritten graph on its inputs, then ``row, column, subtree_end, token_of``.

        Where ``proofs`` are asked, bool [proofs] is one more result.
        """
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        self._metadata = Metadata(*inputs[len(placeholders) :])
        self._forms.update((("full", node), value) for node, value in zip(placeholders, inputs, strict=False))
        layers = {node: layer for layer in find_layers(self.gm.graph) for node in layer.nodes}
        packed = PackedLayers(self._forms, self._known, self._visit, self._named, self._common)
        for node in self.gm.graph.nodes:
            if node not in layers:
                self._visit(node)
            elif node is layers[node].nodes[0]:
                packed.run(layers[node])
        return self._outputs(next(iter(self.gm.graph.find_nodes(op="output"))))

    def _visit(self, node: fx.Node) -> None:
        """Make the forms that are surely wanted in graph order, so that no recursion is deep."""
        if node.op != "call_function" or node not in self._live:
            return
        fact = fact_of(node)
        on_rows = fact.kind is Kind.ROW and not isinstance(fact.law, Reindexed)
        if on_rows or node in self._checks or isinstance(fact.law, Contracted):
            self.full(node)
        elif fact.kind is Kind.PACKED or (fact.parts and fact.parts[0].kind is Kind.PACKED):
            self.packed(node)

    def _known(self, node: fx.Node) -> tuple[Any, ...]:
        """Return facts that decide about a node's forms besides the graph: proofs and the call."""
        law = fact_of(node).law if node.op == "call_function" else None
        conditions = (*law.conditions, *law.padding) if isinstance(law, Attention) else ()
        redundant = [item in self.redundant for item in conditions]
        places = (node in self._live, node in self.changed, node is self.tokens.ids, node in self._of_ids)
        looks_behind = object() if isinstance(law, Pick | Reindexed) else None  # its operands' operators; has no equal
        return (
            node.meta.get(FACT),
            node.meta.get(HAS_KNOWN),
            described(node.meta.get("val")),
            redundant,
            *places,
            looks_behind,
        )

    def _common(self) -> list[Any]:
        """Return values that emitters read besides forms: the trie, and lists they extend."""
        return [*vars(self.metadata).values(), *[holds for _, holds in self.proofs]]

    def _named(self, name: str, node: fx.Node) -> Any:
        return self.full(node) if name == "full" else self.packed(node)

    def _outputs(self, node: fx.Node) -> tuple[Any, ...]:
        results = []
        for position, item in enumerate(node.args[0]):  # type: ignore[arg-type]
            value, output = self._absent(item) if position in self.absent else self._output(item)
            detach = position in self.detached and isinstance(value, Tensor)
            results.append(value.detach() if detach else value)
            self.outputs.append(output)
        return (*results, torch.stack([holds for _, holds in self.proofs])) if self.proofs else tuple(results)

    def _absent(self, item: fx.Node) -> tuple[Any, Output]:
        """Return a stand-in for unread logits that the loss does without."""
        return self.metadata.column.new_zeros((), dtype=item.meta["val"].dtype), Output(fact_of(item).dims)

    def _output(self, item: Any) -> tuple[Any, Output]:
        if not isinstance(item, fx.Node):
            return item, Output()
        held = next((source for source, value in self.changed.items() if _is_same(item, value)), None)
        if held is not None:  # changed in place: the caller holds that tensor, and others may hold it too
            return self.full(held), Output()
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

        def made() -> Any:
            with fx_traceback.set_current_meta(node):
                return make(node)

        return self._forms.make((name, node), made)

    def _make_full(self, node: fx.Node) -> Any:
        fact = fact_of(node) if node.op == "call_function" else None
        computed = fact is not None and (isinstance(fact.law, Contracted) or node.meta.get(HAS_KNOWN, False))
        if fact is not None and fact.kind is Kind.PACKED and _is_token_wise(fact) and not computed:
            assert fact.dims is not None
            first = tokens_first(self.packed(node), fact.dims, self.metadata.tokens)
            return expand_rows(first, fact.dims, self.metadata.token_of)
        if node.op == "get_attr":
            return getattr(self.gm, str(node.target))
        if node.target in SHAPE_ONLY and fact is not None and fact.kind is Kind.INVARIANT:
            value = node.meta["val"]
            return torch.full(value.shape, SHAPE_ONLY[node.target], dtype=value.dtype, device=value.device)
        emit = find_full_emitter(fact) if fact is not None else None
        if emit is not None and fact is not None:
            return emit(self, node, fact)
        if node.target is torch.ops.treefx.attention.default:
            q, k, v, mask, dropout, is_causal, scale, enable_gqa = self._full_args(node)[0]
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
        args, kwargs = self._full_args(node)
        if find_law(node.target) is shape_laws.view:
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
        """Return a full value with the dense memory order of the trace.

        An expanded one may lie in another order, and some operators (group norm) count on the traced one.
        """
        value, traced = self.full(node), node.meta.get("val")
        if not isinstance(traced, Tensor):
            return value
        with disable_proxy_modes_tracing():  # sizes of the trace before this one are not sizes of it
            was_dense = traced.is_contiguous()
        return value.contiguous() if was_dense and not value.is_contiguous() else value

    def _make_packed(self, node: fx.Node) -> Any:
        if node.op == "placeholder" or not self._runs_packed(node):
            return self._gathered(node)
        fact = fact_of(node)
        if node.target is operator.getitem:
            return self.packed(node.args[0])[node.args[1]]
        emit = find_emitter(node, fact)
        if emit is not None:
            return emit(self, node, fact)
        return self.call(node)

    def _runs_packed(self, node: fx.Node) -> bool:
        """Return whether an operator runs on packed operands; functions of inputs run in full."""
        fact = fact_of(node)
        if fact.kind is Kind.PACKED:
            return not isinstance(fact.law, Contracted)
        if fact.kind is Kind.SCORE:  # of a choice; those of attention are lifted
            return True
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

    def once(self, name: str, of: Any, make: Callable[[], T]) -> T:
        """Make a value once per call for several emitters."""
        found: T = self._forms.make((name, of), make)
        return found

    def call(self, node: fx.Node, *, align: Dims | None = None, only: Sequence[int] | None = None) -> Any:
        """Run the node's operator on packed operands; align invariant ones to ``align``.

        ``only`` selects positions.
        """

        def aligned(item: fx.Node) -> Any:
            fact = fact_of(node)
            if fact.kind is Kind.SCORE and fact_of(item).kind not in (Kind.PACKED, Kind.SCORE):
                assert fact.dims is not None
                return at_own_row(self.full(item), fact.dims, self.metadata)
            wanted = only is None or any(node.args[i] is item for i in only)
            return self.operand(item, align if wanted else None)

        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), aligned)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def operand(self, item: Any, align: Dims | None = None) -> Any:
        """An operand of a packed operator: packed, or an invariant one aligned to ``align``."""
        if isinstance(item, fx.Node) and fact_of(item).kind in LABELLED:
            return self.packed(item)
        value = self.full(item)
        return at_columns(value, align, self.metadata) if align is not None and isinstance(value, Tensor) else value

    def shape(self, dims: Dims) -> list[Any]:
        """The packed shape of labelled dimensions."""
        return packed_shape(dims, self.metadata.tokens, self.positions)


def _made_of(source: fx.Node) -> set[fx.Node]:
    """All nodes that depend on one, and that one."""
    found = {source}
    for node in source.graph.nodes:
        if any(item in found for item in node.all_input_nodes):
            found.add(node)
    return found


def _is_same(item: fx.Node, value: Any) -> bool:
    """Return whether an output is a changed input's new value, with or without gradient."""
    return item is value or (item.target is aten.detach.default and _undetached(item) is _undetached(value))


def _undetached(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target is aten.detach.default:
        node = node.args[0]
    return node


def is_packed_output(fact: Fact) -> bool:
    """Whether a value leaves the graph packed."""
    return fact.kind is Kind.PACKED and _is_token_wise(fact)


def _is_token_wise(fact: Fact) -> bool:
    """Whether the value can be expanded: it has rows and tokens, and no slots of experts.

    Nor is it an order of slots, such as the inverse of a sort, which counts those of packed tokens.
    """
    ordered = isinstance(fact.law, expert_laws.Slots)
    return fact.dims is not None and token_axes(fact.dims) == {Axis.ROW, Axis.TOKEN} and not ordered
