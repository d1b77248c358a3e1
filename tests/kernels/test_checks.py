"""``TREEFX_CHECK``: attentions of a running program against the reference on some of their queries."""

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.forests import random_parents
from treefx.errors import TreefxError
from treefx.kernels import checks, tree_attention
from treefx.kernels.cpu import attention as cpu

EndsOf = Callable[[list[int]], Tensor]


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    def check_every(number: int) -> None:
        monkeypatch.setattr(checks, "EVERY", number)
        monkeypatch.setattr(checks, "_forwards", itertools.count())
        monkeypatch.setattr(checks, "_backwards", itertools.count())

    yield check_every


def step(ends: Tensor, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, len(ends), 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    out = tree_attention(q, k, v, ends, **options)
    return [out, *torch.autograd.grad(out, [q, k, v], torch.randn_like(out))]


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "TREEFX_CHECK" in record.getMessage()]


@settings(max_examples=15, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_right_results_pass(data: st.DataObject, dtype: torch.dtype) -> None:
    """Every attention is checked; random numbers of the program stay the same.

    Attention without options takes a shorter way outside of checks, which rounds otherwise.
    """
    parents = data.draw(random_parents())
    options = {"window": 5, "softcap": 2.0} if data.draw(st.booleans()) else {}
    ends = subtree_ends(parents)
    plain = [*step(ends, dtype, **options), torch.rand(1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "EVERY", 1)
        checked = [*step(ends, dtype, **options), torch.rand(1)]
    assert torch.equal(plain[-1], checked[-1])
    close = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.03}[dtype]
    torch.testing.assert_close(checked, plain, rtol=close, atol=close)


def subtree_ends(parents: list[int]) -> Tensor:
    ends = list(range(1, len(parents) + 1))
    for token in reversed(range(len(parents))):
        if parents[token] >= 0:
            ends[parents[token]] = max(ends[parents[token]], ends[token])
    return torch.tensor(ends, dtype=torch.int32)


def test_each_number_of_attentions_is_checked(every: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    every(3)
    ends = torch.full((80,), 80, dtype=torch.int32)
    with caplog.at_level(logging.INFO, "treefx"):
        for _ in range(7):
            step(ends)
    found = texts(caplog)
    assert len(found) == 6 and all("equals the reference" in text for text in found)  # numbers 0, 3 and 6
    assert sum("backward" in text for text in found) == 3


@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_a_wrong_result_stops_the_program(
    every: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """The output, or one of the gradients, off where one query in two is."""
    forward, backward = cpu.forward, cpu.backward

    def off(x: Tensor) -> Tensor:
        return x * torch.where(torch.arange(x.shape[2]) % 2 == 0, 1.0, 1.1)[:, None]

    def wrong_forward(*args: Any) -> Any:
        out, lse = forward(*args)
        return (off(out), lse) if part == 0 else (out, lse)

    def wrong_backward(*args: Any) -> Any:
        found = list(backward(*args))
        found[part - 1] = off(found[part - 1]) if part else found[part - 1]
        return tuple(found)

    monkeypatch.setattr(cpu, "forward", wrong_forward)
    monkeypatch.setattr(cpu, "backward", wrong_backward)
    ends = torch.full((80,), 80, dtype=torch.int32)
    step(ends)  # without checks it runs
    every(1)
    with pytest.raises(TreefxError, match=rf"TREEFX_CHECK: a {'backward' if part else 'forward'} of tree attention"):
        step(ends)


def test_inference_tensors_are_compared(every: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    every(1)
    with torch.inference_mode(), caplog.at_level(logging.INFO, "treefx"):
        q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
        tree_attention(q, k, v, torch.full((9,), 9, dtype=torch.int32))
    assert len(texts(caplog)) == 1


@pytest.mark.parametrize(("text", "code"), [("2", 0), ("often", 1)])
def test_the_variable_is_read_when_the_operator_is_loaded(text: str, code: int) -> None:
    program = "from treefx.kernels import checks, tree_attention; print(checks.EVERY)"
    environment = {**os.environ, "TREEFX_CHECK": text}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.strip() == "2" if code == 0 else "TREEFX_CHECK must be a whole number" in done.stderr
