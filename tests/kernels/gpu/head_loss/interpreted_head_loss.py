"""The kernels of LM head and loss in Triton's interpreter against plain PyTorch in float64.

Not collected by itself: tests/kernels/gpu/test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import treefx
from treefx import logprobs
from treefx.kernels.gpu.triton_tree.small_launches import Launch
from treefx.kernels.head_loss import choose, eager, fused
from treefx.kernels.head_loss.fused import Chunk, Numbers, Picks, Rows
from treefx.kernels.head_loss.problem import HeadLoss

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
    pytest.mark.filterwarnings("ignore:All-NaN"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # of Triton 3.6's interpreter
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CLOSE = {F32: 1e-5, F16: 4e-3, BF16: 3e-2}


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows take several turns of a program, picks several programs, and equal picks several turns."""
    for name, value in {"_LANES": 16, "_PICKS": 4, "_WRITERS": 3, "_ALIGNED": 16}.items():
        monkeypatch.setattr(fused, name, value)


def problem(
    dtype: torch.dtype = F32, *, rows: int = 5, entries: int = 75, picks: int = 17, biased: bool = False,
    scale: float = 1.3, softcap: float | None = None, chunk: int = 48,
) -> HeadLoss:  # fmt: skip
    """Picks of nothing, equal picks, one of the first and of the last entry of a chunk, and a row that none reads."""
    torch.manual_seed(rows + entries + picks)
    hidden, weight = torch.randn(rows, 16), torch.randn(entries, 16) / 2
    bias = torch.randn(entries).to(dtype) if biased else None
    slot, token = torch.randint(-1, max(1, rows - 1), (picks,)), torch.randint(-1, entries, (picks,))
    for number, entry in enumerate((0, chunk - 1, chunk, entries - 1)[:picks]):
        slot[number], token[number] = 0, min(entry, entries - 1)
    slot, token = torch.cat([slot, slot[:6], slot[:6]]), torch.cat([token, token[:6], token[:6]])
    return HeadLoss(hidden.to(dtype), weight.to(dtype), bias, slot, token, scale, softcap, chunk)


def logits_of(given: HeadLoss, *leaves: Tensor) -> Tensor:
    """In float64, of products that are rounded as the chunk is, through which gradients go unchanged."""
    hidden, weight, *bias = leaves
    wide = hidden @ weight.T
    rounded = (given.hidden @ given.weight.T).double()
    wide = wide + (rounded - wide).detach()
    wide = wide + bias[0] if bias else wide
    return given.scale * (wide if given.softcap is None else given.softcap * torch.tanh(wide / given.softcap))


def expected(given: HeadLoss, grad: Tensor) -> list[Tensor]:
    tensors = [given.hidden, given.weight, *([] if given.bias is None else [given.bias])]
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    logits = logits_of(given, *leaves)
    valid = (given.slot >= 0) & (given.token >= 0)
    chosen = logits.log_softmax(-1)[given.slot.clamp(min=0), given.token.clamp(min=0)]
    loss = torch.where(valid, -chosen, 0)
    grads = torch.autograd.grad(loss, leaves, grad.double())
    return [loss.detach(), logits.logsumexp(-1).detach(), *grads]


def computed(given: HeadLoss, grad: Tensor) -> list[Tensor]:
    loss, lse = fused.forward(given)
    found = fused.backward(given, grad, loss, lse, [True, True, given.bias is not None])
    return [loss, lse, *(x for x in found if len(x))]


def check(given: HeadLoss, grad: Tensor | None = None) -> None:
    grad = torch.randn(len(given.token)) if grad is None else grad
    results = zip(computed(given, grad), expected(given, grad), strict=True)
    for number, (got, wanted) in enumerate(results):
        close = CLOSE[given.hidden.dtype] if number > 1 else 1e-5
        size = float(wanted.abs().max()) if len(wanted) else 0.0
        torch.testing.assert_close(got.double(), wanted, rtol=close, atol=close * size)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"biased": True, "scale": 1.0},
    "cap": {"softcap": 2.0, "scale": 0.7},
    "bias and cap": {"softcap": 1.5, "biased": True},
}


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, dtype: torch.dtype) -> None:
    check(problem(dtype, **KINDS[kind]))


@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 1, "entries": 1, "picks": 1, "chunk": 0},
        {"rows": 1, "entries": 100},
        {"rows": 9, "entries": 2, "chunk": 1},
        {"rows": 3, "entries": 64, "picks": 60, "chunk": 64},
        {"rows": 2, "entries": 129, "picks": 5, "chunk": 16},
        {"rows": 5, "entries": 33, "picks": 0, "chunk": 0},
    ],
    ids=str,
)
def test_sizes(sizes: dict[str, int]) -> None:
    """One row, one class, sizes that are no multiples, one chunk or many."""
    check(problem(**sizes, softcap=3.0))


def test_default_chunks_hold_a_bounded_number_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_ENTRIES", 5 * 40)
    given = problem(chunk=0)
    assert [chunk.raw.shape for chunk in fused._chunks(given)] == [(5, 32), (5, 32), (5, 11)]
    check(given)


