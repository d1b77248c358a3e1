"""Cost of attention to listed keys on a device, without one: launches, pairs, waits of the host, registers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from treefx.kernels.gpu.triton_tree.configs import GFX942, usable_shared_memory
from treefx.kernels.gpu.triton_tree.small_launches import Launch
from treefx.kernels.sparse import choose, chunks, fused
from treefx.kernels.sparse.problem import Listed
from treefx.tools.kernels.ahead_of_time import compile_launch

BF16 = torch.bfloat16


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    found: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: found.append(launch))
    yield found


def given(heads: int, kv_heads: int, widths: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> Listed:
    tokens, listed = 64, 32
    q, k, v = (
        torch.zeros(n, tokens, width, dtype=dtype, device=device)
        for n, width in ((heads, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
    )
    return Listed(q, k, v, torch.zeros(tokens, listed, dtype=torch.int32, device=device), 0.1)


def step(problem: Listed) -> None:
    out, lse = fused.forward(problem)
    fused.backward(torch.empty_like(out), problem, out, lse)


def test_nothing_waits_for_the_device(launches: list[Launch]) -> None:
    """On tensors without values, so that whatever looks at one raises."""
    step(given(4, 2, (24, 16), BF16, "meta"))
    assert [launch.kernel.__name__ for launch in launches] == ["attend_listed", "restore_queries", "restore_keys"]


def test_many_heads_of_one_key_are_added(launches: list[Launch]) -> None:
    """By a second launch of the same kernel, in float32; deterministic algorithms sort."""
    problem = given(32, 2, (24, 16), BF16)
    step(problem)
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["attend_listed", "restore_queries", "restore_queries"]
    first, second = (launch.arguments for launch in launches[1:])
    assert first["OfK"] is None and second["OfQ"] is None and second["OfK"].dtype == torch.float32
    launches.clear()
    torch.use_deterministic_algorithms(True)
    try:
        step(problem)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [launch.kernel.__name__ for launch in launches][-1] == "restore_keys"


def test_programs_and_pairs(launches: list[Launch]) -> None:
    """A program per query and key head, which walks one list: N * K pairs, whatever N."""
    step(given(4, 2, (24, 16), BF16, "meta"))
    of_queries, of_keys = launches[:2], launches[2]
    assert [launch.grid for launch in launches] == [(64, 2)] * 3
    assert all(launch.arguments["listed"] == 32 for launch in of_queries)
    assert of_keys.arguments["Queries"].shape == (64 * 32,)


CASES: list[tuple[int, int, tuple[int, int], torch.dtype]] = [
    (2, 2, (192, 128), BF16),
    (8, 2, (128, 128), BF16),
    (32, 2, (64, 64), torch.float16),
    (2, 1, (64, 64), torch.float32),
    (128, 1, (192, 128), BF16),
    (128, 1, (576, 512), BF16),
]
"""Expanded heads of multi-head latent attention first, then groups of query heads; its latent vectors last."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compile_for_hopper(case: Any, launches: list[Launch], tmp_path: Any) -> None:
    import triton

    step(given(*case))
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        for launch in launches:
            report = compile_launch(launch, 90)
            name = launch.kernel.__name__
            assert report.spill_bytes == 0 and not report.warnings, (name, report)
            assert report.shared_bytes <= usable_shared_memory(90), (name, report)
            if name != "restore_keys" and case[3] != torch.float32:
                assert report.mma or report.wgmma, (name, report)


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_kernels_compile_for_amd(case: Any, launches: list[Launch], tmp_path: Any) -> None:
    """Of one architecture, where they are tried too."""
    triton = pytest.importorskip("triton")
    pytest.importorskip("triton.backends.amd.compiler", reason="this Triton has no compiler for AMD")
    step(given(*case))
    assert len(launches) == 3
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        for launch in launches:
            report = compile_launch(launch, GFX942)
            assert report.spill_bytes == 0 and report.shared_bytes <= usable_shared_memory(GFX942), report
            assert report.mfma or launch.kernel.__name__ == "restore_keys", (launch.kernel.__name__, report)


def test_a_new_length_compiles_nothing(launches: list[Launch], tmp_path: Any) -> None:
    """What Triton specialises on is the same for every number of tokens that is not one."""
    step(given(4, 2, (64, 64), BF16))
    for launch in launches:
        special = {item.name for item in launch.kernel.params if not item.do_not_specialize and not item.is_constexpr}
        assert not special & {"tokens", "listed", "scale"}


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64], ids=str)
def test_the_cpu_keeps_its_form(dtype: torch.dtype) -> None:
    for device in ("cpu", "meta"):
        assert choose.choose_implementation("auto", given(2, 2, (8, 8), dtype, device)) is chunks


def test_first_tokens_are_an_attention() -> None:
    problem = given(2, 2, (8, 8), BF16)
    problem = replace(problem, keys=torch.arange(64, dtype=torch.int32)[:, None].expand(64, 32))
    first = problem.first_tokens(10, 4)
    shapes: list[Tensor] = [first.q, first.k, first.v, first.keys]
    assert [tuple(x.shape) for x in shapes] == [(2, 10, 8), (2, 10, 8), (2, 10, 8), (10, 4)]
    assert int(first.keys.max()) < 10
