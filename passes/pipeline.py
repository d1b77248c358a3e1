"""Order the passes of the backend, and pass data between them.

==  ======================  ==================================================================================
1   ``trace``               Dynamo's graph to functional ATen, forward only; attention kept whole
2   ``label_tokens``        each value invariant, prefix-determined, packed or per row; dimensions labelled
3   ``lift_mask``           (inside 2, at each attention) masks and biases as one expression, causality proved
4   ``contract``            (inside 2) what a causal mixer computed on rows, read once per token again
5   ``loss_laws``           (inside 2) losses pick from packed values
6   ``tree_scans``          contracted values that are linear recurrences, recognised by value, run along the tree
7   ``sparse_attention``    attentions to few chosen keys, which read these keys alone
8   ``pack_tokens``         the graph once per distinct token, attention as ``treefx::tree_attention``
9   ``regions``             equal layers as calls of one subgraph, compiled once (inductor; not parts)
10  ``compile_inner``       AOTAutograd's joint graph with ``treefx::restore`` nodes, partitioned and compiled
==  ======================  ==================================================================================

``analyse`` runs 1 to 7 for batches of all sizes, or for one shape of inputs, ``rewrite`` 8 for one variant of it,
``compile_variant`` 9 and 10; each of them runs the passes of its stage that ``build_passes`` has listed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from treefx.inputs.fakes import fake_inputs
from treefx.inputs.sizes import BatchSizes, Pattern, Specialised, has_symbols
from treefx.inputs.token_count import TokenCount, add_count_input
from treefx.inputs.values import InputValues
from treefx.kernels.score import walk
from treefx.passes.analysis import Analysis, Expansion, Rewritten, Variant
from treefx.passes.causal.contract import contracting, leaks, mixes
from treefx.passes.causal.convolutions import convolving
from treefx.passes.causal.tree_mixers import LibraryTree, TreeScan
from treefx.passes.causal.tree_scans import find_tree_scans
from treefx.passes.cuts.exchange_kv import cut_graph
from treefx.passes.labels.constants import Constants
from treefx.passes.labels.facts import Kind, fact_of
from treefx.passes.labels.images import find_images
from treefx.passes.labels.label_tokens import MEETS_ROWS, MakeImprove, label_tokens, user_line
from treefx.passes.labels.laws.losses import Pick
from treefx.passes.labels.laws.placed import Placed
from treefx.passes.labels.liveness import live_nodes
from treefx.passes.labels.purity import changed_inputs
from treefx.passes.labels.token_inputs import Role, Tokens, find_tokens
from treefx.passes.packing.compile_inner import Compiled, Inner, Observer, calls_subgraphs, compile_inner
from treefx.passes.packing.kernel_sources import write_kernel_sources
from treefx.passes.packing.pack_tokens import PackingInterpreter
from treefx.passes.regions.find_regions import find_regions, pays_off
from treefx.passes.regions.make_regions import call_regions
from treefx.passes.runner import Pass, run_passes
from treefx.passes.scores import attention_laws as _attention_laws  # noqa: F401  (registers laws)
from treefx.passes.scores.attention_facts import attentions
from treefx.passes.scores.segment_values import along_segments
from treefx.passes.scores.sparse import find_sparse
from treefx.passes.trace.flash import read_equal_once
from treefx.passes.trace.pattern import inline_sizes
from treefx.passes.trace.repeated_inputs import read_repeated_once
from treefx.passes.trace.sink_factors import join_sink_factors
from treefx.passes.trace.token_types import read_types_as_zeros
from treefx.passes.trace.trace import trace_forward, trace_function

__all__ = ["NECESSARY", "OPTIONAL", "analyse", "build_passes", "compile_variant", "rewrite"]

OPTIONAL = {
    "contract": "causal mixers are expanded, and everything after them",
    "tree_scans": "linear recurrences run on rows and are contracted",
    "sparse_attention": "attention to a few chosen keys reads all keys under a mask",
    "loss_laws": "the loss reads logits that are expanded to rows",
}
"""Passes that may be left out, and the effect. Results stay exact."""
NECESSARY = {
    "trace": "every other pass reads its graph",
    "label_tokens": "without labels nothing can be proved",
    "lift_mask": "what a token sees would be unknown; options={'min_sharing': float('inf')} runs the ordinary graph",
    "pack_tokens": "it is what treefx does; options={'min_sharing': float('inf')} runs the ordinary graph",
    "compile_inner": "a graph needs a compiler; options={'inner': 'eager'} runs it unchanged",
}
"""Passes that cannot be left out, and why."""

GIVES_SCORES = "gives attention scores to the caller"
"""The reason of outputs that are computed on rows though the attention itself runs packed."""


@dataclass
class _Work:
    """Hold the passes' data besides the graph."""

    inputs: Sequence[Any]
    """The values of a call, one per placeholder."""
    analysis: Analysis
    known: InputValues = field(default_factory=InputValues)
    variant: Variant = field(default_factory=Variant)
    rewritten: Rewritten | None = None
    observe: Observer = lambda stage, gm: None
    run: Compiled | None = None


