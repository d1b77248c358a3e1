"""Hold the column count of the active forest's packed row, which Dynamo makes a symbol."""

from contextvars import ContextVar

__all__ = ["COLUMNS_IN_USE"]

COLUMNS_IN_USE: ContextVar[int | None] = ContextVar("treefx_columns", default=None)
"""Set by ``treefx.use``; None outside of it."""
