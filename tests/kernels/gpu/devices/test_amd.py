"""AMD's gfx942, which is not there: its kernels as compiled, and when they are chosen.

Each kernel is compiled once for all tests of this file.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.backends.amd.compiler", reason="this Triton has no compiler for AMD")

from tests.cli.validation import assert_measured
from tests.kernels.gpu.interpreted_cases import SCORES, SMALL, draw
from tests.kernels.gpu.stages import compile_to
from tests.kernels.gpu.test_triton_host import BACKWARD, LAUNCHED, attend, compiled  # noqa: F401 - a fixture
from treefx.cli.doctor import _gpu
from treefx.kernels import reference
from treefx.kernels.gpu import dispatch, flex
from treefx.kernels.gpu.triton_tree import attention, device, support
from treefx.kernels.gpu.triton_tree.attention import attention_of
from treefx.kernels.gpu.triton_tree.configs import (
    GFX942,
    SHARED_MEMORY,
    Config,
    Problem,
    _shared_bytes,
    candidates,
    one_pass_fits,
    product_precision,
)
from treefx.kernels.gpu.triton_tree.launch import Attention
from treefx.kernels.gpu.triton_tree.paths import form_refusal
from treefx.tools.bench.attention import kernel as bench_kernel
from treefx.tools.bench.attention.kernel import Case, problems
from treefx.tools.kernels import ahead_of_time, amdgcn
from treefx.tools.kernels.ahead_of_time import CompileReport, compile_kernel
from treefx.tools.kernels.stand_in import Device

BF16 = torch.bfloat16
LIMIT = SHARED_MEMORY[GFX942]
MI300X = Device("an MI300X that is not there", (9, 4), 304, "gfx942:sramecc+:xnack-")
FEW = 8
"""Tokens that are compared as a whole."""
KERNELS = ["forward", "backward_keys", "backward_queries"]
CASES = [Case(BF16, 128, 128, 4), Case(torch.float32, 64, 64, 1, ("window", "alibi"))]
"""``treefx bench kernel --arch gfx942`` has all: 78 kernels and more."""
MOST = {
    (3, 6): {"forward": (22.5, 29.0), "backward_keys": (32.0, 34.0), "backward_queries": (26.5, 35.0)},
    (3, 7): {"forward": (17.0, 24.5), "backward_keys": (30.5, 34.0), "backward_queries": (24.5, 36.0)},
}
"""Instructions per logit of the first case, over full tiles and under the mask, by Triton's version."""
_PTX = re.compile(r"\basm\b|inline_asm|\.reg|setp|selp")


@pytest.fixture(scope="module")
def made(fresh_caches: None) -> dict[tuple[Case, str], Any]:
    """Kernels with products by case and name, as Triton compiled them."""
    found = {}
    for case in CASES:
        for launch in itertools.islice(bench_kernel._launches(case, "plain", GFX942), len(KERNELS)):
            found[case, launch.kernel.__name__] = compile_kernel(launch, GFX942)[1]
    assert len(found) == len(CASES) * len(KERNELS)
    return found


def test_kernels_fit_without_spills(made: dict[tuple[Case, str], Any]) -> None:
    for (case, name), kernel in made.items():
        report = ahead_of_time._report_of_amd(kernel)
        assert not problems(report, case.dtype, name, "plain", GFX942), (case, name, report)
        assert report.spill_bytes == 0 < report.mfma and report.registers <= 512, (case, name, report)
        assert 0 < report.shared_bytes <= LIMIT and len(report.loop_instructions) == 2, (case, name, report)


def test_instructions_per_logit(made: dict[tuple[Case, str], Any]) -> None:
    """Where every warp has 32 rows of a tile: tiles of 64 queries took 34.5 and 46.0 in the forward."""
    first = CASES[0]
    limit = {"shared_limit": LIMIT}
    for name, most in MOST[min(max(MOST), support.triton_version())].items():
        config = candidates(Problem(name, "plain", BF16, 128, 128, 4, **limit))[0]
        logits = config.block_m * config.block_n / (64 * config.warps)
        found = [number / logits for number in ahead_of_time._report_of_amd(made[first, name]).loop_instructions]
        assert all(0 < one <= bound for one, bound in zip(found, most, strict=True)), (name, found)