def build_passes(inner: Inner, disabled: Collection[str] = (), *, regions: bool | str = False) -> tuple[Pass, ...]:
    """All passes in order, their options bound.

    Args:
        inner: The compiler of the rewritten graph.
        disabled: Those of ``OPTIONAL`` to be left out.
        regions: Whether equal layers are compiled once, where the compiler can; "auto": those for which it pays.
    """
    label = functools.partial(
        _label_tokens,
        improve=None if "contract" in disabled else contracting,
        pick_losses="loss_laws" not in disabled,
    )
    calls = regions and calls_subgraphs(inner)
    return (
        Pass("trace", _trace, "analyse"),
        Pass("label_tokens", label, "analyse"),
        *([] if "tree_scans" in disabled else [Pass("tree_scans", _tree_scans, "analyse")]),
        *([] if "sparse_attention" in disabled else [Pass("sparse_attention", _sparse_attention, "analyse")]),
        Pass("pack_tokens", _pack_tokens, "rewrite"),
        Pass("boundary_kv", _boundary_kv, "rewrite"),
        *([Pass("regions", functools.partial(_regions, every=regions is True), "compile")] if calls else []),
        Pass("compile_inner", functools.partial(_compile_inner, inner=inner), "compile"),
    )


def _run_stage(stage: str, passes: Sequence[Pass], gm: fx.GraphModule, work: _Work) -> fx.GraphModule:
    found, wanted = work.analysis, [item for item in passes if item.stage == stage]
    return run_passes(wanted, gm, work, found.seconds, found.changes)


def analyse(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    roles: list[Role],
    known: InputValues,
    passes: Sequence[Pass],
    batch: Pattern | None = None,
    *,
    segmented: bool = False,
) -> Analysis:
    """Trace and label Dynamo's graph for given shapes, or for all shapes of a pattern.

    Numbers among the inputs (symbolic sizes of Dynamo) become part of the graph; everything that counts positions of
    inputs counts tensors alone.

    Args:
        gm: Dynamo's graph.
        inputs: Run-time inputs; values of buffers may enter proofs.
        roles: Role of each tensor among the inputs.
        known: Proofs from the inputs' values, in this and all later calls of the analysis.
        passes: From ``build_passes``.
        batch: Names the sizes of the inputs in rows and columns, which are then symbols.
        segmented: Takes rows to be packed with segments; ``Analysis.segments`` has the conditions on a call.

    Raises:
        Specialised: The sizes cannot be symbols.
    """
    sizes = None if batch is None else BatchSizes(batch, inputs)
    analysis = Analysis(gm, roles, None, [], known=known, batch=sizes, segmented=segmented)
    analysis.gm = _run_stage("analyse", passes, gm, _Work(inputs, analysis, known))
    if analysis.batch is not None:
        analysis.batch.check(inputs)
        _check_symbols(analysis)
    if analysis.tokens is not None:
        live = live_nodes(analysis.gm)
        analysis.expansions = _expansions(analysis.gm, live)
        analysis.obstacles = _obstacles(analysis.gm, live)
        laws = [fact_of(node).law for node in live if node.op == "call_function"]
        analysis.recurrences = sum(isinstance(law, LibraryTree | TreeScan) for law in laws)
    return analysis


def _check_symbols(analysis: Analysis) -> None:
    """Check that symbols stand only where the later passes expect them."""
    if any(has_symbols(node.meta["val"]) for node in changed_inputs(analysis.gm)):
        raise Specialised("an input of rows and columns is changed in place")
    for attention in analysis.attentions:
        expressions = [*attention.tells_apart(), *attention.hides(), *(attention.doubt or ())]
        if any(isinstance(leaf, SymInt) for item in expressions for part in walk(item) for leaf in part):
            raise Specialised("a mask or bias is made from the number of rows or columns")


def _trace(gm: fx.GraphModule, work: _Work) -> fx.GraphModule:
    batch = work.analysis.batch
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) if batch is None else batch.mode
    traced = trace_forward(gm, fake_inputs(work.inputs, mode) if batch is None else batch.fakes(work.inputs), mode)
    inline_sizes(traced)
    for node, value in zip(traced.graph.find_nodes(op="placeholder"), work.inputs, strict=True):
        if not isinstance(value, Tensor):
            traced.graph.erase_node(node)
    read_equal_once(traced, work.known.equal)
    read_types_as_zeros(traced, work.known.zero)
    read_repeated_once(traced, work.known.repeated)
    join_sink_factors(traced)
    traced.recompile()
    work.inputs = [x for x in work.inputs if isinstance(x, Tensor)]
    _add_parts_of_masks(traced, work, mode)
    return traced


