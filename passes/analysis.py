"""Hold results of the passes: analyses, their variants, and rewritten graphs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from treefx.errors import UnsupportedError
from treefx.inputs.sizes import BatchSizes
from treefx.inputs.token_count import TokenCount, common_multiple
from treefx.inputs.values import InputValues
from treefx.kernels.score import Expr
from treefx.passes.causal.blanks import Blank, find_blank
from treefx.passes.causal.contract import mixes
from treefx.passes.cuts.boundary_kv import CutGraph, Ranks, Run
from treefx.passes.labels.body import is_grouped
from treefx.passes.labels.constants import Constants
from treefx.passes.labels.facts import Axis, Dims, Kind, ancestors, fact_of
from treefx.passes.labels.images import Images
from treefx.passes.labels.index_ranges import Lookup, find_lookups
from treefx.passes.labels.laws.placed import Placed
from treefx.passes.labels.laws.reindex import Reindexed
from treefx.passes.labels.liveness import live_nodes
from treefx.passes.labels.purity import has_effects
from treefx.passes.labels.segments import Segments
from treefx.passes.labels.token_inputs import Role, Tokens
from treefx.passes.packing.own_positions import find_own_positions
from treefx.passes.packing.pack_tokens import Output, is_packed_output
from treefx.passes.packing.vocab_tail import LossLogits, logits_of_losses
from treefx.passes.runner import GraphChange
from treefx.passes.scores.attention_facts import Attention
from treefx.passes.scores.blocks import Blocks
from treefx.passes.scores.choices import Choice, choices
from treefx.reason_codes import code_of_operator

__all__ = ["Analysis", "Expansion", "Rewritten", "Variant"]

_ATTENTION = {torch.ops.treefx.attention.default, torch.ops.treefx.flash.default}
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.treefx.head.default,
}
_NAMES = {
    "treefx.attention.default": "scaled_dot_product_attention",
    "treefx.flash.default": "flash attention",
    "treefx.segments.default": "flash attention",
    "treefx.custom_function.default": "autograd.Function",
    "treefx.head.default": "the function of LM head and loss",
}
"""Operator in a traced graph -> the user's name for it."""
_FOREST_TOKENS = 8192
"""The size that graphs of the native level are compiled for; a forest may be larger."""


@dataclass(frozen=True)
class Expansion:
    """An operator that reads expanded values: its name, why, and the user's line.

    Where it is ``contracted``, all that comes of it is proved causal and read once per token again.
    """

    op: str
    reason: str
    line: str | None
    contracted: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", _NAMES.get(self.op, self.op))

    @property
    def code(self) -> str:
        """The stable code of the reason, see ``treefx.reason_codes``."""
        return code_of_operator(self.op, self.reason)


class Variant(NamedTuple):
    """Choose how one analysis is rewritten: calls with other choices run other graphs."""

    detached: frozenset[int] = frozenset()
    """Output positions returned without gradient, because no caller has asked for theirs yet."""
    redundant: frozenset[Expr] = frozenset()
    """Conditions of attentions that the inputs of the call make true for all tokens that run."""
    native: bool = False
    absent: frozenset[int] = frozenset()
    """Output positions of logits that are not computed: only losses read them until now."""
    own_positions: bool = False
    """Whether rows start in different columns and share tokens all the same."""
    part: Run | Ranks | None = None
    """Purpose of a part of a forest, or its concurrent ranks; None for an uncut forest."""

    def token_count(self, positions: int, inputs: Sequence[Any]) -> TokenCount:
        """Return N of a graph for rows of so many ``positions``.

        The row of a part is as long as its plan has counted.
        """
        multiple = 1 if self.part is not None else common_multiple(inputs)
        return TokenCount(_FOREST_TOKENS if self.native else positions, multiple)


