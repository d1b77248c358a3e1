"""Time that jumps from event to event, in an order that does not depend on chance."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

__all__ = ["Action", "Clock"]

Action = Callable[[], None]
"""What happens at an event."""


class Clock:
    """Queue events by time; events of one time run in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._queue: list[tuple[float, int]] = []
        self._actions: dict[int, Action] = {}
        self._order = count()

    def after(self, seconds: float, action: Action) -> int:
        """Let ``action`` happen ``seconds`` from now; the number of the event, for ``cancel``."""
        event = next(self._order)
        self._actions[event] = action
        heappush(self._queue, (self.now + seconds, event))
        return event

    def cancel(self, event: int | None) -> None:
        """Let an event not happen, if it has not: time does not stop at it either."""
        if event is not None:
            self._actions.pop(event, None)

    def run(self) -> float:
        """Let everything happen; the time of the last event."""
        while self._queue:
            time, event = heappop(self._queue)
            action = self._actions.pop(event, None)
            if action is not None:
                self.now = time
                action()
        return self.now