def _add_parts_of_masks(gm: fx.GraphModule, work: _Work, mode: FakeTensorMode) -> None:
    """Add the parts of the caller's masks, values [B, T], as inputs behind the caller's."""
    count, batch = len(work.inputs), work.analysis.batch
    work.inputs = work.known.with_parts(work.inputs)
    work.analysis.roles = [*work.analysis.roles, *["input"] * (len(work.inputs) - count)]
    for i, part in enumerate(work.inputs[count:]):
        with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
            fake = mode.from_tensor(part, static_shapes=True) if batch is None else batch.fake_beside(part, work.inputs)
            gm.graph.placeholder(f"part_of_mask_{i}").meta["val"] = fake
    gm.recompile()


def _label_tokens(gm: fx.GraphModule, work: _Work, *, improve: MakeImprove | None, pick_losses: bool) -> fx.GraphModule:
    found = work.analysis
    found.tokens = find_tokens(gm, found.roles, work.known)
    if found.tokens is None:
        return gm
    found.constants = Constants(gm, work.inputs, found.roles, work.known, found.batch, found.segmented)
    if found.segmented:
        improve = along_segments
    elif found.batch is not None and improve is not None:  # recurrences are read at columns that are numbers
        improve = convolving
    identity = label_tokens(gm, found.roles, found.tokens, improve=improve, pick_losses=pick_losses)
    placeholders = gm.graph.find_nodes(op="placeholder")
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    found.identity = [i for i, node in enumerate(placeholders) if node in identity.always & {*found.tokens.inputs}]
    found.identity_of_keys = {
        condition: [i for i, node in enumerate(placeholders) if node in read]
        for condition, read in identity.of_keys.items()
    }
    found.identity_of_rows = [node for node in gm.graph.nodes if node in identity.always - {*found.tokens.inputs}]
    found.attentions = attentions(gm)
    found.picks = [node for node in calls if isinstance(fact_of(node).law, Pick)]
    placed = [law for node in calls if isinstance(law := fact_of(node).law, Placed)]
    found.placed = [(law, find_images(gm, found.roles, law.source, found.tokens.vectors)) for law in placed]
    return gm


def _tree_scans(gm: fx.GraphModule, work: _Work) -> fx.GraphModule:
    tokens = work.analysis.tokens
    if tokens is not None and work.analysis.batch is None:
        find_tree_scans(gm, tokens.rows, tokens.columns)
    return gm


def _sparse_attention(gm: fx.GraphModule, work: _Work) -> fx.GraphModule:
    if work.analysis.tokens is not None and find_sparse(gm):
        work.analysis.attentions = attentions(gm)
    return gm


def _expansions(gm: fx.GraphModule, live: set[fx.Node]) -> list[Expansion]:
    """The operators that read expanded values, as far as anybody reads theirs."""
    found = []
    for node in gm.graph.nodes:
        fact = fact_of(node) if node in live and node.op == "call_function" else None
        if fact is None or fact.reason is None or node.target is operator.getitem:
            continue
        contracted = not leaks(node, live)
        item = Expansion(fact.blame or str(node.target), fact.reason, user_line(node), contracted)
        begins = fact.reason != MEETS_ROWS or not any(_is_learned_row(source) for source in node.all_input_nodes)
        if (begins or not contracted) and item not in found:  # a loop over the columns names its line once
            found.append(item)
    return found + [Expansion(str(node.target), GIVES_SCORES, user_line(node)) for node in _returned_scores(gm)]


def _returned_scores(gm: fx.GraphModule) -> list[fx.Node]:
    """Return scores and probabilities among the outputs, which have a row per query."""
    outputs: Any = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    nodes = dict.fromkeys(item for item in outputs if isinstance(item, fx.Node))
    return [node for node in nodes if fact_of(node).kind is Kind.SCORE]


def _obstacles(gm: fx.GraphModule, live: set[fx.Node]) -> list[Expansion]:
    """List the operators that kept the whole graph on rows."""
    calls = [node for node in gm.graph.nodes if node in live and node.op == "call_function"]
    found = [(node, fact_of(node)) for node in calls]
    items = [
        Expansion(fact.blame or str(node.target), fact.obstacle, user_line(node))
        for node, fact in found
        if fact.obstacle is not None
    ]
    return list(dict.fromkeys(items))


def _is_learned_row(node: fx.Node) -> bool:
    return fact_of(node).kind is Kind.ROW and fact_of(node).learned


