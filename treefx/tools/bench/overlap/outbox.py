"""Hold memory that one rank writes and all read, as a ring of messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from treefx.errors import InputError

__all__ = ["Outbox"]

_ALIGNED = 64


class Outbox:
    """Place tensors that all ranks put in the same order and sizes at the same offsets.

    Attributes:
        count: Number of tensors put.
    """

    def __init__(self, shared: Sequence[Tensor], rank: int) -> None:
        """Args: shared: By rank, bytes that it writes and all read. rank: Whose outbox this is."""
        self.count, self._shared, self._rank = 0, shared, rank
        self._end = self._read = 0
        self._laid: deque[tuple[int, range]] = deque()

    def put(self, given: Tensor) -> list[Tensor]:
        """Copy a tensor there.

        Returns:
            By rank, where its tensor lies: to be read once that rank has told that it has put it there.

        Raises:
            InputError: No place is free besides unread messages.
        """
        place = self._place(given.nbytes)
        parts = [memory[place.start : place.stop].view(given.dtype).view(given.shape) for memory in self._shared]
        parts[self._rank].copy_(given)
        self._laid.append((self.count, place))
        self._end = -(-place.stop // _ALIGNED) * _ALIGNED
        self.count += 1
        return parts

    def read_by_all(self, count: int) -> None:
        """All ranks have read the first so many tensors: their places are free."""
        self._read = max(self._read, count)

    def _place(self, size: int) -> range:
        """Behind the last tensor, or at the front again where too little is left there."""
        most, start = len(self._shared[self._rank]), self._end
        if start + size > most:
            # What lies there is older than all that has to be read before a later lap gets there.
            while self._laid and self._laid[0][1].start >= self._end:
                self._laid.popleft()
            start = 0
        while self._laid and self._laid[0][1].start < start + size and self._laid[0][1].stop > start:
            if self._laid[0][0] >= self._read:
                break
            self._laid.popleft()
        else:
            if size <= most:
                return range(start, start + size)
        raise InputError(
            f"expected tensors that are under way to take at most {most:,} bytes, got one of {size:,} next to others; "
            "wait for them earlier, or connect with more memory"
        )
