"""The memory of one GPU: two streams of requests, and who goes first.

Addresses are spread evenly over the channels by hashing, so all channels do the same at the same time, and one server
with the rate of all stands for them. Requests flow: between two events every lane is served at a constant rate. The
stream of the compute units has two lanes, what waves read and what they store; communication has one, the reads of
DMA and the updates that arrive. A lane serves its jobs in order.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from math import inf

from treefx.simulate.clock import Action, Clock

__all__ = ["Arbitration", "Lane", "Memory"]


class Lane(Enum):
    """Where a request waits."""

    READ = "compute reads"
    STORE = "compute stores"
    TRANSFER = "communication"


@dataclass(frozen=True)
class Arbitration:
    """Who is served when compute and communication both want the memory (T3, section 4.5).

    A channel serves its queue in order, so each stream gets a share as large as its part of what is queued. Waves
    have no more in the queue than what they fetch ahead; a DMA queues all it has to move. ``occupancy`` limits that:
    T3-MCA serves compute first, and lets communication in only while fewer requests wait, so that no more than
    ``occupancy`` bytes of it stand before a request of compute. ``least`` is the share that communication gets in any
    case, the limit of starvation.
    """

    occupancy: float = inf
    least: float = 0.0

    def divide(self, wants: tuple[float, float], queued: tuple[float, float]) -> tuple[float, float]:
        """The shares of a rate of 1 for compute and communication, which want ``wants`` of it and have ``queued``
        bytes in the queue."""
        ahead = min(queued[1], self.occupancy)
        share = queued[0] / (queued[0] + ahead) if queued[0] > 0.0 else 0.0
        given = min(wants[0], max(min(share, 1.0 - self.least), 1.0 - wants[1]))
        return given, min(wants[1], 1.0 - given)


def _fair(first: float, second: float) -> tuple[float, float]:
    """Two shares of a rate of 1: half each, and what one does not want goes to the other."""
    given = min(first, max(0.5, 1.0 - second))
    return given, min(second, 1.0 - given)


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
        self._version = 0

    # Long: its arguments and what they mean.
    def request(
        self, lane: Lane, size: float, done: Action, *, cost: float = 1.0, ceiling: float = inf, ahead: float = inf
    ) -> None:
        """Move ``size`` bytes and call ``done``.

        ``cost`` is the time a byte takes, as a multiple of a plain access; ``ceiling`` the bytes per second at which
        the requests are issued at most; ``ahead`` the bytes that are requested before earlier ones are there.
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
        wants = [self._want(lane) for lane in Lane]
        both = min(1.0, wants[0] + wants[1]), wants[2]
        compute, transfer = self.arbitration.divide(both, (self._waiting(), max(0.0, self._queued[Lane.TRANSFER])))
        read, store = _fair(wants[0] / compute, wants[1] / compute) if compute > 0.0 else (0.0, 0.0)
        self._shares = dict(zip(Lane, (read * compute, store * compute, transfer), strict=True))
        self.peak = max(self.peak, sum(self._shares.values()))
        self._version += 1
        ends = [self._jobs[lane][0].left / (share * self.rate) for lane, share in self._shares.items() if share > 0.0]
        if ends:
            version = self._version
            self.clock.after(max(0.0, min(ends)), lambda: self._finish(version))

    def _want(self, lane: Lane) -> float:
        return min(1.0, self._jobs[lane][0].ceiling / self.rate) if self._jobs[lane] else 0.0

    def _waiting(self) -> float:
        """Bytes of the compute stream in the queue."""
        reads = self._jobs[Lane.READ]
        return max(0.0, self._queued[Lane.STORE]) + (min(reads[0].left, reads[0].ahead) if reads else 0.0)

    def _finish(self, version: int) -> None:
        if version != self._version:
            return  # the shares have changed since: another event stands for what was planned then
        self._settle()
        # A thousandth of a byte is rounding: sizes are above a kilobyte, and times below a second.
        ended = [self._jobs[lane].popleft() for lane in Lane if self._jobs[lane] and self._jobs[lane][0].left < 1e-3]
        self._plan()
        for job in ended:
            job.done()
