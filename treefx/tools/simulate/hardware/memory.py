"""The memory of one GPU: what waits in its queues, and who is served.

Addresses are spread evenly over the channels by hashing, so all channels do the same at the same time, and one server
with the rate of all stands for them. Requests flow: between two events every lane is served at a constant rate. The
stream of the compute units has two lanes, what waves read and what they store; communication has one, the reads of
DMA and the updates that arrive. A lane serves its jobs in order.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from treefx.tools.simulate.hardware.clock import Action, Clock

__all__ = ["Arbitration", "Lane", "Memory"]


class Lane(Enum):
    """Where a request waits."""

    READ = "compute reads"
    STORE = "compute stores"
    TRANSFER = "communication"


@dataclass(frozen=True)
class Arbitration:
    """Who is served when several lanes want the memory (T3, section 4.5).

    The queue of a channel is served in order, so each lane's share is its part of the queue. Waves queue no more
    reads than they fetch ahead; stores and DMA queue all they have to move, and a burst of them delays the reads.
    T3-MCA lets requests of compute in first, and communication only while fewer than ``occupancy`` bytes of it are in
    the queues (of all channels); such an amount delays no lane, and since it is served in order, it is never starved.
    """

    occupancy: float = inf

    def divide(self, wants: Sequence[float], queued: Sequence[float]) -> list[float]:
        """Return the shares of a rate of 1 for reads, stores and communication.

        They want ``wants`` of it and have ``queued`` bytes to move.
        """
        queued = [*queued[:2], min(queued[2], self.occupancy)]
        shares = [0.0, 0.0, 0.0]
        left, open_ = 1.0, [lane for lane in range(3) if wants[lane] > 0.0]
        while open_:
            total = sum(queued[lane] for lane in open_)
            content = [lane for lane in open_ if wants[lane] * total <= left * queued[lane]]
            for lane in content or open_:
                shares[lane] = wants[lane] if content else left * queued[lane] / total
            left -= sum(shares[lane] for lane in content)
            open_ = [lane for lane in open_ if lane not in content] if content else []
        return shares


@dataclass
class _Job:
    left: float
    ceiling: float
    ahead: float
    done: Action


class Memory:
    """A server of ``rate`` bytes per second.

    ``bytes_of`` counts the bytes of each lane; ``busy`` is the time that the server worked, were it at its full rate;
    ``peak`` the largest share of its rate it ever gave.
    """

    def __init__(self, clock: Clock, rate: float, arbitration: Arbitration | None = None) -> None:
        self.clock = clock
        self.rate = rate
        self.arbitration = arbitration or Arbitration()
        self.bytes_of = dict.fromkeys(Lane, 0.0)
        self.busy = 0.0
        self.peak = 0.0
        self._jobs: dict[Lane, deque[_Job]] = {lane: deque() for lane in Lane}
        self._queued = dict.fromkeys(Lane, 0.0)
        self._shares = dict.fromkeys(Lane, 0.0)
        self._since = 0.0
        self._event: int | None = None

    def request(
        self, lane: Lane, size: float, done: Action, *, cost: float = 1.0, ceiling: float = inf, ahead: float = inf
    ) -> None:
        """Move ``size`` bytes and call ``done``.

        ``cost`` is the time a byte takes, as a multiple of a read; ``ceiling`` the bytes per second at which the
        requests are issued at most; ``ahead`` the bytes that are requested before earlier ones are there.
        """
        self._settle()
        self.bytes_of[lane] += size
        self._queued[lane] += size * cost
        self._jobs[lane].append(_Job(size * cost, ceiling * cost, ahead * cost, done))
        self._plan()

    def _settle(self) -> None:
        """Count what was served since the last event."""
        passed = self.clock.now - self._since
        self._since = self.clock.now
        for lane, share in self._shares.items():
            if share > 0.0:
                self._jobs[lane][0].left -= share * self.rate * passed
                self._queued[lane] -= share * self.rate * passed
                self.busy += share * passed

    def _plan(self) -> None:
        """Divide the rate among the heads of the lanes, and wait for the first that ends."""
        wants = [min(1.0, jobs[0].ceiling / self.rate) if jobs else 0.0 for jobs in self._jobs.values()]
        shares = self.arbitration.divide(wants, [self._in_queue(lane) for lane in Lane])
        self._shares = dict(zip(Lane, shares, strict=True))
        self.peak = max(self.peak, sum(shares))
        self.clock.cancel(self._event)
        ends = {lane: self._jobs[lane][0].left / (share * self.rate) for lane, share in self._shares.items() if share}
        if ends:
            first = max(0.0, min(ends.values()))
            lanes = [lane for lane, end in ends.items() if end <= first * (1.0 + 1e-9)]
            self._event = self.clock.after(first, lambda: self._finish(lanes))

    def _in_queue(self, lane: Lane) -> float:
        # At least a byte: what rounding leaves of a job must still get a share.
        return max(1.0, min(self._queued[lane], self._jobs[lane][0].ahead)) if self._jobs[lane] else 0.0

    def _finish(self, lanes: list[Lane]) -> None:
        self._settle()
        # What was planned to end has ended: the clock may be too coarse to tell by the bytes that are left.
        ended = [self._jobs[lane].popleft() for lane in lanes]
        for lane, job in zip(lanes, ended, strict=True):
            self._queued[lane] -= job.left
        self._plan()
        for job in ended:
            job.done()