def test_no_assembly_of_nvidia(made: dict[tuple[Case, str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In no stage; NVIDIA's kernels have it, and so would AMD's if the target were not looked at."""
    for kernel in made.values():
        assert [_PTX.search(kernel.asm[stage]) for stage in ("ttir", "ttgir", "llir")] == [None] * 3

    def assembly(arch: int) -> list[int]:
        launches = itertools.islice(bench_kernel._launches(CASES[0], "plain", arch), 2)
        return [compile_to("ttgir", launch, arch).asm["ttgir"].count("elementwise_inline_asm") for launch in launches]

    assert min(assembly(90)) > 0 and max(assembly(GFX942)) == 0

    def takes_ptx(_semantic: Any = None) -> Any:
        return device.tl.constexpr(True)

    takes_ptx.__triton_builtin__ = True  # type: ignore[attr-defined]
    monkeypatch.setattr(device, "takes_ptx", takes_ptx)
    assert min(assembly(GFX942)) > 0


ROOM = [
    ("forward", 64, Config(128, 64, 4, 2), 16_384),
    ("forward", 128, Config(64, 64, 4, 2), 40_960),
    ("forward", 128, Config(128, 64, 4, 2), 32_768),
    ("forward", 128, Config(128, 64, 8, 2), 49_152),
    ("forward", 256, Config(128, 32, 4, 2), 65_536),
    ("backward_keys", 64, Config(32, 128, 4, 2), 16_384),
    ("backward_keys", 128, Config(32, 64, 4, 2), 20_480),
    ("backward_keys", 128, Config(64, 128, 8, 2), 49_152),
    ("backward_queries", 64, Config(64, 64, 4, 2), 24_576),
    ("backward_queries", 128, Config(128, 32, 4, 2), 32_768),
    ("backward_queries", 256, Config(128, 16, 4, 2), 65_536),
]
"""Bytes that kernels of bfloat16 took, compiled for gfx942."""


@pytest.mark.parametrize(("kernel", "width", "config", "taken"), ROOM)
def test_tiles_are_never_thought_smaller_than_they_are(kernel: str, width: int, config: Config, taken: int) -> None:
    problem = Problem(kernel, "plain", BF16, width, width, 4, shared_limit=LIMIT)
    assert taken <= _shared_bytes(problem, config) <= taken + 4_608


@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 192, 256])
def test_every_head_has_tiles(width: int) -> None:
    """That load ahead, but in wide heads. No kernel adds up dq, whose order is that of NVIDIA's registers."""
    for dtype, kernel in itertools.product((BF16, torch.float16, torch.float32), KERNELS):
        for features in ({}, {"heavy": True}, {"heavy": True, "loads_pairs": True}):
            problem = Problem(kernel, "plain", dtype, width, width, 4, shared_limit=LIMIT, **features)
            first, *others = candidates(problem)
            assert _shared_bytes(problem, first) <= LIMIT and others
            assert first.stages == 2 or (kernel != "forward" and width >= 80), "its registers are full"
            assert not one_pass_fits(replace(problem, kernel="backward_once"))
    assert product_precision(torch.float32, LIMIT) == product_precision(BF16, LIMIT) == "ieee"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("compiled", [MI300X], indirect=True, ids=lambda one: one.name)
def test_the_plain_form_is_launched(compiled: list[str]) -> None:  # noqa: F811
    """Triton binds and specialises for AMD; long rows take two passes too, and nothing of Gluon is tried."""
    for tokens in (200, 1008):
        LAUNCHED.clear()
        attend(tokens, window=50, softcap=5.0) if tokens == 200 else attend(tokens)
        assert LAUNCHED == ["forward", *BACKWARD]
    inputs = draw(*SMALL, dtype=BF16).narrow
    chosen = attention_of(inputs, SCORES["plain"])
    assert chosen.shared_limit == LIMIT and chosen.config("forward") == Config(128, 64, 4, 2)
    assert form_refusal(chosen, divmod(support.architecture(inputs.q.device), 10)) == "it needs compute capability 9.0"


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> torch.device:
    """A device of AMD's with a compute capability that one of NVIDIA's has."""
    name = getattr(request, "param", MI300X.amd)
    properties = SimpleNamespace(name="an AMD GPU", gcnArchName=name, multi_processor_count=304)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("amd", "text"),
    [("gfx942:sramecc+:xnack-", None), ("gfx90a:sramecc+", "gfx942.*got gfx90a: use"), ("gfx1100", "got gfx1100")],
    indirect=["amd"],
)
def test_only_one_architecture_has_tiles(amd: torch.device, text: str | None) -> None:
    refusal = support.device_refusal(amd)
    assert refusal is None if text is None else re.search(text, str(refusal))
    described = _gpu(amd)
    assert "in the plain form" in described if text is None else "FlexAttention" in described
    assert support.architecture(amd) == GFX942, "whatever its compute capability"


DAMAGE = {
    "": None,
    "wrong": "it is off in the output by [^,]*, dq by",
    "wrong on long forests": "it is off in the output of all tokens by .*, dv of all tokens by",
    "crash": "RuntimeError: hipErrorNoBinaryForGpu",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_it_runs_only_where_the_device_gives_the_reference(
    damage: str, amd: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention takes over with a warning that names the reason; the CPU stands for the device."""
    inputs, score, ran = draw(*SMALL, heads=(2, 2), dtype=BF16).narrow, SCORES["plain"], Counter[int]()

    def results(used: Attention, tensors: Sequence[Tensor]) -> list[Tensor]:
        if damage == "crash":
            raise RuntimeError("hipErrorNoBinaryForGpu")
        tokens = used.inputs.q.shape[2]
        assert used.path == "plain" and used.shared_limit == LIMIT
        ran[tokens] += 1
        if not tensors:
            found = list(reference.forward(used.inputs, used.score))
        else:
            grads = reference.backward(tensors[0], used.inputs, *tensors[1:], used.score, [False] * 5)
            found = [tensors[2], *grads[:3]]
        wrong = damage == "wrong" or (damage and tokens > FEW)
        return [x * 1.1 for x in found] if wrong else found

    monkeypatch.setattr(dispatch, "_problems", {})
    monkeypatch.setattr(dispatch, "_CHECKED_TOKENS", FEW)
    monkeypatch.setattr(support, "refusal", lambda q: support.device_refusal(amd))
    monkeypatch.setattr(attention, "results_of", results)
    why = DAMAGE[damage]
    with nullcontext() if why is None else pytest.warns(RuntimeWarning, match=f"FlexAttention runs.*{why}.*TFX301"):
        chosen = dispatch._chosen(inputs, score)
    assert chosen is (attention if why is None else flex)
    assert damage == "crash" or ran == {FEW: 2, inputs.q.shape[2]: 2}, "forward and backward, on few and on all tokens"


LOOPS = """
; -- Begin function helper
.LBB0_1:
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\ts_cbranch_scc1 .LBB0_1
; -- End function
; -- Begin function kernel
\ts_mov_b32 s0, 0
.LBB1_1:
\tv_add_f32 v0, v1, v2
\ts_nop 1
\ts_cbranch_vccnz .LBB1_4
.LBB1_2:                                ; %next
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\ts_cbranch_scc1 .LBB1_1
.LBB1_3:
\tv_add_f32 v0, v1, v2
\ts_cbranch_scc1 .LBB1_3
\ts_endpgm
.LBB1_4:
\tv_exp_f32 v0, v1 ; out of line
\ts_branch .LBB1_2
; -- End function
    .agpr_count:     0
    .group_segment_fixed_size: 64
    .sgpr_spill_count: 3
    .vgpr_count:     40
    .vgpr_spill_count: 2
"""


def test_loops_are_found_in_assembly() -> None:
    """With blocks out of line, without fillers, functions that are called, and loops that multiply nothing."""
    names = Counter(
        ["v_add_f32", "s_cbranch_vccnz", "v_mfma_f32_32x32x8_bf16", "s_cbranch_scc1", "v_exp_f32", "s_branch"]
    )
    assert amdgcn.names_in_loops(amdgcn.kernel_of(LOOPS, "kernel")) == (names,)
    assert amdgcn.metadata_of(LOOPS) == amdgcn.Metadata(40, 2, 3, 64)
    assert amdgcn.names_in_loops(amdgcn.kernel_of(LOOPS, "none")) == ()


GOOD = CompileReport(357, 0, 32_768, wgmma=0, tcgen05=0, mma=0, setmaxnreg=False, warnings=(), mfma=256)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spill_bytes": 304}, "spills 304 bytes"),
        ({"scalar_spills": 80}, "spills 80 scalar registers"),
        ({"shared_bytes": 65_792}, "needs 65792 bytes of shared memory, the device has 65536"),
        ({"mfma": 0}, "no matrix instruction"),
    ],
)
def test_every_bound_can_be_missed(change: dict[str, Any], text: str) -> None:
    assert not problems(GOOD, BF16, "forward", "plain", GFX942)
    (problem,) = problems(replace(GOOD, **change), BF16, "forward", "plain", GFX942)
    assert text in problem


def test_the_command_compiles_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernel, "CASES", (Case(torch.float16, 32, 32),))
    records = bench_kernel.run_with_progress("gfx942", "all", json=True)
    assert_measured("kernel", records)
    assert [record["kernel"] for record in records] == [*KERNELS, "prologue", "sum_parts"]
    assert {record["path"] for record in records} == {"plain"} and not any(record["problems"] for record in records)
    assert all(len(record["instructions_per_logit"]) == 2 and record["mfma"] for record in records[:3])
    assert {record["prefetch"] for record in records} == {None}
