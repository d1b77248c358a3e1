"""What several files of this folder use.

Most tests here are about the rewritten graph, and run it directly (inner compiler "eager"): tracing and partitioning
its backward takes more than half of a test's time. What AOTAutograd and inductor make of it is tested on all
architectures (test_zoo), on forests (test_native) and where graphs are kept or changed (test_life, test_modes).
"""

import copy
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import cpu_vec_isa
from torch._inductor import utils as inductor

from tests import oracle
from tests.batches import Batch
from tests.models import double

__all__ = [
    "Pair", "assert_packed", "compare", "compile_with", "empty_cache", "fresh_cache", "in_case", "llama",
    "logits_at_real_tokens",
]  # fmt: skip

compare = functools.partial(oracle.compare, inner="eager")
compile_with = functools.partial(oracle.compile_with, inner="eager")


class Pair:
    """Compare many steps of one model with eager mode, on one compilation.

    Args:
        model: Copied twice, for eager mode and for treefx.
        options: Of the backend.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.eager, self.model = copy.deepcopy(model), copy.deepcopy(model)
        self.compiled = compile_with(self.model, **options)

    def check(self, step: oracle.Step | Batch, tolerance: float | None = None) -> oracle.Checked:
        """Assert equal loss and gradients of one step, as `compare` does."""
        run = oracle.loss_of(step) if isinstance(step, Batch) else step
        if tolerance is None:
            in_float64 = next(self.eager.parameters()).dtype == torch.float64
            tolerance = oracle.FLOAT64 if in_float64 else oracle.FLOAT32
        expected = oracle.outcome(self.eager, lambda: run(self.eager))
        got = oracle.outcome(self.model, lambda: run(self.compiled))
        zeros = functools.partial(oracle.zero_gradients, self.eager, run)
        return oracle.Checked(self.compiled, self.model, oracle.assert_close(got, expected, tolerance, zeros))


@contextmanager
def in_case(name: object) -> Iterator[None]:
    """Name the case of a loop in the message of a failed assertion."""
    try:
        yield
    except (AssertionError, pytest.fail.Exception) as error:
        raise AssertionError(f"case {name}: {error}") from error


def llama() -> nn.Module:
    """Llama of one layer in float64, without the float32 casts of its file."""
    return double("llama", num_hidden_layers=1)


def assert_packed(checked: oracle.Checked, tokens: int, layers: int | None = None) -> None:
    """Nothing fell back, the distinct tokens ran, and (where given) each layer's attention ran on them."""
    stats = checked.stats
    assert stats["fallback"] is None
    assert stats["tokens"] == tokens
    assert layers is None or stats["attention_rewritten"] == layers


def logits_at_real_tokens(batch: Batch) -> oracle.Step:
    """A caller's loss: squared logits of the cells under the mask, each with another weight."""

    def step(model: nn.Module) -> Tensor:
        logits = model(**batch.without("labels").inputs()).logits
        weight = torch.linspace(0.5, 2.0, logits[..., 0].numel(), dtype=logits.dtype).view(logits.shape[:2])
        if batch.attention_mask is not None:
            weight = weight * batch.attention_mask
        return (logits.square().mean(-1) * weight).sum()

    return step


def empty_cache(folder: Path) -> dict[str, str]:
    """The environment of processes that find no compiled code but each other's.

    Inductor keeps what it has compiled and what vectors this machine takes in one folder: the second takes eight
    seconds to find out, and is handed over where no probe failed.
    """
    machine = set(cpu_vec_isa.x86_isa_checker())
    probed = all(isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= machine)
    known = {"TORCHINDUCTOR_VEC_ISA_OK": "1"} if probed else {}
    return {**os.environ, **known, "TORCHINDUCTOR_CACHE_DIR": str(folder)}


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Inductor's cache is empty inside; which vectors this machine takes is found out before, in that of all tests."""
    cpu_vec_isa.pick_vec_isa()
    with inductor.fresh_cache():
        yield
