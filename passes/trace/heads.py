"""Run LM heads that score without logits once per distinct pair of token and target.

``treefx::head`` stands for an ``autograd.Function`` of hidden states, the head's weight and bias, and targets, that
gives numbers per row: log-probabilities, entropies, and the like. It calls that function, on each pair of a row and its
target once, and leaves out targets that are ``UNSCORED``: their numbers are zero. Where ``fused_heads`` has a form of
the function for the device, that runs instead.

A library scores all positions and puts zeros (or another number) at unscored positions. ``tell_masks`` pushes that mask
into the operator.

Before::

    scored = head(hidden, targets);  log_probs = masked_fill(view(scored, [B, T]), ~mask, 0)

After::

    scored = head(hidden, where(mask, targets, UNSCORED));  log_probs = masked_fill(view(scored, [B, T]), ~mask, 0)
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.memory import Bounded
from treefx.passes.trace.flash import autograd_recorded
from treefx.passes.trace.fused_heads import FusedHead, fused_head

__all__ = ["UNSCORED", "Head", "copy_graph", "head", "register_head", "tell_masks"]

UNSCORED = -(2**62)
"""The target of an unused row. The -100 of a caller is passed to the function unchanged."""


@dataclass(frozen=True)
class Head:
    """A function that scores rows, and how it is called.

    Attributes:
        function: An ``autograd.Function`` of hidden [N, H], weight [V, H], bias [V] or None and targets int64 [N],
            which gives a tuple of tensors [N], or None, each row's numbers of that row alone.
        settings: its further arguments.
        autocast: The dtype that autocast was on with, if it was.
    """

    function: type[torch.autograd.Function]
    settings: tuple[Any, ...] = ()
    autocast: torch.dtype | None = None

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Sequence[Tensor | None]:
        """Score rows."""
        with torch.autocast(hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            apply: Any = self.function.apply
            found: Sequence[Tensor | None] = apply(hidden, weight, bias, targets, *self.settings)
        return found

    def fused_form(self, hidden: Tensor, weight: Tensor) -> FusedHead | None:
        """Return the form without pairs on this device; None for a weight that is gathered later."""
        whole = weight.shape[1:] == hidden.shape[1:]
        return fused_head(self.function, self.settings, self.autocast, hidden) if whole else None

    @functools.lru_cache(256)
    def example(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Return the results for one row of a type: their number, types and gradients."""
        with unset_fake_temporarily(), autograd_recorded(), torch.inference_mode(mode=False):
            one = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
            return tuple(self(one, one, None, torch.zeros(1, dtype=torch.int64)))


_HEADS: Bounded[str, Head] = Bounded(1024)
"""Dynamo compiles a function once per head, and gives up after a few."""


def register_head(made: Head) -> str:
    """Keep a function that operators call by a key: the same in every process."""
    function = made.function
    key = repr((function.__module__, function.__qualname__, made.settings, made.autocast))
    _HEADS[key] = made
    return key


@dataclass(frozen=True)
class _Pairs:
    """Hold the distinct scored pairs of token and target, and the places of all pairs.

    Rows of hidden and targets [P]; places [R] are ``P`` where nothing is scored.
    """

    row: Tensor
    target: Tensor
    place: Tensor


def _pairs(targets: Tensor, slot: Tensor | None) -> _Pairs:
    row = torch.arange(len(targets), device=targets.device) if slot is None else slot
    scored = (targets != UNSCORED) & (row >= 0)
    pairs, places = torch.unique(torch.stack([row, targets])[:, scored], dim=1, return_inverse=True)
    place = torch.full_like(targets, pairs.shape[1]).masked_scatter_(scored, places)
    return _Pairs(pairs[0], pairs[1], place)


@torch.library.custom_op("treefx::head", mutates_args=(), tags=NOT_CAPTURED)
def head(
    hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor | None, key: str
) -> list[Tensor]:
    """The results of a registered head, one number per target.

    Args:
        hidden: [N, H].
        targets: int64 [R], entries of the vocabulary; ``UNSCORED`` gives 0.
        weight: [V, H].
        bias: [V] or None.
        slot: int64 [R], the row of hidden of each target; a negative one gives 0. None for row r of target r.
        key: from ``register_head``.

    Returns:
        Those results [R] that are not None.
    """
    form = _HEADS[key].fused_form(hidden, weight)
    if form is not None:
        return form.forward(hidden, targets, weight, bias, slot, UNSCORED)
    pairs = _pairs(targets, slot)
    if not len(pairs.row):
        return [hidden.new_zeros(targets.shape, dtype=dtype) for dtype in _dtypes(key, hidden.dtype)]
    found = _HEADS[key](hidden[pairs.row], weight, bias, pairs.target)
    return [torch.cat([x, x.new_zeros(1)])[pairs.place] for x in found if x is not None]


@head.register_fake
def _(
    hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor | None, key: str
) -> list[Tensor]:
    return [hidden.new_empty(targets.shape, dtype=dtype) for dtype in _dtypes(key, hidden.dtype)]


def _dtypes(key: str, dtype: torch.dtype) -> list[torch.dtype]:
    return [x.dtype for x in _HEADS[key].example(dtype) if x is not None]


