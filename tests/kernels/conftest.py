"""What the kernel tests share: forests from parent arrays, poisoned memory, and caches of their own."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.kernels.tiles.tree_blocks import forget_blocks


@pytest.fixture(scope="session")
def ends_of() -> Callable[[list[int]], Tensor]:
    """Turn parents in packed order (-1: root) into ``subtree_end``."""

    def convert(parents: list[int]) -> Tensor:
        ends = list(range(1, len(parents) + 1))
        for token in reversed(range(len(parents))):
            if parents[token] >= 0:
                ends[parents[token]] = max(ends[parents[token]], ends[token])
        return torch.tensor(ends, dtype=torch.int32)

    return convert


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> None:
    """Only in the processes that test_triton_interpreter.py starts."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.gpu.fast_interpreter import install

        install()


@pytest.fixture(autouse=True)
def forgotten_forests() -> Iterator[None]:
    """Lists of tiles and launches of another test, whose forest was alike, serve none: it may have replaced a part."""
    forget_blocks()
    yield
    forget_blocks()


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill fresh memory with NaN, so that a result that was never written is seen."""

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                tensor.detach().fill_(torch.nan)  # a leaf that requires grad takes nothing in place
            return tensor

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch, "empty_strided", poison(torch.empty_strided))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture(scope="module")
def fresh_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the tests of a file share what they compile, and nothing with what was compiled before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEFX_CACHE_DIR", str(tmp_path_factory.mktemp("treefx")))
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for every pass that did not repeat what another has launched."""
    from treefx.kernels.gpu.triton_tree import attention

    found: list[int] = []
    whole = attention.attention_of
    monkeypatch.setattr(attention, "attention_of", lambda *given: (found.append(1), whole(*given))[1])
    return found
