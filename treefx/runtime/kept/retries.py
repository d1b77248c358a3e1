"""Retry failures that may pass: no memory, a file that could not be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from treefx.errors import UnsupportedError

__all__ = ["LATER", "PASSING", "NotNow", "Retries"]

PASSING: tuple[type[Exception], ...] = (MemoryError, OSError, torch.OutOfMemoryError)
"""Errors of the machine at one moment, not of a graph: another call may not have them."""
LATER = "a later call tries again"
"""How the reasons of such failures end."""
_LONGEST = 10
"""Doublings of the number of calls between two tries."""


class NotNow(UnsupportedError):
    """Raised when an analysis or compilation failed for a reason that may pass.

    A later call tries again.
    """


class Retries:
    """Space out retries of one thing: the next call, then after 1, 3, 7, ... others."""

    def __init__(self) -> None:
        self._failures, self._waiting, self._reason = 0, 0, ""

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Try something.

        Args:
            what: The failed action, for the message.

        Raises:
            NotNow: it failed for a reason that may pass, now or a few calls ago.
        """
        if self._waiting:
            self._waiting -= 1
            raise NotNow(self._reason)
        try:
            yield
        except PASSING as error:
            self._waiting = 2 ** min(self._failures, _LONGEST) - 1
            self._failures += 1
            first_line = next(iter(str(error).splitlines()), "")
            self._reason = f"{what}: {type(error).__name__}: {first_line}; {LATER}"
            raise NotNow(self._reason) from error
        self._failures = 0
