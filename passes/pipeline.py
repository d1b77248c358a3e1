"""The passes of the backend, in order, and what they hand on.

==  ======================  ==================================================================================
1   ``trace``               Dynamo's graph to functional ATen, forward only; attention kept whole
2   ``label_tokens``        each value invariant, prefix-determined, packed or per row; dimensions labelled
3   ``lift_mask``           (inside 2, at each attention) masks and biases as one expression, causality proved
4   ``pack_tokens``         the graph once per distinct token, attention as ``treefx::tree_attention``
5   ``loss_laws``           (inside 4) losses pick from packed values; outputs leave packed
6   ``compile_inner``       AOTAutograd's joint graph with ``treefx::restore`` nodes, partitioned and compiled
==  ======================  ==================================================================================

``analyse`` runs 1 to 3 for one shape of inputs, ``rewrite`` 4 and 5 for one variant, ``compile_variant`` 6.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from treefx.errors import UnsupportedError
from treefx.kernels.score import Expr
from treefx.passes.attention_facts import Attention
from treefx.passes.compile_inner import Compiled, Observer, compile_inner
from treefx.passes.constants import Constants
from treefx.passes.facts import Dims, Kind, fact_of
from treefx.passes.label_tokens import SHAPE_ONLY, Role, Tokens, attentions, find_tokens, label_tokens, user_line
from treefx.passes.loss_laws import Pick
from treefx.passes.pack_tokens import Output, Packer, is_packed_output
from treefx.passes.reindex import Reindexed
from treefx.passes.trace import trace_forward, trace_function

__all__ = [
    "Analysis",
    "Expansion",
    "Rewritten",
    "Variant",
    "analyse",
    "compile_variant",
    "fake_inputs",
    "rewrite",
]


@dataclass(frozen=True)
class Expansion:
    """An operator that reads expanded values: its name, why, and the user's line."""

    op: str
    reason: str
    line: str | None


@dataclass(frozen=True)
class Variant:
    """How one analysis is rewritten. Calls that differ in these run differently compiled graphs."""

    keep_padding: bool = False
    detached: frozenset[int] = frozenset()
    """Output positions that leave without gradient, because nobody has asked for theirs yet."""
    redundant: frozenset[Expr] = frozenset()
    """Conditions of attentions that the inputs of the call make true everywhere."""
    native: bool = False


@dataclass
class Analysis:
    """Passes 1 to 3 for one shape of inputs."""

    gm: fx.GraphModule
    roles: list[Role]
    tokens: Tokens | None
    identity: list[int]
    """Positions of the inputs whose values tell tokens apart."""
    identity_with_padding: list[int]
    constants: Constants | None = None
    attentions: list[Attention] = field(default_factory=list)
    expansions: list[Expansion] = field(default_factory=list)
    picks: list[fx.Node] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def packed_outputs(self) -> dict[int, Dims]:
        """Positions and dimensions of the outputs that leave the graph packed."""
        facts = {i: fact_of(item) for i, item in enumerate(self._outputs) if isinstance(item, fx.Node)}
        return {i: fact.dims for i, fact in facts.items() if is_packed_output(fact) and fact.dims is not None}

    @property
    def returns_loss(self) -> bool:
        """Whether a single number made with parameters is among the outputs."""
        nodes = [item for item in self._outputs if isinstance(item, fx.Node)]
        return any(
            fact_of(node).learned and node.meta["val"].numel() == 1 and i not in self.packed_outputs
            for i, node in enumerate(nodes)
        )

    @property
    def returns_reindexed(self) -> bool:
        """Whether shifted logits are among the outputs."""
        return any(isinstance(node, fx.Node) and isinstance(fact_of(node).law, Reindexed) for node in self._outputs)

    @property
    def has_side_effects(self) -> bool:
        """Whether a second run of the graph differs: it draws random numbers or changes a buffer."""
        targets = [node.target for node in self.gm.graph.nodes if node.op == "call_function"]
        seeded = any(torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in targets)
        return seeded or torch.ops.aten.copy_.default in targets

    @property
    def _outputs(self) -> Sequence[Any]:
        outputs: Any = next(iter(self.gm.graph.find_nodes(op="output"))).args[0]
        return outputs  # type: ignore[no-any-return]


@dataclass
class Rewritten:
    """Passes 4 and 5 for one variant of the graph ``traced``."""

    gm: fx.GraphModule
    traced: fx.GraphModule
    outputs: list[Output]
    inputs: list[Any]
    mode: FakeTensorMode

    @property
    def tokens(self) -> Any:
        """The symbolic number of distinct tokens."""
        return self.inputs[-2].shape[0]


