"""Share values between streams of a device: others wait, and memory is not reused."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Made"]


@dataclass(frozen=True)
class Made:
    """Mark the point at which a CUDA stream had finished its work.

    Attributes:
        stream: that stream.
        event: the event that others wait for.
    """

    stream: Any
    event: Any

    @classmethod
    def now(cls, device: torch.device) -> "Made | None":
        """Return this moment of the current stream; ``None`` where the device has no streams."""
        if device.type != "cuda":
            return None
        stream, event = torch.cuda.current_stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return cls(stream, event)

    def use(self, value: Any) -> None:
        """Make the current stream wait before it uses a value, and keep its memory in use.

        Args:
            value: a tensor, or a container: tuples, lists, dataclasses.
        """
        current = torch.cuda.current_stream(self.stream.device)
        if current == self.stream:
            return
        current.wait_event(self.event)
        for tensor in _tensors(value):
            tensor.record_stream(current)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    inner = [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else value
    if isinstance(inner, (tuple, list)):
        for item in inner:
            yield from _tensors(item)
