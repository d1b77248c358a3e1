"""Add a boundary to a graph: ancestors' keys and values in, its own out.

Every attention gets the keys and values of the P tokens above the part as inputs, and those of the Q tokens that other
parts will read become outputs: after the rotary embedding, before heads are repeated, as the attention sees them.
Values that the score loads per token are read for the boundary too, by the same operators at the boundary's columns.
All sizes are symbols, so one compilation serves all parts.

Before::

    out = treefx.tree_attention(q, k, v, subtree_end, [column], None, score, "auto")

After::

    columns = cat([outside_column, column])                                                     # P + N
    out = treefx.tree_attention(q, k, v, subtree_end, [columns], None, score, "auto", bk, bv, lo, hi)
    return [..., k[:, :, outgoing], v[:, :, outgoing]]                                          # [1, Q, heads, width]

Attentions that share a key share its input and output, with the sum as gradient. Values of ancestors that convolutions
read are passed in the same way (:mod:`treefx.passes.cuts.boundary_windows`), states of recurrences once per path
(:mod:`treefx.passes.cuts.boundary_states`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from treefx.errors import UnsupportedError
from treefx.inputs.token_count import TokenCount, add_count_input
from treefx.kernels import ops as _tree_operator  # noqa: F401  (registers it)
from treefx.kernels.score import Score, walk
from treefx.passes.cuts.boundary_states import SCANS, extend_scan, find_scans, state_of
from treefx.passes.cuts.boundary_windows import Window, extend_windows, find_windows
from treefx.passes.labels.purity import changed_inputs
from treefx.passes.ranks import collectives as _collectives  # noqa: F401  (registers sums over ranks)
from treefx.passes.trace import changed_inputs as _changed_inputs  # noqa: F401  (registers as_read)
from treefx.passes.trace import opaque_ops as _opaque_ops  # noqa: F401  (registers custom_function)
from treefx.passes.trace import token_modules as _token_modules  # noqa: F401  (registers the operator)

__all__ = ["CutGraph", "Cutter", "GivenBack", "Ranks", "Run", "StandIn", "add_boundary", "check_operators"]

Run = Literal["train", "infer", "kv"]
"""Purpose of a part: outputs and K/V with gradients, without gradients, or K/V alone."""


class Ranks(NamedTuple):
    """Name the process group whose ranks run the tokens of one forest at the same time."""

    group: str
    size: int


_ATTENTION = torch.ops.treefx.tree_attention.default
_TOKEN_WISE = {
    _ATTENTION, torch.ops.treefx.custom_function.default, operator.getitem, torch.ops.treefx.sum_over_ranks.default,
    torch.ops.treefx.same_on_ranks.default, torch.ops.treefx.gather_pieces.default, torch.ops.treefx.own_piece.default,
    torch.ops.treefx.as_read.default, torch.ops.treefx.token_module.default,
}  # fmt: skip
_VECTORS = (torch.int32, torch.int32, torch.int64)
"""Dtypes of lo, hi and the boundary's columns."""


@dataclass(frozen=True)
class StandIn:
    """Stand for an output that a K/V run does not compute, with its shape and dtype."""

    shape: tuple[int | None, ...]
    """None where the size is N."""
    dtype: torch.dtype
    device: torch.device

    def make(self, tokens: int) -> Tensor:
        """A tensor of zeros that takes no memory."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return zero.expand([tokens if size is None else size for size in self.shape])


@dataclass(frozen=True)
class GivenBack:
    """Mark an output that is a changed input, which Dynamo makes the model's buffer."""

    position: int


@dataclass(frozen=True)
class CutGraph:
    """Describe further inputs and outputs of a graph with a boundary.

    Attributes:
        run: its purpose, or its concurrent ranks.
        caches: fake K and V in the order they come and go, [1, P, heads, width] each; then the inputs of convolutions
            along the tree, [1, P, 1, width] each.
        states: fake states of recurrences in the order they come and go, behind the caches: [1, S, heads, D, E] each.
        results: the uncut graph's outputs where they are not computed: a stand-in, an input, or the constant itself.
        reads_parents: whether it takes the parents of the own tokens [N], of the boundary's [P] and of nothing [1].
        changed: positions of the inputs that it changes in place: counters among the model's buffers.
        reads_whole: whether it takes subtree_end of the whole forest, and how its ranks hold the tokens.
    """

    run: Run | Ranks
    caches: list[Tensor]
    states: list[Tensor]
    results: list[Any]
    reads_parents: bool
    changed: list[int] = field(default_factory=list)
    reads_whole: bool = False


