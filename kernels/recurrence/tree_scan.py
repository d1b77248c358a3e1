"""Run linear recurrences along a forest: Mamba 2, linear attention, gated delta rule, KDA.

Per head, with the state S [D, E] of a token taken from its parent::

    SSD           S = exp(g) S_parent + k v^T                                o = S^T q
    delta rule    S = exp(g) S_parent + k (v - exp(g) S_parent^T w)^T        o = S^T q

In the gated delta rule w is beta k and v is beta times the model's value; without g nothing decays. In Kimi delta
attention (KDA) g has an entry per feature of the key, and exp(g) multiplies the rows of S. Within
a chunk both are products of [L, L] matrices (Dao and Gu 2024; the WY form of Yang et al. 2024, one triangular solve
more); between chunks only the state at a chunk's end is passed on, each from its parent. At a fork the chunks of all
children read the state of one parent, and the gradients of their reads add up. Only inputs are kept for the backward,
which computes the states again.

Within a chunk a product over pairs of tokens multiplies later tokens by 0, which keeps their NaN and infinity. On the
CPU the operator therefore repeats a scan with a result that is not finite, with each token that is not finite in a
separate chunk. NaN then reaches only descendants, and in the backward only ancestors. On a device the operator does not
check results, because the host would wait. There NaN reaches the whole chunk: up to 64 tokens in sequence without a
fork, and the rows that end in it.

The operator is ``treefx::tree_scan``; its schedule (``tree_chunks``) is made once per forest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from treefx.errors import InputError
from treefx.kernels.common import are_finite
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.recurrence.feature_chunk import FeatureChunk
from treefx.kernels.recurrence.scan_chunk import Chunk, Gradients, split
from treefx.kernels.recurrence.tree_chunks import ChunkPlan, Chunks, Doors, find_chunk_plan, find_part_plan, plan_chunks

__all__ = ["CHUNK", "Inputs", "Scan", "contained", "per_head", "tree_delta_rule", "tree_scan", "tree_ssd"]

CHUNK = 64
"""Tokens per chunk: products within chunks cost L per token, states between them D * E / L."""
_FEATURE_CHUNK = 16
"""The same where decays differ by feature: each pair of tokens in a chunk has D exponents."""
_ENTRIES_ON_CPU, _ENTRIES_ON_DEVICE = 1 << 20, 1 << 26
"""Entries of the [L, L] matrices that are in memory together."""
_LARGE = 2.0**60
"""Below it a product of two numbers, summed over the features of a head, stays in the range of float32."""


def tree_ssd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, subtree_end: Tensor, chunk: int = CHUNK) -> Tensor:
    """The state space recurrence of Mamba 2 along every path.

    Args:
        q: reads the state (C of Mamba 2) ``[N, G, D]``; H is a multiple of G, neighbouring heads share a group.
        k: writes it (B) ``[N, G, D]``.
        v: values written (x times its step) ``[N, H, E]``.
        g: logarithm of the decay, at most 0, ``[N, H]``, or per feature of the key ``[N, H, D]``.
        subtree_end: int ``[N]``, exclusive end of each token's subtree in packed order.
        chunk: tokens per chunk.

    Returns:
        ``[N, H, E]``, differentiable in q, k, v and g.

    Raises:
        InputError: a shape does not fit.
    """
    return tree_scan(q, k, v, g, None, subtree_end, chunk)


def tree_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, subtree_end: Tensor, chunk: int = CHUNK
) -> Tensor:
    """Run the gated delta rule along every path; ``beta`` is the step ``[N, H]``.

    Other arguments as in :func:`tree_ssd`.
    """
    if beta.shape != g.shape[:2]:
        raise InputError(f"tree_delta_rule expected beta of shape {list(g.shape[:2])} as g, got {list(beta.shape)}")
    _check(q, k, v, g, None, subtree_end)
    step = beta[..., None]
    return tree_scan(q, k, step * v, g, step * per_head(k, v.shape[1]), subtree_end, chunk)


def tree_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    w: Tensor | None,
    subtree_end: Tensor,
    chunk: int = CHUNK,
) -> Tensor:
    """Run any of the recurrences; ``w`` ``[N, G, D]`` erases; without ``g`` nothing decays.

    Raises:
        InputError: a shape does not fit.
    """
    _check(q, k, v, g, w, subtree_end)
    groups = {x.shape[1] for x in (q, k, w) if x is not None}
    by_feature = g is not None and g.dim() == 3
    if w is not None or by_feature or len(groups) > 1:
        q, k = per_head(q, v.shape[1]), per_head(k, v.shape[1])
        w = None if w is None else per_head(w, v.shape[1])
    chunk = min(chunk, _FEATURE_CHUNK) if by_feature else chunk
    result: Tensor = torch.ops.treefx.tree_scan(q, k, v, g, w, subtree_end, chunk)
    return result


def per_head(x: Tensor, heads: int) -> Tensor:
    """Repeat ``[N, G, D]`` for the heads of each group: ``[N, H, D]``."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, subtree_end: Tensor) -> None:
    heads = v.shape[1] if v.dim() == 3 else 0
    readers = [x for x in (q, k, w) if x is not None]
    fits = heads > 0 and all(x.dim() == 3 and x.shape[2] == q.shape[2] and heads % x.shape[1] == 0 for x in readers)
    fits = fits and (g is None or g.shape[1:] in (v.shape[1:2], (heads, q.shape[2])))
    given = {name: x for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("w", w)) if x is not None}
    if not fits or any(x.shape[0] != subtree_end.shape[0] for x in given.values()):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in given.items())
        raise InputError(
            "expected q, k and w [N, G, D], v [N, H, E], g [N, H] or [N, H, D], H a multiple of G, "
            f"for N = {subtree_end.shape[0]} tokens, got {shapes}"
        )


