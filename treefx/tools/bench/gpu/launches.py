"""Measure the seconds of a program before its first tile, and of a tile, by configuration.

Time on a device is that of its programs side by side: ``milliseconds * processors = programs * overhead + full tiles *
full + partial tiles * partial``, fitted to forests with many tiles of either kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from treefx.kernels.common import Inputs, empty_outputs
from treefx.kernels.gpu.triton_tree.attention import attention_of
from treefx.kernels.gpu.triton_tree.configs import Config, candidates, one_pass_fits
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch
from treefx.kernels.gpu.triton_tree.paths import gluon_refusal
from treefx.kernels.gpu.triton_tree.tuning import keep_rates, rates_key, tile_name
from treefx.kernels.score import make_score
from treefx.planning.execution.nonnegative import fit_nonnegative
from treefx.tools.bench.attention.trees import Tree, repeated_nodes, thought_nodes
from treefx.tools.bench.gpu.scale import Heads, Scale, draw

__all__ = ["KERNELS", "PROLOGUE", "RATES", "Form", "keep", "prologue", "rates", "rehearsed"]

KERNELS = {
    "plain": ("forward", "backward_keys", "backward_queries", "backward_once"),
    "gluon": ("forward", "backward_keys", "backward_queries", "backward_once"),
}
"""By the path."""
_BY_KEY = ("backward_keys", "backward_once")


@dataclass(frozen=True)
class Form:
    """One kernel in one form, for heads of one kind."""

    kernel: str
    path: str
    heads: Heads

    @property
    def name(self) -> str:
        """As a table shows it."""
        return f"{self.kernel}, {self.path}, {self.heads}"


def _forms(*heads: Heads) -> tuple[Form, ...]:
    return tuple(Form(kernel, path, one) for one in heads for path in KERNELS for kernel in KERNELS[path])


PROLOGUE = _forms(Heads(32, 8, 128, 128))
RATES = _forms(Heads(32, 8, 128, 128), Heads(32, 8, 64, 64))
_TREES = (
    Tree("4k in a row", ((-1, 4096),)),
    Tree("12k in a row", ((-1, 12_288),)),
    Tree("prefix", repeated_nodes(4, 2048, 8, 256)),
    Tree("short groups", repeated_nodes(16, 300, 8, 150)),
    Tree("thought", thought_nodes(depth=5)),
)
_TINY = (
    Tree("96 in a row", ((-1, 96),)),
    Tree("200 in a row", ((-1, 200),)),
    Tree("prefix", repeated_nodes(1, 64, 2, 40)),
    Tree("leaves", repeated_nodes(1, 8, 16, 3)),
)


def rehearsed(form: Form) -> Form:
    """Return the form as it runs in Triton's interpreter."""
    return replace(form, heads=Heads(2, 1, 32, 32))