def test_weights_of_zero_and_of_both_signs() -> None:
    given = problem(biased=True)
    grad = torch.randn(len(given.token))
    grad[::2] = 0
    check(given, grad)
    check(given, torch.zeros_like(grad))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_each_entry_is_rounded_once(dtype: torch.dtype) -> None:
    """Also where a pick is subtracted from a probability near 1: the difference is made in float32."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(5, 60)).to(dtype)
    logits[0, 7] = 14.0
    slot, token = torch.tensor([0, 0, 1, 3, 3, 3]), torch.tensor([7, 7, 0, 59, 59, 2])
    grad = torch.tensor([0.5, 0.25, -1.0, 2.0, 1.0, 0.3])
    got = gradient_of(logits, slot, token, grad)
    wide = logits.double().requires_grad_()
    loss = -(0.7 * wide).log_softmax(-1)[slot, token]
    (wanted,) = torch.autograd.grad(loss, wide, grad.double())
    unit = {F32: 3e-6, BF16: 2.0**-7}[dtype]  # the interpreter cuts bits off where a device rounds
    assert ((got.double() - wanted).abs() <= unit * wanted.abs() + 3e-7).all()
    assert not got[[2, 4]].any()


def gradient_of(logits: Tensor, slot: Tensor, token: Tensor, grad: Tensor) -> Tensor:
    """Of losses of given logits, which are one chunk and stay as they are."""
    numbers, rows, before = Numbers.of(0.7, None), Rows.empty(logits, entropy=False), logits.clone()
    chunk = Chunk(0, 0, logits, logits.shape[1])
    fused.fold(chunk, None, numbers, rows, (slot, token, chosen := torch.zeros(len(slot))))
    loss = rows.lse()[slot] - chosen
    total = torch.zeros(len(logits)).index_add_(0, slot, grad)
    picks = Picks.sorted(slot, token, (len(logits), logits.shape[1]), logits.shape[1], grad, loss, total)
    fused.soften(chunk, out := torch.full_like(logits, torch.nan), None, numbers, rows.lse(), picks)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return out


def test_entries_that_are_not_finite() -> None:
    """Forbidden entries get 0; a row of them, of NaN or of infinity is NaN and spoils no other row."""
    torch.manual_seed(0)
    logits = torch.randn(6, 40)
    logits[0, 5:30] = logits[1] = -torch.inf
    logits[2, 3], logits[3, 4], logits[4, 8] = torch.nan, torch.inf, torch.nan
    slot, token = torch.tensor([0, 0, 1, 2, 3, 5]), torch.tensor([0, 33, 1, 2, 4, 39])
    got = gradient_of(logits, slot, token, torch.ones(6))
    wide = logits.double().requires_grad_()
    (wanted,) = torch.autograd.grad(-(0.7 * wide).log_softmax(-1)[slot, token], wide, torch.ones(6).double())
    clean = [0, 5]
    torch.testing.assert_close(got[clean].double(), wanted[clean], rtol=1e-5, atol=1e-7)
    assert got[1:4].isnan().any(1).all() and not got[4].any(), "a row that no pick reads gets 0"


def test_entropies_and_their_gradients() -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(5, 40)
    logits[1, 4:20] = -torch.inf
    slot, token = torch.tensor([0, 1, 1, 3]), torch.tensor([3, 0, 0, 39])
    grad, of_entropy = torch.randn(4), torch.tensor([0.5, -2.0, 1.0, 0.0, 0.7])
    numbers, rows = Numbers.of(1.2, 3.0), Rows.empty(logits, entropy=True)
    chunks = [Chunk(0, 0, logits[:, :16], 16), Chunk(1, 16, logits[:, 16:], 24)]
    chosen = torch.zeros(4)
    for chunk in chunks:
        fused.fold(chunk, None, numbers, rows, (slot, token, chosen))
    lse = rows.lse()
    entropy, total = rows.entropy(lse), torch.zeros(5).index_add_(0, slot, grad)
    picks = replace(
        Picks.sorted(slot, token, (5, 40), 16, grad, lse[slot] - chosen, total), entropy=entropy, of_entropy=of_entropy
    )
    # Chunks of 16 entries: the second one here holds those of the second and the third.
    picks = replace(picks, bounds=picks.bounds[[0, 1, 3]].contiguous())
    out = torch.empty_like(logits)
    for chunk in chunks:
        fused.soften(chunk, out[:, chunk.part], None, numbers, lse, picks)
    wide = logits.double().requires_grad_()
    logp = (1.2 * 3.0 * torch.tanh(wide / 3.0)).log_softmax(-1)
    right = -(logp.exp() * logp).nan_to_num().sum(-1)
    torch.testing.assert_close(entropy.double(), right.detach(), rtol=1e-5, atol=1e-6)
    scored = (-logp[slot, token] * grad).sum() + (right * of_entropy).sum()
    (wanted,) = torch.autograd.grad(scored, wide)
    torch.testing.assert_close(out.double(), wanted.nan_to_num(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_edges_of_a_forest(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the native level, forks and leaves, against its own forms in float64."""
    forest = treefx.Forest.from_sequences([[1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 6], [7, 2]])
    torch.manual_seed(0)
    hidden, weight = torch.randn(forest.num_tokens, 8).to(dtype), torch.randn(70, 8).to(dtype)
    logits = hidden @ weight.T
    logits[forest.subtree_end - torch.arange(forest.num_tokens) == 1] = torch.nan  # leaves predict nothing
    grad = torch.randn(len(forest.edges))

    def run(x: Tensor, **more: Any) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        logp = treefx.edge_logprobs(leaf, forest, 0.7, **more)
        return [logp.detach(), *torch.autograd.grad(logp, leaf, grad.to(logp.dtype))]

    expected = [run(logits.double()), run(hidden.double(), weight=weight.double(), softcap=4.0)]
    monkeypatch.setattr(logprobs, "runs_fused", lambda *_: True)
    monkeypatch.setattr(choose, "runs_fused", lambda *_, **__: True)
    found = [run(logits), run(hidden, weight=weight, softcap=4.0)]
    rounded = 0.0 if dtype == F32 else 0.05  # products of hidden states are
    for number, ((logp, got), (right, wanted)) in enumerate(zip(found, expected, strict=True)):
        close = max(1e-5, number * rounded)
        torch.testing.assert_close(logp.double(), right, rtol=close, atol=close)
        close = max(1e-5, rounded)
        torch.testing.assert_close(got.double(), wanted, rtol=close, atol=close * float(wanted.abs().max()))


