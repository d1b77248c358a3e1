"""Label every value of the traced graph by its dependence on rows and its token axes.

Abstract interpretation in one sweep. Labels flow from the inputs with values of every token through the laws of
``treefx.passes.labels.laws.base``; sizes are never guessed. Analysis only: facts are written on the nodes,
``pack_tokens`` reads them and rewrites.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import fx

from treefx.kernels.score import Expr, walk
from treefx.passes.labels.body import find_body
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import (
    Axis,
    Fact,
    Kind,
    Lifted,
    ReadsOthers,
    ancestors,
    fact_of,
    set_fact,
    token_axes,
)
from treefx.passes.labels.laws import experts as expert_laws  # noqa: F401  (registers laws)
from treefx.passes.labels.laws import features as feature_laws  # noqa: F401  (registers laws)
from treefx.passes.labels.laws import lookups as lookup_laws  # noqa: F401  (registers laws)
from treefx.passes.labels.laws import matmul as matmul_laws  # noqa: F401  (registers laws)
from treefx.passes.labels.laws import movement as movement_laws  # noqa: F401  (registers laws)
from treefx.passes.labels.laws import over_ranks as _over_ranks  # noqa: F401  (registers laws)
from treefx.passes.labels.laws import placed as _placed  # noqa: F401  (registers laws)
from treefx.passes.labels.laws import pointwise as pointwise_laws  # noqa: F401  (registers laws)
from treefx.passes.labels.laws import reductions as reduction_laws  # noqa: F401  (registers laws)
from treefx.passes.labels.laws import shape as shape_laws  # noqa: F401  (registers laws)
from treefx.passes.labels.laws import token_modules as _token_modules  # noqa: F401  (registers laws)
from treefx.passes.labels.laws.base import Call, find_law
from treefx.passes.labels.laws.losses import find_sink
from treefx.passes.labels.laws.reindex import Reindexed, find_reindexed
from treefx.passes.labels.purity import draws, impurity
from treefx.passes.labels.token_inputs import Role, Tokens
from treefx.passes.trace import flash as _flash  # noqa: F401  (registers operators)
from treefx.passes.trace import library_calls as _library_calls  # noqa: F401  (registers operators)

__all__ = [
    "DTYPE_ONLY",
    "MEETS_ROWS",
    "SHAPE_ONLY",
    "Identity",
    "Improve",
    "MakeImprove",
    "label_tokens",
    "user_line",
]

aten = torch.ops.aten
_ops = torch.ops.treefx
_ASKS_ITSELF = {
    _ops.attention.default, _ops.flash.default, _ops.segments.default, _ops.library.default,
    aten.masked_scatter.default,
}  # fmt: skip
"""Their laws say which of their operands may be computed per row."""
DTYPE_ONLY = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default}
"""Their operand gives a dtype and a device, not values."""
SHAPE_ONLY = {aten.zeros_like.default: 0, aten.ones_like.default: 1}
"""Their operand gives a shape as well; the value fills it."""
_LIBRARIES = ("torch", __name__.partition(".")[0])
_NOT_OF_USERS = tuple(str(Path(str(sys.modules[name].__file__)).parent) for name in _LIBRARIES)
"""Lines below are PyTorch's, such as that of ``F.pad``, or those that treefx puts in place of a library's."""
MEETS_ROWS = "meets a value computed per row"
"""The reason of operators that read expanded values only because another one does."""
MEETS_VARIABLE = "meets an input that requires grad: its gradient is another one in every row"
"""The reason of those that would give the gradients of all rows to one of them."""


def _drawn_by(call: Call) -> str | None:
    """The operator that drew the random numbers which a node meets, if it meets any."""
    rows = [node for node in call.operands if fact_of(node).kind is Kind.ROW and not fact_of(node).learned]
    for node in [*rows, *ancestors(*rows)]:
        if draws(node.target):
            return str(node.target)
    return None


def _obstacle_before(call: Call) -> fx.Node | None:
    """Find the first operator on rows of a trained value, if no earlier one was packed."""
    rows = [node for node in call.operands if fact_of(node).kind is Kind.ROW and fact_of(node).learned]
    return next((node for node in [*rows, *ancestors(*rows)] if fact_of(node).obstacle is not None), None)


def _has_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (
        isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)
    )


@dataclass(frozen=True)
class Identity:
    """Hold the values that distinguish tokens: one token iff they agree on prefixes.

    They are inputs with values of every token, and numbers of rows [B], inputs or made from inputs alone.
    """

    always: frozenset[fx.Node]
    of_keys: Mapping[Expr, frozenset[fx.Node]]
    """Values read by a condition on keys, which must agree while it stays in the graph."""


Improve = Callable[[fx.Node, Fact], Fact]
"""The fact of a node, or a better one."""
Sources = dict[fx.Node, frozenset[fx.Node]]
MakeImprove = Callable[[Tokens, Sources, Callable[[fx.Node, frozenset[fx.Node]], bool]], Improve]
"""From the tokens, the inputs that each node is made of, and whether inputs may tell tokens apart for a node."""


def label_tokens(
    gm: fx.GraphModule,
    roles: Sequence[Role],
    tokens: Tokens,
    *,
    improve: MakeImprove | None = None,
    pick_losses: bool = True,
) -> Identity:
    """Write a ``Fact`` on every node of ``gm`` and return the keys of its tokens.

    Args:
        gm: The traced graph.
        roles: Role of each placeholder.
        tokens: Its token axes.
        improve: Makes a hook that revises each fact, such as ``treefx.passes.causal.contract.contracting``.
        pick_losses: Whether losses pick from packed values.
    """
    labeller = _Labeller(gm, roles, tokens, improve, pick_losses=pick_losses)
    labeller.run()
    always = frozenset(labeller.identity)
    return Identity(always, labeller.of_keys)


class _Labeller:
    def __init__(
        self,
        gm: fx.GraphModule,
        roles: Sequence[Role],
        tokens: Tokens,
        make_improve: MakeImprove | None,
        *,
        pick_losses: bool,
    ) -> None:
        self.gm, self.tokens, self.pick_losses = gm, tokens, pick_losses
        self.roles = dict(zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True))
        self.body = find_body(gm, roles, tokens)
        self.identity: set[fx.Node] = {tokens.ids, *tokens.made}
        """Inputs that tell tokens apart, as far as the attention needs them."""
        self.of_keys: dict[Expr, frozenset[fx.Node]] = {}
        self.sources: Sources = {}
        self.improve = make_improve(tokens, self.sources, self._admit) if make_improve is not None else None

    def run(self) -> None:
        """Label all nodes in order."""
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                set_fact(node, self.placeholder(node))
            elif node.op == "get_attr":
                set_fact(node, Fact(Kind.INVARIANT))
            elif node.op == "call_function":
                self._remember_sources(node)
                set_fact(node, self.function(node))
                if self.improve is not None:
                    set_fact(node, self.improve(node, fact_of(node)))

    def placeholder(self, node: fx.Node) -> Fact:
        self.sources[node] = frozenset([node] if node in self.tokens.inputs else [])
        role = self.roles[node]
        learned = role in ("parameter", "variable")
        if role not in ("input", "variable") or not isinstance(node.meta.get("val"), torch.Tensor):
            return Fact(Kind.INVARIANT, learned=learned)
        if node in self.tokens.inputs:
            made = node in self.tokens.made
            return Fact(Kind.PACKED if made else Kind.PREFIX, self.tokens.inputs[node], learned=made)
        return Fact(Kind.INVARIANT if self.tokens.is_same_for_rows(node) else Kind.ROW, learned=learned)

    def _remember_sources(self, node: fx.Node) -> None:
        self.sources[node] = frozenset().union(*[self.sources.get(n, frozenset()) for n in node.all_input_nodes])

    def function(self, node: fx.Node) -> Fact:
        if node.target is operator.getitem:
            return self.part(node)
        call = Call(node)
        facts = [fact_of(operand) for operand in node.all_input_nodes]
        kinds = {fact.kind for fact in facts}
        learned = any(fact.learned for fact in facts)
        if not _has_tensors(node):
            return Fact(Kind.INVARIANT)  # a size
        if draws(node.target):
            return self.refuse(call, "draws random numbers for every row")
        if node.target is aten.copy_.default:
            return self.refuse(call, "changes a buffer of the model")
        if kinds <= {Kind.INVARIANT} or node.target in DTYPE_ONLY:
            return Fact(Kind.INVARIANT, learned=learned)
        if node.target in SHAPE_ONLY and kinds <= {Kind.ROW, Kind.SCORE}:
            return Fact(Kind.INVARIANT)
        in_loss = node not in self.body or Kind.ROW in kinds  # weights behind a gather make it none of a loss
        sink = find_sink(call) if self.pick_losses and in_loss else None
        if sink is not None:
            return sink
        if any(isinstance(fact.law, Reindexed) for fact in facts):
            return find_reindexed(call) or self._refuse_shifted(call, facts)
        if Kind.ROW in kinds and Kind.SCORE not in kinds and node.target not in _ASKS_ITSELF:
            return self.refuse(call, MEETS_VARIABLE if self._meets_variable(call) else MEETS_ROWS)
        try:
            return self.lawful(call)
        except NoLaw as reason:
            reindexed = find_reindexed(call)
            if reindexed is not None:
                return reindexed
            return self.refuse(call, str(reason))

    def part(self, node: fx.Node) -> Fact:
        source, position = node.args
        assert isinstance(source, fx.Node) and isinstance(position, int)
        fact = fact_of(source)
        return fact.parts[position] if fact.parts is not None else fact

    def lawful(self, call: Call) -> Fact:
        if expert_laws.statistic(call):
            return expert_laws.of_statistic(call)
        law = find_law(call.node.target)
        if law is None:
            raise NoLaw("has no token-wise law")
        fact = law(call)
        if fact.kind is Kind.SCORE and fact.dims is not None and Axis.KEY not in token_axes(fact.dims):
            reduction_laws.check_statistic(call)
        if fact.kind is Kind.PACKED:
            self._check_identity(call)
            self._identify(call, fact)
        return fact

    def _check_identity(self, call: Call) -> None:
        """Expand the packed side in the loss, where a per-row value must not become a key.

        Nor must values that weights multiply there, such as hidden states of a teacher.
        """
        if call.node in self.body:
            return
        foreign = [
            node for node in call.operands if fact_of(node).kind is Kind.PREFIX and self.sources[node] - self.identity
        ]
        if foreign or call.node.target is aten.masked_scatter.default:
            raise NoLaw("meets a value given per row")

    def _identify(self, call: Call, fact: Fact) -> None:
        is_mixer = isinstance(fact.law, ReadsOthers) and not isinstance(fact.law, Lifted)
        for node in fact.law.reads() if is_mixer else call.operands:
            if fact_of(node).kind is Kind.PREFIX:
                self.identity |= self.sources[node]
        if isinstance(fact.law, Lifted):
            self.identity |= self._loaded(fact.law.tells_apart())
            self.of_keys |= {condition: self._loaded([condition]) for condition in fact.law.hides()}

    def _loaded(self, expressions: Iterable[Expr]) -> frozenset[fx.Node]:
        """Return the inputs that expressions read, and numbers of rows, without learned values."""
        loads = {part[1] for item in expressions for part in walk(item) if part[0] == "load"}
        for node in loads:
            reason = None if fact_of(node).kind is Kind.PACKED else impurity(node)
            if reason is not None:
                raise NoLaw(f"the mask is made of numbers that differ each time they are computed: {reason}")
        of_rows = frozenset(node for node in loads if fact_of(node).kind is Kind.ROW)
        others = [node for node in loads - of_rows if fact_of(node).kind is not Kind.PACKED]
        return of_rows.union(*[self.sources.get(node, frozenset()) for node in others])

    def _meets_variable(self, call: Call) -> bool:
        """Return whether an operand on rows depends on an input that requires grad.

        It must depend on no packed value.
        """
        rows = [node for node in call.operands if fact_of(node).kind is Kind.ROW]
        sources = {*rows, *ancestors(*rows)}
        packed = any(fact_of(node).kind is Kind.PACKED for node in sources)
        return not packed and any(self.roles.get(node) == "variable" for node in sources)

    def refuse(self, call: Call, reason: str) -> Fact:
        """Compute per row; the reason is kept where packed values have to be expanded for it."""
        facts = [fact_of(operand) for operand in call.node.all_input_nodes]
        packed = any(fact.kind in (Kind.PACKED, Kind.SCORE) or isinstance(fact.law, Reindexed) for fact in facts)
        learned = any(fact.learned for fact in facts)
        if not packed:
            begins = learned and not any(fact.learned and fact.kind is Kind.ROW for fact in facts)
            return Fact(Kind.ROW, learned=learned, obstacle=reason if begins else None, blame=_drawn_by(call))
        origin = _obstacle_before(call) if reason == MEETS_ROWS else None
        if origin is not None:
            return Fact(Kind.ROW, learned=learned, reason=fact_of(origin).obstacle, blame=str(origin.target))
        return Fact(Kind.ROW, learned=learned, reason=reason, blame=_drawn_by(call))

    def _refuse_shifted(self, call: Call, facts: list[Fact]) -> Fact:
        """Refuse readers of a shifted value other than a loss: the shift mixes positions."""
        for node in call.operands:
            while isinstance(fact_of(node).law, Reindexed):
                set_fact(node, replace(fact_of(node), reason=None))
                shift, node = node, Call(node).node_arg(0)
                if not isinstance(fact_of(node).law, Reindexed):
                    set_fact(shift, replace(fact_of(shift), reason="mixes positions along the tokens"))
        if any(fact.kind in (Kind.PACKED, Kind.SCORE) for fact in facts):
            return self.refuse(call, MEETS_ROWS)
        return Fact(Kind.ROW, learned=any(fact.learned for fact in facts))

    def _admit(self, node: fx.Node, sources: frozenset[fx.Node]) -> bool:
        """Let inputs tell tokens apart, except in the loss."""
        if node not in self.body and sources - self.identity:
            return False
        self.identity |= sources
        return True


def user_line(node: fx.Node) -> str | None:
    """Return ``file:line`` and code of a node's user line; None where the trace has none."""
    trace: str | None = node.meta.get("stack_trace")
    if not trace:
        return None
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip() and set(line.strip()) - {"^", "~"}]
    places = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not places:
        return lines[-1]
    at = next((i for i in reversed(places) if not any(folder in lines[i] for folder in _NOT_OF_USERS)), places[-1])
    place = lines[at].split('"')
    number = lines[at].split("line ")[1].split(",")[0]
    code = lines[at + 1] if at + 1 < len(lines) else ""
    return f"{place[1]}:{number}: {code}"
