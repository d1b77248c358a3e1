"""Check the kernels in two stages: no overwritten reads, and errors as of SDPA on rows."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treefx.kernels import tree_attention
from treefx.kernels.gpu.triton_tree.arguments import scratch
from treefx.tools.bench.attention.sample import Sample, rounded
from treefx.tools.bench.attention.trees import Tree, repeated_nodes, thought_nodes
from treefx.tools.bench.gpu.scale import Heads, Scale, draw

__all__ = ["CORRECT", "FORMS", "SANITIZE", "Attention", "correct", "rehearsed", "sanitize"]

_OF_QUERIES = 1
"""Where the gradient of the queries is among the results."""
_ALLOWED = 1.5
"""Times the error of SDPA on separate rows."""


@dataclass(frozen=True)
class Attention:
    """One attention in one of `FORMS`."""

    tree: Tree
    heads: Heads
    form: str

    @property
    def name(self) -> str:
        """As a table shows it."""
        return f"{self.tree.name}, {self.heads}, {self.form}"


FORMS = {
    "one pass": ("plain", False),
    "two passes": ("plain", True),
    "Gluon": ("gluon", True),
    "Gluon, one pass": ("gluon_once", False),
}
"""The path of kernels, and whether gradients must be the same bits every time: if not, long rows take one pass."""
_PREFIX = Tree("prefix", repeated_nodes(1, 1500, 5, 211))
_TREES = (
    _PREFIX,
    Tree("branch at 57", ((-1, 57), (0, 300), (0, 41), (2, 7), (2, 600))),
    Tree("thought", thought_nodes(depth=3)),
    Tree("leaves", ((-1, 3), *((0, 1),) * 2000)),
    Tree("long prefix", ((-1, 20_000), (0, 9), (0, 70))),
)
_WIDE = Heads(16, 4, 128, 128)
_HEADS = (Heads(8, 8, 64, 64), Heads(14, 2, 128, 128), Heads(10, 2, 128, 128), Heads(4, 2, 80, 80))
SANITIZE = tuple(Attention(_PREFIX, heads, form) for heads in (_WIDE, Heads(14, 2, 128, 128)) for form in FORMS)
CORRECT = (
    *(Attention(tree, _WIDE, form) for tree in _TREES for form in FORMS),
    *(Attention(_TREES[2], heads, form) for heads in _HEADS for form in FORMS),
    Attention(_TREES[2], Heads(8, 2, 256, 256), "two passes"),
)


def rehearsed(case: Attention) -> Attention:
    """Return the case for Triton's interpreter: first short nodes, one key head, no Gluon."""
    nodes = tuple((parent, min(length, 40)) for parent, length in case.tree.nodes[:4])
    group = case.heads.queries // case.heads.keys
    form = {"Gluon": "two passes", "Gluon, one pass": "one pass"}.get(case.form, case.form)
    return Attention(Tree(case.tree.name, nodes), Heads(group, 1, 32, 32), form)


def sanitize(scale: Scale, case: Attention) -> dict[str, Any]:
    """Run forward and backward twice under the stage's sanitizer, and compare the bits.

    Of all but dq in one pass, whose sums have no fixed order.
    """
    import triton

    triton.set_allocator(scratch)  # the sanitizer has kernels keep notes in memory of the device, plain ones too
    with torch.autograd.set_multithreading_enabled(False):  # another thread has another allocator
        results = [_run(scale, case) for _ in range(2)]
    same = [torch.equal(*pair) for pair in zip(*results, strict=True)]
    if not FORMS[case.form][1]:
        del same[_OF_QUERIES]
    mode = str(getattr(triton.knobs.compilation, "instrumentation_mode", "") or "none")
    wrong = [] if all(same) else ["two runs must give the same bits, and do not"]
    if not scale.rehearsal and mode != "consan":
        wrong.append(f"kernels must be compiled with the concurrency sanitizer, and were with {mode}")
    return {"sanitizer": mode, "same_bits": all(same), "wrong": wrong}


def _run(scale: Scale, case: Attention) -> list[Tensor]:
    ends, leaves, grad = draw(scale, case.tree, case.heads)
    q, k, v = leaves
    with _in_form(case.form) as deterministic:
        out = tree_attention(q, k, v, ends, impl="triton", deterministic=deterministic)
        results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    scale.synchronize()
    return results


@contextmanager
def _in_form(form: str) -> Iterator[bool]:
    """Let attention run in one form only: a fallback's warning becomes an error."""
    os.environ["TREEFX_KERNEL_PATH"], deterministic = FORMS[form]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*treefx.*is switched off")
        yield deterministic


def correct(scale: Scale, case: Attention) -> dict[str, Any]:
    """Compare results of sampled tokens with float64, within 1.5 times SDPA's errors."""
    ends, leaves, grad = draw(scale, case.tree, case.heads)
    rows = [row.to(scale.device) for row in case.tree.rows()]
    sample = Sample(ends, rows, leaves, grad)
    limits = sample.errors_of_rows()
    record: dict[str, Any] = {"rows_errors": rounded(limits)}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tree_attention(q, k, v, ends, impl="triton", deterministic=deterministic)

    with _in_form(case.form) as deterministic:
        record["wrong"] = sample.judge("tree", attend, limits, _ALLOWED, record)
    return record
