"""The whole interface of ``tree_attention`` as a table: every argument, type and shape, for any implementation.

What an implementation does not refuse by a ``TreefxError`` has to be right: output and all gradients against the dense
reference in float64 on the same numbers.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from treefx.errors import TreefxError
from treefx.kernels import tree_attention

__all__ = ["CASES", "Case", "differs_from_float64"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
PARENTS = [-1, 0, 1, 2, 2, 4, 5, 1, 7, 8, 8, -1, 11, 12, 12, 14, 15, 11, 17, 17]


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        dtype: of all floating tensors.
        heads: of queries and of keys.
        widths: of a key and of a value.
        batch: elements of the batch.
        tokens: of the forest, its first ones.
        options: names of the arguments that are given.
    """

    dtype: torch.dtype
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (8, 8)
    batch: int = 1
    tokens: int = 20
    options: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        names = "+".join(self.options) or "plain"
        shape = "x".join(map(str, (self.batch, *self.heads, self.tokens, *self.widths)))
        return f"{str(self.dtype).removeprefix('torch.')}-{shape}-{names}"


EVERYTHING = ("scale", "window", "softcap", "alibi_slopes", "sinks")
SHAPES: tuple[dict[str, Any], ...] = (
    {"heads": (7, 1)},
    {"heads": (3, 3)},
    {"widths": (8, 16)},
    {"widths": (16, 8)},
    {"batch": 3},
    {"tokens": 1},
    {"tokens": 0},
)
CASES = [
    Case(dtype, **shape, options=options)
    for dtype in TOLERANCE
    for shape, options in (
        *(({}, names) for names in ((), *((name,) for name in EVERYTHING), EVERYTHING, ("depth", "long", "strided"))),
        *((shape, names) for shape in SHAPES for names in ((), EVERYTHING)),
    )
]


def differs_from_float64(case: Case, impl: str) -> str | TreefxError | None:
    """Return an implementation's error, its refusal by name, or ``None`` if all is right."""
    leaves, given, ends, grad = _draw(case)
    wanted = _wanted(case)
    try:
        got = _run(leaves, given, ends, grad, case, impl)
    except TreefxError as refusal:
        return refusal
    for name, first, second in zip(("out", "dq", "dk", "dv", *given), got, wanted, strict=True):
        if first.shape != second.shape or first.dtype != case.dtype:
            return f"{name} is {first.dtype} {list(first.shape)}"
        error = (first.double() - second).abs().max().item() if first.numel() else 0.0
        scale = max(1.0, second.abs().max().item()) if second.numel() else 1.0
        if not error <= TOLERANCE[case.dtype] * scale:  # NaN fails too
            return f"{name} is off by {error / scale:.1e}"
    return None


@lru_cache(maxsize=len(CASES))
def _wanted(case: Case) -> list[Tensor]:
    leaves, given, ends, grad = _draw(case)
    return _run([leaf.double() for leaf in leaves], given, ends, grad.double(), case, "reference")


def _draw(case: Case) -> tuple[list[Tensor], list[str], Tensor, Tensor]:
    """Return q, k, v and the given vectors, the vectors' names, the forest, and a gradient."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    (queries, keys), (width, value_width), n = case.heads, case.widths, case.tokens
    leaves = [normal(case.batch, h, n, d) for h, d in ((queries, width), (keys, width), (keys, value_width))]
    names = [name for name in ("alibi_slopes", "sinks") if name in case.options]
    leaves += [normal(queries).abs() if name == "alibi_slopes" else normal(queries) for name in names]
    ends = list(range(1, n + 1))
    for token in reversed(range(n)):
        if PARENTS[token] >= 0:
            ends[PARENTS[token]] = max(ends[PARENTS[token]], ends[token])
    return leaves, names, torch.tensor(ends, dtype=torch.int32), normal(case.batch, queries, n, value_width)


def _run(tensors: list[Tensor], names: list[str], ends: Tensor, grad: Tensor, case: Case, impl: str) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    q, k, v, *vectors = leaves
    given: dict[str, Any] = {"scale": 0.6, "window": 3, "softcap": 1.5}
    given = {name: value for name, value in given.items() if name in case.options}
    if "depth" in case.options:
        depth = [0] * case.tokens
        for token in range(case.tokens):
            depth[token] = depth[PARENTS[token]] + 1 if PARENTS[token] >= 0 else 0
        given |= {"depth": torch.tensor(depth), "window": 4}
    if "long" in case.options:
        ends = ends.long()
    if "strided" in case.options:
        q, k, v = (tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (q, k, v))
    out = tree_attention(q, k, v, ends, impl=impl, **given, **dict(zip(names, vectors, strict=True)))
    return [out, *torch.autograd.grad(out, leaves, grad)]
