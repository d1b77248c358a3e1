"""A link of a given rate between processes: what is sent goes through gloo, and arrives as late as the link says.

Nobody computes while bytes travel: a collective has a time of arrival, and who waits for it sleeps until then.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["EmulatedLink", "connect"]

_NAME = "treefx_link"


class _Sending(dist.Work):
    """Bytes under way."""

    def __init__(self, works: list[dist.Work], arrival: float) -> None:
        super().__init__()
        self._works, self._arrival = works, arrival

    def wait(self, timeout: Any = None) -> bool:
        """Until gloo has carried them, and the link has had the time for them."""
        for work in self._works:
            work.wait()
        time.sleep(max(0.0, self._arrival - time.perf_counter()))
        return True


class EmulatedLink(dist.ProcessGroup):
    """The collectives of tensor parallelism over a link that carries one after the other.

    Attributes:
        bytes_per_second: Of tensors that go once around the ranks, as in ``Rates``; a change holds from the next
            collective on. Infinite: gloo alone.
        carried_seconds: For how long it has carried something so far.
    """

    def __init__(self, carrier: dist.ProcessGroup) -> None:
        """Args: carrier: A group of gloo with the same ranks; what goes through it directly is not delayed."""
        super().__init__(carrier.rank(), carrier.size())  # type: ignore[call-arg]
        self.bytes_per_second, self.carried_seconds = math.inf, 0.0
        self._carrier, self._free = carrier, 0.0
        self._under_way: list[_Sending] = []

    def getBackendName(self) -> str:
        return _NAME

    @property
    def group_name(self) -> Any:
        """What collectives in graphs call it; torch keeps the names of groups written in Python elsewhere."""
        return dist.distributed_c10d._world.pg_names[self]

    def seconds(self, size: int, around: int = 1) -> float:
        """Of a tensor of so many bytes that goes so often around the ranks."""
        return around * size / self.bytes_per_second

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        size = sum(tensor.nbytes for tensor in tensors)
        return self._send([self._carrier.allreduce(tensors, opts)], self.seconds(size, around=2))

    def all_gather_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        works = [self._carrier._allgather_base(output, given, opts) for output, given in pairs]
        return self._send(works, self.seconds(sum(output.nbytes for output in outputs)))

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        works = [self._carrier._reduce_scatter_base(output, given, opts) for output, given in pairs]
        return self._send(works, self.seconds(sum(given.nbytes for given in inputs)))

    # As torch called them before 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _send(self, works: list[dist.Work], seconds: float) -> dist.Work:
        now = time.perf_counter()
        self._free = max(now, self._free) + seconds
        self.carried_seconds += seconds
        # Torch holds what is written in C++ of a work: its Python part has to live here until it has arrived.
        self._under_way = [sending for sending in self._under_way if sending._arrival > now - 60.0]
        self._under_way.append(_Sending(works, self._free))
        return self._under_way[-1]


def connect() -> EmulatedLink:
    """A new group of all ranks over such a link; every rank has to call it, with gloo as its default group."""
    carrier: Any = dist.group.WORLD
    if _NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_NAME, lambda *_: EmulatedLink(carrier), devices=["cpu"])
    link = dist.new_group(backend=_NAME)
    assert isinstance(link, EmulatedLink)
    return link
