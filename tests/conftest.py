"""Fixtures of every test: fixed seeds, one thread, a fresh Dynamo, and NaN in memory nobody wrote."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.fuzz.drawing import is_drawn
from tests.trainers.leftovers import forget_accelerate

pytest.register_assert_rewrite("tests.oracle", "tests.backend.support")

hypothesis.settings.register_profile("treefx", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("treefx")

WHOLE_RUN = 500
"""A run of at least as many cases is one of everything."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--whole``: what is otherwise drawn."""
    parser.addoption("--whole", action="store_true", help="run all cases of tests marked sample, not one in n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A run of everything takes samples of the tests with many long cases; a run of some files takes all of them."""
    if config.getoption("whole") or len(items) < WHOLE_RUN:
        return
    left_out = [item for item in items if not is_drawn(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if is_drawn(item)]


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
