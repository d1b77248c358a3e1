"""Time Mamba 2 and gated delta net layers along a tree against rows."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treefx.forests.forest import Forest
from treefx.inspection.inspector import inspect
from treefx.kernels.recurrence.tree_conv import tree_conv1d
from treefx.kernels.recurrence.tree_scan import tree_delta_rule, tree_ssd
from treefx.tools.bench.job.models import make_model, require_transformers
from treefx.tools.bench.job.synthetic import shared_prefix_batch
from treefx.tools.bench.job.training import TrainingRun
from treefx.tools.bench.step import WrongResultError

__all__ = ["CASES", "MODELS", "Case", "run", "run_models"]

_TOLERANCE = 1e-3
_SMALL = 1e-3
"""Gradients below this share of the largest one, by norm, are judged against it."""


@dataclass(frozen=True)
class Case:
    """``rows`` rows of ``length`` tokens, the first ``shared`` common to all."""

    rows: int
    length: int
    shared: int

    def forests(self) -> tuple[Forest, Forest]:
        """Return the tree of the rows, and a forest without sharing: rows differ in token 0."""
        own = [list(range(self.length * (b + 1), self.length * (b + 2) - self.shared)) for b in range(self.rows)]
        rows = [[*range(self.shared), *tail] for tail in own]
        apart = [[self.length * (self.rows + 2) + b, *row[1:]] for b, row in enumerate(rows)]
        return Forest.from_sequences(rows), Forest.from_sequences(apart)


CASES = (Case(8, 512, 448), Case(8, 1024, 896))

_COMMON = {
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 1, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "mamba2": {**_COMMON, "num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "qwen3_next": {
        **_COMMON, "layer_types": ["linear_attention"], "mlp_only_layers": [0], "intermediate_size": 512,
        "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
}  # fmt: skip
"""One layer each, chunk sizes as in the released models."""


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
            out = tree_delta_rule(q, k, v, decay, beta.sigmoid(), ends)
        else:
            out = tree_ssd(q, k, v, decay, ends)
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


def run_models(
    *,
    repeats: int = 3,
    inner: str = "inductor",
    cases: Sequence[Case] = CASES[:1],
    models: Mapping[str, Mapping[str, object]] = MODELS,
    on_start: Callable[[str], None] = lambda _: None,
) -> list[dict[str, object]]:
    """Time unmodified transformers models, with treefx and with the same compiler.

    Args:
        repeats: Timed steps of each; the best counts.
        inner: What compiles both.
        cases: Shapes of sharing.
        models: Fields of the configuration by architecture.
        on_start: Called with the name of each model before its compilation.

    Returns:
        Records as of :func:`run`.

    Raises:
        WrongResultError: Gradients disagree, or the recurrence was left on rows.
    """
    return [_time_model(name, models[name], case, repeats, inner, on_start) for name in models for case in cases]


def _time_model(
    name: str, fields: Mapping[str, object], case: Case, repeats: int, inner: str, on_start: Callable[[str], None]
) -> dict[str, object]:
    title = f"{name} model, {case.rows} rows of {case.length}"
    on_start(f"compiling {title}")
    torch._dynamo.reset()
    model = make_model(require_transformers().AutoConfig.for_model(name, **fields))
    batch = shared_prefix_batch(case.rows, case.shared, case.length - case.shared, int(str(fields["vocab_size"])))
    runs = {
        "tree": TrainingRun(model, "treefx", options={"inner": inner}),
        "rows": TrainingRun(model, "treefx", options={"inner": inner, "min_sharing": float("inf")}),
    }
    for each in runs.values():
        each.compile_for(batch)
    stats = inspect(runs["tree"].compiled).stats
    if stats["recurrences_rewritten"] != 1:
        raise WrongResultError(f"{title}: one recurrence should run along the tree, got {stats['expansions']}")
    names = list(runs["rows"].first_gradients)
    gradients = [[each.first_gradients[key] for key in names] for each in runs.values()]
    _check(title, *gradients)
    methods = {method: functools.partial(each.time_forward_backward, batch) for method, each in runs.items()}
    return _record(title, case.shared + case.rows * (case.length - case.shared), case, _best(methods, repeats))


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
    return _record(f"{name}, {case.rows} rows of {case.length}", tree.num_tokens, case, _best(methods, repeats))


def _best(methods: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of the fastest call of each, called in turn."""
    times: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method, call in methods.items():
            start = time.perf_counter()
            call()
            times[method].append((time.perf_counter() - start) * 1e3)
    return {method: min(taken) for method, taken in times.items()}


def _record(title: str, tokens: int, case: Case, best: Mapping[str, float]) -> dict[str, object]:
    raw = case.rows * case.length
    return {
        "case": title, "tokens": tokens, "raw_tokens": raw, "sharing_ratio": round(raw / tokens, 2),
        "tree_ms": round(best["tree"], 1), "rows_ms": round(best["rows"], 1),
        "rows_over_tree": round(best["rows"] / best["tree"], 2),
    }  # fmt: skip


def _check(name: str, tree: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    largest = max(float(wanted.norm()) for wanted in rows)
    for got, wanted in zip(tree, rows, strict=True):
        error = float((got - wanted).norm()) / max(float(wanted.norm()), _SMALL * largest)
        if not error <= _TOLERANCE:  # NaN fails too
            raise WrongResultError(
                f"{name}: gradients along the tree must be within {_TOLERANCE:.0e} of those of separate rows, "
                f"got {error:.2e}: no time is reported"
            )
