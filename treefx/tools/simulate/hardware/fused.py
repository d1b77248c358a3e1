"""A GEMM alone, and a GEMM whose reduce-scatter T3 tracks and triggers.

One GPU is simulated. All others do the same with other chunks at the same time: workgroups are staggered so that the
chunk which a GPU makes at position p is the one that its neighbour made at position p - 1. What this GPU sends of
position p therefore arrives, in the mirror, as the neighbour's part of its position p + 1.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import cast

from treefx.tools.simulate.hardware.clock import Clock
from treefx.tools.simulate.hardware.gemm import Waves
from treefx.tools.simulate.hardware.machine import Machine
from treefx.tools.simulate.hardware.memory import Arbitration, Lane, Memory
from treefx.tools.simulate.hardware.ring import groups_of_a_chunk
from treefx.tools.simulate.hardware.tracker import SimulationError, Tracker
from treefx.tools.simulate.hardware.traffic import Run, Traffic
from treefx.tools.simulate.hardware.wire import Wire

__all__ = ["arbitration_of", "run_fused", "run_gemm"]

_StoreTiles = Callable[[int, int], None]


def run_gemm(waves: Waves, machine: Machine) -> Run:
    """Simulate a GEMM alone.

    Its stores wait in the cache and leave it evenly, so a wave moves its reads and as much of the output as it makes,
    while it computes.
    """
    clock = Clock()
    memory = Memory(clock, machine.memory_bytes_per_second)
    moved = waves.reads + waves.output
    cost = (waves.reads + machine.store_cost * waves.output) / moved
    _Gemm(replace(waves, reads=moved), memory, lambda first, last: None, cost).start()
    seconds = clock.run()
    return Run(
        seconds=seconds,
        traffic=Traffic({"gemm reads": waves.reads, "gemm stores": waves.output}),
        compute_seconds=waves.count * waves.seconds,
        memory_seconds=memory.busy,
        memory_peak=memory.peak,
    )


def arbitration_of(waves: Waves, machine: Machine) -> Arbitration:
    """Return T3-MCA's threshold for the memory share of the first wave alone."""
    intensity = waves.demand() / machine.memory_bytes_per_second
    requests = next(limit for least, limit in machine.occupancies if intensity >= least)
    return Arbitration(requests * machine.request_bytes * machine.channels)


def run_fused(waves: Waves, ranks: int, machine: Machine, arbitration: Arbitration, *, updates: int = 2) -> Run:
    """A GEMM with its ring reduce-scatter, tracked and triggered.

    The chunk of position 0 is stored straight into the neighbour's memory. Of every other chunk, the GEMM's store and
    the neighbour's sum are added by the memory; when the tracker has seen both (``updates``), a DMA sends the sum on,
    but for the last position, whose chunk stays.

    Raises:
        SimulationError: a sum was sent or kept that lacks a rank.
    """
    return _Fused(waves, ranks, machine, arbitration, updates).run()


class _Gemm:
    """Run waves in sequence; call ``stored(first, last)`` with a wave's tiles at its end."""

    def __init__(self, waves: Waves, memory: Memory, stored: _StoreTiles, cost: float = 1.0) -> None:
        self.waves = waves
        self.memory = memory
        self.stored = stored
        self.cost = cost

    def start(self, wave: int = 0) -> None:
        size = self.waves.reads * self.waves.tiles_of(wave) / self.waves.tiles
        self.memory.request(
            Lane.READ,
            size,
            lambda: self._end(wave),
            cost=self.cost,
            ceiling=size / self.waves.seconds,
            ahead=size * self.waves.fetched_ahead,
        )

    def _end(self, wave: int) -> None:
        first = wave * self.waves.per_wave
        self.stored(first, first + self.waves.tiles_of(wave))
        if wave + 1 < self.waves.count:
            self.start(wave + 1)


class _Fused:
    def __init__(self, waves: Waves, ranks: int, machine: Machine, arbitration: Arbitration, updates: int) -> None:
        self.waves, self.ranks, self.cost = waves, ranks, machine.store_cost
        self.clock = Clock()
        self.memory = Memory(self.clock, machine.memory_bytes_per_second, arbitration)
        self.wire = Wire(self.clock, machine.link_bytes_per_second, machine.link_latency_seconds)
        self.tracker = Tracker(self._fire, updates)
        self.groups = groups_of_a_chunk(waves.output, ranks, machine)
        self.group = waves.output / ranks / self.groups
        self.made = self.kept = 0
        self.dma_reads = 0.0

    def run(self) -> Run:
        gemm = _Gemm(self.waves, self.memory, self._store)
        gemm.start()
        seconds = self.clock.run()
        self.tracker.check_empty()
        if self.kept != self.groups:
            raise SimulationError(f"expected {self.groups} groups of sums to stay on each rank; {self.kept} do")
        return Run(
            seconds=seconds,
            traffic=Traffic(
                {
                    "gemm reads": self.waves.reads,
                    "gemm stores": self.memory.bytes_of[Lane.STORE],
                    "rs reads": self.dma_reads,
                    "rs stores": self.memory.bytes_of[Lane.TRANSFER] - self.dma_reads,
                }
            ),
            compute_seconds=self.waves.count * self.waves.seconds,
            memory_seconds=self.memory.busy,
            memory_peak=self.memory.peak,
            wire_bytes=self.wire.sent,
            wire_seconds=self.wire.busy,
            tracker_peak=self.tracker.peak,
        )

    def _store(self, first: int, last: int) -> None:
        """The wave of tiles up to ``last`` has ended: store every group that it completes."""
        made = last * self.ranks * self.groups // self.waves.tiles
        for index in range(self.made, made):
            self._store_group(*divmod(index, self.groups))
        self.made = made

    def _store_group(self, position: int, group: int) -> None:
        if position == 0:
            self._send(position, group, ranks=1)
        else:
            self._update(Lane.STORE, position, group, ranks=1)

    def _update(self, lane: Lane, position: int, group: int, ranks: int) -> None:
        """Add to a group in memory a sum over ``ranks`` ranks, and tell the tracker."""
        done = partial(self.tracker.update, (position, group), ranks)
        self.memory.request(lane, self.group, done, cost=self.cost)

    def _send(self, position: int, group: int, ranks: int) -> None:
        """Send a sum over ``ranks`` ranks; it arrives as an update of the next position."""
        self.wire.send(self.group, partial(self._update, Lane.TRANSFER, position + 1, group, ranks))

    def _fire(self, key: Hashable, ranks: int) -> None:
        """All updates of a group are in memory: send it on, or keep it where it belongs."""
        position, group = cast(tuple[int, int], key)
        if ranks != position + 1:
            raise SimulationError(
                f"expected the sum of {position + 1} ranks in tile group {key} when its DMA was fired; it holds "
                f"{ranks}. The tracker fires after {self.tracker.updates} update(s): let it wait for all"
            )
        if position == self.ranks - 1:
            self.kept += 1
        else:
            self.dma_reads += self.group
            self.memory.request(Lane.TRANSFER, self.group, partial(self._send, position, group, ranks))
