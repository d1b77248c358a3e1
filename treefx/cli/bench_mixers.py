"""Time the layers of Mamba 2 and of a gated delta net along a tree against the same layers on separate rows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treefx.cli.bench_step import WrongResultError
from treefx.forest import Forest
from treefx.kernels.tree_conv import tree_conv1d
from treefx.kernels.tree_scan import tree_delta_rule, tree_ssd

__all__ = ["CASES", "Case", "run"]

_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """``rows`` rows of ``length`` tokens, the first ``shared`` common to all."""

    rows: int
    length: int
    shared: int

    def forests(self) -> tuple[Forest, Forest]:
        """The tree of the rows, and a forest that shares nothing: each row has a first token of its own."""
        own = [list(range(self.length * (b + 1), self.length * (b + 2) - self.shared)) for b in range(self.rows)]
        rows = [[*range(self.shared), *tail] for tail in own]
        apart = [[self.length * (self.rows + 2) + b, *row[1:]] for b, row in enumerate(rows)]
        return Forest.from_sequences(rows), Forest.from_sequences(apart)


CASES = (Case(8, 512, 448), Case(8, 1024, 896))


class _Layer(nn.Module):
    """Projection, causal convolution of four taps, recurrence, gate, projection."""

    def __init__(self, width: int, heads: int, head_dim: int, delta: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.delta = heads, head_dim, delta
        inner = heads * head_dim
        self.enter = nn.Linear(width, 4 * inner + 2 * heads)
        self.taps = nn.Parameter(torch.randn(3 * inner, 1, 4) * 0.5)
        self.leave = nn.Linear(inner, width)

    def forward(self, x: Tensor, parent: Tensor, ends: Tensor) -> Tensor:
        """x [N, width] of the tokens of a forest."""
        inner = self.heads * self.head_dim
        mixed, gate, g, beta = self.enter(x).split([3 * inner, inner, self.heads, self.heads], -1)
        mixed = F.silu(tree_conv1d(mixed, self.taps, None, parent, groups=3 * inner))
        q, k, v = mixed.reshape(-1, 3, self.heads, self.head_dim).unbind(1)
        k, decay = F.normalize(k, dim=-1), -F.softplus(g)
        if self.delta:
            out = tree_delta_rule(q, k, v, decay, beta.sigmoid(), parent, ends)
        else:
            out = tree_ssd(q, k, v, decay, parent, ends)
        result: Tensor = self.leave(out.flatten(1) * F.silu(gate))
        return result


def run(
    *, width: int = 256, heads: int = 4, head_dim: int = 64, repeats: int = 3, cases: Sequence[Case] = CASES
) -> list[dict[str, object]]:
    """Time forward and backward in float32, each the best of ``repeats`` runs taken in turn.

    Returns:
        One record per layer and case: ``case``, ``tokens`` (distinct), ``raw_tokens``, ``sharing_ratio``,
        ``tree_ms``, ``rows_ms`` and ``rows_over_tree``.

    Raises:
        WrongResultError: the gradients of the two disagree, so nothing is reported.
    """
    layers = {"Mamba 2": False, "gated delta net": True}
    pairs = [(case, name) for case in cases for name in layers]
    return [_time(name, layers[name], case, width, heads, head_dim, repeats) for case, name in pairs]


def _time(name: str, delta: bool, case: Case, width: int, heads: int, head_dim: int, repeats: int) -> dict[str, object]:
    torch.manual_seed(0)
    layer = _Layer(width, heads, head_dim, delta)
    tree, rows = case.forests()
    hidden = torch.randn(tree.num_tokens, width)
    # Row after row, which token of the tree each token of the separate rows is.
    same = torch.empty(rows.num_tokens, dtype=torch.int64)
    weight = torch.zeros(tree.num_tokens, 1)
    for of_tree, of_rows in zip(tree.token_of, rows.token_of, strict=True):
        same[torch.as_tensor(of_rows)] = torch.as_tensor(of_tree)
        weight[torch.as_tensor(of_tree)] += 1

    def step(forest: Forest, x: Tensor, scale: Tensor | float) -> list[Tensor]:
        out = layer(x, forest.parent.to(torch.int64), forest.subtree_end)
        return list(torch.autograd.grad((out * torch.linspace(-1, 1, width) * scale).sum(), list(layer.parameters())))

    methods: dict[str, Callable[[], list[Tensor]]] = {
        "tree": lambda: step(tree, hidden, weight),
        "rows": lambda: step(rows, hidden[same], 1.0),
    }
    _check(name, methods["tree"](), methods["rows"]())
    times: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method, call in methods.items():
            start = time.perf_counter()
            call()
            times[method].append((time.perf_counter() - start) * 1e3)
    best = {method: min(taken) for method, taken in times.items()}
    raw = case.rows * case.length
    return {
        "case": f"{name}, {case.rows} rows of {case.length}", "tokens": tree.num_tokens, "raw_tokens": raw,
        "sharing_ratio": round(raw / tree.num_tokens, 2), "tree_ms": round(best["tree"], 1),
        "rows_ms": round(best["rows"], 1), "rows_over_tree": round(best["rows"] / best["tree"], 2),
    }  # fmt: skip


def _check(name: str, tree: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    for got, wanted in zip(tree, rows, strict=True):
        error = float((got - wanted).norm() / wanted.norm())
        if not error <= _TOLERANCE:  # NaN fails too
            raise WrongResultError(
                f"{name}: gradients along the tree must be within {_TOLERANCE:.0e} of those of separate rows, "
                f"got {error:.2e}: no time is reported"
            )