def add_boundary(
    gm: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, run: Run
) -> tuple[fx.GraphModule, list[Any], CutGraph]:
    """Give a packed graph a boundary, in place.

    Args:
        gm: Graph of the native level; its placeholders end with row, column, subtree_end, token_of and N.
        inputs: Its fake inputs.
        mode: Their mode, with a ``TokenCount`` as shape environment.
        run: purpose of the new graph.

    Returns:
        The graph, whose further inputs are now lo, hi [P] int32, the boundary's columns [P] and the outgoing tokens
        [Q] int64, the parents where convolutions read them, where states enter [N] and leave [X] if there are
        recurrences, the caches, the states, P and Q, with recurrences S and X, and whose further outputs are the
        outgoing K/V and states; its inputs; what they are.

    Raises:
        UnsupportedError: Tokens meet outside of attention, convolutions and recurrences, or a score loads a value of
            the model.
    """
    cutter = Cutter(gm, list(inputs), mode)
    check_operators(gm)
    windows = find_windows(gm, cutter.end)
    cutter.cut(windows, find_scans(gm))
    results = cutter.finish(run)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    fakes = cutter.inputs if run == "train" else [_without_gradient(x, mode) for x in cutter.inputs]
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fakes)
    return gm, fakes, CutGraph(run, cutter.caches, cutter.states, results, bool(windows), _changed(gm))


def check_operators(gm: fx.GraphModule) -> None:
    """Refuse graphs whose tokens meet in operators with a state that cannot cross a cut."""
    known = _TOKEN_WISE | SCANS
    for node in gm.graph.nodes:
        namespace = getattr(node.target, "namespace", None)
        if node.op == "call_function" and namespace == "treefx" and node.target not in known:
            raise UnsupportedError(
                "a forest can be cut where tokens meet in attention, a convolution or a known recurrence, but the "
                f"model runs {node.target}, whose state does not cross cuts; run the uncut forest (treefx.use), or a "
                "smaller one"
            )


def _changed(gm: fx.GraphModule) -> list[int]:
    """Positions of the inputs that a graph changes in place."""
    changed = changed_inputs(gm)
    return [i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if node in changed]


def _forms(changed: fx.Node, written: Mapping[fx.Node, Any]) -> list[Any]:
    """Return the nodes of a changed input after the call: itself, its new value, the write."""
    return [changed, written[changed], *[user for user in changed.users if user.args[0] is changed and _writes(user)]]


