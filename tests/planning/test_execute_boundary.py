"""Attention with a boundary: any subset of a forest, its ancestors as keys from outside, against the forest."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.forests import random_parents
from treefx.errors import InputError
from treefx.kernels import ops, reference
from treefx.kernels.common import Boundary
from treefx.kernels.score import Score, make_score

FEATURES = ("window", "softcap", "alibi", "sinks")
COMBINATIONS = list(itertools.chain.from_iterable(itertools.combinations(FEATURES, n) for n in range(5)))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}


@dataclass
class Case:
    """A forest, and the tokens of it that run as one part."""

    end: Tensor
    depth: Tensor
    own: Tensor
    outside: Tensor

    @classmethod
    def cut(cls, parents: list[int], own: list[int]) -> "Case":
        count = len(parents)
        end, depth = list(range(1, count + 1)), [0] * count
        for token in reversed(range(count)):
            if parents[token] >= 0:
                end[parents[token]] = max(end[parents[token]], end[token])
        above: set[int] = set()
        for token in range(count):
            depth[token] = depth[parents[token]] + 1 if parents[token] >= 0 else 0
        for token in own:
            while parents[token] >= 0:
                token = parents[token]
                above.add(token)
        lists = (end, depth, sorted(own), sorted(above - set(own)))
        return cls(*[torch.tensor(numbers, dtype=torch.int64) for numbers in lists])

    def local_end(self, tokens: Tensor) -> Tensor:
        return torch.searchsorted(self.own, self.end[tokens]).to(torch.int32)

    def boundary(self, k: Tensor, v: Tensor) -> Boundary:
        first = torch.searchsorted(self.own, self.outside).to(torch.int32)
        return Boundary(k[:, :, self.outside], v[:, :, self.outside], first, self.local_end(self.outside))

    @property
    def depths(self) -> Tensor:
        return torch.cat([self.depth[self.outside], self.depth[self.own]])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    parents = draw(random_parents())[:60]
    own = draw(st.sets(st.sampled_from(range(len(parents))), min_size=1))
    return Case.cut(parents, sorted(own))


def leaves_of(count: int, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    sizes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])]
    return [torch.randn(1, count, h, d, dtype=dtype).transpose(1, 2).requires_grad_() for h, d in sizes]


def score_of(names: tuple[str, ...]) -> Score:
    return make_score(
        scale=0.4,
        window=5 if "window" in names else None,
        softcap=1.5 if "softcap" in names else None,
        alibi=1 if "alibi" in names else None,
        depth=0 if {"window", "alibi"} & set(names) else None,
    )


def assert_part_equals_forest(
    case: Case,
    impl: str,
    names: tuple[str, ...],
    dtype: torch.dtype,
    widths: tuple[int, int] = (8, 8),
    tolerance: float | None = None,
) -> None:
    leaves = leaves_of(len(case.end), (4, 2), widths, dtype)
    slopes = torch.rand(4, dtype=dtype, requires_grad=True)
    sinks = torch.randn(4, dtype=dtype, requires_grad=True) if "sinks" in names else None
    leaves += [slopes] * ("alibi" in names) + ([] if sinks is None else [sinks])
    if impl == "flex":
        leaves = [leaf.detach() for leaf in leaves]
        slopes, sinks = slopes.detach(), None if sinks is None else sinks.detach()
    q, k, v = leaves[:3]

    def buffers(depth: Tensor) -> list[Tensor]:
        return [depth, slopes] if "alibi" in names else [depth] if "window" in names else []

    score, own = score_of(names), case.own
    whole = ops.attend(q, k, v, case.end.to(torch.int32), score, buffers(case.depth), sinks, "reference")
    part = ops.attend(
        q[:, :, own], k[:, :, own], v[:, :, own], case.local_end(own), score, buffers(case.depths), sinks, impl,
        case.boundary(k, v),
    )  # fmt: skip
    expected = whole[:, :, own]
    wanted, got = [expected], [part]
    if impl != "flex":  # FlexAttention differentiates on GPUs only
        grad = torch.randn_like(expected)
        wanted += torch.autograd.grad(expected, leaves, grad)
        got += torch.autograd.grad(part, leaves, grad)
    for first, second in zip(got, wanted, strict=True):
        difference, scale = (first - second).abs().max(), second.abs().max().clamp(min=1.0)
        assert difference <= (tolerance or TOLERANCE[dtype]) * scale, f"{names}: {difference / scale:.1e}"


FORK = Case.cut([-1, 0, 1, 2, 2, 4, 1, 6], [3, 4, 5, 7])
"""Own tokens below two branch points: tokens 0, 1 are seen by all of them, 2 by the first three, 6 by the last."""


@settings(max_examples=40)
@given(case=cases(), names=st.sampled_from(COMBINATIONS))
def test_reference_in_float64(case: Case, names: tuple[str, ...]) -> None:
    assert_part_equals_forest(case, "auto", names, torch.float64, (8, 6))


@settings(max_examples=30)
@given(case=cases(), names=st.sampled_from(COMBINATIONS), width=st.sampled_from([8, 6]))
def test_cpu(case: Case, names: tuple[str, ...], width: int) -> None:
    assert_part_equals_forest(case, "auto", names, torch.float32, (8, width))


@pytest.mark.parametrize("names", [("window",), ("alibi",), ("window", "alibi", "sinks"), ("softcap",), FEATURES, ()])
def test_cpu_with_many_tiles(names: tuple[str, ...]) -> None:
    """Own tokens of three branches: of several groups of queries, some see a run of the boundary and some do not."""
    parents = [*range(-1, 399), *range(199, 599), 150, *range(800, 1099), 700, *range(1100, 1149)]
    own = [*range(250, 400), *range(620, 800), *range(830, len(parents))]
    assert_part_equals_forest(Case.cut(parents, own), "auto", names, torch.float32, (8, 8 if names else 6), 1e-5)


def test_a_boundary_never_takes_dense_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would grow with the square of a part, which no limit on memory allows for."""

    def dense(*arguments: Any) -> None:
        raise AssertionError("the dense reference ran")

    monkeypatch.setattr(reference, "forward", dense)
    monkeypatch.setattr(reference, "backward", dense)
    q, k, v = (x.detach().requires_grad_() for x in leaves_of(8, (4, 2), (8, 8), torch.float32))
    own = FORK.own
    for names in (("window",), ("softcap",), ("window", "sinks")):
        buffers, sinks = [FORK.depths] * ("window" in names), torch.zeros(4) if "sinks" in names else None
        part = (x[:, :, own] for x in (q, k, v))
        boundary = FORK.boundary(k, v)
        out = ops.attend(*part, FORK.local_end(own), score_of(names), buffers, sinks, "auto", boundary)
        out.sum().backward()


