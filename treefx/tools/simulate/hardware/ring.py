"""Reduce-scatter and all-gather on a ring, alone on the machine.

Each of ``ranks - 1`` steps sends a chunk, ``size / ranks``, to the neighbour; the kernel starts a step when the one
before has arrived. Inside a step, groups of tiles are read, sent and stored one behind the other.
"""

from math import ceil

from treefx.tools.simulate.hardware.clock import Action, Clock
from treefx.tools.simulate.hardware.machine import Machine
from treefx.tools.simulate.hardware.memory import Lane, Memory
from treefx.tools.simulate.hardware.traffic import Run, Traffic
from treefx.tools.simulate.hardware.wire import Wire

__all__ = ["all_gather", "groups_of_a_chunk", "reduce_scatter"]


def groups_of_a_chunk(size: float, ranks: int, machine: Machine) -> int:
    """Groups of tiles in one of ``ranks`` chunks of ``size`` bytes."""
    return max(1, ceil(size / ranks / machine.group_bytes))


def reduce_scatter(size: float, ranks: int, machine: Machine, *, near_memory: bool = False) -> Run:
    """Sum ``size`` bytes over the ring and leave a chunk on each rank.

    On compute units a step reads its own chunk and the one received, and sends the sum; the last sum is read, read
    and stored after the last chunk has arrived. ``near_memory``: what arrives is added by the memory, so that a step
    reads one chunk, and nothing is left to do at the end.
    """
    steps = _Steps(size, ranks, machine)
    for step in range(ranks - 1):
        steps.send(reads=1 if near_memory or step == 0 else 2)
    if not near_memory:
        steps.reduce()
    return steps.run("rs")


def all_gather(size: float, ranks: int, machine: Machine) -> Run:
    """Send every rank's chunk of ``size`` bytes to all others."""
    steps = _Steps(size, ranks, machine)
    for _ in range(ranks - 1):
        steps.send(reads=1)
    return steps.run("ag")


class _Steps:
    """Run steps with a barrier between them; each is a list of groups in sequence."""

    def __init__(self, size: float, ranks: int, machine: Machine) -> None:
        self.clock = Clock()
        self.memory = Memory(self.clock, machine.memory_bytes_per_second)
        self.wire = Wire(self.clock, machine.link_bytes_per_second, machine.link_latency_seconds)
        self.groups = groups_of_a_chunk(size, ranks, machine)
        self.group = size / ranks / self.groups
        self.cost = machine.store_cost
        self.reads = self.stores = 0.0
        self._todo: list[Action] = []
        self._open = 0

    def send(self, reads: int) -> None:
        """A step: every group is read (``reads`` times), sent, and stored where it arrives."""
        chunk = self.group * self.groups
        self.reads += reads * chunk
        self.stores += chunk

        def store() -> None:
            self.memory.request(Lane.TRANSFER, self.group, self._end, cost=self.cost)

        def send() -> None:
            self.wire.send(self.group, store)

        self._todo.append(lambda: self._start(lambda: self.memory.request(Lane.READ, reads * self.group, send)))

    def reduce(self) -> None:
        """The last step: read what arrived and the rank's own chunk, and store their sum."""
        chunk = self.group * self.groups
        self.reads += 2 * chunk
        self.stores += chunk

        def store() -> None:
            self.memory.request(Lane.STORE, self.group, self._end, cost=self.cost)

        self._todo.append(lambda: self._start(lambda: self.memory.request(Lane.READ, 2 * self.group, store)))

    def _start(self, begin: Action) -> None:
        self._open = self.groups
        for _ in range(self.groups):
            begin()

    def _end(self) -> None:
        self._open -= 1
        if self._open == 0 and self._todo:
            self._todo.pop(0)()

    def run(self, name: str) -> Run:
        if self._todo:
            self._todo.pop(0)()
        seconds = self.clock.run()
        return Run(
            seconds=seconds,
            traffic=Traffic({f"{name} reads": self.reads, f"{name} stores": self.stores}),
            wire_bytes=self.wire.sent,
            wire_seconds=self.wire.busy,
            memory_seconds=self.memory.busy,
            memory_peak=self.memory.peak,
        )
