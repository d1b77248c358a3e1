"""Batches that trainers move: the host reads its own copy, and waits for none of them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.integrations.moved_batches import remember_moved, watch_data_loaders
from treefx.kernels import memory
from treefx.runtime import call_plan as tries
from treefx.runtime.call_plan import build_batch, find_unshared

IDS = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Tensors made from now on count as a device's, but for the host's copies; what the host waits for."""
    fetched: list[Tensor] = []
    moved = _moved

    def copied(tensors: list[Tensor]) -> list[Tensor]:
        fetched.extend(tensors)
        return [x.clone() for x in tensors]

    monkeypatch.setattr(memory, "is_on_device", lambda tensor: any(tensor is x for x in moved))
    monkeypatch.setattr(memory, "_fetched", copied)
    monkeypatch.setattr(tries, "_recent", type(tries._recent)(maxlen=4))
    yield fetched
    moved.clear()
    memory._sent.clear()


_moved: list[Tensor] = []


def to_device(value: Any, *_: Any, **__: Any) -> Any:
    if isinstance(value, dict):
        return {name: to_device(item) for name, item in value.items()}
    _moved.append(value.clone())
    return _moved[-1]


def test_the_host_waits_for_nothing_that_a_data_loader_moved(waits: list[Tensor]) -> None:
    loader = SimpleNamespace(send_to_device=to_device, broadcast=dict)
    watch_data_loaders(loader)
    watch_data_loaders(loader)  # twice is once
    for shift in range(3):  # a new forest each time
        batch = loader.send_to_device({"input_ids": IDS + shift, "mask": MASK.bool(), "scores": torch.ones(2, 4)})
        assert find_unshared([batch["input_ids"]], batch["mask"]) is None
        assert build_batch([batch["input_ids"]], batch["mask"]).tokens == 5
    assert not waits


def test_a_batch_moved_otherwise_is_read_at_every_call(waits: list[Tensor]) -> None:
    """Once for a trie. What a collective or ``.data`` writes leaves no trace: an older copy would be wrong."""
    ids, mask = to_device(IDS), to_device(MASK.bool())
    assert build_batch([ids], mask).tokens == 5 and len(waits) == 2
    ids.data[1] = torch.tensor([7, 8, 9, 9])
    assert build_batch([ids], mask).tokens == 7 and len(waits) == 4


def test_a_batch_that_ranks_broadcast_is_read(waits: list[Tensor]) -> None:
    """As accelerate's dispatcher: other ranks move a batch without content, into which rank 0's is written."""

    def broadcast(batch: Any, from_process: int) -> Any:
        batch["input_ids"].data[:] = IDS
        return batch

    loader = SimpleNamespace(send_to_device=to_device, broadcast=broadcast)
    watch_data_loaders(loader)
    batch = loader.send_to_device({"input_ids": torch.zeros_like(IDS)})
    assert build_batch([batch["input_ids"]], None).tokens == 4 and not waits
    batch = loader.broadcast(batch, from_process=0)
    assert build_batch([batch["input_ids"]], None).tokens == 6 and len(waits) == 1


def test_a_tensor_written_to_on_the_device_is_read_again(waits: list[Tensor]) -> None:
    ids = remember_moved([IDS], [to_device(IDS)])[0]
    assert build_batch([ids], None).tokens == 6 and not waits
    ids[1] = torch.tensor([1, 2, 3, 9])
    assert build_batch([ids], None).tokens == 5 and len(waits) == 1


def test_a_buffer_that_the_collator_fills_again_is_no_copy(waits: list[Tensor]) -> None:
    buffer = IDS.clone()
    first = remember_moved(buffer, to_device(buffer))
    buffer.numpy()[1] = [7, 8, 9, 9]  # which no version shows
    assert build_batch([first], None).tokens == 6 and not waits
