"""A link between neighbours of the ring."""

from treefx.tools.simulate.hardware.clock import Action, Clock

__all__ = ["Wire"]


class Wire:
    """Send messages one by one at ``rate`` bytes per second, ``latency`` seconds late.

    All GPUs of the ring do the same at the same time, so what this one sends is also what it receives: ``arrived`` is
    called as the neighbour whose turn it is.
    """

    def __init__(self, clock: Clock, rate: float, latency: float) -> None:
        self.clock = clock
        self.rate = rate
        self.latency = latency
        self.sent = 0.0
        """Bytes sent."""
        self.received = 0.0
        """Bytes that arrived."""
        self.busy = 0.0
        """Seconds that the link worked."""
        self._free = 0.0

    def send(self, size: float, arrived: Action) -> None:
        """Send ``size`` bytes, and call ``arrived`` when the last of them is there."""
        seconds = size / self.rate
        self._free = max(self._free, self.clock.now) + seconds
        self.sent += size
        self.busy += seconds

        def arrive() -> None:
            self.received += size
            arrived()

        self.clock.after(self._free - self.clock.now + self.latency, arrive)