def _writes(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default


def _without_gradient(x: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(x, Tensor):
        return x
    with mode:
        return x.detach()


class Cutter:
    """Rewrite one graph with the boundary's keys and values as inputs.

    A subclass may `_bring` them otherwise.
    """

    def __init__(self, gm: fx.GraphModule, inputs: list[Any], mode: FakeTensorMode) -> None:
        self.gm, self.inputs, self.mode = gm, inputs, mode
        self.caches: list[Tensor] = []
        self.states: list[Tensor] = []
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.row, self.column, self.end, self.token_of, self.tokens = placeholders[-5:]
        self._outside_form: dict[fx.Node, fx.Node] = {}
        self._sources: list[fx.Node] = []
        self._left: list[fx.Node] = []
        """States that leave, [X, heads, D, E] each."""
        device = self.column.meta["val"].device
        count = mode.shape_env
        assert isinstance(count, TokenCount)
        lo, hi, column = count.further(_VECTORS, device, mode)
        outgoing = count.further([torch.int64], device, mode)[0]
        self.sizes = {"boundary_count": lo.shape[0], "outgoing_count": outgoing.shape[0]}
        self.lo, self.hi, self.outside_column, self.outgoing = (
            self.add_input(name, fake)
            for name, fake in (("lo", lo), ("hi", hi), ("outside_column", column), ("outgoing", outgoing))
        )

    def add_input(self, name: str, fake: Tensor) -> fx.Node:
        last = self.gm.graph.find_nodes(op="placeholder")[-1]
        with self.gm.graph.inserting_after(last):
            node = self.gm.graph.placeholder(name)
        node.meta["val"] = fake
        self.inputs.append(fake)
        return node

    def cut(self, windows: list[Window], scans: Sequence[fx.Node] = ()) -> None:
        """Give every attention, every window and every recurrence its boundary."""
        up = self._parents() if windows else ()
        doors = self._doors() if scans else None
        taken: dict[fx.Node, fx.Node] = {}
        attentions = self.gm.graph.find_nodes(op="call_function", target=_ATTENTION)
        for node in attentions:
            taken |= self._bring([source for source in dict.fromkeys(node.args[1:3]) if source not in taken])
        for source in dict.fromkeys(window.source for window in windows):
            heads = self._with_heads(source)
            taken[source] = self._bring([heads])[heads]
        given = [self._state(node) for node in scans]
        for name, size in self.sizes.items():
            add_count_input(self.gm, size, name)
            self.inputs.append(size)
        for node in attentions:
            q, k, v, end, buffers, sinks, score, impl = node.args
            outside = taken[k], taken[v]
            with self.gm.graph.inserting_before(node):
                above = [self._call(torch.ops.aten.transpose.int, cache, 1, 2) for cache in outside]
                extended = self._extended(list(buffers), Score.from_json(score))
                arguments = (q, k, v, end, extended, sinks, score, impl, *above, self.lo, self.hi)
                new = self._call(_ATTENTION, *arguments, **node.kwargs)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            self.gm.graph.erase_node(node)
        extend_windows(self.gm, windows, up, taken)
        if doors is not None:
            self._left = [extend_scan(self.gm, node, x, doors) for node, x in zip(scans, given, strict=True)]

    def _doors(self) -> tuple[fx.Node, fx.Node]:
        """Inputs for where states enter [N] and leave [X]."""
        device, count = self.column.meta["val"].device, self.mode.shape_env
        assert isinstance(count, TokenCount)
        (given,) = count.further([torch.int64], device, self.mode)
        (exits,) = count.further([torch.int64], device, self.mode)
        self.sizes |= {"state_count": given.shape[0], "exit_count": exits.shape[0]}
        with self.mode:
            entry = torch.empty(self.column.meta["val"].shape[0], dtype=torch.int64, device=device)
        return self.add_input("entry", entry), self.add_input("exits", exits)

    def _state(self, scan: fx.Node) -> fx.Node:
        """The input that holds the states that a recurrence starts from."""
        shape, dtype = state_of(scan)
        with self.mode:
            fake = torch.empty(
                (1, self.sizes["state_count"], *shape), dtype=dtype, device=self.column.meta["val"].device
            )
        self.states.append(fake.requires_grad_())
        return self.add_input(f"state_{len(self.states) - 1}", fake)

    def _parents(self) -> tuple[fx.Node, ...]:
        """Inputs for the parents of the own tokens, of the boundary's, and of nothing."""
        device, nodes = self.column.meta["val"].device, []
        sizes = (self.column.meta["val"].shape[0], self.sizes["boundary_count"], 1)
        for name, size in zip(("own_up", "outside_up", "nothing"), sizes, strict=True):
            with self.mode:
                fake = torch.empty(size, dtype=torch.int64, device=device)
            nodes.append(self.add_input(name, fake))
        return tuple(nodes)

    def _with_heads(self, source: fx.Node) -> fx.Node:
        """Values [N, C] as those of one head, [1, 1, N, C]."""
        unsqueeze = torch.ops.aten.unsqueeze.default
        with self.gm.graph.inserting_after(source):
            matrix = self._call(unsqueeze, source, 0)
        with self.gm.graph.inserting_after(matrix):
            heads = self._call(unsqueeze, matrix, 0)
        with self.mode:
            heads.meta["val"] = source.meta["val"][None, None]
        return heads

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.gm.graph.call_function(target, args, kwargs)

    def _bring(self, sources: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Return the boundary's [1, P, heads, width] for keys and values of one attention.

        These are [1, heads, N, width].
        """
        return {source: self._cache(source) for source in sources}

    def _cache(self, source: fx.Node) -> fx.Node:
        """The input that holds a key or value of the boundary."""
        like = source.meta["val"]
        with self.mode:
            fake = torch.empty(
                (1, self.sizes["boundary_count"], like.shape[1], like.shape[3]), dtype=like.dtype, device=like.device
            ).requires_grad_()
        self.caches.append(fake)
        self._sources.append(source)
        return self.add_input(f"cache_{len(self.caches) - 1}", fake)

    def finish(self, run: Run) -> list[Any]:
        """Return outgoing keys and values, after or instead of the graph's outputs.

        Returns the stand-ins of the latter.
        """
        output = next(iter(self.gm.graph.find_nodes(op="output")))
        results = list(output.args[0])
        with self.gm.graph.inserting_before(output):
            handed = []
            for source in self._sources:
                chosen = self._call(torch.ops.aten.index_select.default, source, 2, self.outgoing)
                first = self._call(torch.ops.aten.transpose.int, chosen, 1, 2)
                dense = self.gm.graph.call_function(
                    torch.ops.aten.clone.default, (first,), {"memory_format": torch.contiguous_format}
                )
                handed.append(dense)
            handed += [self._call(torch.ops.aten.unsqueeze.default, left, 0) for left in self._left]
        output.args = ((*(results if run != "kv" else ()), *handed),)
        return [self._stand_in(item) for item in results]

    def _stand_in(self, item: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        inputs = self.gm.graph.find_nodes(op="placeholder")
        changed = changed_inputs(self.gm)
        source = next((i for i, node in enumerate(inputs) if node in changed and item in _forms(node, changed)), None)
        if source is not None:
            return GivenBack(source)
        value = item.meta["val"]
        return StandIn(tuple(x if isinstance(x, int) else None for x in value.shape), value.dtype, value.device)

    # Values loaded by scores
    # ------------------------------------------------------------------------------------------------

    def _extended(self, buffers: list[fx.Node], score: Score) -> list[fx.Node]:
        """The buffers, those along the tokens with the boundary's entries in front."""
        along = _along_tokens(score)
        return [
            self._call(torch.ops.aten.cat.default, [self._outside(x), x], along[i]) if i in along else x
            for i, x in enumerate(buffers)
        ]

    def _outside(self, node: fx.Node) -> fx.Node:
        """Recompute a function of the columns at the boundary's tokens."""
        if node not in self._outside_form:
            self._outside_form[node] = self._make_outside(node)
        return self._outside_form[node]

    def _make_outside(self, node: fx.Node) -> fx.Node:
        if node is self.column:
            return self.outside_column
        if node is self.row:
            return self._call(torch.ops.aten.zeros_like.default, self.outside_column)
        symbols = getattr(node.meta.get("val"), "shape", ())
        if node.op == "placeholder" and not all(isinstance(size, int) for size in symbols):
            raise UnsupportedError(
                f"a forest can be cut where scores load functions of the position, but one loads from {node.name}, "
                "which is known for the tokens of a part only; run the uncut forest (treefx.use), or a smaller one"
            )
        if node.op != "call_function":
            return node
        sources = [(source, self._outside(source)) for source in node.all_input_nodes]
        if all(old is new for old, new in sources):
            return node
        return self.gm.graph.node_copy(node, dict(sources).__getitem__)


def _along_tokens(score: Score) -> dict[int, int]:
    """The buffers that a score loads at a token, and in which dimension.

    Raises:
        UnsupportedError: A token's index enters a score in another way.
    """
    found: dict[int, int] = {}
    for expr in [*walk(score.value), *(() if score.visible is None else walk(score.visible))]:
        if expr[0] == "load":
            found |= {expr[1]: dim for dim, index in enumerate(expr[2:]) if index in (("q",), ("k",))}
            inner = [index for index in expr[2:] if index not in (("q",), ("k",))]
        else:
            inner = [item for item in expr[1:] if isinstance(item, tuple)]
        if ("q",) in inner or ("k",) in inner:
            raise UnsupportedError(
                "a forest can be cut where scores are functions of positions on the path, but one uses the place of a "
                "token in the packed row; run the uncut forest (treefx.use)"
            )
    return found
