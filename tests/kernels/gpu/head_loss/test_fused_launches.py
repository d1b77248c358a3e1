"""Cost of LM head and loss without their products: traffic, launches, waits of the host, registers.

On tensors without values, so that whatever looks at one raises; launches are written down instead of run.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from treefx.kernels.gpu.triton_tree.configs import GFX942
from treefx.kernels.gpu.triton_tree.small_launches import Launch
from treefx.kernels.head_loss import choose, fused
from treefx.kernels.head_loss.problem import HeadLoss
from treefx.tools.kernels.ahead_of_time import compile_launch

BF16, ROWS, ENTRIES, WIDTH = torch.bfloat16, 7788, 151_936, 1024
WITHOUT_KERNEL = {
    "slice", "t", "transpose", "empty", "new_empty", "detach", "select", "view", "_to_copy", "alias",
    "permute",
}  # fmt: skip


class Traffic(TorchDispatchMode):
    """Bytes of logits that operators and launches read and write; and of the sums that hidden's gradient goes into."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.launches: list[Launch] = []
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        found = func(*args, **(kwargs or {}))
        if name not in WITHOUT_KERNEL:
            self.operators[name] += 1
            self.count(name, [*tree_leaves((args, kwargs)), found])
        return found

    def count(self, name: str, tensors: Any) -> None:
        """Each operand is read once, and a result, which ``out`` is among the operands already, written once."""
        found = [x for x in tensors if isinstance(x, Tensor) and x.dim() == 2 and ROWS in x.shape]
        logits = [x for x in found if WIDTH not in x.shape]
        seen = {x.untyped_storage()._cdata: x.numel() * x.element_size() for x in logits}
        self.bytes[name] += sum(seen.values())

    def launched(self, launch: Launch) -> None:
        """A kernel reads Raw once and writes Out once, as its text says; but of Out the picked entries alone."""
        self.launches.append(launch)
        raw = launch.arguments.get("Raw")
        if raw is not None:
            times = 2 if "Out" in launch.arguments else 1
            self.bytes[launch.kernel.__name__] += times * raw.numel() * raw.element_size()


@pytest.fixture
def poisoned_memory() -> None:
    """Memory as users have it: other tests fill empty memory, a launch each."""


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    found = Traffic()
    monkeypatch.setattr(Launch, "run", lambda launch: found.launched(launch))
    return found


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def step(traffic: Traffic, *, biased: bool, picks: int = 20_000) -> None:
    slot, token = empty(picks, dtype=torch.int64), empty(picks, dtype=torch.int64)
    bias = empty(ENTRIES) if biased else None
    given = HeadLoss(empty(ROWS, WIDTH), empty(ENTRIES, WIDTH), bias, slot, token, 1.0, None, 0)
    with traffic:
        loss, lse = fused.forward(given)
        fused.backward(given, empty(picks, dtype=torch.float32), loss, lse, [True, True, biased])


@pytest.mark.parametrize(("biased", "most"), [(False, 14.0), (True, 16.0)])
def test_bytes_per_logit(biased: bool, most: float, traffic: Traffic) -> None:
    """14 where the eager form has 74. A form with separate gradients, not in place, would have 16."""
    step(traffic, biased=biased)
    per_logit = {name: count / ROWS / ENTRIES for name, count in traffic.bytes.items() if count}
    assert sum(per_logit.values()) == pytest.approx(most, rel=1e-3)
    assert {name: per_logit[name] for name in ("mm", "fold_chunk", "soften_chunk")} == {
        "mm": pytest.approx(8), "fold_chunk": pytest.approx(2), "soften_chunk": pytest.approx(4),
    }  # fmt: skip


def test_launches_do_not_depend_on_picks(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    step(traffic, biased=False, picks=300)
    few, first = Counter(traffic.operators), len(traffic.launches)
    step(traffic, biased=False, picks=100_000)
    chunks = -(-ENTRIES // (2**26 // ROWS // 128 * 128))
    assert first == 3 * chunks and len(traffic.launches) == 2 * first
    assert traffic.operators == few + few, "no operator more"
    assert "unique" not in few and few["sort"] == 1


def test_chunks_hold_at_most_128_mib(traffic: Traffic) -> None:
    step(traffic, biased=False)
    raws = [launch.arguments["Raw"] for launch in traffic.launches if "Raw" in launch.arguments]
    assert max(raw.numel() for raw in raws) <= 2**26 and all(raw.stride(0) % 16 == 0 for raw in raws)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["plain", "everything"])
@pytest.mark.parametrize("arch", [90, GFX942])
def test_kernels_compile(arch: int, dtype: torch.dtype, form: str, traffic: Traffic, tmp_path: Any) -> None:
    """Ahead of time, without spills; and none with two kinds of numbers where one is enough."""
    import triton

    if arch == GFX942:
        pytest.importorskip("triton.backends.amd.compiler", reason="this Triton has no compiler for AMD")

    full = form == "everything"
    hidden, weight = torch.zeros(8, 16, dtype=dtype), torch.zeros(300, 16, dtype=dtype)
    numbers = torch.zeros(9, dtype=torch.int64)
    given = HeadLoss(hidden, weight, weight[:, 0] if full else None, numbers, numbers, 0.7, 3.0 if full else None, 0)
    loss, lse = fused.forward(given)
    fused.backward(given, torch.zeros(9), loss, lse, [True, True, full])
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        for launch in traffic.launches:
            entropies = {name: lse for name in ("Moment", "Entropy", "OfEntropy") if name in launch.arguments and full}
            report = compile_launch(replace(launch, arguments={**launch.arguments, **entropies}), arch)
            assert report.spill_bytes == 0 and report.registers <= 64, launch.kernel.__name__


def test_the_cpu_keeps_its_form() -> None:
    for dtype in (torch.float32, BF16, torch.float64):
        assert not choose.runs_fused(torch.zeros(2, 2, dtype=dtype), None)
    assert not choose.runs_fused(torch.empty(2, 2, device="meta"), None)
