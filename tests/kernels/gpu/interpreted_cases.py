"""Attentions for Triton's interpreter: scores, random inputs, and what the reference makes of them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import treefx
from tests.strategies import Rows
from treefx.kernels import reference
from treefx.kernels.common import Boundary, Inputs
from treefx.kernels.gpu.triton_tree import attention
from treefx.kernels.score import Expr, Score, make_score

DEPTH_Q, DEPTH_K = ("load", 0, ("q",)), ("load", 0, ("k",))
BIAS = ("load", 1, ("head",), ("q",), ("k",))


def const(value: float) -> Expr:
    return ("const", value)


SCALED: Expr = ("mul", ("dot",), const(0.3))
SCORES: dict[str, Score] = {
    "plain": make_score(scale=0.3),
    "window": make_score(scale=0.3, window=3, depth=0),
    "softcap": make_score(scale=0.3, softcap=1.5),
    "alibi": make_score(scale=0.3, depth=0, alibi=3),
    "chunked": Score(SCALED, ("eq", ("floordiv", DEPTH_Q, const(4)), ("floordiv", DEPTH_K, const(4)))),
    "bias": Score(("add", SCALED, BIAS)),
    "relative": Score(("add", SCALED, ("load", 2, ("head",), ("min", ("sub", DEPTH_Q, DEPTH_K), const(5))))),
    "negative": Score(("sub", SCALED, ("float", ("mod", ("sub", ("k",), ("q",)), const(7))))),
    "floored": Score(("add", SCALED, ("mul", ("floordiv", ("sub", ("k",), ("q",)), const(3)), const(0.1)))),
    "powers": Score(("pow", ("add", SCALED, const(0.5)), const(3)), ("ne", ("pow", DEPTH_K, const(2)), const(9))),
    "gated": Score(("mul", ("sigmoid", ("dot",)), ("sub", ("exp", ("neg", ("abs", SCALED))), ("load", 3, ("head",))))),
    "clamped": Score(("max", ("min", SCALED, const(0.7)), BIAS), ("or", ("not", ("lt", DEPTH_K, const(2))), DEPTH_Q)),
    "chosen": Score(("where", ("gt", ("dot",), const(0.0)), SCALED, ("sqrt", ("add", ("abs", SCALED), const(1.0))))),
    "masked": Score(("where", ("le", ("mod", DEPTH_K, const(3)), const(1)), SCALED, const(-torch.inf))),
    "keys of the query": Score(SCALED, ("load", 4, ("q",), DEPTH_K)),
    "no product": Score(("float", ("neg", ("sub", DEPTH_Q, DEPTH_K)))),
}

ODD_ROWS: dict[str, Rows] = {
    "one token": [[0]],
    "one row": [[*range(33)]],
    "all shared": [[*range(17)]] * 3,
    "leaves of one token": [[0, leaf] for leaf in range(1, 40)],
    "nothing shared": [[0], [1, 2], [3]],
}


@dataclass
class Case:
    """One attention in float64 and in the type under test, with the same numbers."""

    wide: Inputs
    narrow: Inputs
    grad: Tensor

    @property
    def wanted_grads(self) -> list[bool]:
        return [buffer.is_floating_point() for buffer in self.wide.buffers]


def forest(rows: Rows) -> tuple[Tensor, Tensor]:
    built = treefx.Forest.from_sequences(rows)
    return built.subtree_end.to(torch.int32), built.depth


def draw(
    ends: Tensor,
    depth: Tensor,
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (16, 16),
    batch: int = 1,
    sinks: bool = False,
    outside: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    tokens, generator = len(ends), torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).double()

    tensors = [normal(batch, h, tokens, d) for h, d in zip((heads[0], heads[1], heads[1]), (widths[0], *widths))]
    boundary = None
    if outside:
        lo = torch.randint(0, tokens, (outside,), generator=generator, dtype=torch.int32)
        hi = (lo + torch.randint(0, tokens, (outside,), generator=generator, dtype=torch.int32)).clamp(max=tokens)
        hi[::7] = lo[::7] - 2  # no query sees these
        keys = [normal(batch, heads[1], outside, width) for width in widths]
        boundary = Boundary(*keys, lo, hi)
        depth = torch.cat([torch.randint(0, 3, (outside,), generator=generator), depth + 3])
    total = tokens + outside
    buffers = [depth, normal(heads[0], total, total), normal(heads[0], 6), normal(heads[0])]
    buffers.append(torch.rand(total, int(depth.max()) + 1, generator=torch.Generator().manual_seed(2)) < 0.5)
    wide = Inputs(*tensors, ends, buffers, normal(heads[0]) if sinks else None, boundary)
    return Case(wide, as_type(wide, dtype), normal(batch, heads[0], tokens, widths[1]))


def as_type(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    outside = inputs.boundary
    return replace(
        inputs,
        q=cast(inputs.q),
        k=cast(inputs.k),
        v=cast(inputs.v),
        buffers=[cast(buffer) for buffer in inputs.buffers],
        sinks=None if inputs.sinks is None else cast(inputs.sinks),
        boundary=outside and replace(outside, k=cast(outside.k), v=cast(outside.v)),
    )


def other_numbers(case: Case, seed: int) -> Case:
    """The case of another layer: the same forest, and other numbers in all that is no vector of the forest."""
    generator = torch.Generator().manual_seed(seed)

    def other(tensor: Tensor) -> Tensor:
        return (tensor + torch.randn(tensor.shape, generator=generator)).float().double()

    wide = case.wide
    buffers = [other(buffer) if buffer.is_floating_point() else buffer for buffer in wide.buffers]
    q, k, v = map(other, (wide.q, wide.k, wide.v))
    wide = replace(wide, q=q, k=k, v=v, buffers=buffers, sinks=None if wide.sinks is None else other(wide.sinks))
    return replace(case, wide=wide, narrow=as_type(wide, torch.float32), grad=other(case.grad))


def expected(case: Case, score: Score) -> list[Tensor]:
    out, lse = reference.forward(case.wide, score)
    *grads, rest = reference.backward(case.grad, case.wide, out, lse, score, case.wanted_grads)
    return [out, lse, *grads, *rest]


def computed(case: Case, score: Score) -> list[Tensor]:
    out, lse = attention.forward(case.narrow, score)
    grad = case.grad.to(out.dtype)
    *grads, rest = attention.backward(grad, case.narrow, out, lse, score, case.wanted_grads)
    return [out, lse, *grads, *rest]


def assert_equal(got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-5) -> None:
    assert len(got) == len(wanted)
    for number, (first, second) in enumerate(zip(got, wanted, strict=True)):
        assert first.shape == second.shape
        finite = torch.isfinite(second)
        assert torch.equal(torch.isfinite(first), finite), number
        error = (first.double() - second)[finite].norm()
        scale = max(second[finite].norm().item(), 1.0)  # gradients may vanish exactly; what they sum is of order 1
        assert error <= tolerance * scale, (number, error.item(), scale)


def check(case: Case, score: Score, tolerance: float = 1e-5) -> None:
    assert_equal(computed(case, score), expected(case, score), tolerance)


BRANCH_AT_57 = forest([[*range(57), *range(100, 150)], [*range(57), *range(200, 215)], [*range(3), *range(300, 330)]])
BRANCH_AT_27 = forest([[*range(27), *range(100, 122)], [*range(27), *range(200, 208)], [*range(3), *range(300, 314)]])
"""The same shape for tiles of 16, where the other one takes hundreds of them."""
SMALL = forest([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [1, 7], [1, 7, 8, 8, 8], [5, 5], [5, 6, 1, 1, 1, 1, 1]])
