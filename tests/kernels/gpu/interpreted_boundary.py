"""Keys from outside in Triton's interpreter against the dense reference in float64.

Not collected by itself: test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1.
"""

import warnings
from dataclasses import replace

import pytest
import torch

from tests.kernels.gpu.interpreted_cases import (
    BRANCH_AT_57,
    SCORES,
    SMALL,
    assert_equal,
    check,
    computed,
    draw,
    expected,
)
from treefx.kernels import reference
from treefx.kernels.gpu import dispatch
from treefx.kernels.gpu.triton_tree import attention
from treefx.kernels.gpu.triton_tree.launch import Attention, KeySource, Launch
from treefx.kernels.ops import attend
from treefx.kernels.tiles.tree_blocks import Keys

_OF_HEADS = 7
"""Results: the output, the log-sum-exp, dq, dk, dv, and the gradients of the boundary's keys and values."""


@pytest.mark.parametrize("name", ["plain", "window", "negative", "softcap", "bias"])
@pytest.mark.parametrize("sinks", [False, True])
def test_boundary(name: str, sinks: bool) -> None:
    """The first queries that see a key are read with the last; values of keys are those from its own place on."""
    check(draw(*SMALL, heads=(6, 2), outside=70, sinks=sinks), SCORES[name])


def test_a_boundary_of_many_tiles() -> None:
    case = draw(*BRANCH_AT_57, heads=(4, 1), widths=(24, 16), outside=200)
    check(case, SCORES["softcap"])
    # Without the gradients of slopes, which test_buffer_gradients.py compares by what their large terms allow.
    got, wanted = computed(case, SCORES["alibi"]), expected(case, SCORES["alibi"])
    assert_equal(got[:_OF_HEADS], wanted[:_OF_HEADS])


def test_boundary_through_the_operator() -> None:
    case = draw(*SMALL, outside=5)
    inputs, outside = case.narrow, case.narrow.boundary
    assert outside is not None
    leaves = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v, outside.k, outside.v)]
    results = []
    for impl in ("triton", "reference"):
        out = attend(*leaves[:3], inputs.subtree_end, SCORES["plain"], impl=impl, boundary=outside)
        results.append([out, *torch.autograd.grad(out, leaves, case.grad.to(out.dtype))])
    assert_equal(results[0], [tensor.double() for tensor in results[1]])


def test_keys_in_a_pool() -> None:
    """The keys of ancestors are used where they lie: the result is that of a gathered copy."""
    case = draw(*SMALL, outside=20)
    outside = case.narrow.boundary
    assert outside is not None
    rows = torch.randperm(50, dtype=torch.int32)[:20]
    pools = [torch.full((1, 2, 50, 16), torch.nan) for _ in range(2)]
    for pool, keys in zip(pools, (outside.k, outside.v), strict=True):
        pool[:, :, rows.long()] = keys
    runner = Attention(case.narrow, SCORES["window"], choose=attention._interpreted_config)
    gathered, own = runner.sources()
    pooled = KeySource(*pools, gathered.keys, rows)
    results = []
    for source in (gathered, pooled):
        out, lse = attention.forward_from(runner, [source, own])
        grad = case.grad.float()
        dq, pairs, _ = attention.backward_from(runner, [source, own], grad, out, lse)
        results.append([out, lse, dq, *pairs[0], *pairs[1]])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_sources_may_be_empty() -> None:
    case = draw(*SMALL)
    runner = Attention(case.narrow, SCORES["plain"], choose=attention._interpreted_config)
    nobody = torch.empty(0, dtype=torch.int32)
    empty = KeySource(case.narrow.k[:, :, :0], case.narrow.v[:, :, :0], Keys(nobody, nobody))
    out, lse = attention.forward_from(runner, [empty, runner.own_keys()])
    plain = attention.forward(case.narrow, SCORES["plain"])
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def test_a_boundary_that_nobody_sees_takes_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts without ancestors have two such keys: sizes of at least two serve all parts."""
    case, ran = draw(*SMALL, outside=2, sinks=True), []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: (ran.append(launch.kernel.__name__), run(launch))[1])
    assert case.narrow.boundary is not None
    case.narrow.boundary.lo.zero_()
    case.narrow.boundary.hi.zero_()
    check(case, SCORES["plain"])
    assert ran == ["forward", "prologue", "backward_keys", "backward_queries"]
    ran.clear()
    case.narrow.boundary.hi[1] = 1  # which both inputs read
    check(case, SCORES["plain"])
    assert ran.count("forward") == ran.count("backward_keys") == ran.count("backward_queries") == 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_is_right_of_keys_that_nobody_sees_says_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part of a plan has such keys. Those of a later one are compared, though its first tokens see none."""
    monkeypatch.setattr(dispatch, "_problems", {})
    monkeypatch.setattr(dispatch, "_CHECKED_TOKENS", 9)
    right = Attention.boundary_keys

    def wrong(given: Attention) -> KeySource:
        source = right(given)
        return replace(source, v=1.1 * source.v)

    monkeypatch.setattr(Attention, "boundary_keys", wrong)
    case = draw(*SMALL, outside=20)
    assert case.narrow.boundary is not None and case.wide.boundary is not None
    tokens = case.narrow.q.shape[2]
    for boundary in (case.narrow.boundary, case.wide.boundary):
        boundary.lo.fill_(9)
        boundary.hi.fill_(9)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "treefx")  # of others, Triton 3.6's interpreter has some
        dispatch.forward(case.narrow, SCORES["plain"])
    for boundary in (case.narrow.boundary, case.wide.boundary):
        boundary.hi.fill_(tokens)
    with pytest.warns(RuntimeWarning, match="FlexAttention runs this attention.*it is off in the output"):
        got = dispatch.forward(case.narrow, SCORES["plain"])
    assert_equal(list(got), list(reference.forward(case.wide, SCORES["plain"])))
    assert len(dispatch._problems) == 2