@torch.library.custom_op("treefx::head_backward", mutates_args=(), tags=NOT_CAPTURED)
def head_backward(
    grads: Sequence[Tensor | None], hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None,
    slot: Tensor | None, key: str, wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias; an empty tensor for one that is not ``wanted``.

    The gradients of equal pairs are summed first; the forward runs once more, under autograd: only the function knows
    its saved values.
    """
    form = _HEADS[key].fused_form(hidden, weight)
    if form is not None:
        return form.backward(grads, wanted, hidden, targets, weight, bias, slot, UNSCORED)
    like = (hidden, weight, hidden if bias is None else bias)
    results = [x.new_zeros(x.shape if use else (0,)) for x, use in zip(like, wanted, strict=True)]
    pairs = _pairs(targets, slot)
    if not len(pairs.row):
        return results
    summed = [_of_pairs(grad, pairs) for grad in grads]
    found = _gradients(_HEADS[key], (hidden[pairs.row], weight, bias), pairs.target, summed, wanted)
    if found[0] is not None:
        results[0].index_add_(0, pairs.row, found[0])
    return [results[0], *(zero if x is None else x.contiguous() for x, zero in zip(found[1:], results[1:]))]


def _gradients(
    scores: Head,
    tensors: Sequence[Tensor | None],
    targets: Tensor,
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Return gradients of hidden, weight and bias; None for unrequested or zero ones."""
    with autograd_recorded():
        leaves = [None if x is None else x.detach().requires_grad_(use) for x, use in zip(tensors, wanted, strict=True)]
        hidden, weight, bias = leaves
        assert hidden is not None and weight is not None
        found = [x for x in scores(hidden, weight, bias, targets) if x is not None]
        read = [(x, grad) for x, grad in zip(found, grads, strict=True) if x.requires_grad and grad is not None]
        asked = [x for x in leaves if x is not None and x.requires_grad]
        if not read:
            return [None] * len(leaves)
        made = iter(torch.autograd.grad([x for x, _ in read], asked, [grad for _, grad in read], allow_unused=True))
    return [next(made) if x is not None and x.requires_grad else None for x in leaves]


def _of_pairs(grad: Tensor | None, pairs: _Pairs) -> Tensor | None:
    """Return a result's gradient per distinct pair; None if zero, as of logged values."""
    if grad is None or not bool(grad.any()):
        return None
    return grad.new_zeros(len(pairs.row) + 1).index_add_(0, pairs.place, grad)[:-1]


@head_backward.register_fake
def _(
    grads: Sequence[Tensor | None], hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None,
    slot: Tensor | None, key: str, wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    like = (hidden, weight, hidden if bias is None else bias)
    return [x.new_empty(x.shape if use else (0,)) for x, use in zip(like, wanted, strict=True)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    hidden, targets, weight, bias, slot, ctx.key = inputs
    ctx.save_for_backward(hidden, targets, weight, bias, slot)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    hidden, targets, weight, bias, slot = ctx.saved_tensors
    asked = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
    wanted = [bool(use) and x is not None for use, x in zip(asked, (hidden, weight, bias), strict=True)]
    found = head_backward(grads, hidden, targets, weight, bias, slot, ctx.key, wanted)
    of_hidden, of_weight, of_bias = (x if use else None for x, use in zip(found, wanted, strict=True))
    return of_hidden, None, of_weight, of_bias, None, None


head.register_autograd(_backward, setup_context=_setup_context)


_HEAD = {torch.ops.treefx.head, torch.ops.treefx.head.default, head}


def tell_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """Push masks into heads of a Dynamo graph: outputs that are overwritten are not scored.

    Returns:
        The graph itself if there is no such head, or a copy: Dynamo needs its own graph unchanged.
    """
    if not any(_mask_behind(node) for node in gm.graph.nodes if node.target in _HEAD):
        return gm
    copied = copy_graph(gm)
    for node in copied.graph.nodes:
        mask = _mask_behind(node) if node.target in _HEAD else None
        if mask is not None:
            with copied.graph.inserting_before(node):
                flat = copied.graph.call_method("reshape", (mask, (-1,)))
                node.update_arg(1, copied.graph.call_function(torch.where, (flat, node.args[1], UNSCORED)))
    copied.graph.lint()
    copied.recompile()
    return copied


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph of Dynamo for changes: Dynamo needs its own unchanged."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, new))
    for node in gm.graph.find_nodes(op="placeholder"):
        new[node]._dynamo_source = getattr(node, "_dynamo_source", None)
    copied = fx.GraphModule(gm, graph)
    copied.meta = gm.meta
    setattr(copied, "compile_subgraph_reason", getattr(gm, "compile_subgraph_reason", None))
    return copied


def _mask_behind(node: fx.Node) -> fx.Node | None:
    """Return the mask outside of which a head's results are overwritten, if made before it."""
    masks = {mask for result in node.users for mask in _masks_of(result)}
    mask = masks.pop() if len(masks) == 1 else None
    return mask if mask in itertools.takewhile(lambda other: other is not node, node.graph.nodes) else None


def _masks_of(result: fx.Node) -> Iterator[fx.Node | None]:
    """Yield masks outside of which readers overwrite a result; None for other readers."""
    for user in result.users:
        if user.target == "detach":
            yield from _masks_of(user)
        elif user.target not in ("view", "reshape"):
            yield None
        else:
            yield from (_mask_of(reader, user) for reader in user.users)


def _mask_of(reader: fx.Node, view: fx.Node) -> fx.Node | None:
    """The mask of ``view.masked_fill(~mask, number)``, of the same shape."""
    if reader.target != "masked_fill" or reader.kwargs or reader.args[0] is not view:
        return None
    unscored, fill = reader.args[1:]
    if isinstance(fill, fx.Node) or not isinstance(unscored, fx.Node) or unscored.target is not operator.invert:
        return None
    (mask,) = unscored.args
    assert isinstance(mask, fx.Node)
    shapes = [str(tuple(x.meta["example_value"].shape)) for x in (view, mask)]
    is_bool = mask.meta["example_value"].dtype is torch.bool
    return mask if is_bool and shapes[0] == shapes[1] else None
