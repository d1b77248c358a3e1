"""Time that jumps from event to event, in an order that does not depend on chance."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

__all__ = ["Action", "Clock"]

Action = Callable[[], None]
"""What happens at an event."""


class Clock:
    """A queue of events in time; events of the same time run in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._queue: list[tuple[float, int, Action]] = []
        self._order = count()

    def after(self, seconds: float, action: Action) -> None:
        """Let ``action`` happen ``seconds`` from now."""
        heappush(self._queue, (self.now + seconds, next(self._order), action))

    def run(self) -> float:
        """Let everything happen; the time at which nothing is left."""
        while self._queue:
            self.now, _, action = heappop(self._queue)
            action()
        return self.now
