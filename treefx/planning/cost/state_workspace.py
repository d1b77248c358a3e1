"""Measure workspaces of recurrences: padded chunks, states between them, lists of tokens.

They grow by steps of a chunk, and with the chains of a part, runs of tokens without a fork. Both are measured on the
operator itself, once per operator and shapes of heads: on chains, whose peaks a line `constant + a N` lies above, and
on combs of short chains, whose peaks are divided by their chains.
"""

from functools import cache
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx

from treefx.passes.cuts.boundary_states import PARTS
from treefx.planning.cost.liveness import size_expression, storage_bytes
from treefx.planning.cost.memory import track_peak
from treefx.planning.cost.states import FEWEST_STATES

__all__ = ["chain_bytes", "scan_workspace"]

_BACKWARDS: dict[Any, Any] = {
    torch.ops.treefx.part_scan_backward.default: torch.ops.treefx.part_scan.default,
    torch.ops.treefx.library_part_backward.default: torch.ops.treefx.library_part.default,
}
_GRADIENTS = 2
"""Arguments of a backward before those of its forward."""
_CHAINS = (9, 33, 65, 129, 1025)
"""Tokens of a chain, where a chunk is padded most."""
_LONG = (1024, 2048)
"""Tokens of two chains between which the peak grows as it does from then on."""
_TEETH, _LENGTHS = 4, (1, 9, 33)
"""Half the chains of a comb, and their tokens. They are few, so that no chunks wait for others that run together."""


class _Line(NamedTuple):
    """Bytes above all peaks: `constant + token N`, and `chain` for each chain after the first."""

    constant: float
    token: float
    chain: float


class _Described(NamedTuple):
    """A tensor of a graph; a size of 0 is the number of tokens."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, tokens: int) -> Tensor:
        made = torch.zeros([size or tokens for size in self.shape], dtype=self.dtype, device=self.device)
        return made.requires_grad_(made.is_floating_point())


def scan_workspace(node: fx.Node) -> sympy.Expr | None:
    """Bytes of a recurrence's workspace on one chain, in its tokens; None for other operators."""
    backward = node.target in _BACKWARDS
    if not backward and node.target not in PARTS:
        return None
    target, args = (_BACKWARDS[node.target], node.args[_GRADIENTS:]) if backward else (node.target, node.args)
    line = _measure(target, _describe(args), torch.get_num_threads())[backward]
    entry = args[-2]
    assert isinstance(entry, fx.Node)
    tokens = size_expression(entry.meta["val"].shape[0])
    made = storage_bytes(node.meta["val"]).diff(tokens)  # bytes of the results per token, which are counted as theirs
    return line.constant + max(line.token - made, 0) * tokens


def chain_bytes(gm: fx.GraphModule) -> tuple[float, float]:
    """Bytes per chain after the first at the peak of a recurrence, forward and backward: those of the largest.

    Args:
        gm: a graph with a boundary, whose nodes have fake values.
    """
    nodes = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in PARTS]
    found = [_measure(node.target, _describe(node.args), torch.get_num_threads()) for node in nodes]
    forward, backward = (max((lines[side].chain for lines in found), default=0.0) for side in (0, 1))
    return forward, backward


def _describe(args: Any) -> Any:
    """Describe tensors instead of nodes, hashable."""
    if isinstance(args, (list, tuple)):
        return tuple(map(_describe, args))
    if not isinstance(args, fx.Node):
        return args
    fake = args.meta["val"]
    shape = tuple(0 if isinstance(size, torch.SymInt) else int(size) for size in fake.shape)
    return _Described(shape, fake.dtype, fake.device)


@cache
def _measure(target: Any, described: tuple[Any, ...], threads: int) -> tuple[_Line, _Line]:
    del threads  # as many as there are
    chains = [(n, _peaks(target, described, torch.full((n,), n))) for n in (*_CHAINS, *_LONG)]
    combs = [(2 * _TEETH * length, _peaks(target, described, _comb(length))) for length in _LENGTHS]
    return _line([(n, both[0]) for n, both in chains], [(n, both[0]) for n, both in combs]), _line(
        [(n, both[1]) for n, both in chains], [(n, both[1]) for n, both in combs]
    )


def _line(chains: list[tuple[int, int]], combs: list[tuple[int, int]]) -> _Line:
    (short, first), (long, last) = chains[-2:]
    token = max(last - first, 0) / (long - short)
    constant = max(0.0, *(peak - token * n for n, peak in chains))
    more = max(0.0, *(peak - constant - token * n for n, peak in combs))
    return _Line(constant, token, more / (2 * _TEETH - 2))  # the last leaf goes on from the last fork


def _comb(length: int) -> Tensor:
    """Ends of subtrees: a spine of chains, with a leaf of a chain between two of them."""
    first = 2 * length * torch.arange(_TEETH)[:, None]
    spine = torch.full((_TEETH, length), 2 * length * _TEETH)
    return torch.cat([spine, (first + 2 * length).expand(-1, length)], 1).flatten()


def _peaks(target: Any, described: tuple[Any, ...], ends: Tensor) -> tuple[int, int]:
    """Bytes that the operator adds in the forward, and in the backward."""
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, (_make(item, len(ends)) for item in described), strict=True))
    device = given["states"].device
    given["subtree_end"] = ends.to(device, given["subtree_end"].dtype)
    given["states"] = torch.zeros(FEWEST_STATES, *given["states"].shape[1:], dtype=given["states"].dtype, device=device)
    given["states"].requires_grad_()
    given["entry"] = torch.full((len(ends),), FEWEST_STATES, device=device)
    given["exits"] = torch.full((FEWEST_STATES,), -1, device=device)
    leaves = [x for x in _tensors(list(given.values())) if x.requires_grad]
    with torch.enable_grad(), track_peak(device) as forward:
        results = target(**given)
    gradients = [torch.zeros_like(x) for x in results]
    with track_peak(device) as backward:
        torch.autograd.grad(results, leaves, gradients, allow_unused=True)
    return forward.bytes, backward.bytes


def _make(item: Any, tokens: int) -> Any:
    if isinstance(item, _Described):
        return item.make(tokens)
    return [_make(one, tokens) for one in item] if isinstance(item, tuple) else item


def _tensors(items: list[Any]) -> list[Tensor]:
    nested = [_tensors(item) if isinstance(item, list) else [item] for item in items]
    return [x for found in nested for x in found if isinstance(x, Tensor)]