def prologue(scale: Scale, form: Form) -> dict[str, Any]:
    """Time a launch with empty lists: descriptors, first loads and results alone."""
    tree = _TINY[0] if scale.rehearsal else _TREES[1]
    attention, problem = _attention(scale, tree, form)
    if problem:
        return {"wrong": [], "not_run": problem}
    launch = _launch(attention, form.kernel)
    ends = [name for name in ("start", "middle", "stop") if name in launch.arguments]
    zeros: dict[str, Any] = {name: torch.zeros_like(launch.arguments[name]) for name in ends}
    empty = replace(launch, arguments={**launch.arguments, **zeros}, after=())
    programs, taken = launch.grid[0] * launch.grid[1], scale.milliseconds(empty.run)
    turns = -(-programs // scale.processors)
    return {
        "tile": tile_name(launch.config),
        "programs": programs,
        "ms": round(taken, 4),
        "us_per_turn": round(1000 * taken / turns, 2),
        "wrong": [],
    }


def rates(scale: Scale, form: Form) -> dict[str, Any]:
    """Time every configuration of a kernel on several forests, and fit programs and tiles."""
    trees = _TINY if scale.rehearsal else _TREES
    given = [_attention(scale, tree, form) for tree in trees]
    problem = next((problem for _, problem in given if problem), "")
    if problem:
        return {"wrong": [], "not_run": problem}
    first = given[0][0].problem(form.kernel)
    found = {}
    for config in dict.fromkeys(candidates(first)):
        found[tile_name(config)] = _fit(scale, [_with(attention, config) for attention, _ in given], form.kernel)
    return {"rates": found, "of": rates_key(first), "wrong": []}


def keep(records: Sequence[dict[str, Any]]) -> Path:
    """Choose kernels by the rates of these records from now on; return their file."""
    return keep_rates({
        record["of"]: {
            tile: [found[name] for name in ("program_us", "full_us", "partial_us")]
            for tile, found in record["rates"].items()
            if "problem" not in found
        }
        for record in records
        if "of" in record
    })  # fmt: skip


def _fit(scale: Scale, attentions: Sequence[Attention], kernel: str) -> dict[str, Any]:
    features, times = [], []
    try:
        for attention in attentions:
            launch = _launch(attention, kernel)
            features.append(_work(attention, kernel))
            times.append(1000 * scale.milliseconds(launch.run) * scale.processors)
    except Exception as reason:  # of many types: no room in shared memory, a pass of the compiler that fails
        return {"problem": f"{type(reason).__name__}: {str(reason)[:120]}"}
    overhead, full, partial = fit_nonnegative(features, times).tolist()
    fitted = [sum(a * b for a, b in zip(row, (overhead, full, partial), strict=True)) for row in features]
    worst = max(abs(guess - time) / time for guess, time in zip(fitted, times, strict=True))
    return {"program_us": overhead, "full_us": full, "partial_us": partial, "worst_error": round(worst, 3)}


def _work(attention: Attention, kernel: str) -> tuple[int, int, int]:
    """Programs, full tiles and partial tiles of a kernel, of all heads."""
    blocks = attention.blocks(attention.own_keys(), attention.config(kernel))
    lists = blocks.by_key if kernel in _BY_KEY else blocks.by_query
    programs = len(blocks.key_programs.order) if kernel in _BY_KEY else len(lists.order)
    full = int((lists.middle - lists.start[:-1]).sum())
    return programs * attention.heads, full * attention.heads, (len(lists.tiles) - full) * attention.heads


def _attention(scale: Scale, tree: Tree, form: Form) -> tuple[Attention, str]:
    """Return the attention in its form, and why that cannot run, if it cannot."""
    ends, leaves, _ = draw(scale, tree, form.heads)
    q, k, v = (leaf.detach() for leaf in leaves)
    attention = attention_of(Inputs(q, k, v, ends), make_score(scale=form.heads.width**-0.5))
    attention = replace(attention, path=form.path, once=form.kernel == "backward_once")
    if attention.once and not one_pass_fits(attention.problem(form.kernel)):
        return attention, "one pass does not fit"
    return attention, (gluon_refusal(attention) or "") if form.path == "gluon" else ""


def _with(attention: Attention, config: Config) -> Attention:
    return replace(attention, choose=lambda problem: config)


def _launch(attention: Attention, kernel: str) -> Launch:
    """Return the launch of a kernel on an attention's own keys, with its inputs ready."""
    inputs, source = attention.inputs, attention.own_keys()
    out, lse = (x.zero_() for x in empty_outputs(inputs.q, inputs.v))
    if kernel == "forward":
        return attention.forward(source, out, lse)
    first, of_keys, of_queries = attention.prologue(out, out, lse)
    first.run()
    if kernel in _BY_KEY:
        return attention.backward_keys(source, of_keys, torch.empty_like(inputs.k), torch.empty_like(inputs.v))
    return attention.backward_queries(source, of_queries, torch.empty_like(inputs.q))