# Planted mistakes -----------------------------------------------------------------------------------------------------


def _unsorted(patch: pytest.MonkeyPatch) -> None:
    right = Picks.sorted.__func__  # type: ignore[attr-defined]

    def picks(cls: Any, slot: Tensor, token: Tensor, shape: Any, step: int, *more: Tensor) -> Picks:
        found: Picks = right(cls, slot, token, shape, step, *more)
        order = torch.randperm(len(found.key), generator=torch.Generator().manual_seed(1))
        return replace(found, key=found.key[order], grad=found.grad[order], loss=found.loss[order])

    patch.setattr(Picks, "sorted", classmethod(picks))


def _in_the_chunk_before(patch: pytest.MonkeyPatch) -> None:
    right = Picks.sorted.__func__  # type: ignore[attr-defined]

    def picks(cls: Any, slot: Tensor, token: Tensor, shape: Any, step: int, *more: Tensor) -> Picks:
        found: Picks = right(cls, slot, token, shape, step, *more)
        # The bound between two chunks: their first entry counts to the chunk before.
        bounds = torch.searchsorted(found.key, torch.arange(len(found.bounds)) * step * shape[0] + shape[0])
        bounds[0] = 0
        return replace(found, bounds=bounds.int().clamp_(max=int(found.bounds[-1])))

    patch.setattr(Picks, "sorted", classmethod(picks))


def _sums_of_the_last_chunk(patch: pytest.MonkeyPatch) -> None:
    right = fused.fold

    def fold(chunk: Chunk, bias: Any, numbers: Numbers, rows: Rows, picked: Any) -> None:
        rows.top.fill_(-torch.inf)
        rows.sum.zero_()
        right(chunk, bias, numbers, rows, picked)

    patch.setattr(fused, "fold", fold)


@triton.jit
def no_slope(z, outer, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a derivative of 1."""
    return tl.full([], 1.0, tl.float32)


def _no_slope_of_the_cap(*kernels: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        run = Launch.run

        def uncapped(launch: Launch) -> None:
            from treefx.kernels.head_loss import device_code

            if launch.kernel.__name__ not in kernels:
                return run(launch)
            with pytest.MonkeyPatch.context() as inside:
                inside.setattr(device_code, "cap_slope", no_slope)
                return run(launch)

        patch.setattr(Launch, "run", uncapped)

    return plant


MISTAKES = {
    "unsorted picks": _unsorted,
    "picks across a boundary": _in_the_chunk_before,
    "sums of one chunk": _sums_of_the_last_chunk,
    "no slope of the cap": _no_slope_of_the_cap("soften_chunk", "write_picks"),
    "no slope of the cap at picks": _no_slope_of_the_cap("write_picks"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(softcap=2.0, picks=40)
    check(given)
    MISTAKES[name](monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check(given)


# The choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "biased", "softcap"), [(F32, True, None), (BF16, False, 4.0)])
def test_the_first_use_compares_both_forms(
    dtype: torch.dtype, biased: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(1, dtype=dtype)
    small = choose._problem(x, softcap, biased=biased)
    part = replace(small, weight=small.weight[:99], token=small.token.clamp(max=98), chunk=48)
    part = replace(part, bias=None if small.bias is None else small.bias[:99])
    part = replace(part, hidden=small.hidden[:8], slot=(small.slot % 8)[:40], token=part.token[:40])
    assert choose._judge(part)
    right = eager.backward
    monkeypatch.setattr(eager, "backward", lambda *given: [1.1 * x for x in right(*given)])
    with pytest.warns(RuntimeWarning, match="instead of a Triton kernel, slower: its results differ"):
        assert not choose._judge(part)