def fake_inputs(inputs: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Fake tensors with static shapes for run-time inputs; numbers stay."""
    return [mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) else x for x in inputs]


def analyse(gm: fx.GraphModule, inputs: Sequence[Any], roles: list[Role], consecutive: frozenset[int]) -> Analysis:
    """Trace and label Dynamo's graph for inputs of the given shapes.

    Args:
        gm: Dynamo's graph.
        inputs: Run-time inputs; values of buffers may enter proofs.
        roles: What each placeholder is.
        consecutive: Positions of inputs that count up by one along their rows, in this and all later calls of the
        analysis.
    """
    started = time.perf_counter()
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    traced = trace_forward(gm, fake_inputs(inputs, mode), mode)
    seconds = {"trace": time.perf_counter() - started}
    tokens = find_tokens(traced, roles)
    if tokens is None:
        return Analysis(traced, roles, None, [], [], seconds=seconds)
    started = time.perf_counter()
    constants = Constants(traced, inputs, roles, consecutive)
    identity = label_tokens(traced, roles, tokens)
    seconds["label"] = time.perf_counter() - started
    placeholders = traced.graph.find_nodes(op="placeholder")
    always, with_padding = (
        [i for i, node in enumerate(placeholders) if node in nodes]
        for nodes in (identity.always, identity.with_padding)
    )
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    picks = [node for node in calls if isinstance(fact_of(node).law, Pick)]
    return Analysis(
        traced, roles, tokens, always, with_padding, constants,
        attentions(traced), _expansions(traced), picks, seconds,
    )  # fmt: skip


def _expansions(gm: fx.GraphModule) -> list[Expansion]:
    """The operators that read expanded values, as far as anybody reads theirs."""
    live = _live(gm)
    found = []
    for node in gm.graph.nodes:
        reason = fact_of(node).reason if node in live and node.op == "call_function" else None
        if reason is not None:
            found.append(Expansion(fact_of(node).blame or str(node.target), reason, user_line(node)))
    return found


def _live(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose values reach an output or change a buffer; who only lends a shape does not count."""
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    stack = [*gm.graph.find_nodes(op="output"), *copies]
    seen = set(stack)
    while stack:
        node = stack.pop()
        for source in node.all_input_nodes:
            if source not in seen and node.target not in SHAPE_ONLY:
                seen.add(source)
                stack.append(source)
    return seen


def rewrite(analysis: Analysis, variant: Variant, inputs: Sequence[Any]) -> Rewritten:
    """Write the graph of a variant for a symbolic number of tokens."""
    assert analysis.tokens is not None
    if variant.native and (analysis.expansions or analysis.picks):
        first = analysis.expansions[0].op if analysis.expansions else "a loss over labels"
        raise UnsupportedError(
            f"under treefx.use(forest) every operator must be token-wise, but {first} reads whole rows; "
            "leave labels out and use treefx.losses, or call the model on a padded batch without treefx.use"
        )
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    device = next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))
    metadata = _metadata(analysis.tokens, device, mode)
    fakes = fake_inputs(inputs, mode)
    if variant.native:
        position = analysis.gm.graph.find_nodes(op="placeholder").index(analysis.tokens.ids)
        with mode:
            fakes[position] = torch.empty_like(metadata[1], dtype=inputs[position].dtype)[None]
    packer = Packer(
        analysis.gm, analysis.tokens, keep_padding=variant.keep_padding, detached=variant.detached,
        redundant=variant.redundant, native=variant.native,
    )  # fmt: skip
    tensors = [x for x in fakes if isinstance(x, Tensor)]

    def run(*values: Any) -> tuple[Any, ...]:
        # Numbers are part of the graph: as inputs, AOTAutograd would give them symbols, and one symbol to equal sizes.
        given = iter(values)
        return packer.run(*[next(given) if isinstance(x, Tensor) else x for x in fakes], *given)

    gm = trace_function(run, [*tensors, *metadata], mode)
    return Rewritten(gm, analysis.gm, packer.outputs, [*tensors, *metadata], mode)


def _metadata(tokens: Tokens, device: torch.device, mode: FakeTensorMode) -> list[Any]:
    """row, column, subtree_end of a symbolic length N, and token_of [B, T]."""
    hint = max(2, tokens.rows * tokens.columns)
    vectors = [torch.zeros(hint, dtype=dtype, device=device) for dtype in (torch.int64, torch.int64, torch.int32)]
    context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
    fakes = [mode.from_tensor(vector, symbolic_context=context) for vector in vectors]
    token_of = torch.zeros(tokens.rows, tokens.columns, dtype=torch.int64, device=device)
    return [*fakes, mode.from_tensor(token_of, static_shapes=True)]


def compile_variant(rewritten: Rewritten, inner: str, observe: Observer) -> Compiled:
    """Compile a rewritten graph."""
    with torch._C._DisableAutocast():
        return compile_inner(rewritten.gm, rewritten.inputs, rewritten.mode, inner, observe)


def is_packed(analysis: Analysis) -> bool:
    """Whether anything but the tail of the graph would run packed."""
    kinds = {fact_of(node).kind for node in analysis.gm.graph.nodes if node.op == "call_function"}
    return Kind.PACKED in kinds and bool(analysis.attentions)