@dataclass
class Analysis:
    """Passes 1 to 6, for batches of all sizes (``batch``) or for one shape of inputs."""

    gm: fx.GraphModule
    roles: list[Role]
    tokens: Tokens | None
    identity: list[int]
    """Positions of the inputs with values that distinguish tokens."""
    identity_of_keys: dict[Expr, list[int]] = field(default_factory=dict)
    """The same of those that a condition on keys reads, wherever it stays in the graph."""
    identity_of_rows: list[fx.Node] = field(default_factory=list)
    """Values, one number per row, that do so too."""
    placed: list[tuple[Placed, Images | None]] = field(default_factory=list)
    """Vectors put between embeddings; their images (or their places) distinguish tokens."""
    known: InputValues = field(default_factory=InputValues)
    """Proofs from the values of the inputs, in this and all later calls; may add inputs."""
    batch: BatchSizes | None = None
    """Rows and columns where they are symbols."""
    segmented: bool = False
    """Whether rows are taken to be packed with segments."""
    constants: Constants | None = None
    attentions: list[Attention] = field(default_factory=list)
    recurrences: int = 0
    """Linear recurrences that run along the tree."""
    expansions: list[Expansion] = field(default_factory=list)
    obstacles: list[Expansion] = field(default_factory=list)
    """Where trained values are first computed on rows, in a graph in which nothing before is packed."""
    picks: list[fx.Node] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    changes: dict[str, GraphChange] = field(default_factory=dict)
    """Changes of each pass in its last run."""

    def check(self, variant: Variant) -> None:
        """Make sure that the graph can be written for a forest in use, for a part of it, or among ranks.

        Raises:
            UnsupportedError: An operator reads whole rows, or a mask is no causal one in all calls.
        """
        if variant.native and (self.expansions or self.picks):
            first = self.expansions[0].op if self.expansions else "a loss over labels"
            raise UnsupportedError(
                f"under treefx.use(forest) every operator must be token-wise, but {first} reads whole rows; "
                "leave labels out and use treefx.losses, or call the model on a padded batch without treefx.use"
            )
        if (variant.native or variant.part is not None) and self.blocks:
            raise UnsupportedError(
                "under treefx.use(forest), in parts and among ranks every token sees those before it alone, but the "
                "mask lets tokens of a block see each other; call the model on a padded batch without them"
            )
        if variant.part is not None and any(attention.doubt is not None for attention in self.attentions):
            raise UnsupportedError(
                "parts of a forest expect masks that hide keys whatever their scores are, got one filled with a number "
                "that large scores reach; fill masks with -inf or torch.finfo(dtype).min"
            )

    @cached_property
    def position_of_ids(self) -> int:
        """Which of the tensors of a call are its token ids."""
        assert self.tokens is not None
        return self.gm.graph.find_nodes(op="placeholder").index(self.tokens.ids)

    @cached_property
    def blocks(self) -> list[Blocks]:
        """What puts tokens into blocks of which each token sees all."""
        return list(dict.fromkeys(item.blocks for item in self.attentions if item.blocks is not None))

    @cached_property
    def choices(self) -> list[Choice]:
        """Where queries choose among the keys of their row."""
        live = live_nodes(self.gm)
        return [item for item in choices(self.gm) if item.scores in live]

    @cached_property
    def attentions_on_rows(self) -> int:
        """Count attention operators that read tokens outside of ``attentions``.

        Those of a vision tower are left out.
        """
        assert self.tokens is not None
        attending = [node for node in live_nodes(self.gm) if node.target in _ATTENTION]
        others = [node for node in attending if not isinstance(fact_of(node).law, Attention)]
        return sum(self.tokens.ids in ancestors(node) for node in others)

    @cached_property
    def multiplies_vectors(self) -> bool:
        """Return whether a trained weight multiplies tokens of another graph, as a cut-off head."""
        assert self.tokens is not None
        products = [node for node in live_nodes(self.gm) if node.target in _PRODUCTS or is_grouped(node.target)]
        packed = [node for node in products if fact_of(node).kind is Kind.PACKED and _has_weight(node)]
        return bool(self.tokens.made) and bool(packed)

    @cached_property
    def made_inputs(self) -> frozenset[int]:
        """The inputs that another graph of the model made of tokens, or of images."""
        if self.tokens is None:
            return frozenset()
        of_others = self.tokens.made | self.tokens.vectors
        inputs = enumerate(self.gm.graph.find_nodes(op="placeholder"))
        return frozenset(i for i, node in inputs if node in of_others)

    @cached_property
    def products_on_rows(self) -> int:
        """Count products with a trained weight that run on at least half of all columns of rows.

        These are projections, experts, the head. One vector per row, such as a pooled one, loses nothing.
        """
        assert self.tokens is not None
        cells = math.prod(map(_number, (self.tokens.rows, self.tokens.columns)))
        products = [node for node in live_nodes(self.gm) if node.target in _PRODUCTS or is_grouped(node.target)]
        on_rows = [node for node in products if fact_of(node).kind is Kind.ROW and _has_weight(node)]
        long = [node for node in on_rows if 2 * _positions(node) >= cells]
        return sum(self.tokens.ids in ancestors(node) for node in long)

    def find_own_positions(self, redundant: Collection[Expr] = ()) -> list[fx.Node] | None:
        """Return values [B, T] that distinguish tokens of rows in different columns, or None.

        None where tokens are known by their column. Conditions that all tokens of a call meet are ``redundant``.
        """
        assert self.tokens is not None
        if mixes(self.gm) and self.blank is None and not self.segmented:
            return None  # convolutions and recurrences read padding in front of a row
        live = live_nodes(self.gm, checks=False)
        return find_own_positions(self.gm, self.tokens, self.attentions, live, redundant)

    @cached_property
    def blank(self) -> Blank | None:
        """The positions that leave convolutions and recurrences in the state in which they start."""
        if self.segmented or not mixes(self.gm):
            return None
        return find_blank(sorted(live_nodes(self.gm)))

    @cached_property
    def lookups(self) -> list[Lookup]:
        """Lookups that run once per distinct token, and so not at padding that is dropped."""
        return find_lookups(self.gm, live_nodes(self.gm))

    @cached_property
    def segments(self) -> Segments:
        """Return the masks' facts on segments.

        ``segmented`` analyses hold for calls with such values.
        """
        return Segments() if self.constants is None else self.constants.segments

    def identity_without(self, redundant: frozenset[Expr]) -> list[int]:
        """Return input positions that distinguish tokens, without some conditions on keys."""
        staying = [read for condition, read in self.identity_of_keys.items() if condition not in redundant]
        return sorted({*self.identity}.union(*staying))

    @cached_property
    def packed_outputs(self) -> dict[int, Dims]:
        """Positions and dimensions of the outputs that leave the graph packed."""
        facts = {i: fact_of(item) for i, item in enumerate(self._outputs) if isinstance(item, fx.Node)}
        return {i: fact.dims for i, fact in facts.items() if is_packed_output(fact) and fact.dims is not None}

    @cached_property
    def plain_outputs(self) -> frozenset[int]:
        """Positions of those whose dimensions are rows, tokens and one plain factor each, as [1, N, ...]."""
        front = [[Axis.ROW], [Axis.TOKEN]]
        axes = {i: [[factor.axis for factor in dim] for dim in dims] for i, dims in self.packed_outputs.items()}
        return frozenset(
            i for i, found in axes.items() if found[:2] == front and all(dim == [Axis.PLAIN] for dim in found[2:])
        )

    @cached_property
    def output_sizes(self) -> dict[int, list[Any]]:
        """Positions and sizes on rows of the outputs that leave the graph packed."""
        return {
            i: [math.prod(factor.size for factor in dim) for dim in dims] for i, dims in self.packed_outputs.items()
        }

    @cached_property
    def returns_loss(self) -> bool:
        """Whether a single number made with parameters is among the outputs."""
        nodes = [item for item in self._outputs if isinstance(item, fx.Node)]
        return any(
            fact_of(node).learned and node.meta["val"].numel() == 1 and i not in self.packed_outputs
            for i, node in enumerate(nodes)
        )

    @cached_property
    def returns_reindexed(self) -> bool:
        """Whether shifted logits are among the outputs."""
        return any(isinstance(node, fx.Node) and isinstance(fact_of(node).law, Reindexed) for node in self._outputs)

    @cached_property
    def changed_parameter(self) -> str | None:
        """Which operator changes a parameter, and where; None if none does."""
        roles = dict(zip(self.gm.graph.find_nodes(op="placeholder"), self.roles, strict=True))
        for copy in self.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            target, source = copy.args[:2]
            if roles.get(target) == "parameter" and isinstance(source, fx.Node):
                return f"{source.target} {fact_of(source).obstacle or 'changes it in place'}"
        return None

    @cached_property
    def loss_logits(self) -> LossLogits | None:
        """The logits behind the graph's losses, if each loss picks from those of one linear layer."""
        return logits_of_losses(self.picks)

    @cached_property
    def has_side_effects(self) -> bool:
        """Whether a second run of the graph differs: it draws random numbers or changes a buffer."""
        return has_effects(self.gm)

    @cached_property
    def _outputs(self) -> Sequence[Any]:
        outputs: Any = next(iter(self.gm.graph.find_nodes(op="output"))).args[0]
        return outputs  # type: ignore[no-any-return]