@pytest.mark.parametrize("names", [(), FEATURES])
def test_flex(names: tuple[str, ...]) -> None:
    assert_part_equals_forest(FORK, "flex", names, torch.float64)


def test_many_blocks_of_flex() -> None:
    """Blocks of 128: full ones, partial ones, ragged ones on both sides."""
    parents = [*range(-1, 299), *range(199, 299), 150, *range(400, 449)]
    own = [*range(180, 300), *range(330, len(parents))]
    assert_part_equals_forest(Case.cut(parents, own), "flex", ("alibi",), torch.float64)
    assert_part_equals_forest(Case.cut(parents, own), "flex", (), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wrong", ["interval", "depth", "order"])
def test_wrong_boundary(wrong: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(case: Case, k: Tensor, v: Tensor) -> Boundary:
        first = torch.searchsorted(case.own, case.outside).to(torch.int32)
        outside = case.outside.flip(0) if wrong == "order" else case.outside
        end = case.local_end(case.outside) if wrong != "interval" else torch.full_like(first, len(case.own))
        return Boundary(k[:, :, outside], v[:, :, outside], first, end)

    def packed_depths(case: Case) -> Tensor:
        return torch.cat([case.outside, case.own])

    if wrong == "depth":
        monkeypatch.setattr(Case, "depths", property(packed_depths))
    monkeypatch.setattr(Case, "boundary", spoiled)
    with pytest.raises(AssertionError):
        assert_part_equals_forest(FORK, "auto", ("alibi",), dtype)


def test_without_a_boundary() -> None:
    """P = 0, and P = 2 of unseen keys, are the forest itself."""
    case = Case.cut([-1, 0, 1, 1, 0], [0, 1, 2, 3, 4])
    end, score, never = case.end.to(torch.int32), score_of(()), torch.zeros(2, dtype=torch.int32)
    for impl, dtype in (("cpu", torch.float32), ("reference", torch.float64), ("flex", torch.float64)):
        assert_part_equals_forest(case, impl, (), dtype)
        q, k, v = (x.detach() for x in leaves_of(5, (4, 2), (8, 8), dtype))
        padding = Boundary(k[:, :, :2], v[:, :, :2], never, never)
        padded = ops.attend(q, k, v, end, score, impl=impl, boundary=padding)
        torch.testing.assert_close(padded, ops.attend(q, k, v, end, score, impl="reference"))


def operands(dtype: torch.dtype) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What comes before the score, and the boundary, which comes last."""
    q, k, v = leaves_of(8, (4, 2), (8, 8), dtype)
    own, boundary = FORK.own, FORK.boundary(k.detach(), v.detach())
    q, k, v = (x.detach()[:, :, own].requires_grad_() for x in (q, k, v))
    outside = (boundary.k.requires_grad_(), boundary.v.requires_grad_(), boundary.lo, boundary.hi)
    slopes, sinks = (torch.rand(4, dtype=dtype, requires_grad=True) for _ in range(2))
    return (q, k, v, FORK.local_end(own), [FORK.depths, slopes], sinks), outside


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(dtype: torch.dtype) -> None:
    text = score_of(("window", "alibi")).to_json()
    own, outside = operands(dtype)
    torch.library.opcheck(torch.ops.treefx.tree_attention, (*own, text, "auto", *outside))


@pytest.mark.parametrize("names", [(), ("alibi", "window")])
def test_opcheck_backward(names: tuple[str, ...]) -> None:
    own, outside = (
        [x.detach() if isinstance(x, Tensor) else [y.detach() for y in x] for x in part]
        for part in operands(torch.float32)
    )
    text = score_of(names).to_json()
    out, lse = torch.ops.treefx.tree_attention(*own, text, "auto", *outside)
    arguments = (torch.randn_like(out), *own, out, lse, text, "auto", [False, bool(names)], *outside)
    torch.library.opcheck(
        torch.ops.treefx.tree_attention_backward, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_half_a_boundary_is_refused() -> None:
    own, outside = operands(torch.float32)
    with pytest.raises(InputError, match="keys, values, lo and hi, got 2 of the four"):
        torch.ops.treefx.tree_attention(*own, score_of(()).to_json(), "auto", *outside[:2])
