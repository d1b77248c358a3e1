"""What runs on devices other than a Hopper, by stand-ins for them; and on several in one process."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from tests.kernels.gpu.test_launches import SCORE, device, poisoned_memory  # noqa: F401 - fixtures
from tests.kernels.gpu.test_triton_host import BACKWARD, LAUNCHED, ONCE, attend, compiled  # noqa: F401
from tests.kernels.gpu.test_workspace import FORMS, counted, in_form, part, runner, taken
from treefx.cli.doctor import _gpu
from treefx.kernels.common import Inputs
from treefx.kernels.gpu import dispatch
from treefx.kernels.gpu.triton_tree import attention, tuning
from treefx.kernels.gpu.triton_tree.configs import (
    SHARED_MEMORY,
    Config,
    Problem,
    _shared_bytes,
    candidates,
    usable_shared_memory,
)
from treefx.kernels.gpu.triton_tree.launch import Attention
from treefx.kernels.gpu.triton_tree.tuning import BestConfig, keep_rates, rates_key, tile_name
from treefx.tools.kernels.stand_in import Device

A100 = Device("an A100 that is not there", (8, 0), 108)
SLICE = Device("a slice of an A100", (8, 0), 14)
ADA = Device("an L40S that is not there", (8, 9), 142)
B200 = Device("a B200 that is not there", (10, 0), 148)
DESKTOP = Device("a desktop Blackwell that is not there", (12, 0), 170)
OTHERS = [A100, SLICE, ADA, B200, DESKTOP]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("compiled", OTHERS, indirect=True, ids=lambda one: one.name)
def test_other_devices_take_the_plain_form(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Nothing that only a Hopper has is even compiled; one pass stays where it costs less."""
    attend(200)
    assert LAUNCHED == ["forward", *BACKWARD] and len(compiled) == 4
    for options in ({"window": 50, "softcap": 5.0}, {"deterministic": True}):
        LAUNCHED.clear()
        attend(300, **options)
        assert LAUNCHED == ["forward", *BACKWARD]
    LAUNCHED.clear()
    attend(1008)
    assert LAUNCHED == ["forward", *BACKWARD, *ONCE * 3]