def rewrite(analysis: Analysis, variant: Variant, inputs: Sequence[Any], passes: Sequence[Pass]) -> Rewritten:
    """Write the graph of a variant for a symbolic number of tokens.

    Args:
        analysis: Of the shape.
        variant: How to write it.
        inputs: The tensors of a call.
        passes: From ``build_passes``.

    Raises:
        UnsupportedError: A forest is in use and an operator reads whole rows.
    """
    analysis.check(variant)
    work = _Work(inputs, analysis, variant=variant)
    gm = _run_stage("rewrite", passes, analysis.gm, work)
    assert work.rewritten is not None
    work.rewritten.gm, work.rewritten.analysis = gm, analysis
    return work.rewritten


def _pack_tokens(gm: fx.GraphModule, work: _Work) -> fx.GraphModule:
    tokens, variant = work.analysis.tokens, work.variant
    assert tokens is not None
    count, mode, fakes = _inputs(work)
    metadata = _metadata(tokens, work.inputs[0].device, count, mode)
    if variant.native:
        position = gm.graph.find_nodes(op="placeholder").index(tokens.ids)
        with mode:
            fakes[position] = torch.empty_like(metadata[1], dtype=fakes[position].dtype)[None]
    packer = PackingInterpreter(
        gm, tokens, detached=variant.detached, redundant=variant.redundant, native=variant.native,
        absent=variant.absent, own_positions=variant.own_positions,
    )  # fmt: skip
    packed = trace_function(packer.run, [*fakes, *metadata], mode)
    add_count_input(packed, count.count)
    symbols = [] if work.analysis.batch is None else work.analysis.batch.symbols()
    for size in symbols:
        add_count_input(packed, size, str(size.node.expr))
    work.rewritten = Rewritten(
        packed, gm, packer.outputs, [*fakes, *metadata, count.count, *symbols], mode, count,
        asks=tuple(text for text, _ in packer.proofs),
    )  # fmt: skip
    return packed


def _inputs(work: _Work) -> tuple[TokenCount, FakeTensorMode, list[Any]]:
    """The environment of the rewritten graph, its mode and the fake inputs."""
    tokens, batch = work.analysis.tokens, work.analysis.batch
    assert tokens is not None
    if batch is not None:
        return batch, batch.mode, list(batch.inputs)
    count = work.variant.token_count(tokens.rows * tokens.columns, work.inputs)
    mode = FakeTensorMode(shape_env=count, allow_non_fake_inputs=True)
    return count, mode, fake_inputs(work.inputs, mode)


def _boundary_kv(gm: fx.GraphModule, work: _Work) -> fx.GraphModule:
    rewritten, run = work.rewritten, work.variant.part
    assert rewritten is not None
    if run is not None:
        gm, rewritten.inputs, rewritten.cut = cut_graph(gm, rewritten.inputs, rewritten.mode, run)
    return gm


def _metadata(tokens: Tokens, device: torch.device, count: TokenCount, mode: FakeTensorMode) -> list[Any]:
    """row, column, subtree_end of a symbolic length N, and token_of [B, T]."""
    vectors = count.vectors([torch.int64, torch.int64, torch.int32], device, mode)
    with mode:
        return [*vectors, torch.empty(tokens.rows, tokens.columns, dtype=torch.int64, device=device)]


def compile_variant(analysis: Analysis, rewritten: Rewritten, observe: Observer, passes: Sequence[Pass]) -> Compiled:
    """Compile a rewritten graph; ``observe`` receives the inner compiler's graphs."""
    work = _Work((), analysis, rewritten=rewritten, observe=observe)
    _run_stage("compile", passes, rewritten.gm, work)
    assert work.run is not None
    return work.run


def _regions(gm: fx.GraphModule, work: _Work, *, every: bool) -> fx.GraphModule:
    assert work.rewritten is not None
    if work.rewritten.cut is None:  # the planner counts the bytes that each layer of a part keeps, by its own values
        found = [kind for kind in find_regions(gm) if every or pays_off(kind)]
        work.rewritten.inner = gm = call_regions(gm, found)
    return gm


def _compile_inner(gm: fx.GraphModule, work: _Work, *, inner: Inner) -> fx.GraphModule:
    found, given = work.rewritten, (work.observe, work.analysis.roles)
    assert found is not None
    write_kernel_sources(found.gm)
    with torch._C._DisableAutocast():
        work.run = compile_inner(gm, found.inputs, found.mode, replace(inner, records=found.cut is None), *given)
    return gm


def is_packed(analysis: Analysis) -> bool:
    """Whether anything but the tail of the graph would run packed."""
    kinds = {fact_of(node).kind for node in analysis.gm.graph.nodes if node.op == "call_function"}
    return Kind.PACKED in kinds and bool(analysis.attentions or mixes(analysis.gm) or analysis.multiplies_vectors)
