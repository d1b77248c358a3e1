"""A dictionary with a bound, for answers that a process keeps and can find again."""

from typing import TypeVar

__all__ = ["Bounded"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class Bounded(dict[_K, _V]):
    """Keeps the entries that were set last, at most ``limit`` of them.

    Args:
        limit: How many entries there may be.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: _K, value: _V) -> None:
        self.pop(key, None)  # it becomes the newest
        super().__setitem__(key, value)
        while len(self) > self.limit:
            try:
                del self[next(iter(self))]
            except (KeyError, RuntimeError, StopIteration):  # another thread makes room at the same time
                return