def _has_weight(product: fx.Node) -> bool:
    facts = [fact_of(node) for node in product.all_input_nodes]
    return any(fact.kind is Kind.INVARIANT and fact.learned for fact in facts)


def _positions(product: fx.Node) -> int:
    """How many vectors a product makes; of the fused head, how many it takes."""
    value = product.meta["val"]
    shape = value.shape if isinstance(value, Tensor) else product.all_input_nodes[0].meta["val"].shape
    return math.prod(map(_number, shape[:-1]))


def _number(size: Any) -> int:
    """Return a size; for a symbol its hint, since a guard would bind the graph to it."""
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else int(size)


@dataclass
class Rewritten:
    """Passes 4 and 5 for one variant of the graph ``traced``."""

    gm: fx.GraphModule
    traced: fx.GraphModule
    outputs: list[Output]
    inputs: list[Any]
    mode: FakeTensorMode
    count: TokenCount
    """The number of distinct tokens; an input after the metadata."""
    cut: CutGraph | None = None
    """Further inputs and outputs of a graph of parts."""
    asks: tuple[str, ...] = ()
    """Messages, one per element of the last result, bool: where one is False, all results are wrong."""
    analysis: Analysis | None = None
    """The labels of ``traced``, for the inspector."""
    inner: fx.GraphModule | None = None
    """The inner compiler's input: ``gm``, with calls of subgraphs where layers are equal."""
