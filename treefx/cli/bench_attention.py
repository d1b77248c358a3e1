"""Time tree attention on the CPU against SDPA with the dense tree mask and SDPA on every row alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as _sdpa

from treefx.cli.bench_step import WrongResultError
from treefx.errors import InputError
from treefx.kernels import tree_attention

__all__ = ["CASES", "Tree", "agent_nodes", "choose_device", "repeated_nodes", "run", "thought_nodes"]

_TOLERANCE = 1e-4
_CHECKED_HEADS = 1


@dataclass(frozen=True)
class Tree:
    """A forest as nodes in packed order: the parent node (-1: a root) and the length of each."""

    name: str
    nodes: tuple[tuple[int, int], ...]

    def spans(self) -> list[tuple[int, int]]:
        """Return the token range of each node."""
        stops = np.cumsum([length for _, length in self.nodes]).tolist()
        return [(stop - length, stop) for stop, (_, length) in zip(stops, self.nodes, strict=True)]

    def subtree_end(self) -> Tensor:
        """Return the exclusive end of each token's subtree, int32 ``[N]``."""
        spans = self.spans()
        ends = [stop for _, stop in spans]
        for node in reversed(range(len(ends))):
            parent = self.nodes[node][0]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[node])
        lengths = torch.tensor([length for _, length in self.nodes])
        return torch.tensor(ends, dtype=torch.int32).repeat_interleave(lengths)

    def rows(self) -> list[Tensor]:
        """Return the packed indices of every root-to-leaf row."""
        spans, parents = self.spans(), [parent for parent, _ in self.nodes]
        rows = []
        for leaf in sorted(set(range(len(parents))) - set(parents)):
            path: list[Tensor] = []
            node = leaf
            while node >= 0:
                path.insert(0, torch.arange(*spans[node]))
                node = parents[node]
            rows.append(torch.cat(path))
        return rows


def repeated_nodes(count: int, prefix: int, leaves: int, length: int) -> tuple[tuple[int, int], ...]:
    """Return ``count`` prefixes with ``leaves`` continuations each."""
    trees = ([(-1, prefix), *[(tree * (leaves + 1), length)] * leaves] for tree in range(count))
    return tuple(node for tree in trees for node in tree)


def agent_nodes(count: int = 102) -> tuple[tuple[int, int], ...]:
    """Return a conversation that forks now and then: a long system prompt, then turns of 30 to 70 tokens."""
    random = np.random.default_rng(0)
    nodes, path = [(-1, 1000)], [0]
    for node in range(1, count):
        if random.random() < 0.3:
            path = path[: int(random.integers(1, len(path) + 1))]
        nodes.append((path[-1], int(random.integers(30, 71))))
        path.append(node)
    return tuple(nodes)


def thought_nodes(depth: int = 4, width: int = 4) -> tuple[tuple[int, int], ...]:
    """Return a full tree of short thoughts, 15 to 45 tokens each."""
    random = np.random.default_rng(0)
    nodes: list[tuple[int, int]] = []

    def grow(parent: int, level: int) -> None:
        nodes.append((parent, int(random.integers(15, 46))))
        node = len(nodes) - 1
        for _ in range(width if level < depth else 0):
            grow(node, level + 1)

    grow(-1, 0)
    return tuple(nodes)


CASES = (
    Tree("prefix 2048 + 8 x 256", repeated_nodes(1, 2048, 8, 256)),
    Tree("GRPO 2 x (512 + 8 x 512)", repeated_nodes(2, 512, 8, 512)),
    Tree("DPO 8 x (384 + 2 x 192)", repeated_nodes(8, 384, 2, 192)),
    Tree("agent, 102 nodes", agent_nodes()),
    Tree("tree of thought, 341 nodes", thought_nodes()),
)


