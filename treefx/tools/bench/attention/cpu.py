"""Time CPU tree attention against a dense mask, separate rows, and its bare kernel calls.

The last is the floor of the method on the machine at hand: ATen's flash attention on the same rectangles of the tree,
on operands that lie ready, with nothing merged. Where the same trees were timed before on another machine, those
figures are printed as well: absolute times differ with the machine, quotients should not.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from treefx.errors import InputError
from treefx.kernels import tree_attention
from treefx.kernels.common import Inputs
from treefx.kernels.cpu.rectangles import attend_tile, differentiate_tile, plain_tiles, take_keys
from treefx.kernels.score import make_score
from treefx.kernels.tiles.structure import find_structure
from treefx.output import make_table
from treefx.tools.bench.attention.rivals import Scores, dense, rows_alone
from treefx.tools.bench.attention.sample import Attend, Sample
from treefx.tools.bench.attention.trees import Tree, agent_nodes, repeated_nodes, thought_nodes
from treefx.tools.bench.step import WrongResultError

__all__ = ["CASES", "Case", "choose_device", "make_summary", "run"]

_TOLERANCE = 1e-4
_CHECKED_HEADS = 1
_SECONDS, _SHORT_MS = 2.0, 100.0
_TIMES_ROWS = 1.5
"""16-bit results may be off by so many times what SDPA on separate rows is."""

Step = tuple[float, float]
"""Milliseconds of the forward and of the backward."""


@dataclass(frozen=True)
class Case:
    """Hold methods that are timed together.

    Attributes:
        tree: the forest.
        dtype: of q, k and v.
        scores: logits besides a plain product.
        before: milliseconds forward and backward of each method on two cores of another machine (a Xeon), where they
            are known. Of its agent tree only the numbers of nodes and tokens are.
    """

    tree: Tree
    dtype: torch.dtype = torch.float32
    scores: Scores = Scores()
    before: tuple[tuple[str, Step], ...] = ()


_PREFIX = Tree("prefix 2048 + 8 x 256", repeated_nodes(1, 2048, 8, 256))
_SHORT = Tree("prefix 512 + 8 x 64", repeated_nodes(1, 512, 8, 64))
_LONG_AGENT = Tree("agent, 102 nodes, long", (*agent_nodes(101, (49, 118)), (0, 91)))
CASES = (
    Case(_PREFIX, before=(("tree", (59, 130)), ("dense", (172, 318)), ("rows", (202, 478)))),
    Case(_PREFIX, torch.bfloat16, before=(("tree", (25, 121)), ("dense", (75, 291)), ("rows", (81, 395)))),
    Case(_LONG_AGENT, before=(("tree", (141, 172)), ("dense", (927, 1870)))),
    Case(Tree("tree of thought, 341 nodes", thought_nodes())),
    Case(Tree("agent, 102 nodes", agent_nodes())),
    Case(Tree("agent, 102 nodes", agent_nodes()), torch.bfloat16),
    Case(Tree("GRPO 2 x (512 + 8 x 512)", repeated_nodes(2, 512, 8, 512))),
    Case(Tree("DPO 8 x (384 + 2 x 192)", repeated_nodes(8, 384, 2, 192))),
    Case(Tree("128 tokens, 64 + 4 x 16", repeated_nodes(1, 64, 4, 16))),
    *(
        Case(_SHORT, scores=scores)
        for scores in (
            Scores("window 256", window=256),
            Scores("ALiBi", slopes=True),
            Scores("ALiBi, learned", slopes=True, learned=True),
            Scores("softcap", softcap=20.0),
            Scores("sinks", sinks=True),
        )
    ),
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
    *, heads: int = 8, head_dim: int = 64, repeats: int = 2, cases: Sequence[Case] = CASES
) -> Iterator[dict[str, Any]]:
    """Time forward and backward, each the best of ``repeats`` runs taken in turn.

    Args:
        heads: query and key heads.
        head_dim: width of a head.
        repeats: timed runs of each method.
        cases: the timed cases.

    Yields:
        One record per case: ``case``, ``dtype``, ``score``, ``tokens`` (distinct), ``raw_tokens`` (over the rows),
        forward and backward milliseconds of ``tree``, of the ``floor`` (plain scores only), under the ``dense`` mask
        and of the ``rows``; quotients of the sums, ``tree_over_floor`` among them; and the same from ``before``.

    Raises:
        WrongResultError: tree attention and the dense reference disagree, so nothing is reported.
    """
    for case in cases:
        yield _time_case(case, heads, head_dim, repeats)


def make_summary(records: Sequence[dict[str, Any]]) -> Table:
    """Return the records as a table."""
    headers = ("tree", "dtype", "score", "tokens", "tree, ms", "/ floor", "dense, ms", "dense x", "rows, ms", "rows x")
    rows = [
        (
            record["case"],
            record["dtype"],
            record["score"],
            record["tokens"],
            _pair(record, "tree"),
            record.get("tree_over_floor", "-"),
            _pair(record, "dense"),
            _beside(record, "dense"),
            _pair(record, "rows"),
            _beside(record, "rows"),
        )
        for record in records
    ]
    title = "Attention over a tree, forward / backward; in brackets: an earlier machine"
    return make_table(title, headers, rows)


def _pair(record: dict[str, Any], method: str) -> str:
    times = [f"{record[f'{method}_{way}_ms']:.3g}" for way in ("forward", "backward")]
    before = record.get("before", {}).get(method)
    return " / ".join(times) + ("" if before is None else f" ({before[0]:g} / {before[1]:g})")


def _beside(record: dict[str, Any], method: str) -> str:
    before = record.get(f"before_{method}_over_tree")
    return f"{record[f'{method}_over_tree']:.2f}" + ("" if before is None else f" ({before:.2f})")


def _time_case(case: Case, heads: int, head_dim: int, repeats: int) -> dict[str, Any]:
    ends, rows = case.tree.subtree_end(), case.tree.rows()
    tokens, given = len(ends), case.scores.arguments(heads)
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, tokens, heads, head_dim).to(case.dtype).transpose(2, 3)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    attend: Attend = lambda q, k, v: tree_attention(q, k, v, ends, **given)  # noqa: E731
    if case.dtype == torch.float32:
        _check(case, ends, [tensor[:, :_CHECKED_HEADS].detach() for tensor in (*leaves, grad)])
    else:
        _check_16_bits(case, Sample(ends, rows, leaves, grad), attend)
    others = [value for value in given.values() if isinstance(value, Tensor) and value.requires_grad]
    alone = [[tensor.detach()[:, :, row].requires_grad_() for tensor in leaves] for row in rows]
    grads_alone = [grad[:, :, row] for row in rows]
    under_mask, of_rows = dense(ends, case.scores, given, case.dtype), rows_alone(rows, case.scores, given, case.dtype)
    methods = {
        "tree": lambda: _steps([leaves], [grad], [attend], others),
        "dense": lambda: _steps([leaves], [grad], [under_mask], others),
        "rows": lambda: _steps(alone, grads_alone, of_rows, others),
    }
    if case.scores == Scores():
        methods["floor"] = _floor([tensor.detach() for tensor in (*leaves, grad)], ends)
    return _record(case, tokens, sum(map(len, rows)), _best_ms(methods, repeats))


def _record(case: Case, tokens: int, raw: int, times: dict[str, Step]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "case": case.tree.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "score": case.scores.name,
        "tokens": tokens,
        "raw_tokens": raw,
        "threads": torch.get_num_threads(),
    }
    for name, (forward, backward) in times.items():
        record |= {f"{name}_forward_ms": round(forward, 3), f"{name}_backward_ms": round(backward, 3)}
    for name in ("dense", "rows"):
        record[f"{name}_over_tree"] = round(sum(times[name]) / sum(times["tree"]), 2)
    if "floor" in times:
        record["tree_over_floor"] = round(sum(times["tree"]) / sum(times["floor"]), 3)
    before = dict(case.before)
    if before:
        record["before"] = {name: list(step) for name, step in before.items()}
        for name in before.keys() - {"tree"}:
            record[f"before_{name}_over_tree"] = round(sum(before[name]) / sum(before["tree"]), 2)
    return record


def _steps(inputs: list[list[Tensor]], grads: list[Tensor], attends: Sequence[Attend], others: list[Tensor]) -> Step:
    """Return the forward and backward milliseconds over all inputs."""
    forward = backward = 0.0
    for leaves, grad, attend in zip(inputs, grads, attends, strict=True):
        start = time.perf_counter()
        out = attend(*leaves)
        middle = time.perf_counter()
        torch.autograd.grad(out, [*leaves, *others], grad)
        forward += middle - start
        backward += time.perf_counter() - middle
    return forward * 1e3, backward * 1e3


def _floor(tensors: Sequence[Tensor], ends: Tensor) -> Callable[[], Step]:
    """Return a timer of the kernel's calls on the tree's rectangles, with operands ready."""
    q, k, v, grad = tensors
    factor, inputs = q.shape[-1] ** -0.5, Inputs(q, k, v, ends)
    out, lse = torch.ops.treefx.tree_attention(q, k, v, ends, [], None, _plain_text(factor), "cpu")
    calls = [
        ([tensor[:, :, tile.start : tile.stop] for tensor in (grad, q, out, lse)], take_keys(k, tile.keys), tile)
        for tile in plain_tiles(inputs, find_structure(ends))
    ]
    values = [take_keys(v, tile.keys) for _, _, tile in calls]

    def measure() -> Step:
        start = time.perf_counter()
        for (rows, keys, tile), value in zip(calls, values, strict=True):
            attend_tile(rows[1], keys, value, tile, factor)
        middle = time.perf_counter()
        for (rows, keys, tile), value in zip(calls, values, strict=True):
            differentiate_tile(rows, keys, value, tile, factor)
        return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3

    return measure


def _plain_text(factor: float) -> str:
    return make_score(scale=factor).to_json()


def _best_ms(methods: dict[str, Callable[[], Step]], repeats: int) -> dict[str, Step]:
    """Time methods in turn, so that a busy machine disturbs all; drop the slowest run.

    The first run of each warms it up and counts only where it took seconds anyway.
    """
    found = {name: [method()] for name, method in methods.items()}
    whole = sum(sum(steps[0]) for steps in found.values())
    for _ in range(repeats if whole > _SHORT_MS else 10 * repeats):
        for name, method in methods.items():
            if len(found[name]) < 2 or sum(found[name][0]) < _SECONDS * 1e3:
                found[name].append(method())
    for name, (first, *others) in found.items():
        found[name] = [first, *others] if sum(first) > _SECONDS * 1e3 else others
    return {name: (min(step[0] for step in steps), min(step[1] for step in steps)) for name, steps in found.items()}


def _check(case: Case, ends: Tensor, tensors: list[Tensor]) -> None:
    *inputs, grad = tensors
    given = case.scores.arguments(inputs[0].shape[1])
    results = []
    for impl in ("auto", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        q, k, v = leaves
        out = tree_attention(q, k, v, ends, impl=impl, **given)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for name, got, wanted in zip(("output", "dq", "dk", "dv"), *results, strict=True):
        error = ((got - wanted).norm() / wanted.norm()).item()
        if not error <= _TOLERANCE:  # NaN fails too
            raise WrongResultError(
                f"{case.tree.name}: {name} of tree attention must be within {_TOLERANCE:.0e} of the reference, "
                f"got {error:.2e}: no time is reported"
            )


def _check_16_bits(case: Case, sample: Sample, attend: Attend) -> None:
    wrong = sample.judge("tree", attend, sample.errors_of_rows(), _TIMES_ROWS, {})
    if wrong:
        raise WrongResultError(f"{case.tree.name}: {'; '.join(wrong)}: no time is reported")