@dataclass(frozen=True)
class Inputs:
    """Hold the operator's inputs; G = H where w is given, and where g has three dimensions."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    w: Tensor | None

    def state_shape(self, count: int) -> tuple[int, ...]:
        heads, width = self.v.shape[1:]
        groups, features = self.q.shape[1:]
        return count, groups, features, heads // groups * width

    @property
    def decays_by_feature(self) -> bool:
        return self.g is not None and self.g.dim() == 3

    def of(self, chunks: Chunks, part: slice) -> Chunk | FeatureChunk:
        """The inputs of some chunks."""
        tokens = chunks.tokens[part]
        padding = None if chunks.padding is None else chunks.padding[part]
        q, k, v, w = (None if x is None else _take(x, tokens, padding) for x in (self.q, self.k, self.v, self.w))
        assert q is not None and k is not None and v is not None
        decay = self.v.new_zeros(self.v.shape[:2]) if self.g is None else self.g
        if self.decays_by_feature:
            return FeatureChunk(q, k, v, _take(decay, tokens, padding), w)
        g = _take(decay[..., None], tokens, padding).squeeze(-1)
        return Chunk(q, k, v, g, w)


def _take(x: Tensor, tokens: Tensor, padding: Tensor | None) -> Tensor:
    """``[N, G, D]`` as ``[C, G, L, D]``, zero at padding."""
    taken = split(x.index_select(0, tokens.flatten()), 0, tokens.shape[0])
    if padding is not None:
        taken = taken.masked_fill_(padding[..., None, None], 0)
    return taken.transpose(1, 2).contiguous()


def _put(target: Tensor, chunks: Chunks, part: slice, values: Tensor) -> None:
    """Write ``[C, G, L, D]`` to the tokens of some chunks."""
    tokens, found = chunks.tokens[part].flatten(), values.transpose(1, 2).flatten(0, 1)
    if chunks.padding is not None:
        real = (~chunks.padding[part]).flatten().nonzero().squeeze(1)
        tokens, found = tokens[real], found[real]
    target.index_copy_(0, tokens, found)


class Scan:
    """Run over a forest, or a part of one, once: states between chunks, and their gradients.

    Args:
        inputs: of the recurrence.
        plan: the chunks.
        given: states that enter a part, ``[S, G, D, R * E]``.
    """

    def __init__(self, inputs: Inputs, plan: ChunkPlan, given: Tensor | None = None) -> None:
        self.inputs, self.plan = inputs, plan
        shape = inputs.state_shape(plan.states + plan.given + 1)
        self.states = inputs.v.new_zeros(shape)
        """By slot; the last one is zero, the state of roots."""
        if given is not None:
            self.states[plan.states : -1] = given
        self._gates: list[Tensor] = []
        self._transfers: list[tuple[Tensor, Tensor] | None] = []
        for chunks in plan.chunks:
            self._prepare(chunks)
        for segment in plan.segments:
            self._advance(segment.number, slice(segment.start, segment.start + segment.count), segment.first)

    def _prepare(self, chunks: Chunks) -> None:
        """Compute outgoing states of zero incoming ones, and the map of others."""
        gates, keys, reads = [], [], []
        for part in self.parts(chunks, 0, len(chunks.slots)):
            chunk = self.inputs.of(chunks, part)
            self.states.index_copy_(0, chunks.slots[part], chunk.outgoing())
            gates.append(chunk.gate)
            if chunk.transfer is not None:
                keys.append(chunk.transfer[0])
                reads.append(chunk.transfer[1])
        self._gates.append(torch.cat(gates) if gates else self.states)
        self._transfers.append((torch.cat(keys), torch.cat(reads)) if keys else None)

    def parts(self, chunks: Chunks, first: int, last: int) -> Iterator[slice]:
        """The chunks [first, last) in pieces that fit into memory."""
        length = chunks.tokens.shape[1]
        limit = _ENTRIES_ON_CPU if self.inputs.v.device.type == "cpu" else _ENTRIES_ON_DEVICE
        entries = length * length * self.inputs.v.shape[1]
        if self.inputs.decays_by_feature:
            entries *= self.inputs.q.shape[2]
        step = max(1, limit // entries)
        for start in range(first, last, step):
            yield slice(start, min(last, start + step))

    def _advance(self, number: int, part: slice, first: int) -> None:
        incoming = self.states[self.plan.chunks[number].incoming[part]]
        out = self.states[first : first + len(incoming)]
        out.addcmul_(self._gates[number][part], incoming)
        transfer = self._transfers[number]
        if transfer is not None:
            out -= transfer[0][part].mT @ (transfer[1][part] @ incoming)

    def output(self) -> Tensor:
        """``[N, H, E]``."""
        out = torch.empty_like(self.inputs.v, memory_format=torch.contiguous_format)
        for chunks in self.plan.chunks:
            for part in self.parts(chunks, 0, len(chunks.tokens)):
                _put(out, chunks, part, self.inputs.of(chunks, part).output(self.states[chunks.incoming[part]]))
        return out

    def leaving(self) -> Tensor:
        """Return the states that leave a part, ``[X, G, D, R * E]``."""
        assert self.plan.exits is not None
        return self.states[self.plan.exits]

    def backward(self, grad: Tensor, of_leaving: Tensor | None = None) -> list[Tensor]:
        """Return gradients of the inputs that there are; in a part, of the states that enter as well.

        Args:
            grad: of the outputs ``[N, H, E]``.
            of_leaving: of the states that leave a part.
        """
        of_states = self._state_gradients(grad, of_leaving)
        given = {item.name: getattr(self.inputs, item.name) for item in fields(self.inputs)}
        results = {name: torch.empty_like(x, memory_format=torch.contiguous_format)
                   for name, x in given.items() if x is not None}  # fmt: skip
        for chunks in self.plan.chunks:
            inner = len(chunks.slots)
            for first, last in ((0, inner), (inner, len(chunks.tokens))):
                for part in self.parts(chunks, first, last):
                    outgoing = of_states[chunks.slots[part]] if first < inner else None
                    _put_all(results, chunks, part, self._gradients(grad, chunks, part, outgoing))
        of_given = [] if of_leaving is None else [of_states[self.plan.states : -1].clone()]
        return [*results.values(), *of_given]

    def _gradients(self, grad: Tensor, chunks: Chunks, part: slice, outgoing: Tensor | None) -> Gradients:
        chunk = self.inputs.of(chunks, part)
        return chunk.backward(_grad_of(grad, chunks, part), self.states[chunks.incoming[part]], outgoing)

    def _state_gradients(self, grad: Tensor, of_leaving: Tensor | None) -> Tensor:
        """Of the outgoing states, by slot."""
        found = torch.zeros_like(self.states)
        if of_leaving is not None:
            assert self.plan.exits is not None
            found.index_add_(0, self.plan.exits, of_leaving)
        for chunks in self.plan.chunks:
            for part in self.parts(chunks, 0, len(chunks.tokens)):
                chunk = self.inputs.of(chunks, part)
                read = chunk.incoming_gradient(_grad_of(grad, chunks, part))
                found.index_add_(0, chunks.incoming[part], read)
        for segment in reversed(self.plan.segments):
            self._retreat(found, segment.number, slice(segment.start, segment.start + segment.count), segment.first)
        return found

    def _retreat(self, found: Tensor, number: int, part: slice, first: int) -> None:
        incoming = self.plan.chunks[number].incoming[part]
        out = found[first : first + len(incoming)]
        through = self._gates[number][part] * out
        transfer = self._transfers[number]
        if transfer is not None:
            through -= transfer[1][part].mT @ (transfer[0][part] @ out)
        found.index_add_(0, incoming, through)


def _grad_of(grad: Tensor, chunks: Chunks, part: slice) -> Tensor:
    return _take(grad, chunks.tokens[part], None if chunks.padding is None else chunks.padding[part])


def _put_all(results: dict[str, Tensor], chunks: Chunks, part: slice, found: Gradients) -> None:
    for name, target in results.items():
        values = getattr(found, name)
        if name == "g" and target.dim() == 2:
            _put(target[..., None], chunks, part, values[..., None])
        else:
            _put(target, chunks, part, values)


def contained(
    run: Callable[[ChunkPlan], list[Tensor]],
    inputs: Inputs,
    subtree_end: Tensor,
    chunk: int,
    also_read: Sequence[Tensor] = (),
    doors: Doors | None = None,
) -> list[Tensor]:
    """Run a scan; on the CPU, repeat non-finite results with suspect tokens apart.

    Args:
        run: computes the results of a scan of some chunks.
        inputs: of the scan.
        subtree_end: of the forest.
        chunk: tokens per chunk.
        also_read: further values of tokens, ``[N, ...]``, that ``run`` reads.
        doors: of a part of a forest.
    """
    plan = find_chunk_plan(subtree_end, chunk) if doors is None else find_part_plan(subtree_end, chunk, doors)
    found = run(plan)
    if not inputs.v.is_cpu or are_finite(*found):
        return found
    given = [x for x in (*vars(inputs).values(), *also_read) if x is not None]
    alone = torch.stack([~(x.abs() < _LARGE).flatten(1).all(1) for x in given]).any(0)
    return run(plan_chunks(subtree_end, chunk, alone, doors)) if alone.any() else found


@torch.library.custom_op("treefx::tree_scan", mutates_args=(), tags=NOT_CAPTURED)
def _tree_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, subtree_end: Tensor, chunk: int
) -> Tensor:
    with torch.autocast(v.device.type, enabled=False):  # dtypes are settled outside
        inputs = Inputs(q, k, v, g, w)
        (out,) = contained(lambda plan: [Scan(inputs, plan).output()], inputs, subtree_end, chunk)
        return out


@_tree_scan.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, subtree_end: Tensor, chunk: int) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("treefx::tree_scan_backward", mutates_args=(), tags=NOT_CAPTURED)
def _tree_scan_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, subtree_end: Tensor, chunk: int
) -> list[Tensor]:
    """Gradients of q, k, v, then of g and w where given."""
    with torch.autocast(v.device.type, enabled=False):
        inputs = Inputs(q, k, v, g, w)
        return contained(lambda plan: Scan(inputs, plan).backward(grad), inputs, subtree_end, chunk, [grad])


@_tree_scan_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, subtree_end: Tensor, chunk: int
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, w) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, g, w, subtree_end = ctx.saved_tensors
    found = torch.ops.treefx.tree_scan_backward(grad, q, k, v, g, w, subtree_end, ctx.chunk)
    of_q, of_k, of_v, *rest = found
    of_g = None if g is None else rest.pop(0)
    return of_q, of_k, of_v, of_g, None if w is None else rest.pop(0), None, None


_tree_scan.register_autograd(_backward, setup_context=_setup_context)