@pytest.mark.parametrize("form", [form for form in FORMS if FORMS[form] == "plain"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("compiled", [A100, DESKTOP], indirect=True, ids=lambda one: one.name)
def test_launches_allocate_what_is_counted(
    seed: int,
    form: str,
    device: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = in_form(form, part(seed), monkeypatch)
    given = runner(inputs, SCORE, form)
    got = taken(inputs, SCORE)
    if form == "two passes" or "backward_once" in LAUNCHED:
        assert counted(given) == got


ROOM = [
    ("forward", 128, Config(128, 64, 8, 3), 98_816),
    ("forward", 128, Config(64, 64, 4, 3), 90_624),
    ("forward", 256, Config(64, 32, 4, 3), 102_656),
    ("backward_keys", 96, Config(32, 128, 8, 3), 74_240),
    ("backward_keys", 128, Config(32, 128, 8, 3), 98_816),
    ("backward_keys", 128, Config(64, 64, 8, 3), 107_520),
    ("backward_keys", 256, Config(32, 32, 8, 3), 100_864),
    ("backward_queries", 128, Config(64, 64, 4, 3), 107_008),
    ("backward_queries", 128, Config(128, 32, 8, 3), 98_560),
    ("backward_once", 64, Config(64, 128, 8, 3), 82_944),
]
"""Bytes of shared memory that kernels of bfloat16 took, compiled for sm_89."""
BIAS = ("backward_queries", 128, Config(128, 32, 8, 3), 106_752)
"""Of a score with a bias per pair."""
FLOAT32 = ("forward", 128, Config(32, 32, 4, 3), 106_752)


@pytest.mark.parametrize(("kernel", "width", "config", "taken"), [*ROOM, BIAS, FLOAT32])
def test_tiles_are_never_thought_smaller_than_they_are(kernel: str, width: int, config: Config, taken: int) -> None:
    """Or a launch fails on the device: of 64 rows weights change hands, which takes 8 KB of the last 99."""
    dtype = torch.float32 if (kernel, width, config, taken) == FLOAT32 else torch.bfloat16
    pairs = (kernel, width, config, taken) == BIAS
    limit = usable_shared_memory(89)
    problem = Problem(kernel, "plain", dtype, width, width, 4, loads_pairs=pairs, shared_limit=limit)
    assert taken <= _shared_bytes(problem, config) <= taken + (4_000 if dtype == torch.bfloat16 else 16_000)


@pytest.mark.parametrize("arch", [80, 86, 87, 89, 120, 121])
@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 192, 256])
def test_every_device_has_tiles_that_load_ahead(width: int, arch: int) -> None:
    """With room for them; wider heads than 192 alone wait for every tile where there are 99 KB."""
    limit = usable_shared_memory(arch)
    for dtype in (torch.bfloat16, torch.float32):
        for kernel in ("forward", "backward_keys", "backward_queries"):
            for features in ({}, {"heavy": True}, {"heavy": True, "loads_pairs": True}):
                problem = Problem(kernel, "plain", dtype, width, width, 4, shared_limit=limit, **features)
                first = candidates(problem)[0]
                assert _shared_bytes(problem, first) <= limit == SHARED_MEMORY.get(arch, SHARED_MEMORY[86])
                assert first.stages == 3 or width >= 192 or dtype == torch.float32


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One process has a Hopper and, as the second device, a slice of it; what it finds is forgotten."""
    monkeypatch.setenv("TREEFX_CACHE_DIR", str(tmp_path))
    kinds = {"whole": 132, "slice": 16}
    known = [SimpleNamespace(name=name, multi_processor_count=count) for name, count in kinds.items()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one=None: known[0 if one is None else one.index])
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda one: None)  # PyTorch 2.11 would start the driver
    found = tuning._findings, tuning._rates
    for one in found:
        one.cache_clear()
    yield
    for one in found:
        one.cache_clear()


def fake(number: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(*shape, dtype=dtype, device=f"cuda:{number}")


def on(number: int, ends: torch.Tensor) -> Attention:
    q = fake(number, 1, 4, len(ends), 64)
    return Attention(Inputs(q, q, q, ends), SCORE, "gluon")


@pytest.mark.usefixtures("two_devices")
def test_programs_are_as_many_as_their_own_device_runs() -> None:
    ends = torch.full((40_000,), 40_000, dtype=torch.int32)
    grids = []
    for number in (0, 1, 0):
        given = on(number, ends)
        lse = fake(number, 1, 4, len(ends), dtype=torch.float32)
        grids.append(given.forward(given.own_keys(), given.inputs.q, lse).grid[0])
    assert grids == [132 // 4, 16 // 4, 132 // 4]


@pytest.mark.usefixtures("two_devices")
def test_findings_and_rates_are_of_the_device_that_runs(tmp_path: Path) -> None:
    """Whichever the current one is."""
    ends = [fake(number, 64, dtype=torch.int32) for number in range(2)]
    given = on(1, torch.full((64,), 64, dtype=torch.int32))
    problem = replace(given, choose=BestConfig(ends[1], 4)).problem("forward")
    first, second = candidates(problem)[:2]
    assert [BestConfig(one, 4)(problem) for one in ends] == [first, first]
    tuning._remember(tuning._key(problem, ends[1].device), second)
    assert [BestConfig(one, 4)(problem) for one in ends] == [first, second]
    keep_rates({rates_key(problem): {tile_name(first): [1.0, 1.0, 1.0]}})
    assert list(json.loads((tmp_path / "rates.json").read_text())) == ["whole"]
    assert [bool(tuning.configs_of_forest(on(number, given.inputs.subtree_end), ["forward"])) for number in (0, 1)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (A100, "in the plain form"),
        (Device("a Hopper", (9, 0), 132), "in Gluon where it can"),
        (Device("a T4", (7, 5), 40), "FlexAttention.*8.0 or later, got 7.5"),
    ],
    ids=lambda one: one.name if isinstance(one, Device) else "",
)
def test_doctor_says_what_runs_attention(one: Device, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: one.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=one.name))
    described = _gpu(torch.device("cuda", 0))
    assert described.startswith(one.name) and re.search(text, described)


@pytest.mark.parametrize("way", ["", "older", "newer"])
def test_the_reference_is_exact_whatever_a_program_allows(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32 it would be off by more than kernels of float32 may be; the program has its setting again."""
    matmul, seen = torch.backends.cuda.matmul, list[str]()
    found = matmul.fp32_precision
    zeros = torch.zeros(1, 1, 2, 16)

    def result(*_: Any, **__: Any) -> Any:
        seen.append(matmul.fp32_precision)
        return zeros, zeros[..., 0]

    for module in (dispatch.reference, attention):
        monkeypatch.setattr(module, "forward", result)
        monkeypatch.setattr(module, "backward", lambda *args, **_: (*result(), zeros, []))
    if way == "older":
        torch.set_float32_matmul_precision("high")
    elif way == "newer":
        matmul.fp32_precision = "tf32"
    allowed = matmul.fp32_precision
    try:
        dispatch._errors(Inputs(zeros, zeros, zeros, torch.ones(2, dtype=torch.int32)), SCORE)
        assert seen[:2] == ["ieee" if way else found] * 2 and seen[2:] == [allowed] * 2
        assert matmul.fp32_precision == allowed == ("tf32" if way else found)
        if way == "older":
            assert torch.get_float32_matmul_precision() == "high" and matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = found
