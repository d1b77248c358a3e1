"""Fixtures of every test: fixed seeds, one thread, a fresh Dynamo, and NaN in uninitialised memory."""

import gc
import logging
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.trainers.leftovers import forget_accelerate

pytest.register_assert_rewrite("tests.oracle", "tests.backend.support")

hypothesis.settings.register_profile("treefx", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("treefx")


def pytest_collection_finish() -> None:
    """What the imports made lives until the end: Python need not walk it again and again (a fifth of all seconds).

    Nor need the planner count it one by one to learn that there is some (a thirtieth).

    PyTorch's cache of the results of operators on fake tensors checks each new entry by making the result once more:
    models of many equal layers gain by it, those of one or two lose (a tenth). Processes that tests start have it.

    pytest also listens to loggers that do not propagate; PyTorch's structured log, which writes nothing without a
    listener, would print every graph for it (a twentieth of all seconds).
    """
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.get_freeze_count = lambda: 1
    torch._dynamo.config.fake_tensor_cache_enabled = False


@pytest.fixture(scope="module", autouse=True)
def walked_once() -> Iterator[None]:
    """What a module leaves behind, such as lazily imported libraries, is not walked again either."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def reproducible() -> Iterator[None]:
    """Same random numbers and summation order in every run; no compiled code and no trainer outlives its test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)
    forget_accelerate()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills what torch.empty and its kin return with NaN (integers: their largest value)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