def choose_device(device: str) -> str:
    """Return ``"cpu"`` or ``"cuda"``.

    Raises:
        InputError: it is neither of them, nor ``"auto"``.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be auto, cpu or cuda, got {device!r}")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def run(
    json: bool = False, *, heads: int = 8, head_dim: int = 64, repeats: int = 2, cases: Sequence[Tree] = CASES
) -> list[dict[str, object]]:
    """Time forward and backward in float32, each the best of ``repeats`` runs taken in turn.

    Args:
        json: a program reads the result; the records are the same.
        heads: query and key heads.
        head_dim: width of a head.
        repeats: timed runs of each method.
        cases: the forests.

    Returns:
        One record per case: ``case``, ``tokens`` (distinct), ``raw_tokens`` (over the rows), forward and
        backward milliseconds of the tree, of SDPA with the dense N x N mask, of SDPA on every row alone, and
        the quotients.

    Raises:
        WrongResultError: tree attention and the dense reference disagree, so nothing is reported.
    """
    del json  # no progress bar to switch off
    return [_time_case(case, heads, head_dim, repeats) for case in cases]


def _time_case(case: Tree, heads: int, head_dim: int, repeats: int) -> dict[str, object]:
    ends, rows = case.subtree_end(), case.rows()
    tokens = len(ends)
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, tokens, heads, head_dim).transpose(2, 3)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    _check(case, ends, [tensor[:, :_CHECKED_HEADS].detach() for tensor in (*leaves, grad)])
    index = torch.arange(tokens)
    dense = (index[None, :] <= index[:, None]) & (index[:, None] < ends[None, :])
    alone = [[tensor.detach()[:, :, row].requires_grad_() for tensor in leaves] for row in rows]
    row_grads = [grad[:, :, row] for row in rows]
    times = _best_ms(
        {
            "tree": lambda: _steps([leaves], [grad], lambda q, k, v: tree_attention(q, k, v, ends)),
            "dense": lambda: _steps([leaves], [grad], lambda q, k, v: _sdpa(q, k, v, attn_mask=dense)),
            "rows": lambda: _steps(alone, row_grads, lambda q, k, v: _sdpa(q, k, v, is_causal=True)),
        },
        repeats,
    )
    record: dict[str, object] = {"case": case.name, "tokens": tokens, "raw_tokens": sum(map(len, rows))}
    for name, (forward, backward) in times.items():
        record |= {f"{name}_forward_ms": round(forward, 1), f"{name}_backward_ms": round(backward, 1)}
    for name in ("dense", "rows"):
        record[f"{name}_over_tree"] = round(sum(times[name]) / sum(times["tree"]), 2)
    return record


Step = tuple[float, float]


def _steps(inputs: list[list[Tensor]], grads: list[Tensor], attend: Callable[..., Tensor]) -> Step:
    """Return the forward and backward milliseconds over all inputs."""
    forward = backward = 0.0
    for leaves, grad in zip(inputs, grads, strict=True):
        start = time.perf_counter()
        out = attend(*leaves)
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, grad)
        forward += middle - start
        backward += time.perf_counter() - middle
    return forward * 1e3, backward * 1e3


def _best_ms(methods: dict[str, Callable[[], Step]], repeats: int) -> dict[str, Step]:
    """Run the methods in turn, so that a busy moment of the machine meets all of them."""
    runs = [{name: method() for name, method in methods.items()} for _ in range(repeats + 1)][1:]
    return {name: (min(run[name][0] for run in runs), min(run[name][1] for run in runs)) for name in methods}


def _check(case: Tree, ends: Tensor, tensors: list[Tensor]) -> None:
    *inputs, grad = tensors
    results = []
    for impl in ("auto", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        q, k, v = leaves
        out = tree_attention(q, k, v, ends, impl=impl)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for name, got, wanted in zip(("output", "dq", "dk", "dv"), *results, strict=True):
        error = ((got - wanted).norm() / wanted.norm()).item()
        if not error <= _TOLERANCE:  # NaN fails too
            raise WrongResultError(
                f"{case.name}: {name} of tree attention must be within {_TOLERANCE:.0e} of the reference, "
                f"got {error:.2e}: no time is reported"
            )
