"""Lists of tiles that one stream has made and another uses; streams and events are stand-ins."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.kernels.tiles import tree_blocks
from treefx.kernels.tiles.streams import Made
from treefx.kernels.tiles.tree_blocks import Keys, TreeBlocks, find_blocks


@dataclass(eq=False)
class Stream:
    """One that remembers what it waited for."""

    device: torch.device = torch.device("cuda")
    waited: list[Any] = field(default_factory=list)

    def wait_event(self, event: "Event") -> None:
        self.waited.append(event.stream)


class Event:
    """One that remembers where it was recorded."""

    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream


@dataclass
class Device:
    """The current stream, and the memory that streams have in use."""

    current: Stream = field(default_factory=Stream)
    held: list[tuple[int, Stream]] = field(default_factory=list)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found, now = Device(), Made.now
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: found.held.append((x.data_ptr(), stream)))
    monkeypatch.setattr(Made, "now", lambda device: now(torch.device("cuda")))
    monkeypatch.setattr(tree_blocks, "is_on_device", lambda tensor: True)
    yield found
    tree_blocks.forget_blocks()


def lists(ends: Tensor) -> TreeBlocks:
    return find_blocks(Keys(ends), len(ends), 16, 16)


def test_another_stream_waits_and_holds_the_memory(device: Device) -> None:
    ends = torch.full((100,), 100, dtype=torch.int32)
    first, second = device.current, Stream()
    made = lists(ends)
    assert lists(ends) is made and not first.waited and not device.held, "on the same stream there is an order"
    device.current = second
    assert lists(ends) is made
    assert second.waited == [first] and not first.waited
    vectors = [made.size, *(x for part in (made.by_query, made.by_key) for x in vars(part).values())]
    vectors += [x for x in vars(made.key_programs).values() if isinstance(x, Tensor)]
    assert {(x.data_ptr(), second) for x in vectors if len(x)} <= set(device.held)


def test_every_stream_makes_lists_of_new_forests_itself(device: Device) -> None:
    lists(torch.full((100,), 100, dtype=torch.int32))
    device.current = Stream()
    lists(torch.arange(1, 101, dtype=torch.int32))
    assert not device.current.waited


def test_without_streams_there_is_nothing_to_wait_for() -> None:
    assert Made.now(torch.device("cpu")) is None
