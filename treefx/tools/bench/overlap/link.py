"""Emulate a link of a given rate between processes: messages arrive after its delay.

No processor works while bytes travel, as with a network card that reads and writes memory by itself: the issuer of a
collective copies its message into memory that all ranks read; a waiting rank sleeps until it has arrived, and adds up.
Only the time of issue is told through gloo.
"""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treefx.errors import InputError
from treefx.tools.bench.overlap.outbox import Outbox

__all__ = ["EmulatedLink", "connect"]

_NAME = "treefx_link"
_IN_MEMORY = Path("/dev/shm")
"""Files there are on no disk."""

_made: list[EmulatedLink] = []
"""The link that torch requests next."""

Receive = Callable[[Tensor, list[Tensor]], Any]
"""Called with the destination, and the messages by rank."""


class _Sending(dist.Work):
    """A collective under way."""

    def __init__(self, link: EmulatedLink, first: int, seconds: float, receive: Callable[[], None]) -> None:
        """Start a collective of so many seconds on a link, after ``first`` earlier tensors."""
        super().__init__()
        self.first, self.seconds, self.arrival, self.received = first, seconds, math.nan, False
        self._link, self._receive = link, receive
        self.told = torch.tensor([time.perf_counter(), -link.received(first)], dtype=torch.float64)
        self.issued = link.largest(self.told)

    def wait(self, timeout: Any = None) -> bool:
        """Until all ranks have issued it, and the link has had the time for it."""
        if not self.received:
            self._link.carry_up_to(self)
            time.sleep(max(0.0, self.arrival - time.perf_counter()))
            self._receive()
            self.received = True
        return True


class EmulatedLink(dist.ProcessGroup):
    """Run tensor parallelism's collectives, all sums, over a link one after the other.

    Attributes:
        bytes_per_second: Of tensors that go once around the ranks, as in ``Rates``; a change holds from the next
            collective on. Infinite: as fast as ranks copy and add.
        carried_seconds: Seconds for which it has carried messages.
    """

    def __init__(self, carrier: dist.ProcessGroup, outbox: Outbox) -> None:
        """Args: carrier: A group of gloo with the same ranks. outbox: What this rank sends."""
        super().__init__(carrier.rank(), carrier.size())  # type: ignore[call-arg]
        self.bytes_per_second, self.carried_seconds = math.inf, 0.0
        self._carrier, self._outbox, self._free = carrier, outbox, 0.0
        self._to_carry: deque[_Sending] = deque()
        self._to_receive: deque[_Sending] = deque()

    def getBackendName(self) -> str:
        return _NAME

    @property
    def group_name(self) -> Any:
        """Return the group's name in graphs; torch keeps names of Python groups elsewhere."""
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        _check_sum(opts)
        return self._send(tensors, tensors, _add, 2 * _bytes(tensors))

    def all_gather_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        return self._send(outputs, inputs, lambda output, parts: torch.cat(parts, out=output), _bytes(outputs))

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        _check_sum(opts)
        ranks, rank = self.size(), self.rank()

        def add_shares(output: Tensor, parts: list[Tensor]) -> None:
            _add(output, [part.chunk(ranks)[rank] for part in parts])

        return self._send(outputs, inputs, add_shares, _bytes(inputs))

    # As torch called them before 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def received(self, sent: int) -> int:
        """How many of so many tensors have arrived here with all that were sent before them."""
        while self._to_receive and self._to_receive[0].received:
            self._to_receive.popleft()
        return self._to_receive[0].first if self._to_receive else sent

    def largest(self, values: Tensor) -> dist.Work:
        """Makes each the largest of all ranks, in place, once that has been waited for."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self._carrier.allreduce([values], options)

    def carry_up_to(self, last: _Sending) -> None:
        """Compute arrivals up to one: each starts when all ranks issued it and the last arrived."""
        while math.isnan(last.arrival):
            first = self._to_carry.popleft()
            first.issued.wait()
            issued, received = first.told.tolist()
            self._free = first.arrival = max(issued, self._free) + first.seconds
            self._outbox.read_by_all(-int(received))

    def _send(self, outputs: list[Tensor], inputs: list[Tensor], receive: Receive, around: int) -> dist.Work:
        """Args: around: Bytes times how often they go around the ranks."""
        first = self._outbox.count
        parts = [self._outbox.put(given) for given in inputs]

        def receive_all() -> None:
            for output, sent in zip(outputs, parts, strict=True):
                receive(output, sent)

        seconds = around / self.bytes_per_second
        self.carried_seconds += seconds
        sending = _Sending(self, first, seconds, receive_all)
        self._to_carry.append(sending)
        # Torch holds the C++ part of a work: its Python part has to live here until it has arrived.
        self._to_receive.append(sending)
        return sending


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _add(output: Tensor, parts: list[Tensor]) -> None:
    """In the order of ranks, the same on all."""
    functools.reduce(lambda total, part: torch.add(total, part, out=output), parts)


def _check_sum(opts: Any) -> None:
    if opts.reduceOp != dist.ReduceOp.SUM:
        raise InputError(f"expected a sum over the ranks of an emulated link, got {opts.reduceOp.op}")


def connect(most_bytes: int) -> EmulatedLink:
    """Make a group of all ranks over such a link; every rank calls it, default group gloo.

    Args:
        most_bytes: Of what a rank has sent and not all have received, at once.
    """
    carrier: Any = dist.group.WORLD
    outbox = Outbox(_shared_memory(most_bytes), dist.get_rank())
    if _NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_NAME, lambda *_: _made.pop(), devices=["cpu"])
    _made.append(EmulatedLink(carrier, outbox))
    link = dist.new_group(backend=_NAME)
    assert isinstance(link, EmulatedLink)
    return link


def _shared_memory(size: int) -> list[Tensor]:
    """Map bytes that all ranks share, by rank; files lose their names once all are open."""
    folder = tempfile.mkdtemp(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) if dist.get_rank() == 0 else None
    given: list[Any] = [folder]
    dist.broadcast_object_list(given)
    paths = [f"{given[0]}/{rank}" for rank in range(dist.get_world_size())]
    found = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
    dist.barrier()
    if folder is not None:
        shutil.rmtree(folder)
    return found
